//! `MADV_PAGEOUT`: the program says which pages to reclaim.

use super::{Why, look};
use crate::addr::{AddrRange, Frame, PAGE_SIZE, TABLE_ENTRIES};
use crate::frame::{BLOCK_FRAMES, Ram};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::page_table::{Level, Pte, Slot};
use crate::vma::VmFlags;
use core::ops::ControlFlow;

/// Pages collected before they are looked at: their numbers are on the stack, for reclaim allocates nothing.
const BATCH: usize = 64;

/// Reclaims the pages that are mapped in `range`, used or not: private ones that nobody shares go to swap, pages of objects out of
/// memory. What must stay stays. Huge pages in the range are divided, unless others share them or there is no table for that.
/// Blocks on files and swap; not while pinned. Returns how many pages were freed. O(pages mapped).
pub fn page_out<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) -> usize {
    let mut freed = 0;
    let mut at = range.start;
    while at < range.end {
        let mut frames = [Frame(0); BATCH];
        let mut count = 0;
        let mut next = range.end;
        let mut divided = None;
        {
            let pin = cpu.pin();
            let ram = mm.ram(&pin);
            let _ = mm.page_table.for_each_run(&ram, AddrRange::new(at, range.end), |run| {
                if run.level != Level::PAGE {
                    // Looked at once more then, page by page.
                    divided = divide(mm, &ram, run.addr, run.slots).then_some(run.addr.max(at));
                    return if divided.is_some() {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    };
                }
                debug_assert!(run.slots.len() <= TABLE_ENTRIES);
                let end = run.address_of(run.slots.len());
                Slot::for_each_used(run.slots, |index, slot| {
                    let (Pte::Page { frame, .. } | Pte::NoAccess { frame, .. }) =
                        Pte::decode::<H::Format>(slot.load())
                    else {
                        return ControlFlow::Continue(());
                    };
                    if !ram.frames.contains(frame) {
                        return ControlFlow::Continue(());
                    }
                    frames[count] = frame;
                    count += 1;
                    next = run.address_of(index) + PAGE_SIZE;
                    if count == BATCH { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                })?;
                // A table at a time: no pin is to last long.
                next = end;
                ControlFlow::Break(())
            });
        }
        if let Some(block) = divided {
            at = block;
            continue;
        }
        at = next.max(at + PAGE_SIZE);
        freed += frames[..count]
            .iter()
            .filter(|&&frame| look(cpu, frame, Why::Advised) == super::Verdict::Freed)
            .count();
    }
    freed
}

/// Makes the huge page of an entry of level 2 a table of pages. False when it stays: others share it, the mapping keeps it, there is no memory for
/// a table, or there is none.
fn divide<H: Host>(mm: &Mm<H>, ram: &Ram<'_, H>, addr: u64, slots: &[Slot]) -> bool {
    let Some((first, _)) = slots.first().and_then(|slot| Pte::block::<H::Format>(slot.load())) else {
        return false;
    };
    let keeps = mm.index.find(ram.pin, addr).is_none_or(|vma| vma.flags().contains(VmFlags::LOCKED));
    let shared = (0..BLOCK_FRAMES as u32).any(|n| ram.meta(Frame(first.0 + n)).references() > 1);
    if keeps || shared {
        return false;
    }
    let mut table = ram.allocate().or_else(|| mm.machine.reclaim().take_table());
    let divided = mm.divide_block(ram, addr, &mut table);
    if let Some(unused) = table {
        ram.free(unused);
    }
    divided.is_ok()
}
