//! Dividing the blocks in which a call's range begins or ends; see [`mm::block`](crate::mm) for the rules.
//!
//! A call that takes part of a block away, or changes what part of it allows, [reserves](Splits::reserve) before its first change
//! and [cuts](Splits::cut) after the last one and before it sweeps. Inside the range no block needs to be divided: it lies in one
//! VMA, and the boundaries of VMAs inside were made by calls that had an address in common with this one, and so are over.

use crate::addr::{AddrRange, Frame};
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::{BLOCK_SIZE, Mm};
use crate::stats::Counter;

/// The ends of a range, and a frame for the page table that each may need.
pub(super) struct Splits<'a, H: Host> {
    mm: &'a Mm<H>,
    cpu: &'a Cpu<H>,
    range: AddrRange,
    tables: [Option<Frame>; 2],
}

impl<'a, H: Host> Splits<'a, H> {
    /// For a call that holds `range`. Nothing is reserved.
    #[inline]
    pub(super) fn new(mm: &'a Mm<H>, cpu: &'a Cpu<H>, range: AddrRange) -> Self {
        Self { mm, cpu, range, tables: [None; 2] }
    }

    /// The ends that may lie within a block.
    #[inline]
    fn ends(&self) -> [Option<u64>; 2] {
        let may_divide = |at: u64| Some(at).filter(|at| at % BLOCK_SIZE != 0);
        if self.mm.may_have_blocks() { [self.range.start, self.range.end].map(may_divide) } else { [None; 2] }
    }

    /// Makes sure that [`cut`](Self::cut) cannot fail. Costs nothing in a space without blocks, else two frames from the CPU's
    /// cache. Not while pinned.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    #[inline]
    pub(super) fn reserve(&mut self) -> Result<(), OutOfMemory> {
        for (end, table) in self.ends().into_iter().zip(&mut self.tables) {
            if end.is_some() && table.is_none() {
                let frame = super::retry_with_memory(self.cpu, || {
                    let pin = self.cpu.pin();
                    self.mm.machine.frames().allocate(&pin).ok_or(OutOfMemory)
                })?;
                *table = Some(frame);
            }
        }
        Ok(())
    }

    /// Divides the blocks at the ends of the range. Not while pinned.
    #[inline]
    pub(super) fn cut(&mut self) {
        for (end, table) in self.ends().into_iter().zip(&mut self.tables) {
            let Some(at) = end else { continue };
            let mut rounds = 0;
            loop {
                let done = {
                    let pin = self.cpu.pin();
                    let (ram, before) = (self.mm.ram(&pin), table.is_some());
                    let done = self.mm.divide_block(&ram, at, table);
                    if before && table.is_none() {
                        ram.count(Counter::PgAlloc);
                    }
                    done
                };
                if done.is_ok() {
                    break;
                }
                // Not reserved: no call does that. But the layout is changed, so there is no way back.
                debug_assert!(false, "a block is divided without a table");
                let pin = self.cpu.pin();
                *table = self.mm.machine.frames().allocate(&pin);
                drop(pin);
                if table.is_none() {
                    self.cpu.quiesce();
                    self.mm.machine.host().relax(self.cpu.id(), rounds);
                    rounds = rounds.saturating_add(1);
                }
            }
        }
    }
}

impl<H: Host> Drop for Splits<'_, H> {
    #[inline]
    fn drop(&mut self) {
        if self.tables.iter().any(Option::is_some) {
            let pin = self.cpu.pin();
            for frame in self.tables.iter_mut().filter_map(Option::take) {
                self.mm.machine.frames().free(&pin, frame);
            }
        }
    }
}
