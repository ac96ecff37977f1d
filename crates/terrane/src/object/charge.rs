//! How shared memory counts in the account of what programs have been promised; see [`commit`](crate::commit).
//!
//! As in Linux: shared anonymous memory counts as a whole, from when it is made until it goes, so that no fault is ever refused. A
//! `memfd`, or what was mapped with `NORESERVE`, counts page by page, from when a page is made until it is taken out, wherever
//! it is meanwhile, in memory or in swap; where no more may be promised the fault is a bus error. Files count nothing: their pages can be
//! dropped.
//!
//! A page counts for as long as its slot is not empty, so who fills an empty slot adds one, and who empties it takes one off. Each does it
//! behind a compare-and-swap that only one can win, in a shard of its own CPU: no line is shared that the slot does not share already.

use super::Object;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::host::Host;
use crate::sync::Pin;

/// What counts of an object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Charge {
    /// Nothing.
    None,
    /// Its length.
    Whole,
    /// The pages that there are.
    Pages,
}

/// Pages of `len` bytes.
pub(super) fn pages(len: u64) -> u64 {
    (len >> PAGE_SHIFT) + u64::from(len & (PAGE_SIZE - 1) != 0)
}

impl<H: Host> Object<H> {
    /// Whether a page more may come.
    #[inline]
    pub(super) fn may_charge(&self) -> bool {
        self.charge != Charge::Pages || self.machine.commit().allows(1)
    }

    /// Counts pages whose slots have been filled, or emptied.
    #[inline]
    pub(super) fn charge_pages(&self, pin: &Pin<'_>, pages: i64) {
        if self.charge == Charge::Pages {
            self.machine.commit().add(pin.cpu(), pages);
        }
    }

    /// Counts a change of length, in bytes. By one at a time.
    pub(crate) fn charge_len(&self, pin: &Pin<'_>, before: u64, after: u64) {
        if self.charge == Charge::Whole {
            self.machine.commit().add(pin.cpu(), pages(after) as i64 - pages(before) as i64);
        }
    }
}
