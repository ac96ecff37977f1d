//! Faults on pages that are swapped out; see [`swap`](crate::swap).

use super::{Attempt, Course, Stop, Translation, private, user};
use crate::error::FaultError;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::rss::PageKind;
use crate::page_table::{Format, PteFlags, Raw, Slot, swap_slot};
use crate::stats::Counter;
use crate::swap::Found;
use crate::vma::Access;

/// The entry says `Swap(payload)`.
#[cold]
pub(super) fn swapped<H: Host>(
    attempt: &Attempt<'_, H>,
    access: Access,
    slot: &Slot,
    raw: Raw,
    payload: u64,
) -> Result<Translation, Stop<H>> {
    let number = swap_slot(payload);
    let taken = slot.take(raw).ok_or(Stop::Again)?;
    if !attempt.still_valid() {
        return Err(Stop::GiveUp(Counter::SpfVmaChanged));
    }
    let ram = &attempt.ram;
    match attempt.mm.machine.swap().find(ram, number) {
        Some(Found::Page { frame, alone }) => {
            let flags = if user::is_protected(attempt, raw) {
                attempt.seen.flags.read_only_pte().union(PteFlags::ACCESSED).union(PteFlags::USER_WP)
            } else if alone && attempt.seen.flags.allows(Access::Write) {
                private::writable_pte(attempt.seen.flags)
            } else {
                attempt.seen.flags.read_only_pte().union(PteFlags::ACCESSED)
            };
            taken.publish(H::Format::page(frame, flags));
            attempt.mm.count_page(ram.pin, PageKind::Anon);
            attempt.mm.uncount_page(ram.pin, PageKind::Swap);
            // A store to a shared page copies it, as any other does.
            if access == Access::Write && !flags.contains(PteFlags::WRITE) {
                return Err(Stop::Again);
            }
            Ok(Translation { frame, flags })
        }
        // In these cases the entry is given back as it was.
        Some(Found::Unsettled) => Err(Stop::Again),
        Some(Found::Away) => Err(Stop::SwapIn(number)),
        None => Err(Stop::Fail(FaultError::Io)),
    }
}

impl<H: Host> Course<'_, H> {
    /// Reads the page that an attempt found to be in slot `number`.
    ///
    /// # Errors
    /// [`FaultError::Io`] when the device does not give it, [`FaultError::OutOfMemory`].
    pub(super) fn swap_in(&mut self, cpu: &Cpu<H>, number: u64) -> Result<(), FaultError> {
        let machine = &*self.mm.machine;
        self.count_major(cpu);
        match machine.swap().read_in(cpu, number) {
            Err(FaultError::OutOfMemory) => self.find_memory(cpu),
            result => result,
        }
    }
}
