//! The index by itself, with nodes of four, so that a few entries divide and join them: lookups beside writers, writers
//! beside each other, and the gap hints that they raise and lower.

use crate::schedules::{Effort, check, check_caught};
use std::ptr::NonNull;
use std::sync::Arc;
use terrane::index::{Alone, Direction, Entry, GapRequest, Index, Reserve};
use terrane::sync::atomic::{AtomicU64, Ordering};
use terrane::sync::{CpuId, Epoch, Freeing, Participant, Pin, RetireLink};
use terrane::{AddrRange, PAGE_SIZE};

#[repr(C)]
struct Record {
    link: RetireLink,
    start: AtomicU64,
    end: AtomicU64,
}

// SAFETY: taken out before it is retired; freed behind the epoch.
unsafe impl Entry for Record {
    fn start(&self) -> u64 {
        self.start.load(Ordering::Relaxed)
    }
    fn end(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }
}

// SAFETY: the link is used by the queue of the epoch only.
unsafe impl Sync for Record {}

unsafe fn free(link: NonNull<RetireLink>, _: &mut Freeing<'_>) {
    // SAFETY: the link is the first field of a record that `insert` leaked.
    drop(unsafe { Box::from_raw(link.cast::<Record>().as_ptr()) });
}

type Small = Index<Record, 4, 4>;

/// Pages that the index is about.
const PAGES: u64 = 64;
/// Every so many pages lies an entry that never changes.
const STRIDE: u64 = 4;

/// A gap of some pages between pages `low` and `high`.
fn gap(pages: u64, low: u64, high: u64, direction: Direction) -> GapRequest {
    let (length, low, high) = (pages * PAGE_SIZE, low * PAGE_SIZE, high.min(PAGES) * PAGE_SIZE);
    GapRequest { length, low, high, direction, align_mask: 0, align_offset: 0 }
}

struct Scene {
    epoch: Epoch,
    index: Small,
}

impl Scene {
    /// With the entries that never change.
    fn new() -> Arc<Self> {
        let epoch = Epoch::try_new(3).unwrap();
        (0..3).for_each(|_| _ = epoch.register().unwrap().id());
        let limits = AddrRange::new(0, PAGES * PAGE_SIZE);
        let scene = Self { epoch, index: Small::try_new(limits, true).unwrap() };
        let me = scene.cpu(0);
        let mut reserve = Reserve::new();
        for page in (0..PAGES).step_by(STRIDE as usize) {
            scene.insert(&me.pin(), &mut reserve, page);
        }
        Arc::new(scene)
    }

    fn cpu(&self, id: u32) -> Participant<'_> {
        // SAFETY: registered by `new`; one thread is this processor.
        unsafe { self.epoch.participant(CpuId(id)) }
    }

    fn insert(&self, pin: &Pin<'_>, reserve: &mut Reserve<Record, 4, 4>, page: u64) {
        let range = AddrRange::new(page * PAGE_SIZE, (page + 1) * PAGE_SIZE);
        let (start, end) = (AtomicU64::new(range.start), AtomicU64::new(range.end));
        let record = Box::leak(Box::new(Record { link: RetireLink::new(), start, end }));
        self.index.reserve(reserve, 1).unwrap();
        let record = NonNull::from(record);
        // Both ways in, in turns.
        let alone = !page.is_multiple_of(2)
            && match self.index.insert_alone(reserve, pin, range, record, |_, _| false) {
                Alone::Inserted => true,
                Alone::Unclear => false,
                Alone::Taken => panic!("the page is free"),
            };
        if !alone {
            self.index.insert(reserve, pin, range, record);
        }
    }

    /// The entry of `page` takes the one above in, or is taken in by the one below, if they are in its leaf.
    fn absorb(&self, pin: &Pin<'_>, reserve: &mut Reserve<Record, 4, 4>, page: u64, above: bool) {
        let gone = self.index.edit(reserve, pin, page * PAGE_SIZE, 0, |record, edit| {
            if above {
                let gone = NonNull::from(edit.above()?);
                edit.absorb_above();
                record.end.store(edit.range().end, Ordering::Relaxed);
                return Some(gone);
            }
            let low = NonNull::from(edit.below()?);
            edit.absorb_into_below();
            // SAFETY: in the index, which the edit has locked there.
            unsafe { low.as_ref() }.end.store(edit.range().end, Ordering::Relaxed);
            Some(NonNull::from(record))
        });
        if let Some(gone) = gone.expect("the entry is there") {
            // SAFETY: taken out just now.
            unsafe { Participant::retire(pin, gone.cast(), free) };
        }
    }

    fn remove(&self, pin: &Pin<'_>, reserve: &mut Reserve<Record, 4, 4>, page: u64) {
        self.index.reserve(reserve, 0).unwrap();
        let gone = self.index.edit(reserve, pin, page * PAGE_SIZE, 0, |record, edit| {
            assert_eq!(edit.range().start, page * PAGE_SIZE);
            edit.remove();
            NonNull::from(record)
        });
        let gone = gone.expect("the entry is there");
        // SAFETY: taken out just now.
        unsafe { Participant::retire(pin, gone.cast(), free) };
    }

    /// Fills the pages between the entries from `from` to `to`, and empties them again.
    fn churn(&self, cpu: u32, from: u64, to: u64) {
        let me = self.cpu(cpu);
        let mut reserve = Reserve::new();
        let pages = || (from..to).filter(|page| !page.is_multiple_of(STRIDE));
        for page in pages() {
            self.insert(&me.pin(), &mut reserve, page);
        }
        me.collect_now();
        for page in pages() {
            self.remove(&me.pin(), &mut reserve, page);
        }
        me.collect_now();
    }

    /// The first pages of all entries.
    fn all(&self) -> Vec<u64> {
        let me = self.cpu(0);
        let pin = me.pin();
        let mut pages = Vec::new();
        self.index.for_each(&pin, self.index.limits(), |record| {
            pages.push(record.start() / PAGE_SIZE);
            std::ops::ControlFlow::Continue(())
        });
        pages
    }

    fn end(self: Arc<Self>) {
        assert_eq!(self.all(), (0..PAGES).step_by(STRIDE as usize).collect::<Vec<_>>());
        assert_eq!(self.index.len() as u64, PAGES / STRIDE);
        let me = self.cpu(0);
        let pin = me.pin();
        // Each gap is found, and no larger one.
        for direction in [Direction::BottomUp, Direction::TopDown] {
            for page in (0..PAGES).step_by(STRIDE as usize) {
                for pages in [STRIDE - 1, STRIDE] {
                    let found = self.index.search(&pin, &gap(pages, page, page + 2 * STRIDE, direction));
                    assert_eq!(found.is_some(), pages < STRIDE, "{direction:?} {pages} at {page}: {found:?}");
                }
            }
        }
    }
}

/// A reader that looks for what is always there, beside a writer.
fn lookup() {
    let scene = Scene::new();
    let other = Arc::clone(&scene);
    let reader = shuttle::thread::spawn(move || {
        let me = other.cpu(1);
        for page in [20, 24, 28, 20] {
            let pin = me.pin();
            let at = page * PAGE_SIZE;
            let found = other.index.find(&pin, at).expect("an entry that nobody touches was missed");
            assert_eq!(found.start(), at);
            assert_eq!(other.index.find_exact(&pin, at + 1).map(Record::start), Some(at));
            // Pages of the writer: there or not, but never freed.
            let near = other.index.find(&pin, at + PAGE_SIZE);
            assert!(near.is_none_or(|found| found.start() == at + PAGE_SIZE));
            // Each that nobody changes is seen once, whatever happens between them.
            let mut seen = Vec::new();
            let span = AddrRange::new(16 * PAGE_SIZE, 33 * PAGE_SIZE);
            other.index.for_each(&pin, span, |record| {
                let page = record.start() / PAGE_SIZE;
                if page.is_multiple_of(STRIDE) {
                    seen.push(page);
                }
                std::ops::ControlFlow::Continue(())
            });
            assert_eq!(seen, [16, 20, 24, 28, 32]);
        }
    });
    scene.churn(0, 18, 33);
    reader.join().unwrap();
    scene.end();
}

/// Entries that take one another in, beside a reader and a writer in the same leaves.
fn gathering() {
    let scene = Scene::new();
    let other = Arc::clone(&scene);
    let reader = shuttle::thread::spawn(move || {
        let me = other.cpu(1);
        for page in [19, 18, 20, 19] {
            let pin = me.pin();
            if let Some(found) = other.index.find(&pin, page * PAGE_SIZE) {
                assert!(found.start() <= page * PAGE_SIZE && found.start() >= 17 * PAGE_SIZE, "freed");
            }
            assert!(
                other.index.find(&pin, 24 * PAGE_SIZE).is_some(),
                "an entry that nobody touches was missed"
            );
        }
    });
    let other = Arc::clone(&scene);
    let writer = shuttle::thread::spawn(move || other.churn(2, 21, 24));
    let me = scene.cpu(0);
    let mut reserve = Reserve::new();
    for page in 17..20 {
        scene.insert(&me.pin(), &mut reserve, page);
    }
    scene.absorb(&me.pin(), &mut reserve, 18, true);
    scene.absorb(&me.pin(), &mut reserve, 18, false);
    me.collect_now();
    // As many entries as could not be gathered.
    let mut page = 17;
    while page < 20 {
        let pin = me.pin();
        let end = scene.index.find_exact(&pin, page * PAGE_SIZE).expect("an address was lost").end();
        scene.remove(&pin, &mut reserve, page);
        page = end / PAGE_SIZE;
    }
    assert_eq!(page, 20);
    me.collect_now();
    reader.join().unwrap();
    writer.join().unwrap();
    scene.end();
}

/// Two writers side by side, in the same leaves at the border.
fn writers() {
    let scene = Scene::new();
    let other = Arc::clone(&scene);
    let writer = shuttle::thread::spawn(move || other.churn(1, 30, 40));
    scene.churn(0, 20, 30);
    writer.join().unwrap();
    scene.end();
}

/// Two writers, and one who searches: hints are lowered beside those who raise them, and no room is forgotten.
fn hints() {
    let scene = Scene::new();
    let other = Arc::clone(&scene);
    let writer = shuttle::thread::spawn(move || other.churn(1, 1, 12));
    let other = Arc::clone(&scene);
    let searcher = shuttle::thread::spawn(move || {
        let me = other.cpu(2);
        for (pages, low, high) in [(3, 4, 12), (2, 0, 24), (3, 12, 20), (4, 0, 24), (3, 4, 12)] {
            let found = other.index.search(&me.pin(), &gap(pages, low, high, Direction::TopDown));
            assert!(found.is_none() || pages < STRIDE, "{found:?}");
        }
    });
    scene.churn(0, 13, 22);
    writer.join().unwrap();
    searcher.join().unwrap();
    scene.end();
}

/// One frees addresses in a stretch that was full, and raises the hints for it; the other inserts beside it, and
/// replaces the nodes that hold the hints; a third lowers them.
fn raising() {
    let scene = Scene::new();
    let me = scene.cpu(0);
    let mut reserve = Reserve::new();
    let full = || (17..32u64).filter(|page| !page.is_multiple_of(STRIDE));
    for page in full() {
        scene.insert(&me.pin(), &mut reserve, page);
    }
    let room = |scene: &Scene, me: &Participant<'_>| {
        [Direction::BottomUp, Direction::TopDown]
            .map(|direction| scene.index.search(&me.pin(), &gap(3, 20, 24, direction)).is_some())
    };
    assert_eq!(room(&scene, &me), [false; 2]);
    let other = Arc::clone(&scene);
    let beside = shuttle::thread::spawn(move || other.churn(1, 13, 16));
    let other = Arc::clone(&scene);
    let searcher = shuttle::thread::spawn(move || {
        let me = other.cpu(2);
        let _ = other.index.search(&me.pin(), &gap(3, 16, 32, Direction::TopDown));
    });
    for page in 21..24 {
        scene.remove(&me.pin(), &mut reserve, page);
    }
    beside.join().unwrap();
    searcher.join().unwrap();
    assert_eq!(room(&scene, &me), [true; 2], "the gap was forgotten");
    for page in full().filter(|page| !(21..24).contains(page)) {
        scene.remove(&me.pin(), &mut reserve, page);
    }
    scene.end();
}

const SOME: Effort = Effort { schedules: 150, steps: 400_000 };

#[test]
fn lookups_beside_a_writer() {
    check(SOME, lookup);
}

#[test]
fn writers_beside_each_other() {
    check(SOME, writers);
}

#[test]
fn entries_that_take_one_another_in() {
    check(SOME, gathering);
}

#[test]
fn gap_hints_beside_searches() {
    check(SOME, hints);
    check(SOME, raising);
}

#[test]
fn the_index_needs_its_checks() {
    check_caught("index-read-unvalidated", SOME, lookup);
    check_caught("index-obsolete-leaf", SOME, writers);
    check_caught("grace_of_one", SOME, lookup);
    check_caught("advance_past_pins", SOME, lookup);
    check_caught("index-never-raise", SOME, raising);
}
