//! The handler's write-protection of a range, and taking it away.
//!
//! The call holds its range (shared), so what is mapped there stays; faults go on, entry by entry before or after. An entry that is
//! protected loses its permission to store and carries the mark; shoot-down and stores under way are awaited before the
//! call returns, as `protect` does, because the handler relies on the page standing still. Taking the protection away only takes the mark
//! away: the next store finds out whether the page may be written or must be copied.
//!
//! Where nothing is there yet, shared memory (and private memory, if the context asks for it) gets a mark in the empty
//! entry, so that whatever comes there is protected from the start.
//!
//! A fault that was making the page writable when the mark came either had taken the entry before, so the sweep waits and marks what it
//! published; or its compare-and-swap fails, because the mark is part of what it expects.

use crate::addr::{AddrRange, PAGE_SIZE, TABLE_ENTRIES};
use crate::error::{Error, OutOfMemory};
use crate::frame::Ram;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::{BLOCK_SIZE, Mm};
use crate::page_table::pte::PAYLOAD_USER_WP;
use crate::page_table::{EMPTY, Level, Pte, PteFlags, Slot, SlotError};
use crate::stats::Counter;
use crate::sync::atomic::Ordering;
use crate::vma::VmFlags;
use core::ops::ControlFlow;

/// What is to be done with the entries.
#[derive(Clone, Copy)]
struct Task {
    /// Protect, or take the protection away.
    on: bool,
    /// Mark empty entries too.
    empties: bool,
}

/// What a pass over entries has met.
#[derive(Default)]
struct Met {
    /// A permission to store was taken away.
    reduced: bool,
    /// An entry was in a state that passes.
    again: bool,
}

/// Protects the pages of `range` (`on`), or takes that away. Blocks; not while pinned, nor with a range held.
///
/// # Errors
/// [`Error::NotFound`] when nothing is mapped there, or at the first mapping that is not registered for it;
/// [`Error::NoMemory`]. What lies before is done.
pub(crate) fn write_protect<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    on: bool,
    unpopulated: bool,
) -> Result<(), Error> {
    let _steady = mm.share(cpu, range);
    let mut met = Met::default();
    let mut of_object = false;
    let mut at = range.start;
    let mut result = Err(Error::NotFound);
    while at < range.end {
        let found = {
            let pin = cpu.pin();
            mm.next_vma(&pin, at, range.end).map(|(vma, seen)| (seen, vma.object().is_some()))
        };
        let Some((seen, shows_object)) = found else { break };
        if !seen.flags.contains(VmFlags::UFFD_WP) {
            result = Err(Error::NotFound);
            break;
        }
        if shows_object && on && !of_object {
            // See `Mm::ending`: the permission to store to an object's pages goes.
            of_object = true;
            mm.ending.fetch_add(1, Ordering::SeqCst);
        }
        let task = Task { on, empties: on && (shows_object || unpopulated) };
        result = sweep(mm, cpu, seen.range.intersection(range), task, &mut met).map_err(Error::from);
        if result.is_err() {
            break;
        }
        at = seen.range.end;
    }
    if met.reduced {
        let ticket = {
            let pin = cpu.pin();
            mm.shoot_down(&mm.ram(&pin), range)
        };
        mutant!("user_protect_not_awaited", cpu.await_stores(ticket), ());
    } else {
        cpu.count(Counter::TlbFlushSkipped, 1);
    }
    if of_object {
        mm.ending.fetch_sub(1, Ordering::SeqCst);
    }
    result
}

/// Takes the handler's marks off the entries of `range`, which the caller holds and which is not registered any more.
pub(crate) fn clear<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) {
    let task = Task { on: false, empties: false };
    // Only protecting needs memory.
    let _ = sweep(mm, cpu, range, task, &mut Met::default());
}

/// Takes the mark off the page at `addr`, if it is registered with context `number` still. Blocks; not while pinned, nor with a range held.
pub(super) fn lift<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, addr: u64, number: u16) {
    let page = AddrRange::new(addr, addr + PAGE_SIZE);
    let _steady = mm.share(cpu, page);
    let is_registered = {
        let pin = cpu.pin();
        mm.vma_at(&pin, addr).is_some_and(|(_, seen)| seen.flags.user_context() == number)
    };
    if is_registered {
        let task = Task { on: false, empties: false };
        // Only protecting needs memory.
        let _ = sweep(mm, cpu, page, task, &mut Met::default());
    }
}

fn sweep<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    task: Task,
    met: &mut Met,
) -> Result<(), OutOfMemory> {
    if task.on {
        divide_blocks(mm, cpu, range)?;
    }
    if task.empties {
        make_tables(mm, cpu, range)?;
    }
    let mut rounds = 0;
    loop {
        met.again = false;
        mm.for_each_part(cpu, range, |ram, part| {
            let _ = mm.page_table.for_each_run(ram, part, |run| {
                if run.level != Level::PAGE {
                    return ControlFlow::Continue(());
                }
                if task.empties {
                    run.slots.iter().for_each(|slot| change(ram, slot, task, met));
                    return ControlFlow::Continue(());
                }
                Slot::for_each_used(run.slots, |_, slot| {
                    change(ram, slot, task, met);
                    ControlFlow::Continue(())
                })
            });
        });
        if !met.again {
            return Ok(());
        }
        mm.machine.host().relax(cpu.id(), rounds);
        rounds = rounds.saturating_add(1);
    }
}

/// Divides the blocks that touch `range`. There will be no new ones, for it is registered.
fn divide_blocks<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) -> Result<(), OutOfMemory> {
    if !mm.may_have_blocks() {
        return Ok(());
    }
    loop {
        let mut blocks = [0; 16];
        let mut count = 0;
        mm.for_each_part(cpu, range, |ram, part| {
            if count < blocks.len() && mm.page_table.block_slot(ram, part.start).is_some() {
                blocks[count] = part.start;
                count += 1;
            }
        });
        for &addr in &blocks[..count] {
            divide(mm, cpu, addr)?;
        }
        if count < blocks.len() {
            return Ok(());
        }
    }
}

/// Makes the block that covers `addr`, if there is one, a table of pages. Not while pinned.
pub(super) fn divide<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, addr: u64) -> Result<(), OutOfMemory> {
    let once = || {
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        let mut table = ram.allocate();
        let done = mm.divide_block(&ram, addr, &mut table);
        if let Some(unused) = table {
            ram.free(unused);
        }
        done
    };
    once().or_else(|OutOfMemory| {
        cpu.find_memory();
        once()
    })
}

/// Makes the leaf tables of `range`.
fn make_tables<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) -> Result<(), OutOfMemory> {
    let mut at = range.start;
    let mut rounds = 0;
    let mut tried = false;
    while at < range.end {
        let made = {
            let pin = cpu.pin();
            mm.page_table.make_leaf_table(&mm.ram(&pin), at).map(drop)
        };
        match made {
            Ok(()) => {
                at = (at & !(BLOCK_SIZE - 1)).saturating_add(PAGE_SIZE * TABLE_ENTRIES as u64);
                tried = false;
            }
            Err(SlotError::Changed) => {
                // A table is being made or closed.
                mm.machine.host().relax(cpu.id(), rounds);
                rounds = rounds.saturating_add(1);
            }
            Err(SlotError::OutOfMemory) if tried => return Err(OutOfMemory),
            Err(SlotError::OutOfMemory) => {
                tried = true;
                cpu.find_memory();
            }
        }
    }
    Ok(())
}

fn change<H: Host>(ram: &Ram<'_, H>, slot: &Slot, task: Task, met: &mut Met) {
    loop {
        let raw = slot.wait_not_busy(ram);
        let marked = |flags: PteFlags| {
            if task.on {
                flags.difference(PteFlags::WRITE).union(PteFlags::USER_WP)
            } else {
                flags.difference(PteFlags::USER_WP)
            }
        };
        let mut reduces = false;
        let new = match Pte::decode::<H::Format>(raw) {
            Pte::Page { frame, flags } => {
                reduces = task.on && flags.contains(PteFlags::WRITE);
                Pte::Page { frame, flags: marked(flags) }
            }
            Pte::NoAccess { frame, flags } => Pte::NoAccess { frame, flags: marked(flags) },
            Pte::Swap(payload) if task.on => Pte::Swap(payload | PAYLOAD_USER_WP),
            Pte::Swap(payload) => Pte::Swap(payload & !PAYLOAD_USER_WP),
            Pte::Migration(payload) => {
                // Its owner expects the entry as it is. Not for long.
                met.again |= (payload & PAYLOAD_USER_WP != 0) != task.on;
                return;
            }
            Pte::UserWp if !task.on => Pte::Empty,
            Pte::Empty if task.empties => {
                if raw != EMPTY {
                    return;
                }
                // Nobody unmaps: the range is held. So the mark will not be left behind in a table that goes.
                let Some(taken) = slot.take(EMPTY) else {
                    met.again = true;
                    return;
                };
                taken.publish(Pte::UserWp.encode::<H::Format>());
                return;
            }
            _ => return,
        };
        let new = new.encode::<H::Format>();
        if new == raw {
            return;
        }
        if slot.replace(raw, new).is_ok() {
            met.reduced |= reduces;
            return;
        }
    }
}
