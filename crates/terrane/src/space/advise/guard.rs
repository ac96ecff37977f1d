//! `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE`: entries at which every access raises a signal, without a VMA for each.
//!
//! # What it guarantees
//!
//! A guard is an entry like any other, owned before it changes, so a fault beside it comes before the guard (and its page is given
//! up) or after. It is in nobody's way: a sweep that forgets pages leaves it ([`Slot::clear_but_guard`]), changes of protection
//! and divisions of the VMA do not look at it, a fork copies it, and unmapping takes it away.
//!
//! # All or nothing
//!
//! Installing makes the tables first, and can fail only then. A table stays as long as a mapping reaches into its span, and the
//! call holds the range; a block cannot come into being where a table is. So the second pass finds the tables.
//!
//! # Forks
//!
//! A fork looks into the entries of VMAs that have private pages, or that are marked ([`VmFlags::MAYBE_GUARD`]). The VMA gets the mark, all of it,
//! before the first guard, and keeps it. As in Linux private memory also gets an anon_vma, which decides what it merges with. The step is one of attributes (a bracket, under the lock of the leaf), but says nothing that decides
//! what addresses mean, so the call need not hold what it does not change: whoever computes new attributes does so under the same lock, and a
//! merge takes the mark along.

use crate::addr::{AddrRange, PAGE_SIZE};
use crate::error::{Error, OutOfMemory};
use crate::fault;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::{Mm, Parting};
use crate::page_table::{EMPTY, GUARD, Pte, SlotError};
use crate::space::retry_with_memory;
use crate::space::sweep::Sweep;
use crate::vma::VmFlags;

/// Entries changed under one pin: some 10 us.
const PAGES_A_PIN: u64 = 256;

/// Makes every page of `range`, which lies in one VMA (`of_memory`: of private memory) and is held, a guard; what is there is given to `sweep`.
///
/// # Errors
/// [`Error::NoMemory`], and nothing done.
pub(super) fn install<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    of_memory: bool,
    stores_reach: bool,
    sweep: &mut Sweep<'_, H>,
) -> Result<(), Error> {
    if of_memory {
        fault::prepare_anon_held(mm, cpu, range.start).map_err(|_| Error::NoMemory)?;
    }
    mark(mm, cpu, range.start);
    make_tables(mm, cpu, range)?;
    sweep.end_objects(stores_reach);
    let mut parting = mm.may_share_pages().then(Parting::new);
    let mut at = range.start;
    while at < range.end {
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        let from = at;
        let stop = range.end.min(at + PAGES_A_PIN * PAGE_SIZE);
        while at < stop {
            let taken = mm.page_table.slot(&ram, at).ok().and_then(|slot| slot.take_any(&ram));
            let Some(taken) = taken else { break };
            let before = Pte::decode::<H::Format>(taken.previous());
            taken.publish(GUARD);
            sweep.gone(&ram, before, parting.as_mut());
            at += PAGE_SIZE;
        }
        if at < stop {
            // The table is being looked at by whoever frees empty ones, and stays.
            ram.relax(0);
        }
        drop(pin);
        if let Some(parting) = &mut parting {
            parting.part(mm, cpu, AddrRange::new(from, stop));
        }
    }
    Ok(())
}

/// Says that there may be guards in the VMA at `addr`, which the caller holds.
fn mark<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, addr: u64) {
    let mut nodes = mm.take_reserve(cpu);
    {
        let pin = cpu.pin();
        // Nothing is divided.
        let _ = mm.index.edit(&mut nodes, &pin, addr, 0, |vma, _| {
            let flags = vma.flags();
            if !flags.contains(VmFlags::MAYBE_GUARD) {
                vma.change(|vma| vma.set_flags(flags | VmFlags::MAYBE_GUARD));
            }
        });
    }
    mm.give_reserve(cpu, nodes);
}

/// Makes the tables of `range`, and tables of the blocks in it.
fn make_tables<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) -> Result<(), OutOfMemory> {
    const SPAN: u64 = crate::mm::BLOCK_SIZE;
    let mut at = range.start;
    while at < range.end {
        let mut rounds = 0u32;
        loop {
            let made = retry_with_memory(cpu, || {
                let pin = cpu.pin();
                let ram = mm.ram(&pin);
                match mm.page_table.slot(&ram, at) {
                    Ok(_) => Ok(true),
                    Err(SlotError::OutOfMemory) => Err(OutOfMemory),
                    Err(SlotError::Changed) => {
                        let mut table = Some(ram.allocate().ok_or(OutOfMemory)?);
                        let divided = mm.divide_block(&ram, at, &mut table);
                        table.into_iter().for_each(|unused| ram.free(unused));
                        divided.map(|()| false)
                    }
                }
            })?;
            if made {
                break;
            }
            mm.machine.host().relax(cpu.id(), rounds);
            rounds = rounds.saturating_add(1);
        }
        at = (at & !(SPAN - 1)).saturating_add(SPAN);
    }
    Ok(())
}

/// Takes the guards of `range` away, and nothing else.
pub(super) fn remove<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) {
    mm.for_each_part(cpu, range, |ram, part| {
        mm.page_table.for_each_slot(ram, part, |_, slot| {
            if slot.load() == GUARD {
                // Somebody else may take it away at the same time; nobody makes it anything else.
                let _ = slot.replace(GUARD, EMPTY);
            }
            core::ops::ControlFlow::Continue(())
        });
    });
}
