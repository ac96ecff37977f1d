//! The steps that take mappings away: out of the index, then out of the page table, then out of the reverse mapping.
//!
//! The order is what makes them right. A VMA that is out of the index with its counter killed lets no fault publish; only then is
//! it swept; and until it is swept it stays in the list of its object and keeps its anon_vma, so that a walk of the reverse mapping finds
//! every entry there still is.

use super::{Change, Supplies, part_off};
use crate::addr::AddrRange;
use crate::host::Host;
use crate::space::sweep::Sweep;
use crate::stats::Counter;
use crate::sync::Pin;
use crate::vma::{Snapshot, Vma};
use core::ptr::NonNull;

/// What became of a VMA that reaches into a range that is being unmapped.
pub(in crate::space) enum Gone<H: Host> {
    /// All of it lay in the range: it is out of the index.
    All(NonNull<Vma<H>>),
    /// The part of an object's VMA that lay in the range: a VMA of its own now, in no index.
    Piece(NonNull<Vma<H>>),
    /// The part of memory that lay in the range.
    Part(AddrRange),
}

/// What unmapping a range comes to.
pub(in crate::space) struct Removal {
    /// Whether anything is mapped there.
    pub(in crate::space) anything: bool,
    /// One VMA reaches over both ends, and so becomes two.
    pub(in crate::space) is_hole: bool,
    /// Records to plan for.
    pub(in crate::space) records: usize,
}

impl<H: Host> Change<'_, H> {
    /// Unmaps `range` if it is exactly one VMA, which takes nothing from reserves. False, and nothing done, when it is not.
    #[inline]
    pub(in crate::space) fn remove_whole(&mut self, pin: Pin<'_>, range: AddrRange) -> bool {
        let removed = self.mm.index.edit(&mut self.supplies.nodes, &pin, range.start, 0, |vma, edit| {
            if edit.range() != range {
                return None;
            }
            vma.seq.kill();
            edit.remove();
            Some(NonNull::from(vma))
        });
        let Some(Some(vma)) = removed else { return false };
        self.mm.count_unmapped(self.cpu.id(), range.pages());
        self.committed();
        // SAFETY: taken out just now, and retired only below.
        let record = unsafe { vma.as_ref() };
        self.mm.account(self.cpu.id(), record.flags(), -(range.pages() as i64));
        // Memory that was never touched: nothing to sweep, and all under one pin.
        if record.object().is_none() && !self.mm.has_tables(&pin, range) {
            let anon = record.close_anon();
            // SAFETY: out of the index, and in no list.
            unsafe { Vma::retire(vma, &pin) };
            drop(pin);
            self.cpu.count(Counter::TlbFlushSkipped, 1);
            self.mm.relocations.forget(range);
            self.end_use(anon);
            return true;
        }
        drop(pin);
        record.chain_removed(None);
        self.sweep_removed(range, Some(vma), &[]);
        true
    }

    /// Unmaps `range`: what is mapped there is gone from the index, the page table and the reverse mapping.
    /// [`plan`](Self::plan) has reserved [`removal`](Self::removal)'s records. `last`: nothing else is changed after.
    pub(in crate::space) fn remove(&mut self, range: AddrRange, last: bool) {
        let mut removed: Option<NonNull<Vma<H>>> = None;
        // What is cut off from VMAs of memory that stay.
        let mut parts = [AddrRange::new(0, 0); 2];
        let mut cut = 0;
        let mut at = range.start;
        let mut count = 0;
        while at < range.end {
            let Some((next, gone)) = self.remove_next(range, at) else { break };
            at = next;
            match gone {
                Gone::All(vma) | Gone::Piece(vma) => {
                    // SAFETY: just taken out, or made and never in; ours until retired.
                    unsafe { vma.as_ref() }.chain_removed(removed);
                    removed = Some(vma);
                }
                Gone::Part(part) => {
                    // One at each end of the range at most.
                    parts[cut % 2] = part;
                    cut += 1;
                }
            }
            count += 1;
            if count % 256 == 0 {
                // Nodes given up on the way are to come back.
                self.cpu.participant().collect();
            }
        }
        if last {
            self.committed();
        }
        self.sweep_removed(range, removed, &parts[..cut.min(2)]);
    }

    /// Takes the first VMA in `at..range.end` out of the range, whole or in part; returns where to go on, or `None` when
    /// nothing is left.
    pub(in crate::space) fn remove_next(&mut self, range: AddrRange, at: u64) -> Option<(u64, Gone<H>)> {
        loop {
            let pin = self.cpu.pin();
            let (vma, seen) = self.mm.next_vma(&pin, at, range.end)?;
            let probe = seen.range.start.max(at);
            let is_hole = seen.range.start < range.start && seen.range.end > range.end;
            let object = vma.object().cloned();
            let (pin, mappings) = match &object {
                None => (pin, None),
                Some(_) => {
                    drop(pin);
                    let mappings = self.lock_mappings(object.as_ref());
                    (self.cpu.pin(), mappings)
                }
            };
            let (supplied, keeps) = (self.supplies.count(), self.keeps_pieces || object.is_some());
            let (mm, cpu, Supplies { records, nodes }) = (self.mm, self.cpu, &mut self.supplies);
            // For merging nodes that run empty. Without memory for that they stay, and removing goes on, more slowly.
            if !is_hole {
                let _ = mm.index.reserve(nodes, 0);
            }
            let gone = mm.index.edit(nodes, &pin, probe, usize::from(is_hole), |vma, edit| {
                let all = edit.range();
                let part = all.intersection(range);
                let (low, high) = (all.start < range.start, all.end > range.end);
                let hole = low && high;
                let needs = usize::from(hole) + usize::from((low || high) && keeps);
                if hole && !is_hole || needs > supplied {
                    return None; // a neighbour has merged with it meanwhile
                }
                let next = part.end;
                if !low && !high {
                    vma.seq.kill();
                    edit.remove();
                    return Some((next, Gone::All(NonNull::from(vma))));
                }
                mm.note(cpu, &pin, vma);
                let seen = vma.snapshot();
                vma.seq.write_begin();
                let gone = match mappings.as_deref() {
                    None if !keeps => Some(Gone::Part(part)),
                    // The part to go must stay in the object's list until it is swept, so it becomes a VMA.
                    list => part_off(records, mm, vma, seen, part, seen.flags, list).map(|piece| {
                        // SAFETY: just made.
                        unsafe { piece.as_ref() }.seq.kill();
                        Gone::Piece(piece)
                    }),
                };
                if hole {
                    let upper = AddrRange::new(range.end, all.end);
                    let list = mappings.as_deref();
                    if let Some(upper) = part_off(records, mm, vma, seen, upper, seen.flags, list) {
                        edit.divide(range.end, upper);
                    }
                }
                if low {
                    vma.set_end(range.start);
                    edit.set_end(range.start);
                } else {
                    vma.set_start(range.end);
                    edit.set_start(range.end);
                }
                vma.seq.write_end();
                gone.map(|gone| (next, gone))
            });
            if let Some(Some((next, gone))) = gone {
                let pages = match &gone {
                    Gone::Part(part) => part.pages(),
                    // SAFETY: ours until retired.
                    Gone::All(vma) | Gone::Piece(vma) => unsafe { vma.as_ref() }.range().pages(),
                };
                mm.count_unmapped(self.cpu.id(), pages);
                mm.account(self.cpu.id(), seen.flags, -(pages as i64));
                if is_hole {
                    mm.machine.stats().count(&pin, Counter::VmaSplit);
                }
                return Some((next, gone));
            }
            drop((pin, mappings));
            self.supply();
        }
    }

    /// Sweeps what has been unmapped: `parts`, and the VMAs of the chain, which end here.
    pub(in crate::space) fn sweep_removed(
        &mut self,
        range: AddrRange,
        mut removed: Option<NonNull<Vma<H>>>,
        parts: &[AddrRange],
    ) {
        self.cut_blocks();
        let mut sweep = Sweep::new(self.mm, self.cpu);
        for &part in parts {
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
        self.mm.relocations.forget(range);
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

    /// What unmapping `range` comes to; exact but for records that neighbours change meanwhile.
    pub(in crate::space) fn removal(&self, pin: &Pin<'_>, range: AddrRange) -> Removal {
        let low = self.mm.next_vma(pin, range.start, range.end);
        let high = self.mm.vma_at(pin, range.end - 1).filter(|(_, seen)| seen.range.end > range.end);
        let is_low = |seen: &Snapshot| seen.range.start < range.start;
        Removal {
            anything: low.is_some(),
            is_hole: low.is_some_and(|(_, seen)| is_low(&seen) && seen.range.end > range.end),
            records: match (low, high) {
                (Some((low, seen)), _) if is_low(&seen) && seen.range.end > range.end => {
                    1 + usize::from(low.object().is_some())
                }
                (low, high) => {
                    let low = low.filter(|(_, seen)| is_low(seen));
                    [low, high].iter().flatten().filter(|(vma, _)| vma.object().is_some()).count()
                }
            },
        }
    }

    /// Cuts `gone` off the VMA that ends with it and reaches below it; it is to be swept after. False when there is no such
    /// VMA of private memory.
    pub(in crate::space) fn cut_top(&mut self, gone: AddrRange, with_rmap_lock: bool) -> bool {
        let lender = if with_rmap_lock { self.visit_anon(gone.start) } else { None };
        // SAFETY: visited: it stays until `leave`.
        let tree = lender.map(|anon| unsafe { anon.as_ref() }.lock_tree());
        let pin = self.cpu.pin();
        let cut = self.mm.index.edit(&mut self.supplies.nodes, &pin, gone.start, 0, |vma, edit| {
            let all = edit.range();
            let fits = all.end == gone.end && all.start < gone.start && vma.object().is_none();
            if fits {
                self.mm.account(self.cpu.id(), vma.flags(), -(gone.pages() as i64));
                self.mm.note(self.cpu, &pin, vma);
                vma.change(|vma| vma.set_end(gone.start));
                edit.set_end(gone.start);
            }
            fits
        });
        drop(pin);
        drop(tree);
        if let Some(anon) = lender {
            // SAFETY: ends the visit above.
            unsafe { anon.as_ref().leave(&self.cpu.participant()) };
        }
        let cut = cut == Some(true);
        if cut {
            self.mm.count_unmapped(self.cpu.id(), gone.pages());
        }
        cut
    }
}
