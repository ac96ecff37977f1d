//! Free addresses: the hints that say where they may be, and the search for them.
//!
//! # What it guarantees
//!
//! A hint says of a child of an inner node that no gap that touches the child's span is larger. A gap that reaches over
//! several spans counts for each of them: so it makes no difference to a hint in which leaf the entries beside a gap lie, and
//! mapping and unmapping on one side of a gap never takes it from one child to another.
//!
//! **A hint is never too low** for a gap whose freeing has returned, not even for a moment. Therefore a search whose caller
//! holds all the addresses of its request misses nothing: gaps among them change only by the caller, and every level says so.
//!
//! # How
//!
//! *Freeing.* Under the lock of the leaf, after the change, the hints on the way are looked at. If they are high enough, as a
//! rule, that was all, and nothing has been written. If not, or if the gap reaches beyond the leaf, [`Index::settle`] comes
//! after the lock has been given back: full fence, look at the whole gap, raise the hints of all leaves that it touches, on
//! all levels, from the leaf upwards. Two calls that free both sides of a border at once: the one whose fence is later sees
//! both changes.
//!
//! *Lowering.* A search that finds a hint too high **marks** it (its low bits say by whom), then looks again, at the leaf under
//! its lock, and then exchanges the marked hint for what it found. Whoever raises a hint, or only looks whether it is high
//! enough, takes a mark away; then the exchange fails. Either the one who lowers sees the freed addresses, or the one who freed
//! them sees the mark: inside one leaf because both take the leaf's lock, across leaves by the full fence of `settle`
//! and the read-modify-write of the mark, between two levels because all of these are sequentially consistent.
//! Two who lower have different marks.
//!
//! *Copying* a node, it is marked obsolete before its hints are read; who raises, or looks, checks that after. If it is
//! obsolete he starts over from the root. So he raised before the copy was made, or raises in the copy.
//!
//! *Taking* addresses writes no hint.
//!
//! # Who may break it
//!
//! A hint stored without a compare; a raise under a leaf's lock (it may wait for a node that is being copied, by somebody who
//! waits for that lock); stopping at the first hint that is high enough (another raise may be under way above it).

use super::find::{Path, Snapshot};
use super::node::{Held, Leaf, MARK, Node};
use super::{Direction, Entry, GapRequest, Index};
use crate::addr::{PAGE_SIZE, page_ceil, page_floor};
use crate::sync::atomic::{AtomicU64, Ordering, fence, spin_loop};
use crate::sync::{CpuId, Pin};
use core::ptr;

/// A gap at an end of a leaf's span, from an entry of the leaf to one of another.
#[derive(Clone, Copy)]
pub(super) enum Edge {
    /// It ends at `top`; `outer` is the last address of the leaf before.
    Low { top: u64, outer: u64 },
    /// It begins at `bottom`; `outer` is the first address of the leaf behind.
    High { bottom: u64, outer: u64 },
}

/// What is to be done about hints after a gap has grown.
pub(super) enum Counted {
    /// Nothing.
    Yes,
    /// They are to be settled.
    No,
    /// It depends on the leaf beside.
    Beside(Edge),
}

/// What a look into one leaf came to.
enum Look {
    /// It fits at this address.
    Fit(u64),
    /// Not here, perhaps further on. The largest gap that touches the span, if all of them were looked at.
    On(Option<u64>),
    /// Not here, and what lies further on is out of bounds.
    Over,
}

/// Raises a hint to at least `gap`, and takes a mark away.
fn raise(hint: &AtomicU64, gap: u64) {
    let mut seen = hint.load(Ordering::SeqCst);
    while !is_enough(seen, gap) {
        let higher = (seen & !MARK).max(gap);
        match hint.compare_exchange(seen, higher, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return,
            Err(now) => seen = now,
        }
    }
}

#[inline]
fn is_enough(hint: u64, gap: u64) -> bool {
    hint >= gap && hint & MARK == 0
}

/// Lowers a hint to what `look` finds after the hint was marked; `None` leaves it as it is.
fn lower(hint: &AtomicU64, cpu: CpuId, look: impl FnOnce() -> Option<u64>) {
    // Beyond some thousand CPUs two could have the same mark.
    let mark = cpu.index() as u64 + 1;
    let seen = hint.load(Ordering::SeqCst);
    if mark > MARK || seen & MARK != 0 {
        return;
    }
    if hint.compare_exchange(seen, seen | mark, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        return;
    }
    let found = look().map_or(seen, |gap| gap.min(seen));
    let _ = hint.compare_exchange(seen | mark, found, Ordering::SeqCst, Ordering::Relaxed);
}

impl GapRequest {
    /// The request in whole pages and inside `from..to`, or `None` when it cannot be met there.
    fn clamped(&self, from: u64, to: u64) -> Option<GapRequest> {
        let length = page_ceil(self.length).filter(|&length| length != 0)?;
        let (low, high) = (self.low.max(from), self.high.min(to));
        let align_mask = self.align_mask | (PAGE_SIZE - 1);
        let align_offset = page_floor(self.align_offset);
        (low.checked_add(length)? <= high).then_some(GapRequest {
            length,
            low,
            high,
            align_mask,
            align_offset,
            ..*self
        })
    }

    /// The best address in the free range `bottom..top`.
    #[inline]
    fn place(&self, bottom: u64, top: u64) -> Option<u64> {
        match self.direction {
            Direction::TopDown => {
                let addr = top.checked_sub(self.length)?;
                let addr = addr.checked_sub(addr.wrapping_sub(self.align_offset) & self.align_mask)?;
                (addr >= bottom).then_some(addr)
            }
            Direction::BottomUp => {
                let addr = bottom.checked_add(self.align_offset.wrapping_sub(bottom) & self.align_mask)?;
                (addr.checked_add(self.length)? <= top).then_some(addr)
            }
        }
    }
}

impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// What is to be done about the hints after the gap before the entry of this rank has grown. Under the
    /// lock of the leaf.
    #[inline]
    pub(super) fn count(&self, path: &Path<'_, T, N, F>, leaf: &Held<'_, T, N>, rank: usize) -> Counted {
        if !self.top.gaps {
            return Counted::Yes;
        }
        // Another leaf, when room had to be made: the path is old then.
        if !ptr::eq(path.leaf(), &**leaf) {
            return Counted::No;
        }
        if path.height() == 0 {
            return Counted::Yes;
        }
        if 0 < rank && rank < leaf.len() {
            let gap = leaf.start(rank).saturating_sub(leaf.end(rank - 1));
            return if Self::is_allowed_for(path, gap) { Counted::Yes } else { Counted::No };
        }
        match (rank.checked_sub(1), leaf.low().checked_sub(1)) {
            // Nothing lies below the first leaf.
            (None, None) if leaf.len() > 0 => {
                let gap = leaf.start(0).saturating_sub(self.top.limits.start);
                if Self::is_allowed_for(path, gap) { Counted::Yes } else { Counted::No }
            }
            (Some(last), _) => Counted::Beside(Edge::High { bottom: leaf.end(last), outer: leaf.high() }),
            (None, Some(outer)) if leaf.len() > 0 => Counted::Beside(Edge::Low { top: leaf.start(0), outer }),
            _ => Counted::No,
        }
    }

    /// True when all hints on the path allow for `gap`, and none of its nodes is being replaced.
    #[inline]
    fn is_allowed_for(path: &Path<'_, T, N, F>, gap: u64) -> bool {
        (0..path.height()).rev().all(|depth| {
            let inner = path.inner(depth);
            is_enough(inner.gap(path.at(depth)).load(Ordering::SeqCst), gap) && !inner.is_obsolete()
        })
    }

    /// As [`settle`](Self::settle) for a gap at an end of the path's leaf, if that is not the whole span: looks only, and says
    /// whether all hints allow for it. `inner` is where the gap ends inside the leaf, and `outer` an address beside the span.
    #[inline]
    pub(super) fn is_counted_beside(&self, pin: &Pin<'_>, path: &Path<'_, T, N, F>, edge: Edge) -> bool {
        let (inner, outer) = match edge {
            Edge::Low { top, outer } => (top, outer),
            Edge::High { bottom, outer } => (bottom, outer),
        };
        fence(Ordering::SeqCst);
        let other = self.path(pin, outer);
        let seen = other.leaf().read(|leaf| {
            if !leaf.covers(outer) {
                return None;
            }
            match (edge, leaf.len().checked_sub(1)) {
                (Edge::Low { .. }, Some(last)) => Some((leaf.end(last), leaf.end(last) < leaf.high())),
                (Edge::High { .. }, Some(_)) => Some((leaf.start(0), leaf.low() < leaf.start(0))),
                // The first leaf, and empty: below the lowest stretch of a CPU, say.
                (Edge::Low { .. }, None) if leaf.low() == 0 => Some((self.top.limits.start, true)),
                _ => None,
            }
        });
        let Some((end, touches)) = seen else { return false };
        let gap = inner.abs_diff(end);
        Self::is_allowed_for(path, gap) && (!touches || Self::is_allowed_for(&other, gap))
    }

    /// Sees to it that all hints allow for the gap around `addr`, which the caller has freed: after the change, with no lock
    /// of a leaf held.
    #[cold]
    pub(super) fn settle(&self, pin: &Pin<'_>, addr: u64) {
        // Of two who free addresses beside each other, one sees the other's change.
        fence(Ordering::SeqCst);
        let bottom = self.below(pin, addr + 1).map_or(self.top.limits.start, |item| item.end);
        let top = self.above(pin, addr).start;
        let gap = top.saturating_sub(bottom);
        let mut at = bottom;
        while at < top {
            at = self.raise(pin, at, gap);
        }
    }

    /// Raises the hints for the leaf that `at` is routed to, on all levels; returns where the leaf ends.
    fn raise(&self, pin: &Pin<'_>, at: u64, gap: u64) -> u64 {
        loop {
            let path = self.path(pin, at);
            let raised = (0..path.height()).rev().all(|depth| {
                let inner = path.inner(depth);
                mutant!("index-never-raise", raise(inner.gap(path.at(depth)), gap), ());
                !inner.is_obsolete()
            });
            let high = path.leaf().read(|leaf| leaf.covers(at).then(|| leaf.high()));
            match high {
                Some(high) if raised => return high,
                // A node of the way is being replaced, or a separator moved.
                _ => spin_loop(),
            }
        }
    }

    /// The largest gap that touches `low..high`, a part of the span of `leaf`, which is locked or a state of its own.
    pub(super) fn largest_gap(&self, pin: &Pin<'_>, leaf: &Snapshot<T, N>, low: u64, high: u64) -> u64 {
        let mut most = 0;
        let mut count = |bottom: u64, top: u64| {
            if bottom < high && low < top {
                most = most.max(top.saturating_sub(bottom));
            }
        };
        let (mut bottom, mut is_first) = (leaf.low, true);
        for item in leaf.items() {
            if bottom < item.start {
                count(if is_first { self.bottom_of(pin, leaf.low) } else { bottom }, item.start);
            }
            (bottom, is_first) = (item.end, false);
        }
        if bottom < leaf.high {
            let bottom = if is_first { self.bottom_of(pin, leaf.low) } else { bottom };
            count(bottom, self.above(pin, leaf.high).start);
        }
        most
    }

    /// Where the gap begins that reaches to `addr` or beyond.
    fn bottom_of(&self, pin: &Pin<'_>, addr: u64) -> u64 {
        self.below(pin, addr).map_or(self.top.limits.start, |item| item.end)
    }

    /// Lowers the hint of the path's leaf to what is true.
    #[cold]
    fn correct_leaf(&self, pin: &Pin<'_>, path: &Path<'_, T, N, F>) {
        let Some(depth) = path.height().checked_sub(1) else { return };
        lower(path.inner(depth).gap(path.at(depth)), pin.cpu(), || {
            // Under the lock: whoever frees inside the leaf looks at the hint under it, without a fence.
            let seen = {
                let held = path.leaf().lock();
                let is_live = !held.is_obsolete();
                is_live.then(|| Snapshot::of(&held))
            };
            seen.map(|seen| self.largest_gap(pin, &seen, seen.low, seen.high))
        });
    }

    /// Lowers the hint of the node at `depth` to the highest in it.
    #[cold]
    fn correct_inner(pin: &Pin<'_>, path: &Path<'_, T, N, F>, depth: usize) {
        let inner = path.inner(depth);
        let hint = path.inner(depth - 1).gap(path.at(depth - 1));
        if hint.load(Ordering::Relaxed) <= inner.highest_gap() {
            return;
        }
        lower(hint, pin.cpu(), || {
            let highest = inner.highest_gap();
            (!inner.is_obsolete()).then_some(highest)
        });
    }

    /// Free addresses for `request`: the highest or the lowest that fit, or `None` when none do.
    ///
    /// O(log n) when the hints are right; a hint that is too high costs one look into a node and is corrected by it.
    /// Without gap hints it looks at every entry on the way.
    ///
    /// Takes no lock and keeps nobody away: the caller takes the addresses found for a candidate, locks them, and looks
    /// whether they are free. If it holds all the addresses of the request before, the result and `None` are exact.
    pub fn search(&self, pin: &Pin<'_>, request: &GapRequest) -> Option<u64> {
        self.search_counting(pin, request, &mut 0)
    }

    /// As [`search`](Self::search); adds the number of leaves it looked into to `leaves`.
    pub fn search_counting(&self, pin: &Pin<'_>, request: &GapRequest, leaves: &mut usize) -> Option<u64> {
        let mut request = request.clamped(self.top.limits.start, self.top.limits.end)?;
        if self.top.gaps {
            self.search_hinted(pin, &mut request, leaves)
        } else {
            self.scan(pin, &mut request, leaves)
        }
    }

    /// Looks at one entry after the other, as Linux did before 3.8: from the address `from` (where the caller's last
    /// search ended, say) to the limit in the direction of the request, and if nothing fits once more from the other
    /// limit. O(n). A baseline: [`search`](Self::search) is better in every respect.
    pub fn search_linear(&self, pin: &Pin<'_>, request: &GapRequest, from: u64) -> Option<u64> {
        let whole = request.clamped(self.top.limits.start, self.top.limits.end)?;
        let rest = match request.direction {
            Direction::TopDown => whole.clamped(0, from),
            Direction::BottomUp => whole.clamped(from, u64::MAX),
        };
        let scan = |mut request| self.scan(pin, &mut request, &mut 0);
        rest.and_then(scan).or_else(|| scan(whole))
    }

    /// Looks at every entry on the way.
    fn scan(&self, pin: &Pin<'_>, request: &mut GapRequest, leaves: &mut usize) -> Option<u64> {
        if request.direction == Direction::BottomUp {
            let mut bottom = self.bottom_of(pin, request.low);
            let mut at = request.low;
            loop {
                *leaves += 1;
                let seen = self.read_at(pin, at, Snapshot::of);
                for item in seen.items().iter().filter(|item| item.start >= at || item.end > at) {
                    if bottom > request.high - request.length {
                        return None;
                    }
                    if let Some(addr) = self.fit(pin, bottom, item.start, item.entry, request) {
                        return Some(addr);
                    }
                    bottom = item.end;
                }
                at = seen.high;
                // The last leaf ends with the sentinel, which is behind every request.
                if at == u64::MAX {
                    return None;
                }
            }
        }
        let above = self.above(pin, request.high);
        let (mut top, mut entry) = (above.start, above.entry);
        let mut at = request.high;
        while at > 0 {
            *leaves += 1;
            let seen = self.read_at(pin, at - 1, Snapshot::of);
            for item in seen.items().iter().rev().filter(|item| item.start < at) {
                if let Some(addr) = self.fit(pin, item.end, top, entry, request) {
                    return Some(addr);
                }
                (top, entry) = (item.start, item.entry);
                if top < request.low + request.length {
                    return None;
                }
            }
            at = seen.low;
        }
        self.fit(pin, self.top.limits.start, top, entry, request)
    }

    /// The best address in the gap `bottom..top` below `above`. As in Linux, a search downwards that would reach into the guard
    /// gap of a stack goes on below all of that gap, whatever else is mapped in it: that lowers the request's `high`.
    #[inline]
    fn fit(
        &self,
        _: &Pin<'_>,
        bottom: u64,
        top: u64,
        above: *mut T,
        request: &mut GapRequest,
    ) -> Option<u64> {
        let bottom = bottom.max(request.low);
        // By the key first: most entries lie close together, and their records need no look.
        if top.min(request.high).saturating_sub(bottom) < request.length {
            return None;
        }
        // SAFETY: it was in place under the pin, so not yet freed (contract of `Entry`).
        let guard = unsafe { above.as_ref() }.map_or(0, T::guard_below);
        let addr = request.place(bottom, top.min(request.high))?;
        let limit = top.saturating_sub(guard);
        if addr + request.length <= limit {
            return Some(addr);
        }
        if request.direction == Direction::BottomUp {
            return None;
        }
        request.high = request.high.min(limit);
        request.place(bottom, request.high)
    }

    fn search_hinted(&self, pin: &Pin<'_>, request: &mut GapRequest, leaves: &mut usize) -> Option<u64> {
        let ahead = request.direction == Direction::BottomUp;
        let near = if ahead { request.low } else { request.high - 1 };
        let from_above = if ahead { None } else { self.seek_last_gap(pin, near, request.length) };
        let mut path = from_above.unwrap_or_else(|| self.path(pin, near));
        loop {
            let hint = Self::hint(&path);
            if hint >= request.length {
                *leaves += 1;
                if let Some(addr) = Self::look_inside(pin, path.leaf(), request) {
                    return Some(addr);
                }
                match self.look(pin, path.leaf(), request) {
                    Look::Fit(addr) => return Some(addr),
                    Look::Over => return None,
                    Look::On(Some(most)) if most < hint => self.correct_leaf(pin, &path),
                    Look::On(_) => {}
                }
            }
            if !Self::step_to_gap(pin, &mut path, request) {
                return None;
            }
        }
    }

    /// The path to the last leaf, up to that of the address `near`, that the hints say is worth a look: where a search
    /// downwards begins, without going to `near` first. `None` when there is none, or a hint on the way is too high: then the
    /// search goes the long way, and corrects it.
    #[inline(always)]
    fn seek_last_gap<'p>(&'p self, pin: &'p Pin<'_>, near: u64, length: u64) -> Option<Path<'p, T, N, F>> {
        let mut path = self.top_of_path(pin);
        // On the way to `near`, what lies further on in a node is above it: a hint of the node above speaks for that as well.
        let mut is_near = near < self.top.limits.end - PAGE_SIZE;
        let mut depth = 0;
        while depth < path.height() {
            let inner = path.inner(depth);
            let count = if is_near { inner.route(near) + 1 } else { inner.len() };
            if let Some(at) = inner.last_gap(count, length) {
                is_near &= at + 1 == count;
                path.enter(depth, at);
                depth += 1;
                continue;
            }
            if !is_near {
                return None;
            }
            // Back to the lowest node on the way that has something before it.
            is_near = false;
            loop {
                depth = depth.checked_sub(1)?;
                if let Some(at) = path.inner(depth).last_gap(path.at(depth), length) {
                    path.enter(depth, at);
                    depth += 1;
                    break;
                }
            }
        }
        Some(path)
    }

    /// What the hint says of the leaf.
    #[inline]
    fn hint(path: &Path<'_, T, N, F>) -> u64 {
        match path.height() {
            0 => u64::MAX,
            height => path.inner(height - 1).gap(path.at(height - 1)).load(Ordering::SeqCst) & !MARK,
        }
    }

    /// A first look at one leaf from above, which as a rule is all that a search needs: at the gaps whose ends are known here,
    /// because entries of the leaf or the bounds of the request end them. Without a copy of the leaf, which took a
    /// quarter of the time of a map and unmap.
    #[inline]
    fn look_inside(_: &Pin<'_>, leaf: &Leaf<T, N>, request: &GapRequest) -> Option<u64> {
        if request.direction == Direction::BottomUp {
            return None;
        }
        let lowest = request.low + request.length;
        let (addr, above, border) = leaf.read(|leaf| {
            let (low, high, len) = (leaf.low(), leaf.high(), leaf.len());
            // From above, the gap below the entry of each rank; at first the one above the last entry.
            let (mut top, mut is_known) = (high, request.high <= high);
            for rank in (0..=len).rev() {
                // The gap below the first entry may begin further down, but what lies in the span is free, and the higher part.
                let (below, bottom) = match rank.checked_sub(1) {
                    Some(below) => leaf.bounds(below),
                    None => (0, low),
                };
                // By size first: as a rule most gaps of a leaf are none.
                if top.saturating_sub(bottom) >= request.length
                    && is_known
                    && let Some(addr) = request.place(bottom.max(request.low), top.min(request.high))
                {
                    let above = if rank < len { leaf.entry(rank) } else { ptr::null_mut() };
                    return Some((addr, above, (rank == len).then_some(high)));
                }
                // Further down nothing is in bounds; or what lies above the leaf must be asked first.
                if rank == 0 || below < lowest || (!is_known && request.high > bottom) {
                    break;
                }
                (top, is_known) = (below, true);
            }
            None
        })?;
        // SAFETY: it was in place under the pin, so not yet freed (contract of `Entry`).
        let guard = unsafe { above.as_ref() }.map_or(0, T::guard_below);
        // What lies above the leaf was not looked at: its guard may reach down here.
        let is_clear =
            border.is_none_or(|border| addr + request.length <= border.saturating_sub(T::GUARD_MAX));
        (guard == 0 && is_clear).then_some(addr)
    }

    /// Looks at the gaps that touch the span of one leaf, in the direction of the request.
    #[inline]
    fn look(&self, pin: &Pin<'_>, leaf: &Leaf<T, N>, request: &mut GapRequest) -> Look {
        let ahead = request.direction == Direction::BottomUp;
        let seen = leaf.read(Snapshot::of);
        if (ahead && seen.low >= request.high) || (!ahead && seen.high <= request.low) {
            return Look::Over;
        }
        let items = seen.items();
        let (mut most, mut all) = (0, true);
        for nth in 0..=items.len() {
            let rank = if ahead { nth } else { items.len() - nth };
            let (before, above) = (rank.checked_sub(1).map(|below| &items[below]), items.get(rank));
            // Only a gap at an end of the span asks for what other leaves say of it.
            let (bottom, top) =
                (before.map_or(seen.low, |item| item.end), above.map_or(seen.high, |item| item.start));
            if bottom >= top {
                continue;
            }
            if if ahead { bottom >= request.high } else { top <= request.low } {
                return Look::Over;
            }
            if if ahead { top <= request.low } else { bottom >= request.high } {
                // Nearer than the bounds.
                all = false;
                continue;
            }
            let whole = || before.map_or_else(|| self.bottom_of(pin, seen.low), |item| item.end);
            let (top, entry) = above.map_or_else(
                || {
                    let above = self.above(pin, seen.high);
                    (above.start, above.entry)
                },
                |item| (item.start, item.entry),
            );
            // How far the gap goes on below the bounds makes no difference to what fits. It is looked at only for the
            // hint: what lies there may be where another CPU is at work.
            let bottom = if seen.low <= request.low { bottom } else { whole() };
            if let Some(addr) = self.fit(pin, bottom, top, entry, request) {
                return Look::Fit(addr);
            }
            most = most.max(top.saturating_sub(whole()));
        }
        Look::On(all.then_some(most))
    }

    /// Goes on to the next leaf, in the direction of the request, that its hints say is worth a look. Corrects the
    /// hint of every node that it leaves.
    fn step_to_gap(pin: &Pin<'_>, path: &mut Path<'_, T, N, F>, request: &GapRequest) -> bool {
        let ahead = request.direction == Direction::BottomUp;
        let height = path.height();
        // Going up: the nodes at `depth` and below are done with.
        let mut depth = height;
        while depth > 0 {
            depth -= 1;
            let (inner, at) = (path.inner(depth), path.at(depth));
            // The parent's hint speaks for the whole node: as a rule it says that there is nothing here, in one look.
            if depth > 0
                && path.inner(depth - 1).gap(path.at(depth - 1)).load(Ordering::SeqCst) < request.length
            {
                continue;
            }
            let worth = |&at: &usize| inner.gap(at).load(Ordering::SeqCst) >= request.length;
            let next = if ahead {
                (at + 1..inner.len()).find(worth)
            } else if at > 0 && inner.from(at) < request.low + request.length {
                // Every entry further on in this node starts below that separator. (Not every one of the index: the
                // separator may have been overtaken, see `raise_fence`.)
                None
            } else {
                inner.last_gap(at, request.length)
            };
            let Some(next) = next else {
                if depth > 0 {
                    Self::correct_inner(pin, path, depth);
                }
                continue;
            };
            path.enter(depth, next);
            depth += 1;
            while depth < height {
                let inner = path.inner(depth);
                let worth = |&at: &usize| inner.gap(at).load(Ordering::SeqCst) >= request.length;
                let next = match ahead {
                    true => (0..inner.len()).find(worth),
                    false => inner.last_gap(inner.len(), request.length),
                };
                let Some(next) = next else {
                    Self::correct_inner(pin, path, depth);
                    break;
                };
                path.enter(depth, next);
                depth += 1;
            }
            if depth == height {
                return true;
            }
        }
        false
    }
}
