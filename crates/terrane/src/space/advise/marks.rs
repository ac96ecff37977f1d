//! `MADV_COLD` and `MADV_FREE`: the marks of the pages of a range are taken away, and with them the claim to be kept.

use crate::addr::AddrRange;
use crate::fault::{Marks, age_block, age_entry};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::{Mm, block_around};
use crate::page_table::{Level, Slot};
use core::ops::ControlFlow;

/// Takes `marks` from the entries of `range`, whose ends divide no block. Returns true when the range must be shot down. Not
/// while pinned; the caller holds the range.
pub(super) fn take_marks<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange, marks: Marks) -> bool {
    let mut found = false;
    mm.for_each_part(cpu, range, |ram, part| {
        let mut divided = true;
        while divided {
            divided = false;
            let _ = mm.page_table.for_each_run(ram, part, |run| {
                if run.level == Level::PAGE {
                    return Slot::for_each_used(run.slots, |_, slot| {
                        found |= age_entry(ram, slot, marks);
                        ControlFlow::Continue(())
                    });
                }
                // A block that reaches beyond the part is younger than the call: a first touch.
                if let Some(slot) = run.slots.first().filter(|_| part.covers(block_around(run.addr))) {
                    match age_block(ram, slot, marks) {
                        Some(used) => found |= used,
                        None => divided = true,
                    }
                }
                ControlFlow::Continue(())
            });
        }
    });
    found
}
