//! Calls that are over in one step: private memory that is mapped anywhere, or where nothing is; that is unmapped, or whose
//! protection is changed, without ever having been touched. They hold no range.
//!
//! # Why it is right
//!
//! All that such a call changes is in one leaf of the index, whose lock it holds, and when it gives the lock back nothing is left to be
//! done for the addresses: no page table to sweep, no processor to ask, no object's list to leave. So it is alone with the
//! records; what it must know is that nobody relies on the *addresses*, as calls do from their first look to their last
//! shoot-down. It looks, behind a full fence and with the leaf locked, whether a range is held anywhere near
//! ([`RangeLock::is_quiet`](crate::range_lock::RangeLock::is_quiet)), and goes the long way if so. Whoever takes hold of a range
//! later finds the leaf locked or the counter of the record odd, or else the step done.
//!
//! *Faults.* The counter is odd before the page table is looked at, with a full fence between: a fault that takes an entry after that look
//! fails to validate, and one that took it before has made its table, which is seen. As soon as there is a table the call
//! goes the long way, and nothing has happened. A fault on the locked path holds its page, so it is seen, or looks at the
//! counter after it has been made odd.
//!
//! *Fork* keeps the counter of a record odd while it copies it, without the lock of the leaf, and holds the whole space. It makes it odd under that
//! lock; a step that finds it so gives up before it has touched it, and one that was first ends first.
//!
//! *The anon pointer* is frozen by the compare-and-swap that serves as the fence, so no fault leaves an anon_vma behind on a record
//! that goes.
//!
//! *Listings.* A call under way that does not know of a listing is waited for, because it is pinned
//! ([`Recording::begin_reading`](crate::history::Recording::begin_reading)). It looks for one with the leaf locked, so it
//! comes after no call that did know: that one's changes to the leaf it would have met, and with them the word. If there is one, a call of
//! the same CPU that held the range, or more, may have written the image: then nothing is left to be told about these addresses, because the first
//! image of an address is all that a listing takes of it, and what a step changes beyond its range it notes as others do. Else the call goes the long
//! way, and writes the image; the next one at the same place is a step again.
//!
//! # Who may break it
//!
//! Whoever looks at a leaf or a record on the strength of a range before having registered for it; a step that has something to do
//! after it.

use super::AddressSpace;
use super::change::Change;
use super::map::MapRequest;
use super::protect::Within;
use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::host::Host;
use crate::index::Alone;
use crate::machine::Cpu;
use crate::mm::{Exclusive, Locking, Mm};
use crate::stats::Counter;
use crate::sync::Pin;
use crate::vma::{MapFlags, Prot, VmFlags, Vma, merge};

/// What is left to the long way.
const NOT_SIMPLE: MapFlags = MapFlags::SHARED.union(MapFlags::GROWSDOWN);

impl<H: Host> Mm<H> {
    /// True when there is a page table for part of `range`.
    #[inline]
    pub(super) fn has_tables(&self, pin: &Pin<'_>, range: AddrRange) -> bool {
        !self.page_table.is_untouched(&self.ram(pin), range)
    }

    /// Whether a step about `range` may go on without holding it. With the leaf locked, behind a full fence.
    #[inline]
    pub(super) fn may_step(&self, cpu: &Cpu<H>, range: AddrRange) -> bool {
        self.is_told(cpu, range) && self.ranges.is_quiet(range)
    }

    /// True when there is no listing under way, or this CPU has written an image for it that covers `range`.
    #[inline]
    fn is_told(&self, cpu: &Cpu<H>, range: AddrRange) -> bool {
        let number = self.history.active();
        mutant!("step_untold", number == 0 || cpu.images().contains(number, range), true)
    }
}

impl<H: Host> AddressSpace<H> {
    /// The short way of `map`, which as a rule is all of it: private memory of its own, at any address or where nothing is. One pin,
    /// one look for a place, one at the leaf for all the rest.
    ///
    /// # Errors
    /// The place that it found, if it got so far: nothing is done, and it is not as simple as that.
    #[inline]
    pub(super) fn map_at_once(
        &self,
        cpu: &Cpu<H>,
        request: &MapRequest<H>,
        len: u64,
        flags: VmFlags,
    ) -> Result<u64, Option<u64>> {
        let (mm, config) = (self.mm(), self.config());
        let is_simple = request.object.is_none()
            && !request.flags.intersects(NOT_SIMPLE)
            && !flags.contains(VmFlags::LOCKED)
            && self.check_commit(flags, len >> PAGE_SHIFT).is_ok()
            && config.locking == Locking::Speculative
            && len <= config.range.len()
            && !self.has_limits();
        if !is_simple {
            return Err(None);
        }
        let pin = cpu.pin();
        let addr = self.candidate_at_once(cpu, &pin, request, len).ok_or(None)?;
        let range = AddrRange::new(addr, addr + len);
        if self.insert_at_once(cpu, &pin, range, flags) {
            mm.ram(&pin).event(Counter::Map, addr);
            drop(pin);
            cpu.tidy();
            return Ok(addr);
        }
        if self.insert_held_at_once(cpu, pin, range, flags) { Ok(addr) } else { Err(Some(addr)) }
    }

    /// Maps `range` without holding it.
    #[inline]
    fn insert_at_once(&self, cpu: &Cpu<H>, pin: &Pin<'_>, range: AddrRange, flags: VmFlags) -> bool {
        let mm = self.mm();
        // As a rule it is not in vain.
        if !mm.may_step(cpu, range) {
            return false;
        }
        let Ok(record) = mm.machine.records().allocate(pin) else { return false };
        let pgoff = range.start >> PAGE_SHIFT;
        let vma = Vma::create(record, &mm.machine, range, flags, pgoff, None, mm.cookie());
        let candidate = merge::Candidate { flags, object: None, pgoff, pages: range.pages() };
        let may = |below: Option<&Vma<H>>, above: Option<&Vma<H>>| {
            // Whoever extends one of the two has to do with its anon_vma, and has the long way to do it.
            !below.is_some_and(|low| candidate.extends_up(low))
                && !above.is_some_and(|high| candidate.extends_down(high))
                && mm.may_step(cpu, range)
        };
        if mm.index.insert_at_once(pin, range, vma, may) != Alone::Inserted {
            // SAFETY: it was nowhere, and has nothing that needs dropping.
            unsafe { mm.machine.records().free(pin, record) };
            return false;
        }
        mm.account(cpu.id(), flags, range.pages() as i64);
        mm.mapped.add(cpu.id(), range.pages() as i64);
        true
    }

    /// The same, holding the range, if that takes no waiting: beside a call elsewhere in its zone.
    #[cold]
    fn insert_held_at_once(&self, cpu: &Cpu<H>, pin: Pin<'_>, range: AddrRange, flags: VmFlags) -> bool {
        let mm = self.mm();
        let Some(mut change) = Change::begin_at_once(mm, cpu, range) else { return false };
        let done = change.plan(&pin, 1).is_ok()
            && change.insert_alone(&pin, range, flags, range.start >> PAGE_SHIFT);
        if done {
            mm.ram(&pin).event(Counter::Map, range.start);
        }
        // First the pin: a change pins when it ends.
        drop(pin);
        drop(change);
        cpu.tidy();
        done
    }

    /// The short way of `unmap`: exactly one mapping, of private memory that was never touched. False, and nothing done, when it is
    /// not as simple as that.
    #[inline]
    pub(super) fn unmap_at_once(&self, cpu: &Cpu<H>, range: AddrRange) -> bool {
        let (mm, config) = (self.mm(), self.config());
        let is_simple = config.locking == Locking::Speculative
            && !config.linear_search
            && !mm.may_have_blocks()
            && !mm.may_be_sealed()
            && mm.relocations.is_empty()
            && !self.has_limits();
        if !is_simple {
            return false;
        }
        let pin = cpu.pin();
        if mm.has_tables(&pin, range) || !mm.may_step(cpu, range) {
            return false;
        }
        let mut anon = None;
        let removed = mm.index.remove_at_once(&pin, range, |vma| {
            if vma.object().is_some() || vma.seq.is_changing() {
                return false;
            }
            vma.seq.write_begin_before(|| vma.freeze_anon());
            if mm.may_step(cpu, range) && !mm.has_tables(&pin, range) && !mm.may_be_sealed() {
                vma.seq.kill_begun();
                anon = vma.close_frozen_anon();
                return true;
            }
            vma.thaw_anon(None);
            vma.seq.write_end();
            false
        });
        let Some(vma) = removed else { return false };
        mm.count_unmapped(cpu.id(), range.pages());
        mm.account(cpu.id(), vma.flags(), -(range.pages() as i64));
        // SAFETY: out of the index just now, and in no list.
        unsafe { Vma::retire(vma.into(), &pin) };
        mm.ram(&pin).event(Counter::Unmap, range.start);
        cpu.count(Counter::TlbFlushSkipped, 1);
        drop(pin);
        if let Some(anon) = anon {
            // SAFETY: the count was the VMA's, which gave it up; it keeps the node until here.
            unsafe { anon.as_ref().end_use(&mm.machine, &cpu.participant()) };
        }
        cpu.tidy();
        true
    }

    /// The short way of `protect`: a range within one VMA of memory, where nothing was ever touched, and which is merged with nothing in
    /// another leaf. False, and nothing done, when it is not as simple as that.
    #[inline]
    pub(super) fn protect_at_once(&self, cpu: &Cpu<H>, range: AddrRange, prot: Prot) -> bool {
        let mm = self.mm();
        if mm.locking != Locking::Speculative {
            return false;
        }
        let pin = cpu.pin();
        if mm.has_tables(&pin, range) || !mm.may_step(cpu, range) {
            return false;
        }
        let found = mm.index.find(&pin, range.start).and_then(|vma| Some((vma, vma.read()?)));
        let Some((vma, seen)) = found.filter(|(_, seen)| seen.flags.prot() != prot) else { return false };
        let Some(Within { flags, splits }) = self.look_within(vma, &seen, range, prot) else { return false };
        let mut change = Change::holding(mm, cpu, Exclusive::Covered, range);
        let rest = match splits > 0 && change.plan(&pin, splits).is_err() {
            true => None,
            false => change.set_flags_at_once(&pin, range, splits, seen.flags, flags),
        };
        let Some(rest) = rest else {
            // Before the change ends, which pins.
            drop(pin);
            return false;
        };
        mm.recount(cpu.id(), seen.flags, flags, range.pages() as i64);
        cpu.count(Counter::TlbFlushSkipped, 1);
        drop(pin);
        change.finish_within(range, rest);
        drop(change);
        cpu.tidy();
        true
    }
}
