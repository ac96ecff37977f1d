//! A layout change under way: what it has reserved, and the steps that changes are made of.
//!
//! A [`Change`] holds the layout lock for writing. [`Change::plan`] reserves; the other methods change and
//! cannot fail. Steps that concern a VMA of an object hold the object's mapping lock, and so are not pinned around it; the
//! others pass one pin on, because each costs 9 ns and a call has a dozen steps.

use super::sweep::Sweep;
use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::machine::{Cpu, Record};
use crate::mm::{Layout, Mm};
use crate::object::Object;
use crate::rmap::AnonVma;
use crate::stats::Counter;
use crate::sync::{Pin, Shared};
use crate::vma::{Anon, VmFlags, Vma, merge};
use core::ops::ControlFlow;
use core::ptr::NonNull;

/// Records that one change may need at most: `protect` and a fixed mapping split twice, and make one.
const SPARE: usize = 3;

/// A layout change under way.
pub(super) struct Change<'a, H: Host> {
    pub(super) mm: &'a Mm<H>,
    pub(super) cpu: &'a Cpu<H>,
    pub(super) layout: lock_api::RwLockWriteGuard<'a, H::RwLock, Layout<H>>,
    spare: [Option<NonNull<Record>>; SPARE],
}

impl<'a, H: Host> Change<'a, H> {
    /// Waits for faults on the locked path and for other changes.
    #[inline]
    pub(super) fn begin(mm: &'a Mm<H>, cpu: &'a Cpu<H>) -> Self {
        Self { mm, cpu, layout: mm.layout.write(), spare: [None; SPARE] }
    }

    /// Reserves what a change needs that makes up to `records` VMAs (at most 3).
    pub(super) fn plan(&mut self, pin: &Pin<'_>, records: usize) -> Result<(), OutOfMemory> {
        self.mm.index.reserve(&mut self.layout.reserve, records)?;
        for place in self.spare.iter_mut().take(records) {
            if place.is_none() {
                *place = Some(self.mm.machine.records().allocate(pin)?);
            }
        }
        Ok(())
    }

    /// A VMA from a reserved record, in no index and in no list yet.
    fn create(
        &mut self,
        range: AddrRange,
        flags: VmFlags,
        pgoff: u64,
        object: Option<Shared<Object<H>>>,
    ) -> Option<NonNull<Vma<H>>> {
        let record = self.spare.iter_mut().find_map(Option::take);
        debug_assert!(record.is_some(), "a change makes more VMAs than it planned");
        Some(Vma::create(record?, &self.mm.machine, range, flags, pgoff, object, self.mm.cookie()))
    }

    /// Counts and takes the lock of `object`'s mappings.
    pub(super) fn lock_mappings<'o>(
        &self,
        object: Option<&'o Shared<Object<H>>>,
    ) -> Option<lock_api::MutexGuard<'o, H::Mutex, crate::object::MappingList>> {
        let object = object?;
        let pin = self.cpu.pin();
        self.mm.machine.stats().count(&pin, Counter::RmapLock);
        drop(pin);
        Some(object.lock_mappings())
    }

    /// Maps `range`, which is free, as a VMA of its own.
    pub(super) fn insert(
        &mut self,
        pin: Pin<'_>,
        range: AddrRange,
        flags: VmFlags,
        pgoff: u64,
        object: Option<Shared<Object<H>>>,
    ) {
        let Some(vma) = self.create(range, flags, pgoff, object) else { return };
        // SAFETY: just made; VMAs are freed an epoch after they leave the index, under this lock.
        let record = unsafe { vma.as_ref() };
        let pin = if record.object().is_none() {
            pin
        } else {
            drop(pin);
            // In the list before it can be faulted on.
            if let Some(mappings) = self.lock_mappings(record.object()) {
                // SAFETY: in no list yet; VMAs do not move.
                unsafe { mappings.insert(&record.link) };
            }
            self.cpu.pin()
        };
        self.mm.index.insert(&mut self.layout.reserve, &pin, vma);
        self.layout.total_pages += range.pages();
    }

    /// Divides the VMA that contains `at` there, unless it begins there. No new VMA when none contains it.
    pub(super) fn split(&mut self, at: u64) {
        let found = {
            let pin = self.cpu.pin();
            self.mm.index.find(&pin, at).map(NonNull::from)
        };
        let Some(low) = found else { return };
        // SAFETY: in the index, which only this change may take it from.
        let low = unsafe { low.as_ref() };
        let seen = low.snapshot();
        if seen.range.start == at {
            return;
        }
        let upper = AddrRange::new(at, seen.range.end);
        let Some(high) = self.create(upper, seen.flags, seen.index_of(at), low.object().cloned()) else {
            return;
        };
        // SAFETY: just made.
        let record = unsafe { high.as_ref() };
        let mappings = self.lock_mappings(low.object());
        let pin = self.cpu.pin();
        low.change(|low| {
            if let Anon::Some(anon) = low.anon() {
                anon.use_again();
                record.install_anon(NonNull::from(anon));
            }
            if let Some(mappings) = &mappings {
                // SAFETY: in no list yet; VMAs do not move.
                unsafe { mappings.insert(&record.link) };
            }
            low.set_end(at);
            self.mm.index.divide(&mut self.layout.reserve, &pin, seen.range.start, at, high);
        });
        self.mm.machine.stats().count(&pin, Counter::VmaSplit);
    }

    /// Merges the VMA that ends at `at` with the one that begins there, if they are one mapping.
    pub(super) fn merge_at(&mut self, at: u64) {
        let found = {
            let pin = self.cpu.pin();
            let low = at.checked_sub(1).and_then(|last| self.mm.index.find(&pin, last));
            let high = self.mm.index.find(&pin, at);
            low.zip(high)
                .filter(|(low, high)| high.start() == at && merge::can_merge(low, high))
                .map(|(low, high)| (NonNull::from(low), NonNull::from(high)))
        };
        let Some((low, high_ptr)) = found else { return };
        // SAFETY: both are in the index, which only this change may take them from.
        let (low, high) = unsafe { (low.as_ref(), high_ptr.as_ref()) };
        let mappings = self.lock_mappings(low.object());
        let end = high.end();
        // No fault may set one of the pointers while they are compared and joined.
        low.freeze_anon();
        high.freeze_anon();
        if !merge::can_merge(low, high) {
            high.thaw_anon(None);
            low.thaw_anon(None);
            return;
        }
        let pin = self.cpu.pin();
        low.seq.write_begin();
        high.seq.kill();
        let anon = high.close_anon();
        let spare = match low.anon() {
            Anon::Some(_) => anon,
            _ => {
                low.thaw_anon(anon);
                None
            }
        };
        low.set_end(end);
        self.mm.index.join(&mut self.layout.reserve, &pin, low.start(), at);
        low.seq.write_end();
        if let Some(mappings) = &mappings {
            // SAFETY: it joined the list when it was made.
            unsafe { mappings.remove(&high.link) };
        }
        self.mm.machine.stats().count(&pin, Counter::VmaMerge);
        // SAFETY: out of the index and the list.
        unsafe { Vma::retire(high_ptr, &pin) };
        drop(pin);
        drop(mappings);
        self.end_use(spare);
    }

    fn end_use(&self, anon: Option<NonNull<AnonVma<H>>>) {
        if let Some(anon) = anon {
            // SAFETY: the count was a VMA's, which gave it up; it keeps the node until here.
            unsafe { anon.as_ref().end_use(&self.mm.machine, &self.cpu.participant()) };
        }
    }

    /// Moves the end of the VMA that starts at `start`: upwards over free addresses, or downwards; what is cut off
    /// is to be swept after. Takes no reverse-mapping lock (requirement E2), unless the baseline asks for it.
    pub(super) fn move_end(&mut self, start: u64, end: u64, with_rmap_lock: bool) {
        let found = {
            let pin = self.cpu.pin();
            self.mm.index.find(&pin, start).map(NonNull::from)
        };
        let Some(vma) = found else { return };
        // SAFETY: in the index, which only this change may take it from.
        let vma = unsafe { vma.as_ref() };
        let tree = vma.anon_vma().filter(|_| with_rmap_lock).map(|anon| {
            let pin = self.cpu.pin();
            self.mm.machine.stats().count(&pin, Counter::RmapLock);
            drop(pin);
            anon.lock_tree()
        });
        let pin = self.cpu.pin();
        let before = vma.range().pages();
        vma.change(|vma| {
            vma.set_end(end);
            self.mm.index.move_end(&mut self.layout.reserve, &pin, start, end);
        });
        self.layout.total_pages = self.layout.total_pages - before + ((end - start) >> PAGE_SHIFT);
        drop(tree);
    }

    /// Moves the start of the VMA that starts at `start`: downwards over free addresses, or upwards; what is cut off is
    /// to be swept after.
    pub(super) fn move_start(&mut self, start: u64, to: u64) {
        let found = {
            let pin = self.cpu.pin();
            self.mm.index.find(&pin, start).map(NonNull::from)
        };
        let Some(vma) = found else { return };
        // SAFETY: in the index, which only this change may take it from.
        let vma = unsafe { vma.as_ref() };
        let mappings = self.lock_mappings(vma.object());
        let pin = self.cpu.pin();
        let before = vma.range().pages();
        vma.change(|vma| {
            vma.set_start(to);
            self.mm.index.move_start(&mut self.layout.reserve, &pin, start, to);
        });
        self.layout.total_pages = self.layout.total_pages - before + vma.range().pages();
        drop(mappings);
    }

    /// What [`remove`](Self::remove) will meet in `range`.
    pub(super) fn look_at(&self, pin: &Pin<'_>, range: AddrRange) -> Affected<H> {
        let cut_of = |vma: &Vma<H>| Cut { vma: vma.range(), has_object: vma.object().is_some() };
        let cut = |at: u64| self.mm.index.find(pin, at).map(cut_of);
        let first = self.mm.index.find(pin, range.start);
        // Most calls unmap exactly one VMA: found with one lookup, and nothing else in the way.
        let whole = first.filter(|vma| vma.range() == range).map(NonNull::from);
        if whole.is_some() {
            return Affected { anything: true, whole, low: None, high: None };
        }
        let first = first.map(cut_of);
        let low = first.filter(|cut| cut.vma.start < range.start);
        let high = match first {
            Some(cut) if cut.vma.end > range.end => Some(cut),
            Some(cut) if cut.vma.end == range.end => None,
            _ => cut(range.end).filter(|cut| cut.vma.start < range.end),
        };
        let anything = first.is_some()
            || high.is_some()
            || self.mm.index.first_ending_after(pin, range.start).is_some_and(|vma| vma.start() < range.end);
        Affected { anything, whole, low, high }
    }

    /// Unmaps `range`: what is mapped there is gone from the index, the page table and the reverse mapping.
    /// `affected` is what [`look_at`](Self::look_at) said, and [`plan`](Self::plan) has reserved its
    /// [`records`](Affected::records).
    pub(super) fn remove(&mut self, range: AddrRange, affected: &Affected<H>) {
        // What is cut off from VMAs that stay, and so is in no removed one.
        let mut cut_off = [AddrRange::new(0, 0); 2];
        match (affected.low, affected.high) {
            (Some(low), Some(high)) if low.vma == high.vma => {
                // A hole: the upper part becomes a VMA of its own.
                self.split(range.end);
                cut_off[0] = self.cut_top(low, range);
            }
            (low, high) => {
                if let Some(low) = low {
                    cut_off[0] = self.cut_top(low, range);
                }
                if let Some(high) = high {
                    cut_off[1] = self.cut_bottom(high, range);
                }
            }
        }
        // Whole VMAs now. From here on no fault finds them, and those under way see the killed counters.
        let mut removed: Option<NonNull<Vma<H>>> = None;
        let mut pin = self.cpu.pin();
        let mut at = range.start;
        let mut count = 0;
        while at < range.end {
            let next = match affected.whole {
                // SAFETY: it was in the index under the layout lock, which we have held since.
                Some(vma) => Some(unsafe { vma.as_ref() }),
                // The next one, as a rule, begins where the last one ended.
                None => {
                    let there = self.mm.index.find(&pin, at);
                    there.or_else(|| self.mm.index.first_ending_after(&pin, at))
                }
            };
            let Some(vma) = next.filter(|vma| vma.start() < range.end) else { break };
            let start = vma.start();
            at = vma.end();
            vma.seq.kill();
            self.layout.total_pages -= vma.range().pages();
            // For merging nodes that run empty. Without memory for that they stay, and removing goes on, more slowly.
            let _ = self.mm.index.reserve(&mut self.layout.reserve, 0);
            let Some(gone) = self.mm.index.remove(&mut self.layout.reserve, &pin, start) else { break };
            // SAFETY: just removed, not yet retired.
            unsafe { gone.as_ref() }.chain_removed(removed);
            removed = Some(gone);
            count += 1;
            if count % 256 == 0 {
                // No pin is to last long, and nodes given up on the way are to come back.
                drop(pin);
                self.cpu.participant().collect();
                pin = self.cpu.pin();
            }
        }
        // One VMA of memory that was never touched: nothing to sweep, and all under one pin.
        if let Some(gone) = removed
            // SAFETY: in our chain; retired below or further down.
            && let vma = unsafe { gone.as_ref() }
            && vma.next_removed().is_none()
            && vma.object().is_none()
            && cut_off.iter().all(AddrRange::is_empty)
            && !self.has_tables(&pin, vma.range())
        {
            let anon = vma.close_anon();
            // SAFETY: out of the index, and in no list.
            unsafe { Vma::retire(gone, &pin) };
            drop(pin);
            return self.end_use(anon);
        }
        drop(pin);
        let mut sweep = Sweep::new(self.mm, self.cpu);
        for part in cut_off {
            // Never of an object: those are divided, not cut.
            sweep.zap(part, false);
        }
        let mut next = removed;
        while let Some(gone) = next {
            // SAFETY: in our chain; retired below.
            let vma = unsafe { gone.as_ref() };
            sweep.zap(vma.range(), vma.object().is_some());
            next = vma.next_removed();
        }
        sweep.finish(range, true);
        // Out of the reverse mapping only now: until it is swept, a walk must find every entry.
        while let Some(gone) = removed {
            // SAFETY: in our chain; retired below.
            let vma = unsafe { gone.as_ref() };
            removed = vma.next_removed();
            if let Some(mappings) = self.lock_mappings(vma.object()) {
                // SAFETY: it joined the list when it was made.
                unsafe { mappings.remove(&vma.link) };
            }
            self.end_use(vma.close_anon());
            let pin = self.cpu.pin();
            // SAFETY: out of the index, the list and our chain.
            unsafe { Vma::retire(gone, &pin) };
        }
    }

    /// True when there is a page table for part of `range`.
    fn has_tables(&self, pin: &Pin<'_>, range: AddrRange) -> bool {
        self.mm.page_table.for_each_run(&self.mm.ram(pin), range, |_| ControlFlow::Break(())).is_break()
    }

    /// Makes the VMA of `cut` end where `range` starts; returns what it lost.
    fn cut_top(&mut self, cut: Cut, range: AddrRange) -> AddrRange {
        if cut.has_object {
            // The part to go must stay in the object's list until it is swept, so it becomes a VMA.
            self.split(range.start);
            return AddrRange::new(0, 0);
        }
        self.move_end(cut.vma.start, range.start, false);
        AddrRange::new(range.start, cut.vma.end.min(range.end))
    }

    /// Makes the VMA of `cut` start where `range` ends; returns what it lost.
    fn cut_bottom(&mut self, cut: Cut, range: AddrRange) -> AddrRange {
        if cut.has_object {
            self.split(range.end);
            return AddrRange::new(0, 0);
        }
        self.move_start(cut.vma.start, range.end);
        AddrRange::new(cut.vma.start, range.end)
    }

    /// Calls `visit` for each VMA that overlaps `range`, ascending.
    pub(super) fn for_each(
        &self,
        pin: &Pin<'_>,
        range: AddrRange,
        visit: impl FnMut(&Vma<H>) -> ControlFlow<()>,
    ) {
        self.mm.index.for_each(pin, range, visit);
    }
}

/// What is mapped in a range that is about to be unmapped.
pub(super) struct Affected<H: Host> {
    /// Whether anything is.
    pub(super) anything: bool,
    /// The one VMA that is, if the range is all of it.
    whole: Option<NonNull<Vma<H>>>,
    /// The VMA that reaches over the start.
    low: Option<Cut>,
    /// The VMA that reaches over the end; perhaps the same.
    high: Option<Cut>,
}

impl<H: Host> Affected<H> {
    /// True when one VMA reaches over both ends, and so becomes two.
    pub(super) fn is_hole(&self) -> bool {
        matches!((self.low, self.high), (Some(low), Some(high)) if low.vma == high.vma)
    }

    /// Records that [`Change::remove`] needs.
    pub(super) fn records(&self) -> usize {
        match (self.low, self.high) {
            (Some(low), Some(high)) if low.vma == high.vma => 1 + usize::from(low.has_object),
            (low, high) => [low, high].iter().flatten().filter(|cut| cut.has_object).count(),
        }
    }
}

/// A VMA that reaches over a boundary of a range.
#[derive(Clone, Copy)]
struct Cut {
    vma: AddrRange,
    has_object: bool,
}

impl<H: Host> Drop for Change<'_, H> {
    fn drop(&mut self) {
        if self.spare.iter().any(Option::is_some) {
            let pin = self.cpu.pin();
            for record in self.spare.iter_mut().filter_map(Option::take) {
                // SAFETY: allocated by `plan`, made into nothing.
                unsafe { self.mm.machine.records().free(&pin, record) };
            }
        }
    }
}
