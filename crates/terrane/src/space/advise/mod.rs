//! Advice (`madvise`), and populating.
//!
//! | module | advice |
//! |---|---|
//! | `attributes` | that changes the attributes of mappings |
//! | `guard` | `GUARD_INSTALL`, `GUARD_REMOVE` |
//! | `marks` | `COLD`, `FREE` |
//! | `process` | on the ranges of another space |
//! | [`collapse`](super::collapse) | `COLLAPSE` |
//! | here | the rest |

mod attributes;
mod guard;
mod marks;
mod process;

use super::seal::refuses_advice;
use super::splits::Splits;
use super::sweep::Sweep;
use super::{AddressSpace, page_range};
use crate::addr::{AddrRange, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::fault::{self, Marks, user::events};
use crate::host::Host;
use crate::machine::Cpu;
use crate::object::Object;
use crate::reclaim;
use crate::vma::{Access, Advice, VmFlags, Vma};
use attributes::Attributes;
use core::ops::Range;
use marks::take_marks;

impl<H: Host> AddressSpace<H> {
    /// `madvise` with Linux's number for the advice.
    ///
    /// # Errors
    /// As [`advise`](Self::advise), and [`Error::Invalid`] for a number that stands for no advice
    /// ([`Advice::from_linux`]), whatever the range.
    pub fn madvise(&self, cpu: &Cpu<H>, addr: u64, len: u64, number: i32) -> Result<(), Error> {
        self.advise(cpu, addr, len, Advice::from_linux(number).ok_or(Error::Invalid)?)
    }

    /// Follows `advice` for `len` bytes (rounded up to pages) at `addr`. A length of 0 does nothing. Takes one mapping after the
    /// other, and goes on behind holes (but populating), as Linux does; ends at the first mapping that refuses.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned address, a range that wraps, or a mapping that the advice does not apply to (before
    /// that mapping, it has been followed); [`Error::NotPermitted`] for advice that discards, and sealed memory that may not be stored to; [`Error::NoMemory`] when part of the range is not mapped (elsewhere it has been
    /// followed), or memory is short; [`Error::Again`] when a mapping cannot be divided. Populating: [`Error::Invalid`] where the
    /// mapping does not allow the access, [`Error::BadAddress`] for a page that would raise a signal. Removing:
    /// [`Error::Access`] for a mapping through which the object cannot be written, [`Error::Io`]. Collapsing:
    /// [`Error::Invalid`] for memory that is not for huge pages or was never stored to, [`Error::Again`] for pages in a state that
    /// passes; what can be collapsed is.
    pub fn advise(&self, cpu: &Cpu<H>, addr: u64, len: u64, advice: Advice) -> Result<(), Error> {
        let range = page_range(addr, len)?;
        if range.is_empty() {
            return Ok(());
        }
        if let Some(attributes) = Attributes::of(advice) {
            return self.set_attributes(cpu, range, attributes);
        }
        match advice {
            Advice::Collapse => self.collapse(cpu, range),
            Advice::WillNeed => self.read_ahead(cpu, range),
            Advice::Remove => self.punch(cpu, range),
            Advice::PopulateRead => self.populate(cpu, range, Access::Read),
            Advice::PopulateWrite => self.populate(cpu, range, Access::Write),
            _ => self.advise_entries(cpu, range, advice),
        }
    }

    /// Advice about what the page table holds. Holds its range (shared), so that what is mapped there stays; faults that run
    /// at the same time come before or after, page by page.
    fn advise_entries(&self, cpu: &Cpu<H>, range: AddrRange, advice: Advice) -> Result<(), Error> {
        let mm = self.mm();
        if matches!(advice, Advice::DontNeed | Advice::DontNeedLocked | Advice::Free) {
            events::removing(mm, cpu, range);
        }
        let mut result = Ok(());
        {
            let _steady = mm.share(cpu, range);
            let mut splits = Splits::new(mm, cpu, range);
            splits.reserve()?;
            splits.cut();
            let mut sweep = Sweep::new(mm, cpu);
            let mut marked = false;
            let mut next = range.start;
            while next < range.end {
                let found = {
                    let pin = cpu.pin();
                    let vma = mm.next_vma(&pin, next, range.end);
                    vma.map(|(vma, seen)| (seen, vma.object().is_some()))
                };
                let Some((seen, of_object)) = found else {
                    result = Err(Error::NoMemory);
                    break;
                };
                let part = seen.range.intersection(AddrRange::new(next, range.end));
                if part.start > next {
                    result = Err(Error::NoMemory);
                }
                let stores = of_object && seen.flags.contains(STORES_REACH);
                let done = check_entries(advice, seen.flags, of_object).and_then(|()| {
                    match advice {
                        Advice::Free => marked |= take_marks(mm, cpu, part, Marks::AndDirty),
                        Advice::Cold | Advice::PageOut => {
                            marked |= take_marks(mm, cpu, part, Marks::Accessed);
                        }
                        Advice::GuardInstall => {
                            guard::install(mm, cpu, part, !of_object, stores, &mut sweep)?
                        }
                        Advice::GuardRemove => guard::remove(mm, cpu, part),
                        _ if of_object && seen.flags.contains(VmFlags::UFFD_WP) => {
                            sweep.forget_but_marks(part, stores);
                        }
                        _ => sweep.forget(part, stores),
                    }
                    Ok(())
                });
                if done.is_err() {
                    result = done;
                    break;
                }
                next = part.end;
            }
            if marked {
                let pin = cpu.pin();
                mm.shoot_down(&mm.ram(&pin), range);
            } else if !matches!(advice, Advice::GuardRemove) {
                sweep.finish(range, false);
            }
        }
        if advice == Advice::PageOut {
            // What is mapped there by now: nothing is lost by paging out too much.
            reclaim::page_out(mm, cpu, range);
        }
        cpu.tidy();
        result
    }

    /// What is mapped in `range`, with the pages of the object: one VMA after the other, so that nothing is held while
    /// `act` blocks. Returns whether the range had a hole.
    fn for_each_vma(
        &self,
        cpu: &Cpu<H>,
        range: AddrRange,
        mut act: impl FnMut(Option<&Object<H>>, VmFlags, Range<u64>) -> Result<(), Error>,
    ) -> Result<bool, Error> {
        let mut next = range.start;
        let mut hole = false;
        while next < range.end {
            let found = {
                let _steady = self.mm().share(cpu, AddrRange::new(next, range.end));
                let pin = cpu.pin();
                let vma = self.mm().next_vma(&pin, next, range.end);
                vma.map(|(vma, seen)| (seen, vma.object().cloned()))
            };
            let Some((seen, object)) = found else {
                return Ok(true);
            };
            hole |= seen.range.start > next;
            let part = seen.range.intersection(AddrRange::new(next, range.end));
            let first = seen.index_of(part.start);
            act(object.as_deref(), seen.flags, first..first.saturating_add(part.pages()))?;
            next = seen.range.end;
        }
        Ok(hole)
    }

    /// `MADV_REMOVE`: one mapping after the other.
    fn punch(&self, cpu: &Cpu<H>, range: AddrRange) -> Result<(), Error> {
        events::removing(self.mm(), cpu, range);
        let hole = self.for_each_vma(cpu, range, |object, flags, pages| {
            if refuses_advice(flags, object.is_some(), Advice::Remove) {
                return Err(Error::NotPermitted);
            }
            let object = object.filter(|_| !flags.contains(VmFlags::LOCKED)).ok_or(Error::Invalid)?;
            if !flags.contains(VmFlags::SHARED.union(VmFlags::MAYWRITE)) {
                return Err(Error::Access);
            }
            if object.is_device() {
                return Err(Error::NoDevice);
            }
            object.punch(cpu, pages)
        })?;
        cpu.tidy();
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }

    /// `MADV_WILLNEED`: reads file pages into the cache. Read now, not in the background: when it returns they are there,
    /// as far as memory allows.
    fn read_ahead(&self, cpu: &Cpu<H>, range: AddrRange) -> Result<(), Error> {
        let hole = self.for_each_vma(cpu, range, |object, _, pages| {
            let Some(object) = object else { return Ok(()) };
            for index in pages.start..pages.end.min(object.pages()) {
                if !object.is_file() || object.read_in(cpu, index, false).is_err() {
                    break;
                }
            }
            Ok(())
        })?;
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }

    fn populate(&self, cpu: &Cpu<H>, range: AddrRange, access: Access) -> Result<(), Error> {
        let needs = if access == Access::Write { VmFlags::WRITE } else { VmFlags::READ };
        let mut at = range.start;
        while at < range.end {
            // A first look at the mapping: as in Linux, loads need the permission here, which they need nowhere else.
            let seen = {
                let pin = cpu.pin();
                self.mm().index.find(&pin, at).and_then(Vma::read).filter(|seen| seen.range.contains(at))
            };
            if seen.is_some_and(|seen| !seen.flags.contains(needs) || seen.flags.intersects(VmFlags::SPECIAL))
            {
                return Err(Error::Invalid);
            }
            let end = seen.map_or(at + PAGE_SIZE, |seen| seen.range.end).min(range.end);
            fault::populate(self.mm(), cpu, AddrRange::new(at, end), access).map_err(
                |(_, error)| match error {
                    // As Linux: the mapping is there, but not for this.
                    FaultError::NotAllowed => Error::Invalid,
                    error => error.as_populate_error(),
                },
            )?;
            at = end;
        }
        Ok(())
    }
}

/// Whether a mapping with these flags is one for the advice.
fn check_entries(advice: Advice, flags: VmFlags, of_object: bool) -> Result<(), Error> {
    if refuses_advice(flags, of_object, advice) {
        return Err(Error::NotPermitted);
    }
    let refused = match advice {
        Advice::DontNeedLocked => VmFlags::PFNMAP,
        Advice::GuardInstall => VmFlags::SPECIAL.union(VmFlags::LOCKED),
        Advice::GuardRemove => VmFlags::SPECIAL,
        _ => VmFlags::PFNMAP.union(VmFlags::LOCKED),
    };
    let memory_only = advice == Advice::Free;
    if flags.intersects(refused) || memory_only && of_object { Err(Error::Invalid) } else { Ok(()) }
}

const STORES_REACH: VmFlags = VmFlags::SHARED.union(VmFlags::WRITE);
