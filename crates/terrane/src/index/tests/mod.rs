//! Tests of the index: records, a plain model, and the checker of the invariants.
//!
//! Most run on nodes of four slots, so that splits, merges, swallowed leaves and tall trees are common.

mod model;
mod parallel;
mod threads;

use super::node::{Inner, Leaf, MARK, Node};
use super::{Direction, Entry, GapRequest, Index, LeafPool, Reserve};
use crate::addr::{AddrRange, PAGE_SIZE};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Epoch, Freeing, Participant, Pin, RetireLink};
use core::cell::Cell;
use core::ptr::NonNull;
use std::boxed::Box;
use std::vec::Vec;

std::thread_local! {
    /// Allocations of nodes that still succeed on this thread.
    static ALLOWED: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// True when this allocation is to fail: the hook of `Stash::fill`.
pub(super) fn allocation_fails() -> bool {
    ALLOWED.with(|allowed| match allowed.get() {
        0 => true,
        usize::MAX => false,
        left => {
            allowed.set(left - 1);
            false
        }
    })
}

/// Runs `what` while only `allowed` more allocations succeed.
pub(super) fn with_allowed<R>(allowed: usize, what: impl FnOnce() -> R) -> R {
    ALLOWED.set(allowed);
    let result = what();
    ALLOWED.set(usize::MAX);
    result
}

/// What a record says once it is freed; it is leaked, so that a late reader meets this and not foreign memory.
const POISON: u64 = 0xdead_dead_dead_dead;

/// An entry. Whoever frees it poisons it.
#[repr(C, align(64))]
struct Record {
    link: RetireLink,
    start: AtomicU64,
    end: AtomicU64,
    guard: AtomicU64,
    /// For the test's own use.
    tag: AtomicU64,
}

// SAFETY: the tests retire what they take out.
unsafe impl Entry for Record {
    const GUARD_MAX: u64 = 5 * PAGE_SIZE;

    fn start(&self) -> u64 {
        self.start.load(Ordering::Relaxed)
    }
    fn end(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }
    fn guard_below(&self) -> u64 {
        self.guard.load(Ordering::Relaxed)
    }
}

// SAFETY: the link is used by the queue of the epoch only, the rest is atomic.
unsafe impl Sync for Record {}

impl Record {
    fn leak(start: u64, end: u64, guard: u64) -> NonNull<Record> {
        NonNull::from(Box::leak(Box::new(Record {
            link: RetireLink::new(),
            start: AtomicU64::new(start),
            end: AtomicU64::new(end),
            guard: AtomicU64::new(guard),
            tag: AtomicU64::new(0),
        })))
    }

    fn range(&self) -> (u64, u64) {
        (self.start(), self.end())
    }
}

/// Gives a record up; with `keep`, its memory stays, poisoned.
fn retire(pin: &Pin<'_>, record: NonNull<Record>, keep: bool) {
    unsafe fn poison(link: NonNull<RetireLink>, _: &mut Freeing<'_>) {
        // SAFETY: the link is the first field of a leaked record.
        let record = unsafe { link.cast::<Record>().as_ref() };
        record.start.store(POISON, Ordering::Relaxed);
        record.end.store(POISON, Ordering::Relaxed);
        record.guard.store(POISON, Ordering::Relaxed);
    }
    unsafe fn free(link: NonNull<RetireLink>, _: &mut Freeing<'_>) {
        // SAFETY: the link is the first field of a leaked record, which is given up once.
        drop(unsafe { Box::from_raw(link.cast::<Record>().as_ptr()) });
    }
    // SAFETY: it was taken out of the index just now.
    unsafe { Participant::retire(pin, record.cast(), if keep { poison } else { free }) };
}

/// A small, seeded generator (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Takes the entry that starts at `start` out.
fn remove<const N: usize, const F: usize>(
    index: &Index<Record, N, F>,
    reserve: &mut Reserve<Record, N, F>,
    pin: &Pin<'_>,
    start: u64,
) -> Option<NonNull<Record>> {
    index.edit(reserve, pin, start, 0, |record, edit| {
        assert_eq!((edit.range().start, edit.range().end), record.range());
        assert_eq!(edit.range().start, start);
        edit.remove();
        NonNull::from(record)
    })
}

/// A leaf as the checker meets it.
struct Seen {
    low: u64,
    high: u64,
    items: Vec<(u64, u64)>,
    /// On the way to it.
    hints: Vec<u64>,
}

/// What the checker carries from node to node.
#[derive(Default)]
struct Walk {
    bytes: usize,
    leaves: Vec<Seen>,
}

/// Checks every invariant of the tree, which is at rest; returns where its leaves begin.
fn check<const N: usize, const F: usize>(index: &Index<Record, N, F>) -> Vec<u64> {
    let (root, height) = index.root();
    let mut walk = Walk::default();
    check_below(index, root, height, (0, u64::MAX), &mut Vec::new(), &mut walk);
    assert_eq!(walk.bytes, index.bytes());
    let items: Vec<_> = walk.leaves.iter().flat_map(|leaf| leaf.items.iter().copied()).collect();
    assert_eq!(items.len(), index.len() + 1, "with the sentinel");
    assert_eq!(items.last(), Some(&(index.limits().end, u64::MAX)));
    let mut high = 0;
    for leaf in &walk.leaves {
        assert_eq!(leaf.low, high, "spans have holes");
        high = leaf.high;
    }
    assert_eq!(high, u64::MAX);
    let mut bottom = index.limits().start;
    let mut from = 0;
    for &(top, end) in &items {
        assert!(bottom <= top && top < end, "entries overlap");
        // A leaf that has been swallowed has no span, and no gap touches it.
        while walk.leaves[from].high <= bottom {
            from += 1;
        }
        for leaf in walk.leaves[from..].iter().take_while(|leaf| index.top.gaps && leaf.low < top) {
            let hint = leaf.hints.iter().min().copied().unwrap_or(u64::MAX);
            let is_enough = leaf.low == leaf.high || hint >= top - bottom;
            assert!(is_enough, "hint {hint:#x} below the gap {bottom:#x}..{top:#x}");
        }
        if end != u64::MAX {
            bottom = end;
        }
    }
    walk.leaves.iter().map(|leaf| leaf.low).collect()
}

fn check_below<const N: usize, const F: usize>(
    index: &Index<Record, N, F>,
    node: *mut (),
    height: usize,
    (low, high): (u64, u64),
    hints: &mut Vec<u64>,
    walk: &mut Walk,
) {
    if height == 0 {
        // SAFETY: reached from the root, with no writer at work.
        let leaf = unsafe { &*node.cast::<Leaf<Record, N>>() };
        walk.bytes += size_of::<Leaf<Record, N>>();
        assert!(!leaf.is_obsolete());
        assert_eq!((leaf.low(), leaf.high()), (low, high.max(low)), "what the leaf says of its span");
        let sentinel = usize::from(leaf.len() > 0 && leaf.entry(leaf.len() - 1).is_null());
        assert_eq!(leaf.rank(index.limits().end), leaf.len() - sentinel, "the count and the keys disagree");
        let mut items = Vec::new();
        for rank in 0..leaf.len() {
            let item = leaf.item(rank);
            assert!(
                low <= item.start && (item.end <= high || item.entry.is_null()),
                "outside the span of its leaf"
            );
            // SAFETY: in the index, so alive.
            if let Some(record) = unsafe { item.entry.as_ref() } {
                assert_eq!(record.range(), (item.start, item.end));
            } else {
                assert_eq!(item.start, index.limits().end);
            }
            items.push((item.start, item.end));
        }
        walk.leaves.push(Seen { low: leaf.low(), high: leaf.high(), items, hints: hints.clone() });
        return;
    }
    // SAFETY: as above.
    let inner = unsafe { &*node.cast::<Inner<F>>() };
    walk.bytes += size_of::<Inner<F>>();
    assert!(!inner.is_obsolete());
    assert!(inner.len() >= 1 && inner.len() <= F && inner.from(0) == 0);
    for at in 0..inner.len() {
        let behind = if at + 1 < inner.len() { inner.from(at + 1) } else { u64::MAX };
        assert!(inner.from(at) <= behind, "separators out of order");
        // A separator may have been overtaken by one further up, on either side.
        let low_of = low.max(inner.from(at)).min(high);
        let high_of = high.min(behind).max(low_of);
        let hint = inner.gap(at).load(Ordering::Relaxed);
        assert_eq!(hint & MARK, 0, "a mark was left behind");
        if index.top.gaps && height > 1 {
            // SAFETY: as above.
            let below = unsafe { &*inner.child(at).cast::<Inner<F>>() }.highest_gap();
            assert!(hint >= below, "hint {hint:#x} below one of its children's, {below:#x}");
        }
        hints.push(hint);
        check_below(index, inner.child(at), height - 1, (low_of, high_of), hints, walk);
        hints.pop();
    }
}

#[test]
fn a_reserve_that_fails_changes_nothing() {
    let epoch = Epoch::try_new(1).unwrap();
    let cpu = epoch.register().unwrap();
    let index = Index::<Record, 4, 4>::try_new(AddrRange::new(0, 1 << 30), true).unwrap();
    let mut reserve = Reserve::new();
    let pin = cpu.pin();
    for nth in 0..200u64 {
        // However many allocations succeed before one fails.
        for allowed in 0.. {
            let before = index.bytes();
            ALLOWED.with(|left| left.set(allowed));
            let result = index.reserve(&mut reserve, 3);
            ALLOWED.with(|left| left.set(usize::MAX));
            assert_eq!((index.bytes(), index.len() as u64), (before, nth));
            if result.is_ok() {
                break;
            }
        }
        // What was promised needs no allocation.
        ALLOWED.with(|left| left.set(0));
        let start = (nth * 7919 % 200) * 8 * PAGE_SIZE;
        let range = AddrRange::new(start, start + PAGE_SIZE);
        index.insert(&mut reserve, &pin, range, Record::leak(range.start, range.end, 0));
        ALLOWED.with(|left| left.set(usize::MAX));
        check(&index);
    }
    ALLOWED.with(|left| left.set(0));
    assert!(Index::<Record>::try_new(AddrRange::new(0, 1 << 30), true).is_err());
    // Removals need nothing at all.
    let mut empty = Reserve::new();
    for nth in 0..200 {
        let record = remove(&index, &mut empty, &pin, nth * 8 * PAGE_SIZE).unwrap();
        retire(&pin, record, false);
        check(&index);
    }
    ALLOWED.with(|left| left.set(usize::MAX));
    assert!(index.is_empty());
}

#[test]
fn runs_leave_full_leaves_and_merges_give_them_back() {
    let epoch = Epoch::try_new(1).unwrap();
    let cpu = epoch.register().unwrap();
    let pool = LeafPool::try_new(|_, _| ()).unwrap();
    for (descending, pool) in [(false, None), (true, None), (true, Some(&pool))] {
        let index = Index::<Record>::try_new_in(AddrRange::new(0, 1 << 40), true, pool).unwrap();
        let mut reserve = Reserve::new();
        let empty = index.bytes();
        const COUNT: u64 = 10_000;
        for nth in 0..COUNT {
            let pin = cpu.pin();
            let start = if descending { COUNT - nth } else { nth } * PAGE_SIZE;
            index.reserve(&mut reserve, 1).unwrap();
            let range = AddrRange::new(start, start + PAGE_SIZE);
            index.insert(&mut reserve, &pin, range, Record::leak(range.start, range.end, 0));
            drop(pin);
            cpu.collect();
        }
        check(&index);
        let each = index.bytes() / COUNT as usize;
        assert!(each <= 30, "{each} bytes an entry");
        if let Some(pool) = pool {
            assert_eq!(pool.bytes(), 2 << 20);
        }
        for nth in 0..COUNT {
            let pin = cpu.pin();
            let start = (nth * 7919 % COUNT + u64::from(descending)) * PAGE_SIZE;
            index.reserve(&mut reserve, 0).unwrap();
            retire(&pin, remove(&index, &mut reserve, &pin, start).unwrap(), false);
            drop(pin);
            cpu.collect();
        }
        check(&index);
        assert!(index.bytes() <= 4 * empty, "{} bytes for nothing", index.bytes());
    }
}

#[test]
fn an_empty_index_and_odd_requests() {
    let epoch = Epoch::try_new(1).unwrap();
    let cpu = epoch.register().unwrap();
    let pin = cpu.pin();
    let index = Index::<Record>::try_new(AddrRange::new(1, u64::MAX), true).unwrap();
    assert_eq!(index.limits(), AddrRange::new(PAGE_SIZE, u64::MAX - (PAGE_SIZE - 1)));
    let mut request = GapRequest {
        length: 1,
        low: 0,
        high: u64::MAX,
        direction: Direction::TopDown,
        align_mask: 0,
        align_offset: 0,
    };
    assert_eq!(index.search(&pin, &request), Some(index.limits().end - PAGE_SIZE));
    request.direction = Direction::BottomUp;
    assert_eq!(index.search(&pin, &request), Some(PAGE_SIZE));
    for length in [0, u64::MAX, u64::MAX - PAGE_SIZE] {
        request.length = length;
        assert_eq!(index.search(&pin, &request), None);
        assert_eq!(index.search_linear(&pin, &request, 0), None);
    }
    request.length = 1;
    (request.low, request.high) = (u64::MAX, 0);
    assert_eq!(index.search(&pin, &request), None);
    for addr in [0, PAGE_SIZE, u64::MAX - 1, u64::MAX] {
        assert!(index.find(&pin, addr).is_none() && index.find_exact(&pin, addr).is_none());
        assert!(index.first_ending_after(&pin, addr).is_none());
        assert!(index.last_starting_before(&pin, addr).is_none());
    }
    index.for_each(&pin, AddrRange::new(0, u64::MAX), |_| unreachable!());
    let mut reserve = Reserve::new();
    assert!(remove(&index, &mut reserve, &pin, index.limits().end).is_none(), "the sentinel is no entry");
    check(&index);
}

/// What the figures in the head of the module were measured with.
#[test]
fn sizes() {
    use super::{FANOUT, LEAF_SLOTS};
    assert_eq!(size_of::<Leaf<Record, LEAF_SLOTS>>(), 448);
    assert_eq!(size_of::<Inner<FANOUT>>(), 832);
}
