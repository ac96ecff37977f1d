//! What has been written since a handler protected it: for who asks from time to time instead of being told of each store
//! ([`UserFeatures::WP_ASYNC`](super::UserFeatures::WP_ASYNC)).

use crate::addr::{AddrRange, PAGE_SIZE};
use crate::error::Error;
use crate::fault::user::protect;
use crate::host::Host;
use crate::machine::Cpu;
use crate::page_table::{Level, Pte, PteFlags, Slot};
use crate::space::{AddressSpace, page_range};
use crate::vma::VmFlags;
use core::ops::ControlFlow;

impl<H: Host> AddressSpace<H> {
    /// Finds pages in `len` bytes at `addr` that are there (in memory or in swap), registered with a handler in the mode `WP`, and not protected: as
    /// `PAGEMAP_SCAN` finds `PAGE_IS_WRITTEN`. Writes ranges of them to `found`, ascending; returns how many, and where to go on: the end of the
    /// range, or less when `found` was full. With `protect`, what was found is protected again (`PM_SCAN_WP_MATCHING`); a store that comes in
    /// between is found the next time or this time, and never not at all. Blocks; not while pinned. O(pages).
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned range or one beyond the space; [`Error::NoMemory`] when a huge page must be divided to be protected.
    pub fn written(
        &self,
        cpu: &Cpu<H>,
        addr: u64,
        len: u64,
        protect: bool,
        found: &mut [AddrRange],
    ) -> Result<(usize, u64), Error> {
        let range = page_range(addr, len)?;
        if range.end > self.config().range.end {
            return Err(Error::Invalid);
        }
        let mut count = 0;
        let mut at = range.start;
        while at < range.end && count < found.len() {
            let _steady = self.mm().share(cpu, AddrRange::new(at, range.end));
            let next = {
                let pin = cpu.pin();
                self.mm().next_vma(&pin, at, range.end).map(|(_, seen)| seen)
            };
            let Some(seen) = next else { break };
            let part = seen.range.intersection(AddrRange::new(at, range.end));
            at = part.end;
            if !seen.flags.contains(VmFlags::UFFD_WP) {
                continue;
            }
            if let Some(end) = self.written_in(cpu, part, found, &mut count) {
                at = end;
                break;
            }
        }
        if count < found.len() {
            at = range.end;
        }
        if protect {
            for &written in &found[..count] {
                match protect::write_protect(self.mm(), cpu, written, true, true) {
                    // What is not registered any more is nobody's to ask for.
                    Ok(()) | Err(Error::NotFound) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok((count, at))
    }

    /// Returns where `found` was full.
    fn written_in(
        &self,
        cpu: &Cpu<H>,
        part: AddrRange,
        found: &mut [AddrRange],
        count: &mut usize,
    ) -> Option<u64> {
        let mut full = None;
        let mut add = |addr: u64, bytes: u64| {
            if let Some(last) = found[..*count].last_mut()
                && last.end == addr
            {
                last.end = addr + bytes;
                return ControlFlow::Continue(());
            }
            let Some(place) = found.get_mut(*count) else { return ControlFlow::Break(()) };
            *place = AddrRange::new(addr, addr + bytes);
            *count += 1;
            ControlFlow::Continue(())
        };
        self.mm().for_each_part(cpu, part, |ram, part| {
            if full.is_some() {
                return;
            }
            let _ = self.mm().page_table.for_each_run(ram, part, |run| {
                let mut visit = |index: usize, slot: &Slot, bytes: u64| {
                    let raw = slot.wait_not_busy(ram);
                    let pte = match run.level {
                        Level::PAGE => Pte::decode::<H::Format>(raw),
                        _ => Pte::decode_block::<H::Format>(raw),
                    };
                    let is_written = match pte {
                        Pte::Page { flags, .. } | Pte::NoAccess { flags, .. } | Pte::Block { flags, .. } => {
                            !flags.contains(PteFlags::USER_WP)
                        }
                        Pte::Swap(payload) => payload & crate::page_table::PAYLOAD_USER_WP == 0,
                        _ => false,
                    };
                    if is_written && add(run.address_of(index), bytes).is_break() {
                        full = Some(run.address_of(index));
                        return ControlFlow::Break(());
                    }
                    ControlFlow::Continue(())
                };
                if run.level == Level::PAGE {
                    return Slot::for_each_used(run.slots, |index, slot| visit(index, slot, PAGE_SIZE));
                }
                run.slots.iter().enumerate().try_for_each(|(index, slot)| {
                    let block = crate::mm::BLOCK_SIZE;
                    visit(index, slot, block)
                })
            });
        });
        full
    }
}
