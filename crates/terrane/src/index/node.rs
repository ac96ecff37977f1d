//! The two kinds of node: what is stored where, and in which order it is written.

use super::pool::Piece;
use crate::addr::PAGE_SIZE;
use crate::sync::RetireLink;
use crate::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence, spin_loop,
};
use core::hint::select_unpredictable;
use core::ops::Deref;
use core::ptr::{self, NonNull};

/// The separator of a child that is not there. Greater than every address.
pub(super) const FREE: u64 = u64::MAX;

/// The bits of a key that hold the number of its slot: addresses are page aligned, so they are to be had.
const SLOT_BITS: u64 = PAGE_SIZE - 1;

/// The key of a slot without an entry: as of a start above every address.
const FREE_KEY: u64 = 0;

/// The key of an entry: its start, counted downwards from the top, and its slot. So one addition makes of it how far below an
/// address the entry starts.
#[inline]
const fn key(start: u64, slot: usize) -> u64 {
    !start & !SLOT_BITS | slot as u64
}

/// The start of the entry that has this key.
#[inline]
const fn start_of(key: u64) -> u64 {
    !key & !SLOT_BITS
}

/// Comparisons that do not wait for one another.
const LANES: usize = 4;

/// How many of `words`, which are few, are such: without branches, and counted by itself, whatever it is then added to.
#[inline(always)]
fn count(words: &[AtomicU64], is_such: impl Fn(u64) -> bool) -> usize {
    let count = opaque(words.iter().map(|word| usize::from(is_such(word.load(Ordering::Relaxed)))).sum());
    // SAFETY: one at most for each, which the compiler can no longer see.
    unsafe { core::hint::assert_unchecked(count <= words.len()) };
    count
}

/// `value`, of which the compiler no longer knows where it comes from. Else it makes one chain of all additions of a sum,
/// whatever their brackets, each of which waits for the one before: a nanosecond for four.
#[inline(always)]
fn opaque(mut value: usize) -> usize {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: there is no instruction in it.
    unsafe {
        core::arch::asm!("/* {0} */", inout(reg) value, options(pure, nomem, nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        value = core::convert::identity(value);
    }
    value
}

/// Has the line of `what` fetched, while other things are done.
#[inline(always)]
fn prefetch<T>(what: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every processor of this architecture has the instruction, which is harmless for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(what.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = what;
}

/// No slot, in [`Leaf::recent`].
const NO_SLOT: u8 = u8::MAX;

/// Bytes of a cache line.
const LINE: usize = 64;

/// The order of an empty leaf.
const ORDER: u64 = 0xfedc_ba98_7654_3210;

/// The ranks below `rank`, in an order.
#[inline]
const fn mask(rank: usize) -> u64 {
    (1 << (4 * rank)) - 1
}

/// An order without what it has at `rank`: those behind move up.
#[inline]
const fn without(order: u64, rank: usize) -> u64 {
    order & mask(rank) | order >> 4 & !mask(rank)
}

/// An order with `slot` at `rank`: those from there on move back, and the last one falls out.
#[inline]
const fn with(order: u64, rank: usize, slot: usize) -> u64 {
    order & mask(rank) | (slot as u64) << (4 * rank) | (order & !mask(rank)) << 4
}

/// An entry as writers carry it about: never read from the record, whose owner may change it first or last.
pub(super) struct Item<T> {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Null for the sentinel.
    pub(super) entry: *mut T,
}

impl<T> Clone for Item<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Item<T> {}

/// What a slot holds besides its key, in one cache line: a lookup reads both.
#[repr(C, align(16))]
struct Slot<T> {
    entry: AtomicPtr<T>,
    end: AtomicU64,
}

/// A leaf: `N` slots in no order, and the order beside them.
///
/// Lookups read `keys`, `slots` and, after a miss, `obsolete`. All stores are made by the holder of the leaf's lock; whoever
/// reads more than a lookup does reads under [`Leaf::read`].
#[repr(C, align(64))]
pub(super) struct Leaf<T, const N: usize> {
    /// The [`key`] of each slot, or [`FREE_KEY`].
    keys: [AtomicU64; N],
    slots: [Slot<T>; N],
    // From here on the line of those who change the leaf.
    /// The lock, and what tells readers of a change: odd while held, and another even number after.
    version: AtomicU32,
    len: AtomicU8,
    /// The slot of the last insertion, or [`NO_SLOT`]: what tells an ascending or a descending run.
    recent: AtomicU8,
    obsolete: AtomicBool,
    /// The leaf begins at a fence: it is never merged with the one before it.
    fenced: AtomicBool,
    /// A permutation of the slots, four bits each: the first `len` are in use, ascending by start; the others are
    /// free. (After the permuter of Masstree: Y. Mao, E. Kohler, R. Morris, EuroSys 2012; but lookups do without.)
    order: AtomicU64,
    /// The span: the addresses that are routed here. Every entry lies wholly in it.
    low: AtomicU64,
    high: AtomicU64,
    link: RetireLink,
    /// Where its memory is to be given back, if not to the allocator.
    home: Option<NonNull<Piece>>,
}

impl<T, const N: usize> Leaf<T, N> {
    pub(super) const SIZES_FIT: () = assert!(N >= 4 && N.is_multiple_of(LANES) && N <= 16);

    /// A leaf without entries for the addresses `low..high`.
    pub(super) fn new(low: u64, high: u64) -> Self {
        let () = Self::SIZES_FIT;
        Self {
            keys: core::array::from_fn(|_| AtomicU64::new(FREE_KEY)),
            slots: core::array::from_fn(|_| Slot {
                entry: AtomicPtr::new(ptr::null_mut()),
                end: AtomicU64::new(0),
            }),
            version: AtomicU32::new(0),
            len: AtomicU8::new(0),
            recent: AtomicU8::new(NO_SLOT),
            obsolete: AtomicBool::new(false),
            fenced: AtomicBool::new(false),
            order: AtomicU64::new(ORDER),
            low: AtomicU64::new(low),
            high: AtomicU64::new(high),
            link: RetireLink::new(),
            home: None,
        }
    }

    /// Waits for the lock. Held for some dozens of instructions; its holder waits for nobody, unless it holds the
    /// structure lock as well.
    #[inline]
    pub(super) fn lock(&self) -> Held<'_, T, N> {
        loop {
            let seen = self.version.load(Ordering::Relaxed);
            if seen & 1 == 0
                && self
                    .version
                    .compare_exchange_weak(seen, seen | 1, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                // Whoever sees a store of the holder sees the version odd, or a later one.
                fence(Ordering::Release);
                return Held { leaf: self };
            }
            spin_loop();
        }
    }

    #[inline]
    fn unlock(&self) {
        let odd = self.version.load(Ordering::Relaxed);
        self.version.store(odd.wrapping_add(1), Ordering::Release);
    }

    /// The version, if nobody is changing the leaf.
    #[inline]
    pub(super) fn version_at_rest(&self) -> Option<u32> {
        Some(self.version.load(Ordering::Acquire)).filter(|version| version & 1 == 0)
    }

    /// True when nobody has changed the leaf since it had this version.
    #[inline]
    pub(super) fn is_still(&self, version: u32) -> bool {
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version
    }

    /// What `look` makes of one state of the leaf. It may run several times, and on mixtures of states, whose results
    /// are thrown away: it must not follow pointers. Writes nothing, unless the leaf changes all the time.
    #[inline]
    pub(super) fn read<R>(&self, look: impl Fn(&Self) -> R) -> R {
        for _ in 0..READS {
            let seen = self.version.load(Ordering::Acquire);
            if seen & 1 == 0 {
                let result = look(self);
                fence(Ordering::Acquire);
                if mutant!("index-read-unvalidated", self.version.load(Ordering::Relaxed) == seen, true) {
                    return result;
                }
            }
            spin_loop();
        }
        look(&self.lock())
    }

    /// The entry with the greatest start at or below `addr`, if it ends above; null when it does not, or there is none, or
    /// it is the sentinel. An entry that is being changed may be missed.
    ///
    /// One pass without branches. The distance to a start above `addr`, or to that of a free slot, wraps to more than any
    /// distance to a start below, so the least distance decides; and it has the slot in its low bits.
    #[inline]
    pub(super) fn locate(&self, addr: u64) -> *mut T {
        // Where the leaf is in no cache near by, its keys and its slots come together, and not these after those.
        self.slots.iter().step_by(LINE / size_of::<Slot<T>>()).for_each(|slot| prefetch(slot));
        let limit = addr | SLOT_BITS;
        let above = limit.wrapping_add(1);
        let mut least = [u64::MAX; LANES];
        for group in self.keys.as_chunks::<LANES>().0 {
            for (least, key) in least.iter_mut().zip(group) {
                let distance = key.load(Ordering::Relaxed).wrapping_add(above);
                *least = select_unpredictable(distance < *least, distance, *least);
            }
        }
        // Pairs with the release of the key: what is read below was stored with that key, or later.
        fence(Ordering::Acquire);
        let [a, b, c, d] = least;
        let least = a.min(b).min(c.min(d));
        if least > limit {
            return ptr::null_mut();
        }
        let at = (least & SLOT_BITS) as usize % N;
        let slot = &self.slots[at];
        let (entry, end) = (slot.entry.load(Ordering::Acquire), slot.end.load(Ordering::Acquire));
        // The slot may have been given to another entry since the look at its key. Then the key has changed.
        let is_same = self.keys[at].load(Ordering::Relaxed) == least.wrapping_sub(above);
        if addr < end && is_same { entry } else { ptr::null_mut() }
    }

    /// How many entries start below `bound`, which is at most one above the end of the limits: the rank of the first that
    /// does not.
    #[inline]
    pub(super) fn rank(&self, bound: u64) -> usize {
        // Starts are page aligned, so that the slot's number in the low bits changes no comparison with an aligned bound.
        let bound = !(bound.wrapping_add(SLOT_BITS) & !SLOT_BITS);
        let mut below = [0; 2];
        for group in self.keys.as_chunks::<2>().0 {
            for (below, key) in below.iter_mut().zip(group) {
                *below += usize::from(key.load(Ordering::Relaxed) > bound);
            }
        }
        below[0] + below[1]
    }

    /// True when `addr` is routed to this leaf.
    #[inline]
    pub(super) fn covers(&self, addr: u64) -> bool {
        self.low() <= addr && addr < self.high()
    }

    /// The first address of the span.
    #[inline]
    pub(super) fn low(&self) -> u64 {
        self.low.load(Ordering::Relaxed)
    }

    /// The first address behind the span; the greatest there is for the last leaf.
    #[inline]
    pub(super) fn high(&self) -> u64 {
        self.high.load(Ordering::Relaxed)
    }

    #[inline]
    fn slot(&self, rank: usize) -> usize {
        (self.order.load(Ordering::Relaxed) >> (4 * (rank & 15)) & 15) as usize % N
    }

    /// Entries in the leaf, the sentinel included.
    #[inline]
    pub(super) fn len(&self) -> usize {
        (self.len.load(Ordering::Relaxed) as usize).min(N)
    }

    /// The start of the entry of this rank.
    #[inline]
    pub(super) fn start(&self, rank: usize) -> u64 {
        start_of(self.keys[self.slot(rank)].load(Ordering::Relaxed))
    }

    /// The end of the entry of this rank.
    #[inline]
    pub(super) fn end(&self, rank: usize) -> u64 {
        self.slots[self.slot(rank)].end.load(Ordering::Relaxed)
    }

    /// Start and end of the entry of this rank.
    #[inline]
    pub(super) fn bounds(&self, rank: usize) -> (u64, u64) {
        let slot = self.slot(rank);
        let start = start_of(self.keys[slot].load(Ordering::Relaxed));
        (start, self.slots[slot].end.load(Ordering::Relaxed))
    }

    /// The entry of this rank; null for the sentinel.
    #[inline]
    pub(super) fn entry(&self, rank: usize) -> *mut T {
        self.slots[self.slot(rank)].entry.load(Ordering::Acquire)
    }

    pub(super) fn item(&self, rank: usize) -> Item<T> {
        Item { start: self.start(rank), end: self.end(rank), entry: self.entry(rank) }
    }

    /// True when the leaf begins at a fence.
    pub(super) fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Relaxed)
    }

    /// True when the entry of this rank was the last one inserted.
    pub(super) fn is_recent(&self, rank: usize) -> bool {
        self.slot(rank) == self.recent.load(Ordering::Relaxed) as usize
    }
}

/// How often a reader looks at a leaf that changes before it takes the lock.
const READS: usize = 16;

/// The lock of a leaf, held.
pub(super) struct Held<'p, T, const N: usize> {
    leaf: &'p Leaf<T, N>,
}

impl<T, const N: usize> Drop for Held<'_, T, N> {
    #[inline]
    fn drop(&mut self) {
        self.leaf.unlock();
    }
}

impl<T, const N: usize> Deref for Held<'_, T, N> {
    type Target = Leaf<T, N>;

    #[inline]
    fn deref(&self) -> &Leaf<T, N> {
        self.leaf
    }
}

impl<T, const N: usize> Held<'_, T, N> {
    /// True when the leaf is the one to change for `addr`.
    #[inline]
    pub(super) fn is_for(&self, addr: u64) -> bool {
        mutant!("index-obsolete-leaf", !self.obsolete.load(Ordering::Relaxed), true) && self.covers(addr)
    }

    /// The rank of the entry that contains `addr`.
    // Always, as it is most of what a change costs beside the locks.
    #[inline(always)]
    pub(super) fn rank_at(&self, addr: u64) -> Option<usize> {
        let rank = self.rank(addr + 1).checked_sub(1)?;
        (addr < self.end(rank)).then_some(rank)
    }

    /// Adds an entry as the one of this rank, to a leaf that is not full.
    #[inline]
    pub(super) fn insert(&self, rank: usize, item: Item<T>) {
        let len = self.len();
        debug_assert!(len < N && rank <= len);
        let at = self.slot(len);
        // Takes the free slot out of its place, and lets it in before the later ones.
        let order = without(self.order.load(Ordering::Relaxed), len);
        self.order.store(with(order, rank, at), Ordering::Relaxed);
        self.len.store(len as u8 + 1, Ordering::Relaxed);
        self.recent.store(at as u8, Ordering::Relaxed);
        let slot = &self.slots[at];
        // What is taken out and put in again finds its slot as it was: then the line stays with those who look up others in
        // it. They learn of the record by the key, which is stored in any case.
        if slot.end.load(Ordering::Relaxed) != item.end {
            slot.end.store(item.end, Ordering::Release);
        }
        if slot.entry.load(Ordering::Relaxed) != item.entry {
            slot.entry.store(item.entry, Ordering::Release);
        }
        self.keys[at].store(key(item.start, at), Ordering::Release);
    }

    /// Adds an entry behind the others.
    pub(super) fn push(&self, item: Item<T>) {
        self.insert(self.len(), item);
    }

    /// Takes the entry of this rank out.
    #[inline]
    pub(super) fn remove(&self, rank: usize) {
        let at = self.slot(rank);
        self.keys[at].store(FREE_KEY, Ordering::Release);
        let len = self.len() - 1;
        // The slot becomes the first of the free ones.
        let order = without(self.order.load(Ordering::Relaxed), rank);
        self.order.store(with(order, len, at), Ordering::Relaxed);
        self.len.store(len as u8, Ordering::Relaxed);
        if self.recent.load(Ordering::Relaxed) == at as u8 {
            self.recent.store(NO_SLOT, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn set_start(&self, rank: usize, start: u64) {
        let at = self.slot(rank);
        self.keys[at].store(key(start, at), Ordering::Release);
    }

    #[inline]
    pub(super) fn set_end(&self, rank: usize, end: u64) {
        self.slots[self.slot(rank)].end.store(end, Ordering::Release);
    }

    #[inline]
    pub(super) fn set_entry(&self, rank: usize, entry: *mut T) {
        self.slots[self.slot(rank)].entry.store(entry, Ordering::Release);
    }

    /// Changes the span. The structure lock is held.
    pub(super) fn set_span(&self, low: u64, high: u64) {
        self.low.store(low, Ordering::Relaxed);
        self.high.store(high, Ordering::Relaxed);
    }

    /// The leaf begins at a fence, or does not.
    pub(super) fn set_fenced(&self, fenced: bool) {
        self.fenced.store(fenced, Ordering::Relaxed);
    }

    /// Forgets which entry was inserted last: filling a new leaf from an old one is no run.
    pub(super) fn forget_recent(&self) {
        self.recent.store(NO_SLOT, Ordering::Relaxed);
    }
}

/// A child as writers carry it about.
#[derive(Clone, Copy)]
pub(super) struct Child {
    pub(super) node: *mut (),
    /// The least address below the child, as its parent says it.
    pub(super) from: u64,
    /// Upper bound on the largest gap before an entry below the child.
    pub(super) gap: u64,
}

/// An inner node of up to `F` children. Which children it has never changes once it is published; what a child
/// pointer, a separator or a gap hint says may.
#[repr(C, align(64))]
pub(super) struct Inner<const F: usize> {
    /// Copies of the separators a quarter, a half and three quarters into the node: a lookup reads this line, one
    /// quarter of `from` and one child, instead of all of the node.
    quarters: [AtomicU64; 3],
    link: RetireLink,
    /// Written before the node is published.
    len: AtomicU8,
    obsolete: AtomicBool,
    /// `from[i]` is the least address routed to child `i`, ascending; 0 for the first and [`FREE`] for none.
    from: [AtomicU64; F],
    children: [AtomicPtr<()>; F],
    gaps: [AtomicU64; F],
}

impl<const F: usize> Inner<F> {
    pub(super) const SIZES_FIT: () = assert!(F >= 4 && F.is_multiple_of(4) && F < 255);

    /// A node without children, to be filled before it is published.
    pub(super) fn new() -> Self {
        let () = Self::SIZES_FIT;
        Self {
            quarters: core::array::from_fn(|_| AtomicU64::new(FREE)),
            from: core::array::from_fn(|_| AtomicU64::new(FREE)),
            children: core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            gaps: core::array::from_fn(|_| AtomicU64::new(0)),
            link: RetireLink::new(),
            len: AtomicU8::new(0),
            obsolete: AtomicBool::new(false),
        }
    }

    /// Adds a child behind the others, to a node that is not yet published.
    pub(super) fn push(&self, child: Child) {
        let at = self.len();
        self.set_from(at, if at == 0 { 0 } else { child.from });
        self.children[at].store(child.node, Ordering::Relaxed);
        self.gaps[at].store(child.gap, Ordering::Relaxed);
        self.len.store(at as u8 + 1, Ordering::Relaxed);
    }

    /// The number of the child that `addr` belongs to.
    ///
    /// Counts all separators, without branches. A count is also what makes in-place changes harmless: a separator
    /// is on the same side of a given entry whenever it is read, so any mixture of old and new values routes the
    /// entry's addresses to the same child.
    #[inline]
    pub(super) fn route(&self, addr: u64) -> usize {
        // Two steps, each of comparisons that do not wait for one another: a binary search waits five times. Where all children
        // are in the first quarter, as in the root of a small tree, nobody waits for the first: processors guess that well.
        let is_below = |from: u64| from <= addr;
        let quarter = if self.len() <= F / 4 {
            0
        } else {
            let (one, two) = self.quarters.split_at(1);
            (count(one, is_below) + count(two, is_below)) * (F / 4)
        };
        let (one, two) = self.from[quarter..][1..F / 4].split_at((F / 4 - 1) / 2);
        quarter + count(one, is_below) + count(two, is_below)
    }

    #[inline]
    pub(super) fn child(&self, at: usize) -> *mut () {
        self.children[at].load(Ordering::Acquire)
    }

    /// Publishes another node for the same span.
    pub(super) fn set_child(&self, at: usize, node: *mut ()) {
        self.children[at].store(node, Ordering::Release);
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed) as usize
    }

    #[inline]
    pub(super) fn from(&self, at: usize) -> u64 {
        self.from[at].load(Ordering::Relaxed)
    }

    pub(super) fn set_from(&self, at: usize, from: u64) {
        self.from[at].store(from, Ordering::Relaxed);
        if at > 0 && at.is_multiple_of(F / 4) {
            self.quarters[at / (F / 4) - 1].store(from, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn gap(&self, at: usize) -> &AtomicU64 {
        &self.gaps[at]
    }

    /// The highest of all gap hints.
    pub(super) fn highest_gap(&self) -> u64 {
        self.gaps[..self.len()].iter().fold(0, |most, gap| most.max(gap.load(Ordering::SeqCst) & !MARK))
    }

    /// The last of the first `count` children whose hint allows for a gap of `length`.
    #[inline]
    pub(super) fn last_gap(&self, count: usize, length: u64) -> Option<usize> {
        self.gaps[..count.min(F)].iter().rposition(|gap| gap.load(Ordering::SeqCst) >= length)
    }

    /// True when a neighbour's span has swallowed that of child `at`, which then holds no entry.
    pub(super) fn is_swallowed(&self, at: usize) -> bool {
        at + 1 < self.len() && self.from(at) >= self.from(at + 1)
    }

    pub(super) fn as_child(&self, at: usize) -> Child {
        Child { node: self.child(at), from: self.from(at), gap: self.gap(at).load(Ordering::SeqCst) & !MARK }
    }
}

/// The bits of a gap hint that say that somebody is about to lower it, and who: gaps are page aligned. See `gaps`.
pub(super) const MARK: u64 = PAGE_SIZE - 1;

/// What leaves and inner nodes have in common: the end of their life.
///
/// # Safety
/// `OFFSET` is the offset of the embedded [`RetireLink`].
pub(super) unsafe trait Node {
    const OFFSET: usize;
    fn obsolete(&self) -> &AtomicBool;

    /// The piece of a pool that its memory came from; `None`: the allocator's.
    fn home(&self) -> Option<NonNull<Piece>> {
        None
    }

    /// Says where its memory came from.
    fn set_home(&mut self, home: Option<NonNull<Piece>>) {
        debug_assert!(home.is_none(), "only leaves come from pools");
    }

    /// True once the node has been, or is just being, replaced.
    #[inline]
    fn is_obsolete(&self) -> bool {
        self.obsolete().load(Ordering::SeqCst)
    }

    /// Says that the node is being replaced: before its gap hints are read for the last time, and before a
    /// successor of it is published.
    fn retire_from_now(&self) {
        self.obsolete().store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

// SAFETY: the offset of the field of that type.
unsafe impl<T, const N: usize> Node for Leaf<T, N> {
    const OFFSET: usize = core::mem::offset_of!(Self, link);
    #[inline]
    fn obsolete(&self) -> &AtomicBool {
        &self.obsolete
    }
    fn home(&self) -> Option<NonNull<Piece>> {
        self.home
    }
    fn set_home(&mut self, home: Option<NonNull<Piece>>) {
        self.home = home;
    }
}

// SAFETY: the offset of the field of that type.
unsafe impl<const F: usize> Node for Inner<F> {
    const OFFSET: usize = core::mem::offset_of!(Self, link);
    #[inline]
    fn obsolete(&self) -> &AtomicBool {
        &self.obsolete
    }
}

describe!([T] Slot<T> { entry, end });
describe!([T, const N: usize] Leaf<T, N> {
    keys, slots, version, len, recent, obsolete, fenced, order, low, high, link
});
describe!([const F: usize] Inner<F> { quarters, link, len, obsolete, from, children, gaps });
