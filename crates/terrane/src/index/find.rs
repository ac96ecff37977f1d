//! The way down: lookups without locks, and the exact queries of those who hold the layout lock.

use super::node::{Inner, Leaf, Node};
use super::{Entry, Index, MAX_HEIGHT};
use crate::addr::AddrRange;
use crate::sync::Pin;
use crate::sync::atomic::Ordering;
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

    /// As [`step`](Self::step), but passes over leaves without entries.
    pub(super) fn step_to_entry(&mut self, ahead: bool) -> bool {
        while self.step(ahead) {
            if self.leaf().len() != 0 {
                return true;
            }
        }
        false
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
    fn leaf_of<'p>(&'p self, _: &'p Pin<'_>, addr: u64) -> &'p Leaf<T, N> {
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
    /// Takes no lock, waits for nobody and writes nothing. O(log n). A hit was an entry of the index at some
    /// moment of the call, and its own fields said that it contains `addr`; whoever needs more checks the entry
    /// afterwards. An entry that was in place before the call, and that no writer touched during it, is found.
    ///
    /// **A miss is never proof of absence**: an entry that is being inserted, resized or moved may be missed. Proof
    /// is a miss under the layout lock.
    #[inline]
    pub fn find<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Option<&'p T> {
        if addr >= self.top.limits.end {
            return None;
        }
        for _ in 0..RETRIES {
            let leaf = self.leaf_of(pin, addr);
            // SAFETY: the slot's key was in place while the pin lasted, so the entry is not yet freed
            // (contract of `Entry`).
            if let Some(entry) = unsafe { leaf.locate(addr).as_ref() }
                && (entry.start() <= addr && addr < entry.end())
            {
                return Some(entry);
            }
            if !leaf.obsolete().load(Ordering::Acquire) {
                break;
            }
        }
        None
    }

    /// The path to the first entry that starts at `bound` or above, and its rank. There is always one: the sentinel.
    #[inline(always)]
    pub(super) fn seek<'p>(&'p self, pin: &'p Pin<'_>, bound: u64) -> (Path<'p, T, N, F>, usize) {
        let mut path = self.path(pin, bound);
        let mut rank = path.leaf().rank(bound);
        if rank == path.leaf().len() && path.step_to_entry(true) {
            rank = 0;
        }
        (path, rank)
    }

    /// As [`seek`](Self::seek), but an entry that contains `addr` comes first.
    #[inline(always)]
    fn seek_ending_after<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> (Path<'p, T, N, F>, usize) {
        let mut path = self.path(pin, addr);
        let mut rank = path.leaf().rank(addr + 1);
        if rank > 0 && path.leaf().end(rank - 1) > addr {
            rank -= 1;
        } else if rank == path.leaf().len() && path.step_to_entry(true) {
            rank = 0;
        }
        (path, rank)
    }

    #[inline]
    fn entry_at<'p>(path: &Path<'p, T, N, F>, rank: usize) -> Option<&'p T> {
        if rank >= path.leaf().len() {
            return None;
        }
        // SAFETY: in place under the pin of the path, so not yet freed (contract of `Entry`).
        unsafe { path.leaf().entry(rank).as_ref() }
    }

    /// The lowest entry that ends above `addr`: the one that contains it, or the next one. O(log n).
    ///
    /// Exact while no writer runs: callers hold the layout lock.
    pub fn first_ending_after<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Option<&'p T> {
        if addr >= self.top.limits.end {
            return None;
        }
        let (path, rank) = self.seek_ending_after(pin, addr);
        Self::entry_at(&path, rank)
    }

    /// The entries beside `addr`: the highest that starts below it, and the lowest that starts at it or above. One
    /// descent for both. O(log n).
    ///
    /// Exact while no writer runs: callers hold the layout lock.
    pub fn neighbours<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> (Option<&'p T>, Option<&'p T>) {
        let bound = addr.min(self.top.limits.end);
        let path = self.path(pin, bound);
        let rank = path.leaf().rank(bound);
        let below = if rank > 0 {
            Self::entry_at(&path, rank - 1)
        } else {
            let mut before = path;
            if before.step_to_entry(false) { Self::entry_at(&before, before.leaf().len() - 1) } else { None }
        };
        let above = if rank < path.leaf().len() {
            Self::entry_at(&path, rank)
        } else {
            let mut behind = path;
            if behind.step_to_entry(true) { Self::entry_at(&behind, 0) } else { None }
        };
        (below, above)
    }

    /// The highest entry that starts below `addr`. O(log n).
    ///
    /// Exact while no writer runs: callers hold the layout lock.
    pub fn last_starting_before<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Option<&'p T> {
        let bound = addr.min(self.top.limits.end);
        let mut path = self.path(pin, bound);
        let mut rank = path.leaf().rank(bound);
        if rank == 0 {
            if !path.step_to_entry(false) {
                return None;
            }
            rank = path.leaf().len();
        }
        Self::entry_at(&path, rank - 1)
    }

    /// Calls `visit` for every entry that shares an address with `range`, ascending, until it breaks. O(log n)
    /// plus the entries visited.
    ///
    /// Exact while no writer runs: callers hold the layout lock, and `visit` must not change the index.
    pub fn for_each<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        range: AddrRange,
        mut visit: impl FnMut(&'p T) -> ControlFlow<()>,
    ) {
        if range.is_empty() || range.start >= self.top.limits.end {
            return;
        }
        let (mut path, mut rank) = self.seek_ending_after(pin, range.start);
        loop {
            let leaf = path.leaf();
            while rank < leaf.len() {
                if leaf.start(rank) >= range.end {
                    return;
                }
                // The sentinel is behind all others.
                let Some(entry) = Self::entry_at(&path, rank) else { return };
                if visit(entry).is_break() {
                    return;
                }
                rank += 1;
            }
            if !path.step(true) {
                return;
            }
            rank = 0;
        }
    }
}

/// The bits of the root word that hold the height: nodes are aligned to 64 bytes.
const MAX_HEIGHT_MASK: usize = 63;
const _: () = assert!(MAX_HEIGHT <= MAX_HEIGHT_MASK);
