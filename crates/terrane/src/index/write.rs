//! Changes of entries. Most change one leaf under its lock; those that must change more call `shape`.
//!
//! The protocol is in the head of [the index](super).

use super::gaps::Counted;
use super::node::{Held, Item, Leaf, Node};
use super::reserve::Reserve;
use super::shape::scant;
use super::{Entry, Index};
use crate::addr::{AddrRange, is_page_aligned};
use crate::sync::Pin;
use core::ptr::NonNull;

/// No address that was freed.
const NONE: u64 = u64::MAX;

/// What came of [`Index::insert_alone`]. Nothing has changed but for `Inserted`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Alone {
    /// The entry is in.
    Inserted,
    /// The range, or the guard of what lies above it, is not free.
    Taken,
    /// More must be looked at or changed than one leaf.
    Unclear,
}

/// What lies at the near end of the leaf beside, and the state of that leaf.
struct Outer<'p, T, const N: usize> {
    leaf: &'p Leaf<T, N>,
    version: u32,
    item: Item<T>,
}

impl<T, const N: usize> Clone for Outer<'_, T, N> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const N: usize> Copy for Outer<'_, T, N> {}

/// A change of one entry under the lock of its leaf: what [`Index::edit`] hands out.
///
/// It stays with the entry it began with, which is always the lower part of a division.
pub struct Edit<'e, T: Entry, const N: usize = { super::LEAF_SLOTS }, const F: usize = { super::FANOUT }> {
    leaf: &'e Held<'e, T, N>,
    rank: usize,
    range: AddrRange,
    removed: bool,
    divisions: usize,
    absorbed: usize,
    /// An address in each of the ranges that were freed: at the start and at the end.
    freed: [u64; 2],
}

impl<T: Entry, const N: usize, const F: usize> Edit<'_, T, N, F> {
    /// The entry's range, as the index knows it.
    #[inline]
    pub fn range(&self) -> AddrRange {
        self.range
    }

    /// The entry starts at `start` from now on, which is inside its range. The caller changes the record.
    pub fn set_start(&mut self, start: u64) {
        debug_assert!(is_page_aligned(start) && self.range.start <= start && start < self.range.end);
        self.leaf.set_start(self.rank, start);
        self.freed[0] = self.range.start;
        self.range.start = start;
    }

    /// The entry ends at `end` from now on, which is inside its range. The caller changes the record.
    pub fn set_end(&mut self, end: u64) {
        debug_assert!(is_page_aligned(end) && self.range.start < end && end <= self.range.end);
        self.leaf.set_end(self.rank, end);
        self.freed[1] = end;
        self.range.end = end;
    }

    /// The entry ends at `at` from now on, and `high`, a new one, takes the rest. The edit stays with the lower part: to
    /// cut a piece out of the middle, divide at its end first. Divide before [`set_end`](Self::set_end).
    ///
    /// # Panics
    /// When there is no room: `edit` was told of fewer `inserts`.
    pub fn divide(&mut self, at: u64, high: NonNull<T>) {
        debug_assert!(is_page_aligned(at) && self.range.start < at && at < self.range.end);
        debug_assert!(self.freed[1] == NONE && !self.removed, "divide before you cut");
        assert!(self.leaf.len() < N, "a division that `edit` was not told of");
        // First the new one, then the end of the old: every address is found in one of the two at any time.
        let item = Item { start: at, end: self.range.end, entry: high.as_ptr() };
        self.leaf.insert(self.rank + 1, item);
        self.leaf.set_end(self.rank, at);
        self.range.end = at;
        self.divisions += 1;
    }

    /// The entry that ends where this one starts, if it is in the same leaf. `None` proves nothing.
    #[inline]
    pub fn below(&self) -> Option<&T> {
        let below = self.rank.checked_sub(1).filter(|&below| self.leaf.end(below) == self.range.start)?;
        // SAFETY: in the leaf, which is locked, under the pin of the edit, so not yet freed (contract of `Entry`).
        unsafe { self.leaf.entry(below).as_ref() }
    }

    /// The entry that starts where this one ends, if it is in the same leaf. `None` proves nothing.
    #[inline]
    pub fn above(&self) -> Option<&T> {
        let above = self.rank + 1;
        let touches = above < self.leaf.len() && self.leaf.start(above) == self.range.end;
        // SAFETY: as in `below`.
        if touches { unsafe { self.leaf.entry(above).as_ref() } } else { None }
    }

    /// True when what lies below, touching or not, is in another leaf, and may touch.
    #[inline]
    pub fn is_at_low_edge(&self) -> bool {
        self.rank == 0 && self.leaf.low() == self.range.start
    }

    /// True when what lies above, touching or not, is in another leaf, and may touch.
    #[inline]
    pub fn is_at_high_edge(&self) -> bool {
        self.rank + 1 == self.leaf.len() && self.leaf.high() == self.range.end
    }

    /// [`above`](Self::above) is taken out, and the entry takes its range. The caller changes the records.
    pub fn absorb_above(&mut self) {
        let above = self.rank + 1;
        debug_assert!(self.above().is_some() && !self.removed);
        self.range.end = self.leaf.end(above);
        // First the one, then the other: every address is found in one of the two at any time.
        self.leaf.set_end(self.rank, self.range.end);
        self.leaf.remove(above);
        self.absorbed += 1;
    }

    /// The entry is taken out, and [`below`](Self::below) takes its range; the edit goes on with that one. The caller changes
    /// the records.
    pub fn absorb_into_below(&mut self) {
        debug_assert!(self.below().is_some() && !self.removed);
        let below = self.rank - 1;
        self.leaf.set_end(below, self.range.end);
        self.leaf.remove(self.rank);
        self.rank = below;
        self.range.start = self.leaf.start(below);
        self.absorbed += 1;
    }

    /// Takes the entry out of the index: the last thing that is done with it. Readers may still use it: it is to be freed
    /// through the epoch.
    pub fn remove(&mut self) {
        debug_assert!(!self.removed);
        self.removed = true;
        self.leaf.remove(self.rank);
        self.freed[0] = self.range.start;
    }
}

impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// Adds an entry for `range`, which is page aligned, not empty, inside the limits, free, and the caller's. O(log n).
    /// Does not look at the record.
    ///
    /// Does not fail if [`reserve`](Self::reserve) was called for it.
    #[inline]
    pub fn insert(&self, reserve: &mut Reserve<T, N, F>, pin: &Pin<'_>, range: AddrRange, entry: NonNull<T>) {
        let AddrRange { start, end } = range;
        debug_assert!(is_page_aligned(start) && is_page_aligned(end) && start < end);
        debug_assert!(self.top.limits.start <= start && end <= self.top.limits.end);
        reserve.promised = reserve.promised.saturating_sub(1);
        let item = Item { start, end, entry: entry.as_ptr() };
        let leaf = self.lock_leaf(pin, start);
        if leaf.len() < N && end <= leaf.high() {
            Self::insert_into(&leaf, item);
        } else {
            drop(leaf);
            let leaf = self.make_room(reserve, pin, item);
            Self::insert_into(&leaf, item);
        }
        self.len.add(pin.cpu(), 1);
    }

    /// Adds an entry for `range`, as [`insert`](Self::insert) does, if the leaf shows in one look that the range is free, that it
    /// leaves the guard of what lies above free, and that `joins` says of neither of the entries that touch it (below, above)
    /// that it is to be extended instead. So a caller that as a rule finds it so needs no look before.
    #[inline]
    pub fn insert_alone(
        &self,
        reserve: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        range: AddrRange,
        entry: NonNull<T>,
        joins: impl Fn(Option<&T>, Option<&T>) -> bool,
    ) -> Alone {
        let done = self.insert_at_once(pin, range, entry, |below, above| !joins(below, above));
        if done == Alone::Inserted {
            reserve.promised = reserve.promised.saturating_sub(1);
        }
        done
    }

    /// The same for a caller that need not hold the range: `may` runs under the lock of the leaf, once the range has been found free,
    /// and decides. Needs no nodes.
    ///
    /// Where the range touches the border of the leaf, the leaf beside is looked at before, and has not changed when the entry goes
    /// in: a run of mappings begins each leaf so.
    #[inline]
    pub fn insert_at_once(
        &self,
        pin: &Pin<'_>,
        range: AddrRange,
        entry: NonNull<T>,
        mut may: impl FnMut(Option<&T>, Option<&T>) -> bool,
    ) -> Alone {
        let mut outer = [None; 2];
        match self.insert_beside(pin, range, entry, outer, &mut may) {
            Err(borders) => {
                let edges = [range.start.wrapping_sub(1), range.end];
                for (which, edge) in edges.into_iter().enumerate().filter(|&(which, _)| borders[which]) {
                    outer[which] = self.peek(pin, edge, which == 1);
                }
                self.insert_beside(pin, range, entry, outer, &mut may).unwrap_or(Alone::Unclear)
            }
            Ok(done) => done,
        }
    }

    /// The first (`first`) or last entry of the leaf of `addr`, with the version of the leaf; `None` when it is being changed, or
    /// empty. Waits for nobody.
    #[cold]
    fn peek<'p>(&'p self, pin: &'p Pin<'_>, addr: u64, first: bool) -> Option<Outer<'p, T, N>> {
        let leaf = self.leaf_of(pin, addr);
        let version = leaf.version_at_rest()?;
        let rank = if first { 0 } else { leaf.len().checked_sub(1)? };
        let item = leaf.item(rank);
        let is_it = leaf.len() > 0 && leaf.covers(addr) && !leaf.is_obsolete() && leaf.is_still(version);
        is_it.then_some(Outer { leaf, version, item })
    }

    /// One attempt, with what is known of the leaves beside. Of which it would have to know more it says by `Err`: the one below,
    /// the one above.
    #[inline]
    fn insert_beside<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        range: AddrRange,
        entry: NonNull<T>,
        outer: [Option<Outer<'p, T, N>>; 2],
        may: &mut impl FnMut(Option<&T>, Option<&T>) -> bool,
    ) -> Result<Alone, [bool; 2]> {
        let AddrRange { start, end } = range;
        debug_assert!(is_page_aligned(start) && is_page_aligned(end) && start < end);
        let leaf = self.lock_leaf(pin, start);
        let (rank, len) = (leaf.rank(start), leaf.len());
        if len == N || end > leaf.high() {
            return Ok(Alone::Unclear);
        }
        let entry_at = |rank: usize| {
            // SAFETY: in place under the pin, so not yet freed (contract of `Entry`).
            unsafe { leaf.entry(rank).as_ref() }
        };
        // SAFETY: in place under the pin when it was looked at, so not yet freed (contract of `Entry`).
        let outside = |outer: &Outer<'p, T, N>| unsafe { outer.item.entry.as_ref() };
        let mut borders = [false; 2];
        let below = match rank.checked_sub(1).map(|below| (below, leaf.end(below))) {
            Some((_, bottom)) if bottom > start => return Ok(Alone::Taken),
            Some((below, bottom)) => {
                if bottom == start {
                    entry_at(below)
                } else {
                    None
                }
            }
            // Entries lie in the spans of their leaves, so nothing of another one touches the range.
            None if leaf.low() < start => None,
            None => match &outer[0] {
                Some(low) => outside(low).filter(|_| low.item.end == start),
                None => {
                    borders[0] = true;
                    None
                }
            },
        };
        let top = if rank < len {
            Some((leaf.start(rank), rank))
        } else if leaf.high() - end >= T::GUARD_MAX {
            None
        } else {
            match &outer[1] {
                // The leaf beside is the next one, and what lies first in it is the next entry.
                Some(high) if high.leaf.low() == leaf.high() => Some((high.item.start, N)),
                _ => {
                    borders[1] = true;
                    None
                }
            }
        };
        if borders != [false; 2] {
            return Err(borders);
        }
        let mut above = None;
        if let Some((top, rank)) = top {
            let Some(room) = top.checked_sub(end) else { return Ok(Alone::Taken) };
            // The record of what is far away is none of our business, and a cache miss.
            let near = match &outer[1] {
                _ if room >= T::GUARD_MAX => None,
                Some(high) if rank == N => outside(high),
                _ => entry_at(rank),
            };
            if near.is_some_and(|near| room < near.guard_below()) {
                return Ok(Alone::Taken);
            }
            above = near.filter(|_| room == 0);
        }
        if !may(below, above) {
            return Ok(Alone::Unclear);
        }
        // After `may`, which has seen that nobody who might have changed them holds a range here.
        if outer.iter().flatten().any(|outer| !outer.leaf.is_still(outer.version) || outer.leaf.is_obsolete())
        {
            return Ok(Alone::Unclear);
        }
        leaf.insert(rank, Item { start, end, entry: entry.as_ptr() });
        drop(leaf);
        self.len.add(pin.cpu(), 1);
        Ok(Alone::Inserted)
    }

    /// Takes the entry of exactly `range` out, for a caller that need not hold the range: `may` runs under the lock of the leaf,
    /// decides, and changes the record. `None`, and nothing done, when there is no such entry, `may` declined, or the leaf
    /// is to be merged after, which takes nodes. O(log n).
    #[inline]
    pub fn remove_at_once<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        range: AddrRange,
        may: impl FnOnce(&'p T) -> bool,
    ) -> Option<&'p T> {
        if range.end > self.top.limits.end {
            return None;
        }
        let (path, leaf) = self.lock_path(pin, range.start);
        let rank = leaf.rank(range.start);
        if rank == leaf.len() || leaf.bounds(rank) != (range.start, range.end) {
            return None;
        }
        if leaf.len() <= scant(N) + 1 && Self::may_merge(&path).is_some() {
            return None;
        }
        // SAFETY: in place under the pin, so not yet freed (contract of `Entry`).
        let entry = unsafe { leaf.entry(rank).as_ref() }?;
        if !may(entry) {
            return None;
        }
        leaf.remove(rank);
        let counted = self.count(&path, &leaf, rank);
        drop(leaf);
        self.len.add(pin.cpu(), -1);
        let is_enough = match counted {
            Counted::Yes => true,
            Counted::No => false,
            Counted::Beside(edge) => self.is_counted_beside(pin, &path, edge),
        };
        if !is_enough {
            self.settle(pin, range.start);
        }
        Some(entry)
    }

    #[inline]
    fn insert_into(leaf: &Held<'_, T, N>, item: Item<T>) {
        let rank = leaf.rank(item.start);
        debug_assert!(rank == 0 || leaf.end(rank - 1) <= item.start, "entries overlap");
        debug_assert!(rank == leaf.len() || item.end <= leaf.start(rank), "entries overlap");
        leaf.insert(rank, item);
    }

    /// Changes the entry that contains `addr`; `None`, and nothing done, when there is none. O(log n).
    ///
    /// `act` runs under the lock of the leaf: it changes the record, and the index through the [`Edit`], so that nobody
    /// sees the one without the other who takes the lock as well. It does not block, and does not use the index otherwise.
    /// Before it runs there is room for as many divisions as `inserts` says (two at most); reserve for them.
    #[inline]
    pub fn edit<R>(
        &self,
        reserve: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        addr: u64,
        inserts: usize,
        act: impl FnOnce(&T, &mut Edit<'_, T, N, F>) -> R,
    ) -> Option<R> {
        if addr >= self.top.limits.end {
            return None;
        }
        debug_assert!(inserts <= 2);
        let (path, mut leaf) = self.lock_path(pin, addr);
        let mut rank = leaf.rank_at(addr)?;
        if leaf.len() + inserts > N {
            drop(leaf);
            leaf = self.make_room_beside(reserve, pin, addr, inserts)?;
            rank = leaf.rank_at(addr)?;
        }
        let range = AddrRange { start: leaf.start(rank), end: leaf.end(rank) };
        // SAFETY: in place under the pin, so not yet freed (contract of `Entry`).
        let entry = unsafe { leaf.entry(rank).as_ref() }?;
        let mut edit =
            Edit { leaf: &leaf, rank, range, removed: false, divisions: 0, absorbed: 0, freed: [NONE; 2] };
        let result = act(entry, &mut edit);
        let Edit { rank, removed, divisions, absorbed, freed, .. } = edit;
        // The gaps before the entry (or where it was), and behind it.
        let count = |which: usize| match freed[which] {
            NONE => Counted::Yes,
            _ => self.count(&path, &leaf, rank + which),
        };
        let counted = [count(0), count(1)];
        let gone = absorbed + usize::from(removed);
        let is_scant = gone > 0 && leaf.len() <= scant(N);
        drop(leaf);
        let change = divisions as i64 - gone as i64;
        if change != 0 {
            reserve.promised = reserve.promised.saturating_sub(divisions);
            self.len.add(pin.cpu(), change);
        }
        for (addr, counted) in freed.into_iter().zip(counted) {
            let is_enough = match counted {
                Counted::Yes => true,
                Counted::No => false,
                Counted::Beside(edge) => self.is_counted_beside(pin, &path, edge),
            };
            if !is_enough {
                self.settle(pin, addr);
            }
        }
        if is_scant && Self::may_merge(&path).is_some() {
            self.merge(reserve, pin, addr);
        }
        Some(result)
    }

    /// The entry that starts exactly at `at` starts at `to` from now on, below it, over free addresses that are the
    /// caller's, if `act` says so. As [`extend_up`](Self::extend_up).
    pub fn extend_down(
        &self,
        _: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        at: u64,
        to: u64,
        act: impl FnOnce(&T) -> bool,
    ) -> bool {
        debug_assert!(is_page_aligned(to) && to < at && self.top.limits.start <= to);
        if at >= self.top.limits.end {
            return false;
        }
        let leaf = self.lock_leaf(pin, at);
        let Some((rank, entry)) = Self::starting_at(&leaf, at) else { return false };
        if leaf.low() <= to {
            let grows = act(entry);
            if grows {
                leaf.set_start(rank, to);
            }
            return grows;
        }
        drop(leaf);
        let shape = self.shape.lock();
        let span = self.lock_span(&shape, pin, to, at);
        let Some((rank, entry)) = Self::starting_at(span.last(), at) else { return false };
        let grows = act(entry);
        if grows {
            span.lower_fence(to);
            span.last().set_start(rank, to);
        }
        grows
    }

    /// Joins the entry that ends at `at` and the one that starts there, if `act` says so, which gets the low one and the high
    /// one and changes the records: the low one takes the high one's range, and the high one is taken out and
    /// returned. `None`, and nothing done, when there are no two such, or `act` declined. O(log n). `act` runs under the
    /// locks of the leaves, as in [`edit`](Self::edit).
    ///
    /// Lookups find one of the two throughout, and no gap changes.
    pub fn join(
        &self,
        reserve: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        at: u64,
        act: impl FnOnce(&T, &T) -> bool,
    ) -> Option<NonNull<T>> {
        let last = at.checked_sub(1)?;
        if at >= self.top.limits.end {
            return None;
        }
        let leaf = self.lock_leaf(pin, last);
        let (rank, low) = Self::ending_at(&leaf, at)?;
        let (gone, len) = if leaf.covers(at) {
            let (above, high) = Self::starting_at(&leaf, at)?;
            if !act(low, high) {
                return None;
            }
            leaf.set_end(rank, leaf.end(above));
            leaf.remove(above);
            let len = leaf.len();
            drop(leaf);
            (high, len)
        } else {
            drop(leaf);
            let shape = self.shape.lock();
            let span = self.lock_span(&shape, pin, last, at);
            let (rank, low) = Self::ending_at(span.first(), at)?;
            let (above, high) = Self::starting_at(span.last(), at)?;
            if !act(low, high) {
                return None;
            }
            let end = span.last().end(above);
            span.first().set_end(rank, end);
            // The removal last: who comes to the second leaf finds the high one, who comes to the first, the low one.
            span.raise_fence(end);
            span.last().remove(above);
            (high, span.last().len())
        };
        self.len.add(pin.cpu(), -1);
        if len <= scant(N) {
            self.merge(reserve, pin, at);
        }
        Some(NonNull::from(gone))
    }

    /// Puts `entry` in the place of the one that starts at `start` and has the same range. Returns the old one, or
    /// `None` (and does nothing) when there is none. O(log n).
    pub fn replace(
        &self,
        _: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        start: u64,
        entry: NonNull<T>,
    ) -> Option<NonNull<T>> {
        if start >= self.top.limits.end {
            return None;
        }
        let leaf = self.lock_leaf(pin, start);
        let (rank, old) = Self::starting_at(&leaf, start)?;
        leaf.set_entry(rank, entry.as_ptr());
        Some(NonNull::from(old))
    }

    /// The entry of the leaf that ends at `at`.
    #[inline]
    pub(super) fn ending_at<'p>(leaf: &Held<'p, T, N>, at: u64) -> Option<(usize, &'p T)> {
        let rank = leaf.rank_at(at - 1).filter(|&rank| leaf.end(rank) == at)?;
        // SAFETY: in place under the pin that the leaf was reached with, so not yet freed (contract of `Entry`).
        unsafe { leaf.entry(rank).as_ref() }.map(|entry| (rank, entry))
    }

    /// The entry of the leaf that starts at `at`.
    #[inline]
    fn starting_at<'p>(leaf: &Held<'p, T, N>, at: u64) -> Option<(usize, &'p T)> {
        let rank = leaf.rank_at(at).filter(|&rank| leaf.start(rank) == at)?;
        // SAFETY: as above.
        unsafe { leaf.entry(rank).as_ref() }.map(|entry| (rank, entry))
    }
}
