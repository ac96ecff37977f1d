//! What `fork` does to the entries of the page table: private pages become shared, counted and read-only in both spaces.

use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use crate::frame::{BLOCK_FRAMES, FrameFlags, Ram};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::rss::PageKind;
use crate::mm::{BlockFrames, Mm};
use crate::page_table::{EMPTY, Format, GUARD, Level, Pte, PteFlags, Slot, SlotError, swap_slot};
use core::ops::ControlFlow;

/// Makes the private pages of `range` shared between the two. `marks`: what a handler of user faults has protected is protected in the
/// child too.
pub(super) fn share_pages<H: Host>(
    parent: &Mm<H>,
    child: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    marks: bool,
    protected: &mut bool,
) -> Result<(), OutOfMemory> {
    let mut result = Ok(());
    let mut full = false;
    // Pages that the child maps now, and those that it has in swap.
    let mut shared = [0; 2];
    parent.for_each_part(cpu, range, |ram, part| {
        if result.is_err() || full {
            return;
        }
        let mut divided = true;
        while divided && result.is_ok() {
            divided = false;
            result = parent.page_table.for_each_pair(&child.page_table, ram, part, |pair| {
                if pair.level == Level::PAGE {
                    return Slot::for_each_used(pair.parent, |index, slot| {
                        match share_entry(parent, ram, slot, &pair.child[index], marks, &mut shared) {
                            Ok(stores) => *protected |= stores,
                            Err(OutOfMemory) => {
                                full = true;
                                return ControlFlow::Break(());
                            }
                        }
                        ControlFlow::Continue(())
                    });
                }
                for (slot, copy) in pair.parent.iter().zip(pair.child) {
                    match share_block::<H>(ram, slot, copy, &mut shared[0]) {
                        Some(stores) => *protected |= stores,
                        None => divided = true,
                    }
                }
                ControlFlow::Continue(())
            });
        }
    });
    let [mapped, swapped] = shared;
    child.count_pages(&cpu.pin(), PageKind::Anon, mapped);
    child.count_pages(&cpu.pin(), PageKind::Swap, swapped);
    // Nobody else changes the child's tables, so only memory can be missing.
    result.map_err(|_: SlotError| OutOfMemory)?;
    if full { Err(OutOfMemory) } else { Ok(()) }
}

/// Shares one page. Returns true when the parent's processors may hold a translation that allows stores.
///
/// # Errors
/// [`OutOfMemory`] when a swapped page has too many entries.
fn share_entry<H: Host>(
    mm: &Mm<H>,
    ram: &Ram<'_, H>,
    slot: &Slot,
    copy: &Slot,
    marks: bool,
    shared: &mut [u64; 2],
) -> Result<bool, OutOfMemory> {
    let mut rounds = 0;
    loop {
        let raw = slot.wait_not_busy(ram);
        let (frame, flags, hidden) = match Pte::decode::<H::Format>(raw) {
            Pte::Page { frame, flags } => (frame, flags, false),
            Pte::NoAccess { frame, flags } => (frame, flags, true),
            Pte::Swap(payload) => {
                let number = swap_slot(payload);
                if let Some(taken) = slot.take(raw) {
                    let stores = mm.machine.swap().add_entry(ram, number)?;
                    let payload = if marks { payload } else { number };
                    copy.fill(Pte::Swap(payload).encode::<H::Format>());
                    taken.give_back();
                    shared[1] += 1;
                    return Ok(stores);
                }
                continue;
            }
            Pte::Guard => {
                copy.fill(GUARD);
                return Ok(false);
            }
            Pte::UserWp => {
                if marks {
                    copy.fill(raw);
                }
                return Ok(false);
            }
            _ => return Ok(false),
        };
        // Owned: reclaim may take the page away at any time, and its frame be another page then.
        let Some(taken) = slot.take(raw) else {
            // Or the processor has set a mark meanwhile.
            ram.relax(rounds);
            rounds = rounds.saturating_add(1);
            continue;
        };
        let meta = ram.frames.meta(frame);
        if !meta.flags().contains(FrameFlags::ANON) {
            // The zeros stay where they were seen, as Linux has it; they have no count, and nobody may store there. A page of
            // an object the child finds again by itself.
            if frame == mm.machine.zero_frame() {
                copy.fill(raw);
            } else if marks && flags.contains(PteFlags::USER_WP) {
                copy.fill(Pte::UserWp.encode::<H::Format>());
            }
            return Ok(false);
        }
        meta.inc_references();
        let allowed = flags.difference(PteFlags::WRITE);
        // The child has not used it yet. As a rule no handler has protected it there.
        let kept = if marks { PteFlags::empty() } else { PteFlags::USER_WP };
        let stores = !hidden && flags.contains(PteFlags::WRITE);
        let entry = if hidden {
            Pte::NoAccess { frame, flags: allowed.difference(kept) }
        } else {
            Pte::Page { frame, flags: allowed.difference(PteFlags::ACCESSED.union(kept)) }
        };
        copy.fill(entry.encode::<H::Format>());
        shared[0] += 1;
        if stores {
            taken.publish(H::Format::with_flags(raw, allowed));
        } else {
            taken.give_back();
        }
        return Ok(stores);
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
        // Owned: reclaim may divide it, and take pages away, at any time. The processor may have set a mark.
        let Some(taken) = slot.take(raw) else { continue };
        // Counted first: see `fork`.
        BlockFrames(frame).inc_references(ram);
        let shared = flags.difference(PteFlags::WRITE);
        taken.publish(Pte::Block { frame, flags: shared }.encode::<H::Format>());
        // The child has not used it yet.
        let entry = Pte::Block { frame, flags: shared.difference(PteFlags::ACCESSED) };
        copy.fill(entry.encode::<H::Format>());
        *shared_pages += BLOCK_FRAMES as u64;
        return Some(flags.contains(PteFlags::WRITE));
    }
}
