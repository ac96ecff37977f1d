//! What `fork` does to the entries of the page table: private pages become shared, counted and read-only in both spaces.

use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use crate::frame::{FrameFlags, Ram};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::page_table::{BUSY, Format, Pte, PteFlags, Slot, SlotError};
use core::ops::ControlFlow;

/// Makes the private pages of `range` shared between the two.
pub(super) fn share_pages<H: Host>(
    parent: &Mm<H>,
    child: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    protected: &mut bool,
) -> Result<(), OutOfMemory> {
    let mut result = Ok(());
    parent.for_each_part(cpu, range, |ram, part| {
        if result.is_err() {
            return;
        }
        result = parent.page_table.for_each_pair(&child.page_table, ram, part, |pair| {
            Slot::for_each_used(pair.parent, |index, slot| {
                *protected |= share_entry::<H>(ram, slot, &pair.child[index]);
                ControlFlow::Continue(())
            })
        });
    });
    // Nobody else changes the child's tables, so only memory can be missing.
    result.map_err(|_: SlotError| OutOfMemory)
}

/// Shares one page. Returns true when the parent's processors may hold a translation that allows stores.
fn share_entry<H: Host>(ram: &Ram<'_, H>, slot: &Slot, copy: &Slot) -> bool {
    let mut raw = slot.load();
    let mut counted = false;
    loop {
        if raw == BUSY {
            raw = slot.wait_not_busy(ram);
            continue;
        }
        let (frame, flags, hidden) = match Pte::decode::<H::Format>(raw) {
            Pte::Page { frame, flags } => (frame, flags, false),
            Pte::NoAccess { frame, flags } => (frame, flags, true),
            _ => return false,
        };
        let meta = ram.frames.meta(frame);
        if !meta.flags().contains(FrameFlags::ANON) {
            // A page of an object, or the zeros: the child finds it again by itself.
            return false;
        }
        if !counted {
            meta.inc_references();
            counted = true;
        }
        let shared = flags.difference(PteFlags::WRITE);
        if !hidden && flags.contains(PteFlags::WRITE) {
            match slot.replace(raw, H::Format::with_flags(raw, shared)) {
                Ok(()) => {}
                // The processor has set a mark meanwhile. The page is the same: nobody unmaps while we hold the lock.
                Err(now) => {
                    raw = now;
                    continue;
                }
            }
        }
        let entry = if hidden {
            Pte::NoAccess { frame, flags: shared }
        } else {
            // The child has not used it yet.
            Pte::Page { frame, flags: shared.difference(PteFlags::ACCESSED) }
        };
        copy.fill(entry.encode::<H::Format>());
        return !hidden && flags.contains(PteFlags::WRITE);
    }
}
