//! Several writers, each on addresses of its own, in the same leaves.
//!
//! The space is cut into chunks of pages that belong to the writers in turn. A writer keeps a plain map of its pages and
//! checks after every step that the index says the same of them: that holds at every moment, whatever the others do to
//! entries that reach into its chunks from beside.

use super::*;
use crate::sync::CpuId;
use core::ops::ControlFlow;
use core::sync::atomic::AtomicBool;
use std::thread;

const P: u64 = PAGE_SIZE;
/// Pages of a chunk.
const CHUNK: u64 = 10;

/// A writer's chunk: which pages are mapped.
struct Chunk {
    first: u64,
    mapped: [bool; CHUNK as usize],
}

impl Chunk {
    fn end(&self) -> u64 {
        self.first + CHUNK
    }

    fn is_mapped(&self, page: u64) -> bool {
        self.mapped[(page - self.first) as usize]
    }

    fn set(&mut self, from: u64, to: u64, mapped: bool) {
        self.mapped[(from - self.first) as usize..(to - self.first) as usize].fill(mapped);
    }

    /// The free pages around `page`, inside the chunk.
    fn free(&self, page: u64) -> (u64, u64) {
        let low =
            (self.first..page).rev().find(|&page| self.is_mapped(page)).map_or(self.first, |page| page + 1);
        let high = (page..self.end()).find(|&page| self.is_mapped(page)).unwrap_or(self.end());
        (low, high)
    }
}

/// Asks again when the answer is not as it must be. For what an entry's record says, which is read later: a writer beside may
/// have divided the entry, and then another record says it of this writer's pages.
fn again(is_right: impl Fn() -> bool) {
    assert!((0..100).any(|_| is_right()), "the index says something else");
}

struct Writer<'a, const N: usize, const F: usize> {
    index: &'a Index<Record, N, F>,
    cpu: Participant<'a>,
    reserve: Reserve<Record, N, F>,
    chunks: Vec<Chunk>,
    random: Random,
    /// Entries made less entries taken out.
    entries: i64,
}

/// The tag of a record that nobody joins with another.
const STABLE: u64 = 1;

impl<const N: usize, const F: usize> Writer<'_, N, F> {
    fn step(&mut self) {
        let pin = self.cpu.pin();
        self.index.reserve(&mut self.reserve, 2).unwrap();
        let which = self.random.below(self.chunks.len() as u64) as usize;
        let page = self.chunks[which].first + self.random.below(CHUNK);
        let mut chunk =
            core::mem::replace(&mut self.chunks[which], Chunk { first: 0, mapped: [false; CHUNK as usize] });
        match (chunk.is_mapped(page), self.random.below(8)) {
            (false, _) => self.map(&pin, &mut chunk, page),
            (true, 0..3) => self.unmap(&pin, &mut chunk, page),
            (true, 3..5) => self.divide(&pin, &chunk, page),
            (true, 5) => self.replace(&pin, page),
            (true, _) => self.join(&pin, page),
        }
        self.compare(&pin, &chunk);
        self.chunks[which] = chunk;
        drop(pin);
        self.cpu.collect();
    }

    fn map(&mut self, pin: &Pin<'_>, chunk: &mut Chunk, page: u64) {
        let (low, high) = chunk.free(page);
        let (index, reserve) = (self.index, &mut self.reserve);
        let accepts = |record: &Record| record.tag.load(Ordering::Relaxed) != STABLE;
        let (mut from, mut to) =
            (page - self.random.below(page - low + 1), page + 1 + self.random.below(high - page));
        let grown = match self.random.below(3) {
            0 => {
                from = low;
                index.extend_up(reserve, pin, from * P, to * P, |record| {
                    assert_eq!(record.end(), from * P);
                    accepts(record) && {
                        record.end.store(to * P, Ordering::Relaxed);
                        true
                    }
                })
            }
            1 => {
                to = high;
                index.extend_down(reserve, pin, to * P, from * P, |record| {
                    assert_eq!(record.start(), to * P);
                    accepts(record) && {
                        record.start.store(from * P, Ordering::Relaxed);
                        true
                    }
                })
            }
            _ => false,
        };
        if !grown {
            let record = Record::leak(from * P, to * P, 0);
            index.insert(reserve, pin, AddrRange::new(from * P, to * P), record);
            self.entries += 1;
        }
        chunk.set(from, to, true);
    }

    /// Unmaps some pages of the chunk, as `munmap` does.
    fn unmap(&mut self, pin: &Pin<'_>, chunk: &mut Chunk, page: u64) {
        let end = page + 1 + self.random.below(chunk.end() - page);
        let mut at = page;
        while at < end {
            if !chunk.is_mapped(at) {
                at += 1;
                continue;
            }
            self.index.reserve(&mut self.reserve, 1).unwrap();
            let spare = Record::leak(0, 0, 0);
            let mut used = false;
            let done = self.index.edit(&mut self.reserve, pin, at * P, 1, |record, edit| {
                let all = edit.range();
                assert_eq!((all.start, all.end), record.range());
                let (low, high) = (all.start < at * P, all.end > end * P);
                if low && high {
                    // SAFETY: just made.
                    let upper = unsafe { spare.as_ref() };
                    upper.start.store(end * P, Ordering::Relaxed);
                    upper.end.store(all.end, Ordering::Relaxed);
                    edit.divide(end * P, spare);
                    used = true;
                }
                if low {
                    record.end.store(at * P, Ordering::Relaxed);
                    edit.set_end(at * P);
                } else if high {
                    record.start.store(end * P, Ordering::Relaxed);
                    edit.set_start(end * P);
                } else {
                    edit.remove();
                    return (all.end / P, Some(NonNull::from(record)));
                }
                (all.end / P, None)
            });
            let (next, gone) = done.expect("a mapped page was lost");
            self.entries += i64::from(used) - i64::from(gone.is_some());
            if !used {
                retire(pin, spare, false);
            }
            if let Some(gone) = gone {
                retire(pin, gone, true);
            }
            at = next.min(end);
        }
        chunk.set(page, end, false);
    }

    /// Divides the entry at one place or two.
    fn divide(&mut self, pin: &Pin<'_>, chunk: &Chunk, page: u64) {
        let far = (page..chunk.end()).find(|&page| !chunk.is_mapped(page)).unwrap_or(chunk.end());
        let second = page + self.random.below(far - page);
        let spares = [page, second].map(|page| Record::leak(page * P, 0, 0));
        let mut used = [false; 2];
        let done = self.index.edit(&mut self.reserve, pin, page * P, 2, |record, edit| {
            for which in [1, 0] {
                let (at, all) = ([page, second][which] * P, edit.range());
                if all.start < at && at < all.end {
                    // SAFETY: just made.
                    unsafe { spares[which].as_ref() }.end.store(all.end, Ordering::Relaxed);
                    edit.divide(at, spares[which]);
                    record.end.store(at, Ordering::Relaxed);
                    used[which] = true;
                }
            }
        });
        done.expect("a mapped page was lost");
        for which in 0..2 {
            self.entries += i64::from(used[which]);
            if !used[which] {
                retire(pin, spares[which], false);
            }
        }
    }

    fn replace(&mut self, pin: &Pin<'_>, page: u64) {
        // The entry that starts at a page of ours may end elsewhere meanwhile, so under its lock only the start is sure:
        // replaced by itself.
        let Some(record) = self.index.find_exact(pin, page * P) else { panic!("a mapped page was lost") };
        if record.start() == page * P {
            let same = self.index.replace(&mut self.reserve, pin, page * P, NonNull::from(record));
            assert!(same.is_none_or(|same| same == NonNull::from(record)));
        }
    }

    /// Joins two entries at the first border at `page` or above.
    fn join(&mut self, pin: &Pin<'_>, page: u64) {
        let index = self.index;
        let accepts = |record: &Record| record.tag.load(Ordering::Relaxed) != STABLE;
        let gone = index.join(&mut self.reserve, pin, page * P, |low, high| {
            assert_eq!((low.end(), high.start()), (page * P, page * P));
            accepts(low) && accepts(high) && {
                low.end.store(high.end(), Ordering::Relaxed);
                true
            }
        });
        if let Some(gone) = gone {
            self.entries -= 1;
            retire(pin, gone, true);
        }
    }

    /// What the index says of the chunk.
    fn compare(&mut self, pin: &Pin<'_>, chunk: &Chunk) {
        let range = AddrRange::new(chunk.first * P, chunk.end() * P);
        for page in chunk.first..chunk.end() {
            let found = self.index.find_exact(pin, page * P + 7);
            assert_eq!(found.is_some(), chunk.is_mapped(page), "page {page}");
            if found.is_some() {
                again(|| {
                    let (start, end) = self.index.find_exact(pin, page * P).unwrap().range();
                    start <= page * P && page * P < end
                });
            }
        }
        again(|| {
            let mut seen = [false; CHUNK as usize];
            self.index.for_each(pin, range, |record| {
                let (start, end) = record.range();
                for page in start.max(range.start) / P..end.min(range.end) / P {
                    let first = !core::mem::replace(&mut seen[(page - chunk.first) as usize], true);
                    assert!(first, "page {page} was seen twice");
                }
                ControlFlow::Continue(())
            });
            seen == chunk.mapped
        });
        let page = chunk.first + self.random.below(CHUNK);
        let next = (page..chunk.end()).find(|&page| chunk.is_mapped(page));
        again(|| {
            let found = self.index.first_ending_after(pin, page * P).map(Record::range);
            match next {
                Some(next) => found.is_some_and(|(start, end)| start <= next * P && next * P < end),
                None => found.is_none_or(|(start, _)| start >= range.end),
            }
        });
        // The whole request is ours, so the answer is exact.
        let length = 1 + self.random.below(4);
        for direction in [Direction::TopDown, Direction::BottomUp] {
            let request = GapRequest {
                length: length * P,
                low: range.start,
                high: range.end,
                direction,
                align_mask: 0,
                align_offset: 0,
            };
            let fits = |&at: &u64| (at..at + length).all(|page| !chunk.is_mapped(page));
            let mut places = chunk.first..=chunk.end() - length;
            let expected = match direction {
                Direction::TopDown => places.rev().find(fits),
                Direction::BottomUp => places.find(fits),
            };
            assert_eq!(
                self.index.search(pin, &request),
                expected.map(|page| page * P),
                "{length} pages free"
            );
        }
    }
}

/// With `--cfg terrane_watch`: stops for a moment at some of this thread's operations on atomics, so that few threads on few
/// CPUs come between any two steps of each other.
#[cfg(terrane_watch)]
fn disturb() {
    use crate::sync::atomic::{Access, Op, install};

    std::thread_local! {
        static LEFT: Cell<u64> = const { Cell::new(1) };
        static STATE: Cell<u64> = const { Cell::new(0) };
    }
    fn hook(access: &Access) {
        let left = LEFT.get() - 1;
        LEFT.set(left);
        if left == 0 || access.op == Op::Spin {
            let mut random = Random(STATE.get());
            LEFT.set(1 + random.below(100));
            match random.below(32) {
                0 => thread::yield_now(),
                _ => (0..random.below(60)).for_each(|_| core::hint::spin_loop()),
            }
            STATE.set(random.0);
        }
    }
    install(Some(hook));
}

#[cfg(not(terrane_watch))]
fn disturb() {}

/// `writers` writers beside a finder and a searcher.
fn run<const N: usize, const F: usize>(seed: u64, writers: u64, chunks: u64, steps: usize) {
    let epoch = Epoch::try_new(writers as usize + 2).unwrap();
    let pages = chunks * (writers + 1) * CHUNK;
    let index = Index::<Record, N, F>::try_new(AddrRange::new(0, pages * P), true).unwrap();
    // The last chunk of each round never changes: one entry that fills it.
    let stable = |nth: u64| ((nth * (writers + 1) + writers) * CHUNK, (nth + 1) * (writers + 1) * CHUNK);
    {
        let cpu = epoch.register().unwrap();
        let mut reserve = Reserve::new();
        for nth in 0..chunks {
            let pin = cpu.pin();
            let (start, end) = stable(nth);
            index.reserve(&mut reserve, 1).unwrap();
            let range = AddrRange::new(start * P, end * P);
            let record = Record::leak(range.start, range.end, 0);
            // SAFETY: just made.
            unsafe { record.as_ref() }.tag.store(STABLE, Ordering::Relaxed);
            index.insert(&mut reserve, &pin, range, record);
        }
        let id: CpuId = cpu.id();
        // SAFETY: registered above, and used no more.
        unsafe { epoch.unregister(id) };
    }
    let done = AtomicBool::new(false);
    let entries = thread::scope(|scope| {
        let (epoch, index, done) = (&epoch, &index, &done);
        scope.spawn(move || {
            disturb();
            let cpu = epoch.register().unwrap();
            let mut random = Random(seed + 1000);
            while !done.load(Ordering::Relaxed) {
                let pin = cpu.pin();
                let (start, end) = stable(random.below(chunks));
                let addr = (start + random.below(end - start)) * P + random.below(P);
                let record = index.find(&pin, addr).expect("a stable entry was missed");
                assert_eq!(record.range(), (start * P, end * P));
                if let Some(record) = index.find(&pin, random.below(pages) * P) {
                    assert_ne!(record.start(), POISON, "freed under a pin");
                }
                // Each stable entry is seen once, in order.
                let first = random.below(chunks);
                let mut next = first;
                let from = stable(first).0 * P;
                index.for_each(&pin, AddrRange::new(from, from + 40 * CHUNK * P), |record| {
                    assert_ne!(record.start(), POISON, "freed under a pin");
                    if record.tag.load(Ordering::Relaxed) == STABLE {
                        assert_eq!(record.start(), stable(next).0 * P);
                        next += 1;
                    }
                    ControlFlow::Continue(())
                });
                assert!(next > first);
            }
        });
        scope.spawn(move || {
            disturb();
            let cpu = epoch.register().unwrap();
            let mut random = Random(seed + 2000);
            while !done.load(Ordering::Relaxed) {
                // Mostly for more than there is: every look lowers hints.
                let request = GapRequest {
                    length: (1 + random.below(12)) * P,
                    low: 0,
                    high: (1 + random.below(pages)) * P,
                    direction: if random.below(2) == 0 { Direction::TopDown } else { Direction::BottomUp },
                    align_mask: 0,
                    align_offset: 0,
                };
                if let Some(addr) = index.search(&cpu.pin(), &request) {
                    assert!(addr + request.length <= request.high);
                }
            }
        });
        let writers: Vec<_> = (0..writers)
            .map(|mine| {
                scope.spawn(move || {
                    disturb();
                    // Whoever fails ends the others.
                    let end = End(done);
                    let chunks = (0..chunks).map(|nth| Chunk {
                        first: (nth * (writers + 1) + mine) * CHUNK,
                        mapped: [false; CHUNK as usize],
                    });
                    let mut writer = Writer {
                        index,
                        cpu: epoch.register().unwrap(),
                        reserve: Reserve::new(),
                        chunks: chunks.collect(),
                        random: Random(seed + mine),
                        entries: 0,
                    };
                    let mut ran = 0;
                    while ran < steps && !done.load(Ordering::Relaxed) {
                        writer.step();
                        ran += 1;
                    }
                    let pin = writer.cpu.pin();
                    let all = core::mem::take(&mut writer.chunks);
                    all.iter().for_each(|chunk| writer.compare(&pin, chunk));
                    core::mem::forget(end);
                    writer.entries
                })
            })
            .collect();
        let entries: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done.store(true, Ordering::Relaxed);
        entries.into_iter().map(|entries| entries.unwrap()).sum::<i64>()
    });
    assert_eq!(index.len() as i64, entries + chunks as i64);
    check(&index);
}

/// Ends the other threads when a writer panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn writers_in_the_same_leaves_disturb_nobody() {
    run::<4, 4>(1, 3, 4, 6_000);
    run::<4, 4>(2, 2, 30, 6_000);
}

#[test]
fn writers_in_a_tall_tree_disturb_nobody() {
    run::<4, 4>(3, 3, 80, 5_000);
    run::<8, 4>(4, 2, 200, 5_000);
}

#[test]
fn writers_in_real_nodes_disturb_nobody() {
    run::<{ super::super::LEAF_SLOTS }, { super::super::FANOUT }>(5, 2, 12, 8_000);
    run::<{ super::super::LEAF_SLOTS }, { super::super::FANOUT }>(6, 3, 400, 5_000);
}
