//! Advice that changes the attributes of mappings: which flags, and which mappings refuse it.

use crate::addr::AddrRange;
use crate::error::Error;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::HugePages;
use crate::space::AddressSpace;
use crate::space::change::Change;
use crate::space::seal::refuses_advice;
use crate::vma::{Advice, VmFlags};

const ACCESS_PATTERN: VmFlags = VmFlags::RAND_READ.union(VmFlags::SEQ_READ);

/// What a piece of advice makes of the attributes.
#[derive(Clone, Copy)]
pub(super) struct Attributes {
    set: VmFlags,
    clear: VmFlags,
    /// Mappings with one of these refuse it.
    refused_by: VmFlags,
    /// For private anonymous memory only.
    private_memory: bool,
    advice: Advice,
}

impl Attributes {
    /// `None` for advice that changes none.
    pub(super) fn of(advice: Advice) -> Option<Self> {
        let none = VmFlags::empty();
        let (set, clear, refused_by) = match advice {
            Advice::Normal => (none, ACCESS_PATTERN, none),
            Advice::Random => (VmFlags::RAND_READ, VmFlags::SEQ_READ, none),
            Advice::Sequential => (VmFlags::SEQ_READ, VmFlags::RAND_READ, none),
            Advice::DontFork => (VmFlags::DONTCOPY, none, none),
            Advice::DoFork => (none, VmFlags::DONTCOPY, VmFlags::IO),
            Advice::WipeOnFork => (VmFlags::WIPEONFORK, none, VmFlags::SHARED),
            Advice::KeepOnFork => (none, VmFlags::WIPEONFORK, VmFlags::DROPPABLE),
            Advice::DontDump => (VmFlags::DONTDUMP, none, none),
            Advice::DoDump => (none, VmFlags::DONTDUMP, VmFlags::SPECIAL.union(VmFlags::DROPPABLE)),
            Advice::HugePage => (VmFlags::HUGEPAGE, VmFlags::NOHUGEPAGE, VmFlags::SPECIAL),
            Advice::NoHugePage => (VmFlags::NOHUGEPAGE, VmFlags::HUGEPAGE, VmFlags::SPECIAL),
            _ => return None,
        };
        Some(Self { set, clear, refused_by, private_memory: advice == Advice::WipeOnFork, advice })
    }

    fn apply(self, flags: VmFlags) -> VmFlags {
        flags.difference(self.clear).union(self.set)
    }
}

impl<H: Host> AddressSpace<H> {
    /// Changes the attributes of one VMA after the other, and goes on behind holes; stops at the first that refuses.
    ///
    /// # Errors
    /// [`Error::Invalid`] from a VMA that refuses, [`Error::NotPermitted`] from a sealed one; [`Error::NoMemory`] for a hole; [`Error::Again`] when a VMA cannot be
    /// divided for want of memory or within the limit of mappings, as Linux says it.
    pub(super) fn set_attributes(
        &self,
        cpu: &Cpu<H>,
        range: AddrRange,
        attributes: Attributes,
    ) -> Result<(), Error> {
        if attributes.set.contains(VmFlags::HUGEPAGE) && self.config().huge_pages != HugePages::Never {
            self.mm().expect_blocks();
        }
        let mut change = Change::begin(self.mm(), cpu, range);
        if self.has_limits() {
            change.hold_limits();
        }
        let mut changed = false;
        let result = self.set_parts(&mut change, range, attributes, &mut changed);
        if changed {
            change.cut_blocks();
        }
        drop(change);
        cpu.tidy();
        result
    }

    fn set_parts(
        &self,
        change: &mut Change<'_, H>,
        range: AddrRange,
        attributes: Attributes,
        changed: &mut bool,
    ) -> Result<(), Error> {
        let mut at = range.start;
        let mut hole = false;
        while at < range.end {
            let (part, splits, changes) = {
                let pin = change.cpu.pin();
                let Some((vma, seen)) = change.mm.next_vma(&pin, at, range.end) else {
                    hole = true;
                    break;
                };
                if refuses_advice(seen.flags, vma.object().is_some(), attributes.advice) {
                    return Err(Error::NotPermitted);
                }
                let refuses = seen.flags.intersects(attributes.refused_by)
                    || attributes.private_memory && vma.object().is_some();
                if refuses {
                    return Err(Error::Invalid);
                }
                let part = seen.range.intersection(AddrRange::new(at, range.end));
                hole |= part.start > at;
                (part, change.splits(&pin, part), attributes.apply(seen.flags) != seen.flags)
            };
            if changes {
                let limit = self.config().map_limit;
                if limit.is_some_and(|limit| self.mm().index.len() + splits > limit) {
                    return Err(Error::Again);
                }
                // Once for all: it concerns the ends of the range.
                if !*changed {
                    change.plan_splits().map_err(|_| Error::Again)?;
                }
                change.plan(&change.cpu.pin(), splits).map_err(|_| Error::Again)?;
                *changed = true;
                change.alter(part, |_, flags| attributes.apply(flags));
            }
            at = part.end;
        }
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }
}
