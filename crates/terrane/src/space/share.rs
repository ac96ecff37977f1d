//! What `fork` does to the entries of the page table: private pages become shared, counted and read-only in both spaces.

use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use crate::frame::{BLOCK_FRAMES, FrameFlags, FrameList, Ram};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::rss::PageKind;
use crate::mm::{BlockFrames, Mm};
use crate::page_table::{BUSY, EMPTY, Format, GUARD, Level, Pte, PteFlags, Slot, SlotError};
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
    // Pages that the child maps now.
    let mut shared = 0;
    parent.for_each_part(cpu, range, |ram, part| {
        if result.is_err() {
            return;
        }
        let mut divided = true;
        while divided && result.is_ok() {
            divided = false;
            result = parent.page_table.for_each_pair(&child.page_table, ram, part, |pair| {
                if pair.level == Level::PAGE {
                    return Slot::for_each_used(pair.parent, |index, slot| {
                        *protected |= share_entry::<H>(ram, slot, &pair.child[index], &mut shared);
                        ControlFlow::Continue(())
                    });
                }
                for (slot, copy) in pair.parent.iter().zip(pair.child) {
                    match share_block::<H>(ram, slot, copy, &mut shared) {
                        Some(stores) => *protected |= stores,
                        None => divided = true,
                    }
                }
                ControlFlow::Continue(())
            });
        }
    });
    child.count_pages(&cpu.pin(), PageKind::Anon, shared);
    // Nobody else changes the child's tables, so only memory can be missing.
    result.map_err(|_: SlotError| OutOfMemory)
}

/// Shares one page. Returns true when the parent's processors may hold a translation that allows stores.
fn share_entry<H: Host>(ram: &Ram<'_, H>, slot: &Slot, copy: &Slot, shared_pages: &mut u64) -> bool {
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
            Pte::Guard => {
                copy.fill(GUARD);
                return false;
            }
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
        *shared_pages += 1;
        return !hidden && flags.contains(PteFlags::WRITE);
    }
}

/// Shares one block: its frames are counted, and it is read-only on both sides. Returns as [`share_entry`] does; `None`, and
/// nothing shared, when a fault has divided the block this moment.
fn share_block<H: Host>(ram: &Ram<'_, H>, slot: &Slot, copy: &Slot, shared_pages: &mut u64) -> Option<bool> {
    loop {
        let raw = slot.wait_not_busy(ram);
        if raw == EMPTY {
            return Some(false);
        }
        let (frame, flags) = Pte::block::<H::Format>(raw)?;
        let frames = BlockFrames(frame);
        // Counted first: see `fork`.
        frames.inc_references(ram);
        let shared = flags.difference(PteFlags::WRITE);
        let new = Pte::Block { frame, flags: shared }.encode::<H::Format>();
        if new != raw && slot.replace(raw, new).is_err() {
            // Marked by the processor, or divided. The parent maps the frames all the same, so none goes to zero.
            let mut none = FrameList::new();
            frames.drop_references(ram, &mut none);
            debug_assert!(none.is_empty());
            continue;
        }
        // The child has not used it yet.
        let entry = Pte::Block { frame, flags: shared.difference(PteFlags::ACCESSED) };
        copy.fill(entry.encode::<H::Format>());
        *shared_pages += BLOCK_FRAMES as u64;
        return Some(flags.contains(PteFlags::WRITE));
    }
}
