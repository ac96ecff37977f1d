//! `MADV_PAGEOUT`: the program says which pages to reclaim.

use super::{Why, look};
use crate::addr::{AddrRange, Frame, PAGE_SIZE, TABLE_ENTRIES};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::page_table::{Level, Pte, Slot};
use core::ops::ControlFlow;

/// Pages collected before they are looked at: their numbers are on the stack, for reclaim allocates nothing.
const BATCH: usize = 64;

/// Reclaims the pages that are mapped in `range`, used or not: private ones that nobody shares go to swap, pages of objects out of
/// memory. What must stay stays. Blocks that lie in the range are looked at when they have been divided: divide them before, for now.
/// Blocks on files and swap; not while pinned. Returns how many pages were freed. O(pages mapped).
pub fn page_out<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) -> usize {
    let mut freed = 0;
    let mut at = range.start;
    while at < range.end {
        let mut frames = [Frame(0); BATCH];
        let mut count = 0;
        let mut next = range.end;
        {
            let pin = cpu.pin();
            let ram = mm.ram(&pin);
            let _ = mm.page_table.for_each_run(&ram, AddrRange::new(at, range.end), |run| {
                if run.level != Level::PAGE {
                    return ControlFlow::Continue(());
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
        at = next.max(at + PAGE_SIZE);
        freed += frames[..count]
            .iter()
            .filter(|&&frame| look(cpu, frame, Why::Advised) == super::Verdict::Freed)
            .count();
    }
    freed
}
