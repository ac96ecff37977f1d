//! Advice, populating, and writing back.

use super::change::Change;
use super::splits::Splits;
use super::sweep::Sweep;
use super::{AddressSpace, page_range};
use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::error::{Error, FaultError};
use crate::fault;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::HugePages;
use crate::object::Object;
use crate::vma::{Access, Advice, VmFlags, Vma};
use core::ops::Range;

impl<H: Host> AddressSpace<H> {
    /// Follows `advice` for `len` bytes (rounded up to pages) at `addr`. A length of 0 does nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned address, a range that wraps, or a mapping that the advice does not apply to;
    /// [`Error::NoMemory`] when part of the range is not mapped, or memory is short. Populating: [`Error::Invalid`] where the
    /// mapping does not allow the access, [`Error::BadAddress`] for a page that would raise a signal. Collapsing:
    /// [`Error::Invalid`] for memory that is not for huge pages or was never stored to, [`Error::Again`] for pages in a state that
    /// passes; what can be collapsed is. Where Linux follows the
    /// advice in the mapped parts of a range with holes and then reports `ENOMEM`, so does this for `DONTNEED`,
    /// `WILLNEED` and populating (up to the hole); advice that changes attributes changes nothing then.
    pub fn advise(&self, cpu: &Cpu<H>, addr: u64, len: u64, advice: Advice) -> Result<(), Error> {
        let range = page_range(addr, len)?;
        if range.is_empty() {
            return Ok(());
        }
        match advice {
            Advice::Normal => self.set_advice(cpu, range, VmFlags::empty(), ACCESS_PATTERN, |_| true),
            Advice::Random => self.set_advice(cpu, range, VmFlags::RAND_READ, ACCESS_PATTERN, |_| true),
            Advice::Sequential => self.set_advice(cpu, range, VmFlags::SEQ_READ, ACCESS_PATTERN, |_| true),
            Advice::DontFork => self.set_advice(cpu, range, VmFlags::DONTCOPY, VmFlags::empty(), |_| true),
            Advice::DoFork => self.set_advice(cpu, range, VmFlags::empty(), VmFlags::DONTCOPY, |_| true),
            Advice::WipeOnFork => {
                let private_memory = |vma: &Vma<H>| vma.object().is_none();
                self.set_advice(cpu, range, VmFlags::WIPEONFORK, VmFlags::empty(), private_memory)
            }
            Advice::KeepOnFork => {
                self.set_advice(cpu, range, VmFlags::empty(), VmFlags::WIPEONFORK, |_| true)
            }
            Advice::DontDump => self.set_advice(cpu, range, VmFlags::DONTDUMP, VmFlags::empty(), |_| true),
            Advice::DoDump => self.set_advice(cpu, range, VmFlags::empty(), VmFlags::DONTDUMP, |_| true),
            Advice::HugePage => {
                if self.config().huge_pages != HugePages::Never {
                    self.mm().expect_blocks();
                }
                self.set_advice(cpu, range, VmFlags::HUGEPAGE, VmFlags::NOHUGEPAGE, |_| true)
            }
            Advice::NoHugePage => {
                self.set_advice(cpu, range, VmFlags::NOHUGEPAGE, VmFlags::HUGEPAGE, |_| true)
            }
            Advice::Collapse => self.collapse(cpu, range),
            Advice::DontNeed => self.forget(cpu, range),
            Advice::WillNeed => self.read_ahead(cpu, range),
            Advice::PopulateRead => self.populate(cpu, range, Access::Read),
            Advice::PopulateWrite => self.populate(cpu, range, Access::Write),
        }
    }

    fn set_advice(
        &self,
        cpu: &Cpu<H>,
        range: AddrRange,
        set: VmFlags,
        clear: VmFlags,
        applies: impl Fn(&Vma<H>) -> bool,
    ) -> Result<(), Error> {
        let new = |flags: VmFlags| flags.difference(clear).union(set);
        let mut change = Change::begin(self.mm(), cpu, range);
        if self.has_limits() {
            change.hold_limits();
        }
        let mut changes = false;
        let splits = {
            let pin = cpu.pin();
            change.check_covered(&pin, range, |vma, seen| {
                changes |= new(seen.flags) != seen.flags;
                if applies(vma) { Ok(()) } else { Err(Error::Invalid) }
            })?;
            change.splits(&pin, range)
        };
        if changes {
            if self.config().map_limit.is_some_and(|limit| self.mm().index.len() + splits > limit) {
                return Err(Error::NoMemory);
            }
            change.plan_splits()?;
            change.plan(&cpu.pin(), splits)?;
            change.set_flags(range, new);
            change.merge_around(range);
            change.cut_blocks();
        }
        drop(change);
        cpu.tidy();
        Ok(())
    }

    /// `MADV_DONTNEED`. Holds its range (shared), so that what is mapped there stays; faults that run at the same time come before
    /// or after, page by page.
    fn forget(&self, cpu: &Cpu<H>, range: AddrRange) -> Result<(), Error> {
        let mut next = range.start;
        let mut hole = false;
        {
            let _steady = self.mm().share(cpu, range);
            let mut splits = Splits::new(self.mm(), cpu, range);
            splits.reserve()?;
            splits.cut();
            let mut sweep = Sweep::new(self.mm(), cpu);
            while next < range.end {
                let found = {
                    let pin = cpu.pin();
                    let vma = self.mm().next_vma(&pin, next, range.end);
                    vma.map(|(vma, seen)| {
                        (seen.range, vma.object().is_some() && seen.flags.contains(STORES_REACH))
                    })
                };
                let Some((vma, stores)) = found else {
                    hole = true;
                    break;
                };
                hole |= vma.start > next;
                sweep.zap(vma.intersection(range), stores);
                next = vma.end;
            }
            sweep.finish(range, false);
        }
        cpu.tidy();
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }

    /// The objects mapped in `range`, with the pages of each: one VMA after the other, so that nothing is held while
    /// `act` blocks. Returns whether the range had a hole.
    fn for_each_object(
        &self,
        cpu: &Cpu<H>,
        range: AddrRange,
        mut act: impl FnMut(&Object<H>, VmFlags, Range<u64>) -> Result<(), Error>,
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
            let part = seen.range.intersection(range);
            if let Some(object) = object {
                let first = seen.index_of(part.start);
                act(&object, seen.flags, first..first + (part.len() >> PAGE_SHIFT))?;
            }
            next = seen.range.end;
        }
        Ok(hole)
    }

    /// `MADV_WILLNEED`: reads file pages into the cache. Read now, not in the background: when it returns they are there,
    /// as far as memory allows.
    fn read_ahead(&self, cpu: &Cpu<H>, range: AddrRange) -> Result<(), Error> {
        let hole = self.for_each_object(cpu, range, |object, _, pages| {
            for index in pages.start..pages.end.min(object.pages()) {
                if !object.is_file() || object.read_in(cpu, index, false).is_err() {
                    break;
                }
            }
            Ok(())
        })?;
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }

    /// Writes the dirty pages of the file mappings in `len` bytes at `addr` to their files (`MS_SYNC`).
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned address or a range that wraps, [`Error::NoMemory`] for a hole (what is mapped is
    /// written all the same), [`Error::Io`] when a file did not take a page; that page stays dirty.
    pub fn sync(&self, cpu: &Cpu<H>, addr: u64, len: u64) -> Result<(), Error> {
        let range = page_range(addr, len)?;
        let mut result = Ok(());
        let hole = self.for_each_object(cpu, range, |object, flags, pages| {
            if !flags.is_private()
                && let Err(error) = object.write_back_pages(cpu, pages)
            {
                result = Err(error);
            }
            Ok(())
        })?;
        result?;
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }

    fn populate(&self, cpu: &Cpu<H>, range: AddrRange, access: Access) -> Result<(), Error> {
        fault::populate(self.mm(), cpu, range, access).map_err(|(_, error)| match error {
            // As Linux: the mapping is there, but not for this.
            FaultError::NotAllowed => Error::Invalid,
            error => error.as_populate_error(),
        })
    }
}

const STORES_REACH: VmFlags = VmFlags::SHARED.union(VmFlags::WRITE);

const ACCESS_PATTERN: VmFlags = VmFlags::RAND_READ.union(VmFlags::SEQ_READ);
