//! The way down: lookups, and queries that read one state of each leaf they come to.

use super::node::{Held, Inner, Item, Leaf, Node};
use super::{Entry, Index, MAX_HEIGHT};
use crate::addr::AddrRange;
use crate::sync::Pin;
use crate::sync::atomic::{Ordering, spin_loop};
use core::marker::PhantomData;
use core::ops::ControlFlow;
use core::ptr;

/// How often a lookup that ended in an obsolete leaf starts again. The window between marking a node and
/// publishing its successor is a few stores long, so this is for a writer that was interrupted in it.
const RETRIES: usize = 8;

/// The nodes from the root to a leaf, and which child was taken in each.
pub(super) struct Path<'p, T, const N: usize, const F: usize> {
    inners: [*const Inner<F>; MAX_HEIGHT],
    at: [u8; MAX_HEIGHT],
    height: usize,
    leaf: *const Leaf<T, N>,
    pin: PhantomData<&'p Leaf<T, N>>,
}

impl<T, const N: usize, const F: usize> Clone for Path<'_, T, N, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const N: usize, const F: usize> Copy for Path<'_, T, N, F> {}

impl<'p, T, const N: usize, const F: usize> Path<'p, T, N, F> {
    /// Inner nodes above the leaf.
    #[inline]
    pub(super) fn height(&self) -> usize {
        self.height
    }

    #[inline]
    pub(super) fn leaf(&self) -> &'p Leaf<T, N> {
        // SAFETY: reached from the root under the pin whose lifetime the path carries.
        unsafe { &*self.leaf }
    }

    /// The inner node at `depth`, 0 being the root.
    #[inline]
    pub(super) fn inner(&self, depth: usize) -> &'p Inner<F> {
        debug_assert!(depth < self.height);
        // SAFETY: as `leaf`; depths below the height are filled.
        unsafe { &*self.inners[..self.height][depth] }
    }

    /// The child taken at `depth`.
    #[inline]
    pub(super) fn at(&self, depth: usize) -> usize {
        self.at[depth] as usize
    }

    /// Takes child `at` in the node at `depth`, and enters it: what is below is to be chosen next.
    #[inline]
    pub(super) fn enter(&mut self, depth: usize, at: usize) {
        self.at[depth] = at as u8;
        let node = self.inner(depth).child(at);
        if depth + 1 < self.height {
            self.inners[depth + 1] = node.cast();
        } else {
            self.leaf = node.cast();
        }
    }

    /// Goes to the leaf behind or before this one; false when there is none.
    pub(super) fn step(&mut self, ahead: bool) -> bool {
        for depth in (0..self.height).rev() {
            let at = self.at(depth);
            let next = if ahead { at + 1 } else { at.wrapping_sub(1) };
            if next < self.inner(depth).len() {
                self.enter(depth, next);
                for below in depth + 1..self.height {
                    self.enter(below, if ahead { 0 } else { self.inner(below).len() - 1 });
                }
                return true;
            }
        }
        false
    }
}

/// One state of a leaf, sorted.
pub(super) struct Snapshot<T, const N: usize> {
    items: [Item<T>; N],
    len: usize,
    /// The span.
    pub(super) low: u64,
    pub(super) high: u64,
}

impl<T, const N: usize> Snapshot<T, N> {
    /// Of a leaf under [`Leaf::read`] or its lock.
    #[inline]
    pub(super) fn of(leaf: &Leaf<T, N>) -> Self {
        let none = Item { start: 0, end: 0, entry: ptr::null_mut() };
        let len = leaf.len();
        let items = core::array::from_fn(|rank| if rank < len { leaf.item(rank) } else { none });
        Self { items, len, low: leaf.low(), high: leaf.high() }
    }

    /// The entries, ascending, the sentinel included.
    #[inline]
    pub(super) fn items(&self) -> &[Item<T>] {
        &self.items[..self.len]
    }
}

impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// The root node and how many inner nodes are above a leaf.
    #[inline]
    pub(super) fn root(&self) -> (*mut (), usize) {
        let word = self.top.root.load(Ordering::Acquire);
        (word.map_addr(|bits| bits & !(MAX_HEIGHT_MASK)), word.addr() & MAX_HEIGHT_MASK)
    }

    pub(super) fn set_root(&self, node: *mut (), height: usize) {
        self.top.root.store(node.map_addr(|bits| bits | height), Ordering::Release);
    }

    #[inline]
    pub(super) fn leaf_of<'p>(&'p self, _: &'p Pin<'_>, addr: u64) -> &'p Leaf<T, N> {
        let (mut node, height) = self.root();
        for _ in 0..height {
            // SAFETY: nodes are unlinked before they are retired, so what is reached from the root under a pin
            // stays; the root says how many levels are inner nodes.
            let inner = unsafe { &*node.cast::<Inner<F>>() };
            node = inner.child(inner.route(addr));
        }
        // SAFETY: as above.
        unsafe { &*node.cast::<Leaf<T, N>>() }
    }

    /// The leaf to change for `addr`, locked.
    #[inline]
    pub(super) fn lock_leaf<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Held<'p, T, N> {
        loop {
            let leaf = self.leaf_of(pin, addr).lock();
            if leaf.is_for(addr) {
                return leaf;
            }
            drop(leaf);
            spin_loop();
        }
    }

    /// The same, and the way there.
    #[inline(always)]
    pub(super) fn lock_path<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        addr: u64,
    ) -> (Path<'p, T, N, F>, Held<'p, T, N>) {
        loop {
            let path = self.path(pin, addr);
            let leaf = path.leaf().lock();
            if leaf.is_for(addr) {
                return (path, leaf);
            }
            drop(leaf);
            spin_loop();
        }
    }

    /// What `look` makes of one state of the leaf that `addr` is routed to; see [`Leaf::read`]. A leaf that is obsolete
    /// does as well: it is as it was when its successor was published, and that was during this call.
    #[inline]
    pub(super) fn read_at<R>(&self, pin: &Pin<'_>, addr: u64, look: impl Fn(&Leaf<T, N>) -> R) -> R {
        loop {
            if let Some(result) = self.leaf_of(pin, addr).read(|leaf| leaf.covers(addr).then(|| look(leaf))) {
                return result;
            }
            // A separator is on its way.
            spin_loop();
        }
    }

    /// A path that has not gone down yet: every level is to be entered.
    #[inline(always)]
    pub(super) fn top_of_path<'p>(&'p self, _: &'p Pin<'_>) -> Path<'p, T, N, F> {
        let (node, height) = self.root();
        let mut path = Path {
            inners: [ptr::null(); MAX_HEIGHT],
            at: [0; MAX_HEIGHT],
            height,
            leaf: node.cast(),
            pin: PhantomData,
        };
        path.inners[0] = node.cast();
        path
    }

    // Inlined always, like its callers: a path is 200 bytes, and handing it on by copies was a tenth of map and unmap.
    #[inline(always)]
    pub(super) fn path<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Path<'p, T, N, F> {
        let mut path = self.top_of_path(pin);
        for depth in 0..path.height() {
            path.enter(depth, path.inner(depth).route(addr));
        }
        path
    }

    /// The entry that contains `addr`.
    ///
    /// Takes no lock, waits for nobody and writes nothing. O(log n). What it returns was an entry of the index at some moment
    /// of the call, as a rule one that contained `addr` then; the entry itself is not looked at. **Callers check the
    /// entry**, as faults do by its sequence counter. An entry that was in place before the call, and that no writer
    /// touched during it, is found.
    ///
    /// **A miss is never proof of absence**: an entry that is being inserted, resized or moved may be missed. Proof
    /// is a miss of [`find_exact`](Self::find_exact).
    #[inline]
    pub fn find<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Option<&'p T> {
        if addr >= self.top.limits.end {
            return None;
        }
        for _ in 0..RETRIES {
            let leaf = self.leaf_of(pin, addr);
            // SAFETY: the slot's key was in place while the pin lasted, so the entry is not yet freed
            // (contract of `Entry`).
            if let Some(entry) = unsafe { leaf.locate(addr).as_ref() } {
                return Some(entry);
            }
            if !leaf.is_obsolete() {
                break;
            }
        }
        None
    }

    /// The entry that contains `addr`, exactly, if the caller keeps changes of `addr` away: it holds that address, shared or
    /// exclusively. A miss is proof. O(log n). Waits only while the leaf is being changed, and writes nothing as a rule.
    #[inline]
    pub fn find_exact<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Option<&'p T> {
        if addr >= self.top.limits.end {
            return None;
        }
        let entry = self.read_at(pin, addr, |leaf| leaf.locate(addr));
        // SAFETY: in place under the pin, so not yet freed (contract of `Entry`).
        unsafe { entry.as_ref() }
    }

    /// The highest entry that starts below `bound`, which is at most the end of the limits.
    pub(super) fn below(&self, pin: &Pin<'_>, bound: u64) -> Option<Item<T>> {
        let mut at = bound;
        loop {
            // From leaf to leaf, downwards: each begins where the one before it ends.
            let last = at.checked_sub(1)?;
            let (item, low) = self.read_at(pin, last, |leaf| {
                (leaf.rank(bound).checked_sub(1).map(|rank| leaf.item(rank)), leaf.low())
            });
            if item.is_some() {
                return item;
            }
            at = low;
        }
    }

    /// The lowest entry that starts at `bound` or above; the sentinel if need be.
    pub(super) fn above(&self, pin: &Pin<'_>, bound: u64) -> Item<T> {
        let mut at = bound;
        loop {
            let (item, high) = self.read_at(pin, at, |leaf| {
                let rank = leaf.rank(bound);
                ((rank < leaf.len()).then(|| leaf.item(rank)), leaf.high())
            });
            if let Some(item) = item {
                return item;
            }
            at = high;
        }
    }

    /// The entries beside `bound`, as far as the leaf of `at` knows, and the span of that leaf.
    #[inline]
    fn around(&self, pin: &Pin<'_>, at: u64, bound: u64) -> ([Option<Item<T>>; 2], AddrRange) {
        self.read_at(pin, at, |leaf| {
            let rank = leaf.rank(bound);
            let below = rank.checked_sub(1).map(|rank| leaf.item(rank));
            let above = (rank < leaf.len()).then(|| leaf.item(rank));
            ([below, above], AddrRange { start: leaf.low(), end: leaf.high() })
        })
    }

    #[inline]
    fn entry_of<'p>(_: &'p Pin<'_>, item: Option<Item<T>>) -> Option<&'p T> {
        // SAFETY: it was in place under the pin, so not yet freed (contract of `Entry`).
        item.and_then(|item| unsafe { item.entry.as_ref() })
    }

    /// The lowest entry that ends above `addr`: the one that contains it, or the next one. O(log n).
    ///
    /// Exact as far as the caller holds the addresses from `addr` to where the result starts; elsewhere what was there
    /// at some moment of the call.
    pub fn first_ending_after<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Option<&'p T> {
        if addr >= self.top.limits.end {
            return None;
        }
        let ([below, above], span) = self.around(pin, addr, addr + 1);
        let here = below.filter(|item| item.end > addr).or(above);
        Self::entry_of(pin, Some(here.unwrap_or_else(|| self.above(pin, span.end))))
    }

    /// The entries beside `addr`: the highest that starts below it, and the lowest that starts at it or above, each with its
    /// range as the index has it. One descent for both, as a rule. O(log n). Exact as
    /// [`first_ending_after`](Self::first_ending_after) is: whether they cover addresses of the caller's, and which.
    ///
    /// Entries that neither share an address with `within`, which contains `addr`, nor touch it, may be left out: so that a
    /// call need not look at leaves that are no concern of its own, and in which another CPU may be at work.
    #[inline]
    pub fn neighbours<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        addr: u64,
        within: AddrRange,
    ) -> [Option<(AddrRange, &'p T)>; 2] {
        let bound = addr.min(self.top.limits.end);
        let ([below, above], span) = self.around(pin, bound, bound);
        // Every entry lies wholly in the span of its leaf.
        let below = below.or_else(|| (within.start <= span.start).then(|| self.below(pin, bound)).flatten());
        let above = above.or_else(|| (span.end <= within.end).then(|| self.above(pin, span.end)));
        [below, above].map(|item| {
            let range = item.map(|item| AddrRange { start: item.start, end: item.end })?;
            Self::entry_of(pin, item).map(|entry| (range, entry))
        })
    }

    /// The highest entry that starts below `addr`. O(log n). Exact as
    /// [`first_ending_after`](Self::first_ending_after) is, downwards.
    pub fn last_starting_before<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Option<&'p T> {
        Self::entry_of(pin, self.below(pin, addr.min(self.top.limits.end)))
    }

    /// Calls `visit` for every entry that shares an address with `range`, ascending, until it breaks. O(log n) for every
    /// leaf on the way, plus the entries visited. Takes no lock.
    ///
    /// Exact where the caller holds the addresses. Elsewhere each entry that nobody changes meanwhile is seen exactly
    /// once; of the others, what was there when its leaf was read. `visit` must not change the index.
    pub fn for_each<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        range: AddrRange,
        mut visit: impl FnMut(&'p T) -> ControlFlow<()>,
    ) {
        let end = range.end.min(self.top.limits.end);
        let mut at = range.start;
        while at < end {
            let seen = self.read_at(pin, at, Snapshot::of);
            for item in seen.items() {
                // No entry that stays as it is lies across the border of two leaves: from the second leaf on, one that
                // starts below was in an earlier leaf and has been seen there.
                let behind = if at == range.start { item.end > at } else { item.start >= at };
                if !behind {
                    continue;
                }
                let entry = Self::entry_of(pin, Some(*item)).filter(|_| item.start < end);
                let Some(entry) = entry else { return };
                if visit(entry).is_break() {
                    return;
                }
            }
            at = seen.high;
        }
    }
}

/// The bits of the root word that hold the height: nodes are aligned to 64 bytes.
const MAX_HEIGHT_MASK: usize = 63;
const _: () = assert!(MAX_HEIGHT <= MAX_HEIGHT_MASK);
