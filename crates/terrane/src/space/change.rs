//! A layout change under way: what it has reserved, and the steps that changes are made of.
//!
//! A [`Change`] holds its range. [`Change::plan`] reserves; the other methods change and cannot fail.
//!
//! # Steps
//!
//! What is mapped in the range is the change's own business, but records that reach beyond the range are not: see
//! [`mm`](crate::mm). So each step finds its VMA anew and does everything that belongs together under the lock of one leaf of the
//! index: bracket of the sequence counter, record, leaf. Between two steps a neighbour may have divided or merged the
//! record; the attributes at the addresses of the range are the same. A step that needs more divisions than were seen when the
//! change was planned, because a neighbour has merged with what lies at an end of the range, gets what it needs then; the
//! change has begun, so should memory have run out just then it waits for some ([`Change::supply`]).
//!
//! Steps that concern a VMA of an object hold the object's mapping lock, which blocks, and so are not pinned around it; the
//! others pass one pin on, because each costs 9 ns and a call has a dozen steps. The object at an address of the range cannot
//! change, so it is looked up before the lock is taken and need not be compared after.

mod alter;
mod remove;

pub(super) use remove::Gone;

use super::splits::Splits;
use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::index::{Alone, Reserve};
use crate::machine::{Cpu, Record};
use crate::mm::{Exclusive, Mm};
use crate::object::{MappingList, Object};
use crate::range_lock::Mode;
use crate::rmap::AnonVma;
use crate::stats::Counter;
use crate::sync::{Pin, Shared};
use crate::vma::{Anon, Snapshot, VmFlags, Vma, merge};
use core::ops::ControlFlow;
use core::ptr::NonNull;

/// Records that one change may need at most: a fixed mapping makes a hole in a VMA of an object (the part to go and the
/// part above it become VMAs), and a VMA of its own.
const SPARE: usize = 3;

/// Records that a change has reserved.
pub(super) type Records = [Option<NonNull<Record>>; SPARE];

/// Records and index nodes that a change has reserved.
pub(super) struct Supplies<H: Host> {
    records: Records,
    pub(super) nodes: Reserve<Vma<H>>,
}

/// A layout change under way.
pub(super) struct Change<'a, H: Host> {
    pub(super) mm: &'a Mm<H>,
    pub(super) cpu: &'a Cpu<H>,
    pub(super) supplies: Supplies<H>,
    splits: Splits<'a, H>,
    /// Of a space with limits: nobody else changes how much is mapped.
    limits: Option<lock_api::MutexGuard<'a, H::Mutex, ()>>,
    /// What is cut off from VMAs becomes VMAs, also of memory: a move needs their anon_vma.
    pub(super) keeps_pieces: bool,
    hold: Exclusive<'a, H>,
}

impl<H: Host> Supplies<H> {
    pub(super) fn count(&self) -> usize {
        self.records.iter().flatten().count()
    }

    /// A VMA from a reserved record, in no index and in no list yet.
    pub(super) fn create(
        &mut self,
        mm: &Mm<H>,
        range: AddrRange,
        flags: VmFlags,
        pgoff: u64,
        object: Option<Shared<Object<H>>>,
    ) -> Option<NonNull<Vma<H>>> {
        let record = self.records.iter_mut().find_map(Option::take);
        debug_assert!(record.is_some(), "a change makes more VMAs than it planned");
        Some(Vma::create(record?, &mm.machine, range, flags, pgoff, object, mm.cookie()))
    }
}

/// Makes a VMA for `part` of `vma`, whose bracket is open, with `flags`: with a use of the anon_vma, and in the list of the
/// object's mappings.
pub(super) fn part_off<H: Host>(
    records: &mut Records,
    mm: &Mm<H>,
    vma: &Vma<H>,
    seen: Snapshot,
    part: AddrRange,
    flags: VmFlags,
    mappings: Option<&MappingList>,
) -> Option<NonNull<Vma<H>>> {
    let record = records.iter_mut().find_map(Option::take);
    debug_assert!(record.is_some(), "a change makes more VMAs than it planned");
    let pgoff = seen.index_of(part.start);
    let made = Vma::create(record?, &mm.machine, part, flags, pgoff, vma.object().cloned(), mm.cookie());
    // SAFETY: just made.
    let record = unsafe { made.as_ref() };
    if let Anon::Some(anon) = vma.anon() {
        anon.use_again();
        record.install_anon(NonNull::from(anon));
        record.set_kin(vma.kin());
    }
    if let Some(mappings) = mappings {
        // SAFETY: in no list yet; VMAs do not move.
        unsafe { mappings.insert(&record.link) };
    }
    Some(made)
}

impl<'a, H: Host> Change<'a, H> {
    /// Waits for other calls about an address of `range`, and for faults there that are on the locked path.
    #[inline]
    pub(super) fn begin(mm: &'a Mm<H>, cpu: &'a Cpu<H>, range: AddrRange) -> Self {
        Self::begin_within(mm, cpu, range, range)
    }

    /// The same for a change of `range` that keeps others away from all of `reach`.
    #[inline]
    pub(super) fn begin_within(mm: &'a Mm<H>, cpu: &'a Cpu<H>, reach: AddrRange, range: AddrRange) -> Self {
        let hold = mm.exclude(cpu, reach);
        mm.enter(cpu, &[&hold]);
        Self::holding(mm, cpu, hold, range)
    }

    /// The same for a range that the caller holds and has told the listing of.
    #[inline]
    pub(super) fn holding(mm: &'a Mm<H>, cpu: &'a Cpu<H>, hold: Exclusive<'a, H>, range: AddrRange) -> Self {
        let supplies = Supplies { records: [None; SPARE], nodes: mm.take_reserve(cpu) };
        let splits = Splits::new(mm, cpu, range);
        Self { mm, cpu, supplies, splits, limits: None, keeps_pieces: false, hold }
    }

    /// [`begin`](Self::begin) while pinned, if nobody is in the way and no listing is under way; `None` says nothing.
    #[inline]
    pub(super) fn begin_at_once(mm: &'a Mm<H>, cpu: &'a Cpu<H>, range: AddrRange) -> Option<Self> {
        let hold = Exclusive::Range(cpu.lock_range_at_once(&mm.ranges, range, Mode::Exclusive)?);
        if mm.history.active() != 0 {
            return None;
        }
        Some(Self::holding(mm, cpu, hold, range))
    }

    /// Keeps others from changing how much is mapped, until this change ends.
    pub(super) fn hold_limits(&mut self) {
        self.limits = Some(self.mm.limits.lock());
    }

    /// Reserves what a change needs that makes up to `records` VMAs (at most 3).
    pub(super) fn plan(&mut self, pin: &Pin<'_>, records: usize) -> Result<(), OutOfMemory> {
        self.mm.index.reserve(&mut self.supplies.nodes, records)?;
        for place in self.supplies.records.iter_mut().take(records) {
            if place.is_none() {
                *place = Some(self.mm.machine.records().allocate(pin)?);
            }
        }
        Ok(())
    }

    /// What has been reserved, for a step in another module.
    pub(super) fn supplies(&mut self) -> (&mut Records, &mut Reserve<Vma<H>>) {
        (&mut self.supplies.records, &mut self.supplies.nodes)
    }

    /// Reserves what dividing the blocks at the ends of the range takes: for changes that take pages or permissions away. Not
    /// while pinned.
    #[inline]
    pub(super) fn plan_splits(&mut self) -> Result<(), OutOfMemory> {
        self.splits.reserve()
    }

    /// Blocks are divided at the ends of `range`, which is a part of what is held, from now on.
    pub(super) fn narrow(&mut self, range: AddrRange) {
        self.splits = Splits::new(self.mm, self.cpu, range);
    }

    /// Divides the blocks at the ends of the range, after the layout has changed and before it is swept.
    #[inline]
    pub(super) fn cut_blocks(&mut self) {
        self.splits.cut();
    }

    /// Gets records and nodes for the most that a step can need, in the midst of a change, where nothing may fail; see the
    /// head of the module.
    #[cold]
    pub(super) fn supply(&mut self) {
        let mut rounds = 0;
        loop {
            let pin = self.cpu.pin();
            if self.plan(&pin, 2).is_ok() {
                return;
            }
            drop(pin);
            self.cpu.quiesce();
            self.mm.machine.host().relax(self.cpu.id(), rounds);
            rounds = rounds.saturating_add(1);
        }
    }

    /// Says that the layout is changed: what follows is work on the page table.
    pub(super) fn committed(&mut self) {
        self.limits = None;
        self.hold.committed();
    }

    /// Counts and takes the lock of `object`'s mappings.
    pub(super) fn lock_mappings<'o>(
        &self,
        object: Option<&'o Shared<Object<H>>>,
    ) -> Option<lock_api::MutexGuard<'o, H::Mutex, MappingList>> {
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
        let pin = if self.supplies.count() > 0 {
            pin
        } else {
            // What was planned for this went into dividing VMAs that a neighbour had merged with.
            drop(pin);
            self.supply();
            self.cpu.pin()
        };
        let Some(vma) = self.supplies.create(self.mm, range, flags, pgoff, object) else { return };
        // SAFETY: just made; VMAs are freed an epoch after they leave the index, and this one only by a change of
        // its range, which is ours.
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
        self.mm.index.insert(&mut self.supplies.nodes, &pin, range, vma);
        self.mm.account(self.cpu.id(), flags, range.pages() as i64);
        self.mm.mapped.add(self.cpu.id(), range.pages() as i64);
    }

    /// Maps `range` as a VMA of private memory of its own, if one look shows that it is free and continues nothing; a record is
    /// planned for. Says whether it did.
    #[inline]
    pub(super) fn insert_alone(
        &mut self,
        pin: &Pin<'_>,
        range: AddrRange,
        flags: VmFlags,
        pgoff: u64,
    ) -> bool {
        let Some(vma) = self.supplies.create(self.mm, range, flags, pgoff, None) else { return false };
        let candidate = merge::Candidate { flags, object: None, pgoff, pages: range.pages() };
        let joins = |below: Option<&Vma<H>>, above: Option<&Vma<H>>| {
            below.is_some_and(|low| candidate.extends_up(low))
                || above.is_some_and(|high| candidate.extends_down(high))
        };
        if self.mm.index.insert_alone(&mut self.supplies.nodes, pin, range, vma, joins) != Alone::Inserted {
            // It was nowhere, and has nothing that needs dropping: a record again.
            self.supplies.records[0] = Some(vma.cast());
            return false;
        }
        self.mm.account(self.cpu.id(), flags, range.pages() as i64);
        self.mm.mapped.add(self.cpu.id(), range.pages() as i64);
        true
    }

    /// Maps `range`, which is free, by letting the VMA that ends where it starts grow, if `fits` says that the two are one
    /// mapping. Takes no reverse-mapping lock (requirement E2), unless the baseline asks for it.
    pub(super) fn grow_up(
        &mut self,
        range: AddrRange,
        with_rmap_lock: bool,
        fits: impl Fn(&Vma<H>) -> bool,
    ) -> bool {
        let lender = if with_rmap_lock { self.visit_anon(range.start.wrapping_sub(1)) } else { None };
        // SAFETY: visited: it stays until `leave`.
        let tree = lender.map(|anon| unsafe { anon.as_ref() }.lock_tree());
        let pin = self.cpu.pin();
        let grown = self.mm.index.extend_up(&mut self.supplies.nodes, &pin, range.start, range.end, |low| {
            let fits = fits(low);
            if fits {
                self.mm.account(self.cpu.id(), low.flags(), range.pages() as i64);
                self.mm.note(self.cpu, &pin, low);
                low.change(|low| low.set_end(range.end));
            }
            fits
        });
        drop(pin);
        drop(tree);
        if let Some(anon) = lender {
            // SAFETY: ends the visit above.
            unsafe { anon.as_ref().leave(&self.cpu.participant()) };
        }
        if grown {
            self.mm.mapped.add(self.cpu.id(), range.pages() as i64);
        }
        grown
    }

    /// The anon_vma of the VMA at `addr`, visited, for the baseline that locks its tree.
    fn visit_anon(&self, addr: u64) -> Option<NonNull<AnonVma<H>>> {
        let pin = self.cpu.pin();
        let anon = self.mm.index.find(&pin, addr)?.anon_vma().filter(|anon| anon.visit())?;
        self.mm.machine.stats().count(&pin, Counter::RmapLock);
        Some(NonNull::from(anon))
    }

    /// The same downwards: the VMA of `object` that begins where `range` ends.
    pub(super) fn grow_down(
        &mut self,
        range: AddrRange,
        object: Option<&Shared<Object<H>>>,
        fits: impl Fn(&Vma<H>) -> bool,
    ) -> bool {
        let mappings = self.lock_mappings(object);
        let pin = self.cpu.pin();
        let grown =
            self.mm.index.extend_down(&mut self.supplies.nodes, &pin, range.end, range.start, |high| {
                let fits = fits(high);
                if fits {
                    self.mm.account(self.cpu.id(), high.flags(), range.pages() as i64);
                    self.mm.note(self.cpu, &pin, high);
                    high.change(|high| high.set_start(range.start));
                }
                fits
            });
        drop(mappings);
        if grown {
            self.mm.mapped.add(self.cpu.id(), range.pages() as i64);
        }
        grown
    }

    /// Merges the VMA that ends at `at` with the one that begins there, if they are one mapping. At least one of the two
    /// reaches into the change's range.
    pub(super) fn merge_at(&mut self, at: u64) {
        self.merge_if(at, merge::can_merge);
    }

    /// The same, if `fits` says that they are one mapping.
    pub(super) fn merge_if(&mut self, at: u64, fits: impl Fn(&Vma<H>, &Vma<H>) -> bool) {
        let object = {
            let pin = self.cpu.pin();
            let low = at.checked_sub(1).and_then(|last| self.mm.index.find(&pin, last));
            let high = self.mm.index.find(&pin, at);
            // A first look: as a rule there is nothing to merge.
            match low.zip(high) {
                Some((low, high)) if high.start() == at && fits(low, high) => low.object().cloned(),
                _ => return,
            }
        };
        let mappings = self.lock_mappings(object.as_ref());
        let pin = self.cpu.pin();
        let mut spare = None;
        let merged = self.mm.index.join(&mut self.supplies.nodes, &pin, at, |low, high| {
            // No fault may set one of the pointers while they are compared and joined.
            low.freeze_anon();
            high.freeze_anon();
            let same_object = match (low.object(), &object) {
                (Some(a), Some(b)) => Shared::ptr_eq(a, b),
                (None, None) => true,
                _ => false,
            };
            if !same_object || !fits(low, high) {
                high.thaw_anon(None);
                low.thaw_anon(None);
                return false;
            }
            self.mm.note(self.cpu, &pin, low);
            self.mm.note(self.cpu, &pin, high);
            low.seq.write_begin();
            high.seq.kill();
            let anon = high.close_anon();
            match low.anon() {
                Anon::Some(_) => spare = anon,
                _ => low.thaw_anon(anon),
            }
            low.set_end(high.end());
            // Alike but for what sticks.
            low.set_flags(low.flags() | high.flags());
            low.seq.write_end();
            true
        });
        let Some(high) = merged else { return };
        if let Some(mappings) = &mappings {
            // SAFETY: it joined the list when it was made.
            unsafe { mappings.remove(&high.as_ref().link) };
        }
        self.mm.machine.stats().count(&pin, Counter::VmaMerge);
        // SAFETY: out of the index and the list.
        unsafe { Vma::retire(high, &pin) };
        drop(pin);
        drop(mappings);
        self.end_use(spare);
    }

    pub(super) fn end_use(&self, anon: Option<NonNull<AnonVma<H>>>) {
        if let Some(anon) = anon {
            // SAFETY: the count was a VMA's, which gave it up; it keeps the node until here.
            unsafe { anon.as_ref().end_use(&self.mm.machine, &self.cpu.participant()) };
        }
    }

    /// True when nothing is mapped in `range`, which is the change's.
    #[inline]
    pub(super) fn is_free(&self, pin: &Pin<'_>, range: AddrRange) -> bool {
        self.mm.next_vma(pin, range.start, range.end).is_none()
    }

    /// Changes the attributes in `range` to `new` of what they are. VMAs that reach beyond the range are divided;
    /// [`plan`](Self::plan) has reserved a record for each of the two.
    pub(super) fn set_flags(&mut self, range: AddrRange, new: impl Fn(VmFlags) -> VmFlags) {
        self.set_flags_of(range, |_, flags| new(flags));
    }

    /// The same, where it depends on more of a VMA than its attributes.
    pub(super) fn set_flags_of(&mut self, range: AddrRange, new: impl Fn(&Vma<H>, VmFlags) -> VmFlags) {
        let mut at = range.start;
        while at < range.end {
            let pin = self.cpu.pin();
            let Some((vma, seen)) = self.mm.next_vma(&pin, at, range.end) else { return };
            let at_vma = seen.range.start.max(at);
            let over =
                |vma: AddrRange| usize::from(vma.start < range.start) + usize::from(vma.end > range.end);
            let room = over(seen.range);
            if new(vma, seen.flags) == seen.flags {
                at = seen.range.end.min(range.end);
                continue;
            }
            // Only a division changes the list.
            let object = vma.object().filter(|_| room > 0).cloned();
            let (pin, mappings) = match &object {
                None => (pin, None),
                Some(_) => {
                    drop(pin);
                    let mappings = self.lock_mappings(object.as_ref());
                    (self.cpu.pin(), mappings)
                }
            };
            let supplied = self.supplies.count();
            let (mm, cpu, Supplies { records, nodes }) = (self.mm, self.cpu, &mut self.supplies);
            let done = mm.index.edit(nodes, &pin, at_vma, room, |vma, edit| {
                let all = edit.range();
                if over(all) > room.min(supplied) {
                    return None; // a neighbour has merged with it meanwhile
                }
                let seen = vma.snapshot();
                let list = mappings.as_deref();
                let flags = new(vma, seen.flags);
                mm.recount(cpu.id(), seen.flags, flags, all.intersection(range).pages() as i64);
                if over(all) > 0 {
                    mm.note(cpu, &pin, vma);
                }
                vma.seq.write_begin();
                if all.end > range.end {
                    let upper = AddrRange::new(range.end, all.end);
                    if let Some(upper) = part_off(records, mm, vma, seen, upper, seen.flags, list) {
                        vma.set_end(range.end);
                        edit.divide(range.end, upper);
                    }
                }
                if all.start < range.start {
                    let part = all.intersection(range);
                    if let Some(middle) = part_off(records, mm, vma, seen, part, flags, list) {
                        vma.set_end(range.start);
                        edit.divide(range.start, middle);
                    }
                } else {
                    vma.set_flags(flags);
                }
                vma.seq.write_end();
                Some((all.end.min(range.end), over(all)))
            });
            if let Some(Some((next, divided))) = done {
                at = next;
                mm.machine.stats().add(&pin, Counter::VmaSplit, divided as u64);
                continue;
            }
            drop((pin, mappings));
            self.supply();
        }
    }

    /// Merges VMAs in and beside `range` that have become one mapping.
    pub(super) fn merge_around(&mut self, range: AddrRange) {
        // From below, as Linux does: where anon_vmas allow a VMA to be joined with one of its neighbours only, that decides.
        self.merge_at(range.start);
        let mut at = range.start;
        while at < range.end {
            let found = {
                let pin = self.cpu.pin();
                self.mm.next_vma(&pin, at, range.end).map(|(_, seen)| seen.range.end)
            };
            match found {
                Some(end) if end <= range.end => {
                    self.merge_at(end);
                    at = end;
                }
                _ => break,
            }
        }
    }

    /// Calls `visit` for each VMA that overlaps `range`, which is the change's, ascending, with its attributes.
    pub(super) fn for_each(
        &self,
        pin: &Pin<'_>,
        range: AddrRange,
        mut visit: impl FnMut(&Vma<H>, Snapshot) -> ControlFlow<()>,
    ) {
        let mut at = range.start;
        while let Some((vma, seen)) = self.mm.next_vma(pin, at, range.end) {
            at = seen.range.end;
            if visit(vma, seen).is_break() || at >= range.end {
                return;
            }
        }
    }
}

impl<H: Host> Drop for Change<'_, H> {
    fn drop(&mut self) {
        if self.supplies.records.iter().any(Option::is_some) {
            let pin = self.cpu.pin();
            for record in self.supplies.records.iter_mut().filter_map(Option::take) {
                // SAFETY: allocated by `plan`, made into nothing.
                unsafe { self.mm.machine.records().free(&pin, record) };
            }
        }
        let nodes = core::mem::take(&mut self.supplies.nodes);
        self.mm.give_reserve(self.cpu, nodes);
    }
}
