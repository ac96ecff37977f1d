//! Changes of attributes, as Linux makes them: one VMA after the other.
//!
//! Each VMA is divided at the ends of the range, changed, and merged with what lies below it and then above it as they are at that moment,
//! before the next one is looked at. Which mappings a listing shows depends on that order, because anon_vmas may allow a VMA to be
//! merged with one of its neighbours only. **A VMA that has nothing to change is not merged with anything**: after a fork two that are alike may lie
//! side by side until one of them changes.

use super::{Change, part_off};
use crate::addr::AddrRange;
use crate::host::Host;
use crate::stats::Counter;
use crate::vma::{VmFlags, Vma};

/// What became of the first VMA of a range.
pub(in crate::space) struct Altered {
    /// The part of it that lies in the range.
    pub(in crate::space) part: AddrRange,
    /// Its attributes before.
    pub(in crate::space) old: VmFlags,
}

impl<H: Host> Change<'_, H> {
    /// Changes the attributes of the first VMA in `rest`, as far as it lies in it, to `new` of what they are, and merges it. `None` when nothing is
    /// mapped there. [`plan`](Self::plan) has reserved a record for each end of the change's range.
    pub(in crate::space) fn alter_next(
        &mut self,
        rest: AddrRange,
        new: impl Fn(&Vma<H>, VmFlags) -> VmFlags,
    ) -> Option<Altered> {
        let (altered, changes) = {
            let pin = self.cpu.pin();
            let (vma, seen) = self.mm.next_vma(&pin, rest.start, rest.end)?;
            let altered = Altered { part: seen.range.intersection(rest), old: seen.flags };
            (altered, new(vma, seen.flags) != seen.flags)
        };
        if changes {
            self.set_flags_of(altered.part, new);
            self.merge_at(altered.part.start);
            self.merge_at(altered.part.end);
        }
        Some(altered)
    }

    /// Changes the attributes of all that is mapped in `range` to `new` of what they are. [`plan`](Self::plan) has reserved a record for each end of
    /// the range.
    pub(in crate::space) fn alter(&mut self, range: AddrRange, new: impl Fn(&Vma<H>, VmFlags) -> VmFlags) {
        let mut at = range.start;
        while at < range.end
            && let Some(altered) = self.alter_next(AddrRange::new(at, range.end), &new)
        {
            at = altered.part.end;
        }
    }

    /// Divides the VMA that reaches over `at`, if there is one, and leaves it so. [`plan`](Self::plan) has reserved a record. The address
    /// before or the one at the boundary is the change's.
    pub(in crate::space) fn divide_at(&mut self, at: u64) {
        loop {
            let pin = self.cpu.pin();
            let Some((vma, seen)) = self.mm.vma_at(&pin, at) else { return };
            if seen.range.start == at {
                return;
            }
            let object = vma.object().cloned();
            drop(pin);
            let mappings = self.lock_mappings(object.as_ref());
            let pin = self.cpu.pin();
            let supplied = self.supplies.count();
            let (mm, cpu) = (self.mm, self.cpu);
            let (records, nodes) = self.supplies();
            let done = mm.index.edit(nodes, &pin, at, 1, |vma, edit| {
                let all = edit.range();
                if all.start == at {
                    return true;
                }
                if supplied == 0 {
                    return false;
                }
                mm.note(cpu, &pin, vma);
                let seen = vma.snapshot();
                vma.seq.write_begin();
                let upper = AddrRange::new(at, all.end);
                if let Some(upper) = part_off(records, mm, vma, seen, upper, seen.flags, mappings.as_deref())
                {
                    vma.set_end(at);
                    edit.divide(at, upper);
                }
                vma.seq.write_end();
                true
            });
            if done == Some(true) {
                mm.machine.stats().count(&pin, Counter::VmaSplit);
                return;
            }
            drop((pin, mappings));
            self.supply();
        }
    }
}
