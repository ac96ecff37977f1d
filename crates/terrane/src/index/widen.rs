//! An entry that grows upwards, for a caller that holds the addresses, or for one that does not: then one look at its leaf tells all.

use super::node::Held;
use super::{Entry, Index, Reserve};
use crate::addr::is_page_aligned;
use crate::sync::Pin;

impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// The entry that ends exactly at `at` grows to `to`, over free addresses that are the caller's, if `act` says so, which
    /// changes the record. False when there is none, or `act` declined. O(log n). `act` runs under the lock of the leaf,
    /// as in [`edit`](Self::edit).
    pub fn extend_up(
        &self,
        _: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        at: u64,
        to: u64,
        act: impl FnOnce(&T) -> bool,
    ) -> bool {
        let Some((leaf, rank, entry)) = self.lock_ending_at(pin, at, to) else { return false };
        if to <= leaf.high() {
            let grows = act(entry);
            if grows {
                leaf.set_end(rank, to);
            }
            return grows;
        }
        drop(leaf);
        let shape = self.shape.lock();
        let span = self.lock_span(&shape, pin, at - 1, to - 1);
        let Some((rank, entry)) = Self::ending_at(span.first(), at) else { return false };
        let grows = act(entry);
        if grows {
            span.raise_fence(to);
            span.first().set_end(rank, to);
        }
        grows
    }

    /// The same for a caller that need not hold the range: if its leaf shows that the addresses are free, and that `distance` more
    /// bytes, and the guard of what lies above, stay so. `may` is `act` then. False, and nothing done, when `may` declined, or more
    /// must be looked at than one leaf. O(log n).
    #[inline]
    pub fn extend_up_at_once(
        &self,
        pin: &Pin<'_>,
        at: u64,
        to: u64,
        distance: u64,
        may: impl FnOnce(&T) -> bool,
    ) -> bool {
        let Some((leaf, rank, entry)) = self.lock_ending_at(pin, at, to) else { return false };
        let is_next_here = rank + 1 < leaf.len();
        let top = if is_next_here { leaf.start(rank + 1) } else { leaf.high() };
        let Some(room) = top.checked_sub(to).and_then(|room| room.checked_sub(distance)) else {
            return false;
        };
        if room < T::GUARD_MAX {
            // SAFETY: in place under the pin, so not yet freed (contract of `Entry`).
            let next = || unsafe { leaf.entry(rank + 1).as_ref() };
            // Behind the leaf's span something may begin at once, with a guard.
            if !is_next_here || next().is_some_and(|next| room < next.guard_below()) {
                return false;
            }
        }
        let grows = may(entry);
        if grows {
            leaf.set_end(rank, to);
        }
        grows
    }

    /// How both begin: the leaf of the entry that ends exactly at `at`, locked; its rank there; and the entry.
    #[inline]
    fn lock_ending_at<'p>(
        &'p self,
        pin: &'p Pin<'_>,
        at: u64,
        to: u64,
    ) -> Option<(Held<'p, T, N>, usize, &'p T)> {
        debug_assert!(is_page_aligned(to) && at < to && to <= self.top.limits.end);
        let leaf = self.lock_leaf(pin, at.checked_sub(1)?);
        let (rank, entry) = Self::ending_at(&leaf, at)?;
        Some((leaf, rank, entry))
    }
}
