//! A change of attributes within one VMA, in one step: dividing it, or merging it with what lies beside it, under one lock
//! of one leaf. `Change::set_flags` and `Change::merge_around` do the same for any range, with a step for each VMA
//! and each boundary; this is for the calls that programs make again and again.
//!
//! # Why it is right
//!
//! All that is changed is in one leaf, whose lock is held: records leave a leaf, and have their brackets opened, under that lock
//! only, so nobody else changes any of the three. Their counters are made odd together, behind one fence
//! (`SeqCount::write_begin_all`), before the first attribute changes; faults that have read one of them before fail to
//! validate. Their `anon` pointers are frozen while they are compared and joined, and the one in the middle stays frozen until it is
//! known whether it goes as well: thawed before, a fault could set it, and the anon_vma would be lost with the record.
//!
//! The neighbours' addresses are not held, only their records: as in `Change::merge_at`, a merge changes nothing that the
//! addresses mean. A listing is told of each record that reaches beyond the range before its bracket opens.

use super::change::{Change, Records, part_off};
use crate::addr::AddrRange;
use crate::host::Host;
use crate::index::Edit;
use crate::mm::Mm;
use crate::rmap::AnonVma;
use crate::stats::Counter;
use crate::sync::{Pin, SeqCount};
use crate::vma::{VmFlags, Vma, merge};
use core::ptr::NonNull;

/// What a step has left to be done.
pub(super) struct Rest<H: Host> {
    /// Whether the boundaries at the start and at the end of the range are still to be looked at: what lies beside is in
    /// another leaf.
    pub(super) open: [bool; 2],
    /// Uses of anon_vmas that VMAs gave up which are no more.
    pub(super) spare: [Option<NonNull<AnonVma<H>>>; 2],
}

/// `high` becomes part of `low`, which it continues, if the two are one mapping: their brackets are open, their `anon` pointers
/// frozen, and their leaf is locked. Gives what is left of `high`, which is dead then: its use of an anon_vma, if `low` has
/// one of its own.
fn absorb<H: Host>(low: &Vma<H>, high: &Vma<H>) -> Option<Option<NonNull<AnonVma<H>>>> {
    if !merge::can_merge(low, high) {
        return None;
    }
    high.seq.kill_begun();
    low.set_end(high.end());
    low.set_flags(low.flags() | high.flags());
    let anon = high.close_frozen_anon();
    Some(if low.anon_vma().is_some() {
        anon
    } else {
        // Without one it stays frozen: it may be absorbed in its turn.
        if anon.is_some() {
            low.thaw_anon(anon);
        }
        None
    })
}

impl<H: Host> Change<'_, H> {
    /// Gives `range` the attributes `flags`, if it lies within one VMA of memory, which has others; `splits` records are planned
    /// for, as many as ends of the VMA lie beyond the range. `None`, and nothing done, when it does not lie so.
    pub(super) fn set_flags_within(
        &mut self,
        pin: &Pin<'_>,
        range: AddrRange,
        splits: usize,
        flags: VmFlags,
    ) -> Option<Rest<H>> {
        self.set_flags_if(pin, range, splits, flags, |_| true, |_| true)
    }

    /// The same for a call that does not hold the range: see [`at_once`](super::at_once). `None` also when the attributes are not
    /// `seen` any more, and when there would be something left to be done for the addresses.
    #[inline]
    pub(super) fn set_flags_at_once(
        &mut self,
        pin: &Pin<'_>,
        range: AddrRange,
        splits: usize,
        seen: VmFlags,
        flags: VmFlags,
    ) -> Option<Rest<H>> {
        let (mm, cpu) = (self.mm, self.cpu);
        let is_same = |vma: &Vma<H>| vma.flags() == seen && !vma.seq.is_changing();
        self.set_flags_if(pin, range, splits, flags, is_same, |rest| {
            rest.open == [false; 2] && mm.may_step(cpu, range) && !mm.has_tables(pin, range)
        })
    }

    /// [`set_flags_within`](Self::set_flags_within) if `fits` says so, before the first store, and `may`, once all counters are odd.
    #[inline]
    fn set_flags_if(
        &mut self,
        pin: &Pin<'_>,
        range: AddrRange,
        splits: usize,
        flags: VmFlags,
        fits: impl FnOnce(&Vma<H>) -> bool,
        may: impl FnOnce(&Rest<H>) -> bool,
    ) -> Option<Rest<H>> {
        let (mm, cpu) = (self.mm, self.cpu);
        let (records, nodes) = self.supplies();
        let mut gone: [Option<NonNull<Vma<H>>>; 2] = [None; 2];
        let rest = mm.index.edit(nodes, pin, range.start, splits, |vma, edit| {
            let all = edit.range();
            let divides = [all.start < range.start, all.end > range.end];
            let over = divides.iter().filter(|&&divides| divides).count();
            let supplied = records.iter().flatten().count();
            if !all.covers(range) || over != splits || over > supplied || vma.object().is_some() || !fits(vma)
            {
                return None; // a neighbour has merged with it meanwhile, or divided it
            }
            // A call next door may have put something sticky on it meanwhile.
            let flags = flags | (vma.flags() & VmFlags::STICKY);
            let like = |beside: &&Vma<H>| beside.flags().merges_with(flags) && beside.object().is_none();
            let (low, high) = (edit.below().filter(like), edit.above().filter(like));
            let mut rest = Rest { open: [edit.is_at_low_edge(), edit.is_at_high_edge()], spare: [None; 2] };
            if over > 0 {
                // What is cut off keeps the attributes of before, so nothing merges there.
                let may_join = [low.is_some(), high.is_some()];
                rest.open = core::array::from_fn(|end| !divides[end] && (rest.open[end] || may_join[end]));
                mm.note(cpu, pin, vma);
                vma.seq.write_begin();
                let may = may(&rest);
                if may {
                    divide(records, mm, vma, edit, range, flags);
                }
                vma.seq.write_end();
                return may.then_some(rest);
            }
            // SAFETY: in the leaf, which is locked, under the pin.
            let [low, high] =
                [low, high].map(|beside| beside.map(|beside| unsafe { NonNull::from(beside).as_ref() }));
            if [low, high].into_iter().flatten().any(|beside| beside.seq.is_changing()) {
                return None; // a fork has come before this step; never where the range is held
            }
            for beside in [low, high].into_iter().flatten() {
                mm.note(cpu, pin, beside);
            }
            SeqCount::write_begin_all([Some(&vma.seq), low.map(|low| &low.seq), high.map(|high| &high.seq)]);
            let all = [low, Some(vma), high];
            let may = may(&rest);
            if may {
                vma.set_flags(flags);
                if low.is_some() || high.is_some() {
                    // No fault may set one of the pointers while they are compared and joined.
                    all.into_iter().flatten().for_each(Vma::freeze_anon);
                }
                // Downwards first, as Linux does: where their anon_vmas allow one of the two only, that decides.
                let mut whole = vma;
                if let Some(low) = low
                    && let Some(spare) = absorb(low, vma)
                {
                    (rest.spare[0], gone[0]) = (spare, Some(NonNull::from(vma)));
                    edit.absorb_into_below();
                    whole = low;
                }
                if let Some(high) = high
                    && let Some(spare) = absorb(whole, high)
                {
                    (rest.spare[1], gone[1]) = (spare, Some(NonNull::from(high)));
                    edit.absorb_above();
                }
            }
            for vma in all.into_iter().flatten().filter(|vma| !vma.seq.is_dead()) {
                vma.thaw_anon(None);
                vma.seq.write_end();
            }
            may.then_some(rest)
        })??;
        let stats = mm.machine.stats();
        stats.add(pin, Counter::VmaSplit, splits as u64);
        for vma in gone.into_iter().flatten() {
            stats.count(pin, Counter::VmaMerge);
            // SAFETY: out of the index just now, and in no list.
            unsafe { Vma::retire(vma, pin) };
        }
        Some(rest)
    }

    /// What [`set_flags_within`](Self::set_flags_within) has left to be done. Not while pinned.
    pub(super) fn finish_within(&mut self, range: AddrRange, rest: Rest<H>) {
        for (at, open) in [range.start, range.end].into_iter().zip(rest.open) {
            if open {
                self.merge_at(at);
            }
        }
        rest.spare.into_iter().for_each(|anon| self.end_use(anon));
    }
}

/// Divides `vma`, whose leaf is locked and whose bracket is open, so that `range` is a VMA of its own, with `flags`.
fn divide<H: Host>(
    records: &mut Records,
    mm: &Mm<H>,
    vma: &Vma<H>,
    edit: &mut Edit<'_, Vma<H>>,
    range: AddrRange,
    flags: VmFlags,
) {
    let (all, seen) = (edit.range(), vma.snapshot());
    if all.end > range.end {
        let upper = AddrRange::new(range.end, all.end);
        if let Some(upper) = part_off(records, mm, vma, seen, upper, seen.flags, None) {
            vma.set_end(range.end);
            edit.divide(range.end, upper);
        }
    }
    if all.start < range.start {
        if let Some(middle) = part_off(records, mm, vma, seen, range, flags, None) {
            vma.set_end(range.start);
            edit.divide(range.start, middle);
        }
    } else {
        vma.set_flags(flags);
    }
}
