//! Free addresses: the hints that say where they may be, and the search for them.
//!
//! The protocol of the hints is in the head of [the index](super). All of this needs the layout lock; a search needs
//! it for reading only, since searches correct hints with `fetch_min`, which keeps every hint at or above those below
//! it whichever of two searches comes last.

use super::find::Path;
use super::node::Leaf;
use super::{Direction, Entry, GapRequest, Index};
use crate::addr::{PAGE_SIZE, page_ceil, page_floor};
use crate::sync::Pin;
use crate::sync::atomic::{AtomicU64, Ordering};

/// What a look into one leaf came to.
enum Look {
    /// It fits at this address.
    Fit(u64),
    /// Not here, perhaps further on.
    On,
    /// Not here, and what lies further on is out of bounds.
    Over,
}

/// Lowers a hint to `gap` unless it is as low already.
fn lower(hint: &AtomicU64, gap: u64) {
    if hint.load(Ordering::Relaxed) > gap {
        hint.fetch_min(gap, Ordering::Relaxed);
    }
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
    /// The end of the last entry before the one of this rank: where the gap before it begins.
    #[inline]
    pub(super) fn end_before(&self, path: &Path<'_, T, N, F>, rank: usize) -> u64 {
        if rank > 0 {
            return path.leaf().end(rank - 1);
        }
        let mut path = *path;
        match path.step_to_entry(false) {
            true => path.leaf().end(path.leaf().len() - 1),
            false => self.top.limits.start,
        }
    }

    /// Raises the hints for the child taken at every depth below `depth` to at least `gap`.
    #[inline]
    pub(super) fn raise(&self, path: &Path<'_, T, N, F>, depth: usize, gap: u64) {
        for depth in (0..depth).rev() {
            let hint = path.inner(depth).gap(path.at(depth));
            if hint.load(Ordering::Relaxed) >= gap {
                return;
            }
            hint.store(gap, Ordering::Relaxed);
        }
    }

    /// Notes that the gap before the entry of this rank, or before the first one behind the leaf, has grown.
    pub(super) fn gap_grew(&self, path: &Path<'_, T, N, F>, rank: usize) {
        if !self.top.gaps || path.height() == 0 {
            return;
        }
        let bottom = self.end_before(path, rank);
        if rank < path.leaf().len() {
            return self.raise(path, path.height(), path.leaf().start(rank).saturating_sub(bottom));
        }
        let mut path = *path;
        if path.step_to_entry(true) {
            self.raise(&path, path.height(), path.leaf().start(0).saturating_sub(bottom));
        }
    }

    /// The largest gap before any entry of `leaf`, the first of which begins at `bottom`.
    pub(super) fn largest_gap(&self, leaf: &Leaf<T, N>, mut bottom: u64) -> u64 {
        let mut most = 0;
        for rank in 0..leaf.len() {
            most = most.max(leaf.start(rank).saturating_sub(bottom));
            bottom = leaf.end(rank);
        }
        most
    }

    /// The free range for `request`: the highest or the lowest address that fits, or `None` when none does.
    ///
    /// O(log n) when the hints are right; a hint that is too high costs one look into a node and is corrected by it.
    /// Without gap hints it looks at every entry on the way.
    ///
    /// Exact while no writer runs: callers hold the layout lock.
    pub fn search(&self, pin: &Pin<'_>, request: &GapRequest) -> Option<u64> {
        self.search_counting(pin, request, &mut 0)
    }

    /// As [`search`](Self::search); adds the number of leaves it looked into to `leaves`.
    pub fn search_counting(&self, pin: &Pin<'_>, request: &GapRequest, leaves: &mut usize) -> Option<u64> {
        let request = request.clamped(self.top.limits.start, self.top.limits.end)?;
        self.scan(pin, &request, self.top.gaps, leaves)
    }

    /// Looks at one entry after the other, as Linux did before 3.8: from the address `from` (where the caller's last
    /// search ended, say) to the limit in the direction of the request, and if nothing fits once more from the other
    /// limit. O(n). A baseline: [`search`](Self::search) is better in every respect.
    ///
    /// Exact while no writer runs: callers hold the layout lock.
    pub fn search_linear(&self, pin: &Pin<'_>, request: &GapRequest, from: u64) -> Option<u64> {
        let whole = request.clamped(self.top.limits.start, self.top.limits.end)?;
        let rest = match request.direction {
            Direction::TopDown => whole.clamped(0, from),
            Direction::BottomUp => whole.clamped(from, u64::MAX),
        };
        rest.and_then(|rest| self.scan(pin, &rest, false, &mut 0))
            .or_else(|| self.scan(pin, &whole, false, &mut 0))
    }

    fn scan(&self, pin: &Pin<'_>, request: &GapRequest, hinted: bool, leaves: &mut usize) -> Option<u64> {
        let ahead = request.direction == Direction::BottomUp;
        // Upwards, the first gap that counts lies before the first entry that leaves room below itself; downwards,
        // before the first entry that is not below the upper limit.
        let bound = if ahead { request.low + request.length } else { request.high };
        let from_the_end = if hinted && !ahead && bound >= self.top.limits.end {
            self.seek_last_gap(pin, request.length)
        } else {
            None
        };
        let (mut path, mut rank) = from_the_end.unwrap_or_else(|| self.seek(pin, bound));
        loop {
            if !hinted || self.hint(&path) >= request.length {
                *leaves += 1;
                match self.look(&path, rank, request) {
                    Look::Fit(addr) => return Some(addr),
                    Look::Over => return None,
                    Look::On if hinted && path.height() > 0 => {
                        let depth = path.height() - 1;
                        let most = self.largest_gap(path.leaf(), self.end_before(&path, 0));
                        lower(path.inner(depth).gap(path.at(depth)), most);
                    }
                    Look::On => {}
                }
            }
            let on = if hinted { Self::step_to_gap(&mut path, request) } else { path.step(ahead) };
            if !on {
                return None;
            }
            rank = if ahead { 0 } else { path.leaf().len().wrapping_sub(1) };
        }
    }

    /// The path to the last leaf that the hints say is worth a look, and the rank of its last entry: where a search from
    /// the end of the limits downwards begins, without going to the end first. `None` when a hint on the way is too
    /// high: then the search goes the long way, and corrects it.
    #[inline(always)]
    fn seek_last_gap<'p>(&'p self, pin: &'p Pin<'_>, length: u64) -> Option<(Path<'p, T, N, F>, usize)> {
        let mut path = self.top_of_path(pin);
        for depth in 0..path.height() {
            let inner = path.inner(depth);
            let worth = |&at: &usize| inner.gap(at).load(Ordering::Relaxed) >= length;
            path.enter(depth, (0..inner.len()).rev().find(worth)?);
        }
        let len = path.leaf().len();
        (len > 0).then(|| (path, len - 1))
    }

    /// What the hint says of the leaf.
    #[inline]
    fn hint(&self, path: &Path<'_, T, N, F>) -> u64 {
        match path.height() {
            0 => u64::MAX,
            height => path.inner(height - 1).gap(path.at(height - 1)).load(Ordering::Relaxed),
        }
    }

    /// Looks at the gaps before the entries of one leaf, from the one of this rank on in the direction of the request.
    #[inline]
    fn look(&self, path: &Path<'_, T, N, F>, mut rank: usize, request: &GapRequest) -> Look {
        let ahead = request.direction == Direction::BottomUp;
        let leaf = path.leaf();
        while rank < leaf.len() {
            let start = leaf.start(rank);
            if !ahead && start < request.low + request.length {
                return Look::Over;
            }
            let bottom = self.end_before(path, rank);
            if ahead && bottom > request.high - request.length {
                return Look::Over;
            }
            let bottom = bottom.max(request.low);
            // By the key first: most entries lie close together, and their records need no look.
            if start.min(request.high).saturating_sub(bottom) >= request.length {
                // SAFETY: in place under the pin of the path, so not yet freed (contract of `Entry`).
                let guard = unsafe { leaf.entry(rank).as_ref() }.map_or(0, T::guard_below);
                let top = start.saturating_sub(guard).min(request.high);
                if let Some(addr) = request.place(bottom, top) {
                    return Look::Fit(addr);
                }
            }
            rank = if ahead { rank + 1 } else { rank.wrapping_sub(1) };
        }
        Look::On
    }

    /// Goes on to the next leaf, in the direction of the request, that its hints say is worth a look. Corrects the
    /// hint of every node that it leaves.
    fn step_to_gap(path: &mut Path<'_, T, N, F>, request: &GapRequest) -> bool {
        let ahead = request.direction == Direction::BottomUp;
        let height = path.height();
        // Going up: the nodes at `depth` and below are done with.
        let mut depth = height;
        while depth > 0 {
            depth -= 1;
            let (inner, at) = (path.inner(depth), path.at(depth));
            // The parent's hint speaks for the whole node: as a rule it says that there is nothing here, in one look.
            if depth > 0
                && path.inner(depth - 1).gap(path.at(depth - 1)).load(Ordering::Relaxed) < request.length
            {
                continue;
            }
            let worth = |&at: &usize| inner.gap(at).load(Ordering::Relaxed) >= request.length;
            let next = if ahead {
                (at + 1..inner.len()).find(worth)
            } else if at > 0 && inner.from(at) < request.low + request.length {
                // Every entry further on in this node starts below that separator. (Not every one of the index: the
                // separator may have been overtaken, see `raise_fence`.)
                None
            } else {
                (0..at).rev().find(worth)
            };
            let Some(next) = next else {
                if depth > 0 {
                    lower(path.inner(depth - 1).gap(path.at(depth - 1)), inner.highest_gap());
                }
                continue;
            };
            path.enter(depth, next);
            depth += 1;
            while depth < height {
                let inner = path.inner(depth);
                let worth = |&at: &usize| inner.gap(at).load(Ordering::Relaxed) >= request.length;
                let next =
                    if ahead { (0..inner.len()).find(worth) } else { (0..inner.len()).rev().find(worth) };
                let Some(next) = next else {
                    lower(path.inner(depth - 1).gap(path.at(depth - 1)), inner.highest_gap());
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
