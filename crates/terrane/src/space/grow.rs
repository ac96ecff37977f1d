//! Stacks that grow: a fault below a mapping made with `GROWSDOWN` moves its start down.
//!
//! The fault has found nothing mapped, on its locked path, and holds nothing any more. Growing is a small layout call of its own, and the
//! fault starts over. It holds, exclusively, what the decision is about: from the guard gap below the new start to the first
//! page of the stack. So nobody maps anything there meanwhile, and the stack stays what it is. A mapping further down cannot come
//! closer than its own call allows it to.
//!
//! Source: Linux since 4.12 keeps 256 pages between a stack and a mapping below that may be accessed and is no stack itself.

use super::change::Change;
use super::{AddressSpace, Limit};
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE, page_floor};
use crate::error::{FaultError, OutOfMemory};
use crate::fault::{self, Translation};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::STACK_GUARD_GAP;
use crate::vma::{Access, Snapshot, VmFlags};
use core::ops::ControlFlow;

impl<H: Host> AddressSpace<H> {
    /// A fault at an address where nothing is mapped: lets the stack above grow, if there is one, and faults again.
    ///
    /// # Errors
    /// As [`fault`](Self::fault).
    #[cold]
    pub(super) fn fault_below(
        &self,
        cpu: &Cpu<H>,
        addr: u64,
        access: Access,
    ) -> Result<Translation, FaultError> {
        loop {
            self.grow_stack(cpu, page_floor(addr))?;
            match fault::fault(self.mm(), cpu, addr, access) {
                // Unmapped again by another thread.
                Err(FaultError::NotMapped) => {}
                result => return result,
            }
        }
    }

    /// Moves the start of the stack above `addr` down to it. Fine if something is mapped there by now.
    ///
    /// # Errors
    /// [`FaultError::NotMapped`] when there is no stack or it may not grow so far, [`FaultError::OutOfMemory`].
    fn grow_stack(&self, cpu: &Cpu<H>, addr: u64) -> Result<(), FaultError> {
        let mm = self.mm();
        loop {
            // A first look, with nothing held: at what it shows, the range is aimed.
            let start = {
                let pin = cpu.pin();
                let above = mm.index.first_ending_after(&pin, addr).ok_or(FaultError::NotMapped)?;
                let (start, flags) = (above.start(), above.flags());
                if start > addr && !flags.contains(VmFlags::GROWSDOWN) {
                    return Err(FaultError::NotMapped);
                }
                start
            };
            if start <= addr {
                return Ok(());
            }
            let grown = AddrRange::new(addr, start);
            let reach = AddrRange::new(addr.saturating_sub(STACK_GUARD_GAP), start + PAGE_SIZE);
            let mut change = Change::begin_within(mm, cpu, reach, grown);
            if self.has_limits() || self.config().stack_limit.is_some() {
                change.hold_limits();
            }
            let done = self.grow_held(&mut change, reach, grown);
            drop(change);
            cpu.tidy();
            match done {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// False when the stack does not begin where `grown` ends (any more).
    fn grow_held(
        &self,
        change: &mut Change<'_, H>,
        reach: AddrRange,
        grown: AddrRange,
    ) -> Result<bool, FaultError> {
        let (mm, cpu) = (change.mm, change.cpu);
        let pages = grown.pages();
        let stack = {
            let pin = cpu.pin();
            let Some((_, stack)) = mm.next_vma(&pin, grown.start, reach.end) else { return Ok(false) };
            if stack.range.start != grown.end {
                return Ok(false);
            }
            let mut below: Option<Snapshot> = None;
            change.for_each(&pin, AddrRange::new(reach.start, grown.start), |_, seen| {
                below = Some(seen);
                ControlFlow::Continue(())
            });
            let too_near = below.is_some_and(|below| {
                let accessible = below.flags.intersects(VmFlags::PROT);
                accessible && !below.flags.contains(VmFlags::GROWSDOWN)
            });
            let may_grow = stack.flags.contains(VmFlags::GROWSDOWN)
                && !too_near
                && grown.start >= self.config().range.start;
            if !may_grow {
                return Err(FaultError::NotMapped);
            }
            stack
        };
        // As in Linux, a stack that is to grow has an anon_vma from then on, and so a fork looks into its entries; also when the limits are in the
        // way after all.
        fault::prepare_anon_held(mm, cpu, grown.end)?;
        let fits = pages <= stack.pgoff
            && self.limit(Limit::Stack).is_none_or(|limit| stack.range.end - grown.start <= limit)
            && self
                .limit(Limit::Address)
                .is_none_or(|limit| mm.mapped.sum() as u64 + pages <= limit >> PAGE_SHIFT)
            && self.check_commit(stack.flags, pages).is_ok()
            && self.check_memlock(stack.flags, pages).is_ok();
        if !fits {
            return Err(FaultError::NotMapped);
        }
        super::retry_with_memory(cpu, || change.plan(&cpu.pin(), 1))
            .map_err(|OutOfMemory| FaultError::OutOfMemory)?;
        let is_stack = |flags: VmFlags| flags.contains(VmFlags::GROWSDOWN);
        Ok(change.grow_down(grown, None, |stack| stack.start() == grown.end && is_stack(stack.flags())))
    }
}
