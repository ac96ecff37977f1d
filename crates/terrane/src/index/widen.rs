//! An entry that grows upwards without its addresses being held: one look at its leaf tells all.

use super::{Entry, Index};
use crate::addr::is_page_aligned;
use crate::sync::Pin;

impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// The entry that ends exactly at `at` grows to `to`, as in [`extend_up`](Self::extend_up), for a caller that need not hold the
    /// range: if its leaf shows that the addresses are free, and that `distance` more bytes, and the guard of what lies above, stay
    /// so. `may` runs under the lock of the leaf then, decides, and changes the record. False, and nothing done, when `may`
    /// declined, or more must be looked at than one leaf. O(log n).
    #[inline]
    pub fn extend_up_at_once(
        &self,
        pin: &Pin<'_>,
        at: u64,
        to: u64,
        distance: u64,
        may: impl FnOnce(&T) -> bool,
    ) -> bool {
        debug_assert!(is_page_aligned(to) && at < to && to <= self.top.limits.end);
        let Some(last) = at.checked_sub(1) else { return false };
        let leaf = self.lock_leaf(pin, last);
        let Some((rank, entry)) = Self::ending_at(&leaf, at) else { return false };
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
        let may = may(entry);
        if may {
            leaf.set_end(rank, to);
        }
        may
    }
}
