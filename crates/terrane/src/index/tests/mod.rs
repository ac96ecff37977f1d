//! Tests of the index: records, a plain model, and the checker of the invariants.
//!
//! Most run on nodes of four slots, so that splits, merges, swallowed leaves and tall trees are common.

mod model;
mod threads;

use super::node::{Inner, Leaf, Node};
use super::{Direction, Entry, GapRequest, Index, Reserve};
use crate::addr::{AddrRange, PAGE_SIZE};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Epoch, Participant, Pin, RetireLink};
use core::cell::Cell;
use core::ptr::NonNull;
use std::boxed::Box;

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

/// What a record says once it is freed; it is leaked, so that a late reader meets this and not foreign memory.
const POISON: u64 = 0xdead_dead_dead_dead;

/// An entry. Whoever frees it poisons it.
#[repr(C, align(64))]
struct Record {
    link: RetireLink,
    start: AtomicU64,
    end: AtomicU64,
    guard: AtomicU64,
}

// SAFETY: the tests retire what they take out, and keep one reserve for each index.
unsafe impl Entry for Record {
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
        })))
    }

    fn range(&self) -> (u64, u64) {
        (self.start(), self.end())
    }
}

/// Gives a record up; with `keep`, its memory stays, poisoned.
fn retire(pin: &Pin<'_>, record: NonNull<Record>, keep: bool) {
    unsafe fn poison(link: NonNull<RetireLink>, _: &Participant<'_>) {
        // SAFETY: the link is the first field of a leaked record.
        let record = unsafe { link.cast::<Record>().as_ref() };
        record.start.store(POISON, Ordering::Relaxed);
        record.end.store(POISON, Ordering::Relaxed);
        record.guard.store(POISON, Ordering::Relaxed);
    }
    unsafe fn free(link: NonNull<RetireLink>, _: &Participant<'_>) {
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

/// What the checker carries from leaf to leaf.
struct Walk {
    entries: usize,
    bytes: usize,
    end_before: u64,
}

/// Checks every invariant of the tree.
fn check<const N: usize, const F: usize>(index: &Index<Record, N, F>) {
    let (root, height) = index.root();
    let mut walk = Walk { entries: 0, bytes: 0, end_before: index.limits().start };
    check_below(index, root, height, 0, u64::MAX, &mut walk);
    assert_eq!(walk.entries, index.len() + 1, "with the sentinel");
    assert_eq!(walk.bytes, index.bytes());
    assert_eq!(walk.end_before, u64::MAX, "the sentinel is the last");
}

/// Returns the largest gap before an entry below `node`.
fn check_below<const N: usize, const F: usize>(
    index: &Index<Record, N, F>,
    node: *mut (),
    height: usize,
    low: u64,
    high: u64,
    walk: &mut Walk,
) -> u64 {
    if height == 0 {
        // SAFETY: reached from the root, with no writer at work.
        let leaf = unsafe { &*node.cast::<Leaf<Record, N>>() };
        walk.bytes += size_of::<Leaf<Record, N>>();
        assert!(!leaf.obsolete().load(Ordering::Relaxed));
        let sentinel = usize::from(leaf.len() > 0 && leaf.entry(leaf.len() - 1).is_null());
        assert_eq!(leaf.rank(index.limits().end), leaf.len() - sentinel, "the count and the keys disagree");
        let mut most = 0;
        for rank in 0..leaf.len() {
            let item = leaf.item(rank);
            assert!(walk.end_before <= item.start && item.start < item.end);
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
            most = most.max(item.start - walk.end_before);
            walk.end_before = item.end;
            walk.entries += 1;
        }
        return most;
    }
    // SAFETY: as above.
    let inner = unsafe { &*node.cast::<Inner<F>>() };
    walk.bytes += size_of::<Inner<F>>();
    assert!(!inner.obsolete().load(Ordering::Relaxed));
    assert!(inner.len() >= 1 && inner.len() <= F && inner.from(0) == 0);
    let mut total = 0;
    for at in 0..inner.len() {
        let behind = if at + 1 < inner.len() { inner.from(at + 1) } else { u64::MAX };
        assert!(inner.from(at) <= behind, "separators out of order");
        let (low, high) = (low.max(inner.from(at)), high.min(behind));
        let most = check_below(index, inner.child(at), height - 1, low, high, walk);
        if index.top.gaps {
            let hint = inner.gap(at).load(Ordering::Relaxed);
            assert!(hint >= most, "hint {hint:#x} below the gap {most:#x}");
            if height > 1 {
                // SAFETY: as above.
                let below = unsafe { &*inner.child(at).cast::<Inner<F>>() }.highest_gap();
                assert!(hint >= below, "hint {hint:#x} below one of its children's, {below:#x}");
            }
        }
        total = total.max(most);
    }
    total
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
        index.insert(&mut reserve, &pin, Record::leak(start, start + PAGE_SIZE, 0));
        ALLOWED.with(|left| left.set(usize::MAX));
        check(&index);
    }
    ALLOWED.with(|left| left.set(0));
    assert!(Index::<Record>::try_new(AddrRange::new(0, 1 << 30), true).is_err());
    // Removals need nothing at all.
    let mut empty = Reserve::new();
    for nth in 0..200 {
        let record = index.remove(&mut empty, &pin, nth * 8 * PAGE_SIZE).unwrap();
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
    for descending in [false, true] {
        let index = Index::<Record>::try_new(AddrRange::new(0, 1 << 40), true).unwrap();
        let mut reserve = Reserve::new();
        let empty = index.bytes();
        const COUNT: u64 = 10_000;
        for nth in 0..COUNT {
            let pin = cpu.pin();
            let start = if descending { COUNT - nth } else { nth } * PAGE_SIZE;
            index.reserve(&mut reserve, 1).unwrap();
            index.insert(&mut reserve, &pin, Record::leak(start, start + PAGE_SIZE, 0));
            drop(pin);
            cpu.collect();
        }
        check(&index);
        let each = index.bytes() / COUNT as usize;
        assert!(each <= 30, "{each} bytes an entry");
        for nth in 0..COUNT {
            let pin = cpu.pin();
            let start = (nth * 7919 % COUNT + u64::from(descending)) * PAGE_SIZE;
            index.reserve(&mut reserve, 0).unwrap();
            retire(&pin, index.remove(&mut reserve, &pin, start).unwrap(), false);
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
        assert!(index.find(&pin, addr).is_none());
        assert!(index.first_ending_after(&pin, addr).is_none());
        assert!(index.last_starting_before(&pin, addr).is_none());
    }
    index.for_each(&pin, AddrRange::new(0, u64::MAX), |_| unreachable!());
    let mut reserve = Reserve::new();
    assert!(index.remove(&mut reserve, &pin, index.limits().end).is_none(), "the sentinel is no entry");
    check(&index);
}

/// What the figures in the head of the module were measured with.
#[test]
fn sizes() {
    use super::{FANOUT, LEAF_SLOTS};
    assert_eq!(size_of::<Leaf<Record, LEAF_SLOTS>>(), 448);
    assert_eq!(size_of::<Inner<FANOUT>>(), 832);
}
