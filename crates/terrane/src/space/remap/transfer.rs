//! How one mapping goes from one place to another: the steps that the head of [`remap`](super) states.

use super::{Source, Wish, outside};
use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::error::Error;
use crate::fault::user::context::UserFeatures;
use crate::fault::user::protect;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::object::Object;
use crate::space::carry::{Carrier, Luggage};
use crate::space::change::{Change, Gone};
use crate::space::splits::Splits;
use crate::space::{AddressSpace, retry_with_memory};
use crate::sync::Shared;
use crate::vma::{RemapFlags, Snapshot, VmFlags, Vma};
use core::ops::ControlFlow;
use core::ptr::NonNull;

impl<H: Host> AddressSpace<H> {
    /// Moves what `wish` says of `source` to `new`; both ranges are held. `replace`: something may be mapped there.
    #[allow(clippy::too_many_arguments, reason = "two ends of a move")]
    pub(super) fn move_to(
        &self,
        cpu: &Cpu<H>,
        old: &mut Change<'_, H>,
        into: &mut Change<'_, H>,
        source: &Source<H>,
        wish: Wish,
        new: AddrRange,
        replace: bool,
    ) -> Result<(), Error> {
        let mm = self.mm();
        let keep = wish.flags.contains(RemapFlags::DONTUNMAP);
        // What shrinks is cut first.
        let from = AddrRange::new(wish.addr, wish.addr + wish.old_len.min(wish.new_len));
        // All that can fail.
        into.narrow(new);
        let (mut replaced, mut freed) = (None, 0);
        if replace {
            into.plan_splits()?;
            into.check_seals(new)?;
            let pin = cpu.pin();
            replaced = Some(into.removal(&pin, new)).filter(|removal| removal.anything);
            if replaced.is_some() && keep {
                into.for_each(&pin, new, |_, seen| {
                    freed += seen.range.intersection(new).pages();
                    ControlFlow::Continue(())
                });
            }
        }
        let records = 1 + replaced.as_ref().map_or(0, |removal| removal.records);
        retry_with_memory(cpu, || into.plan(&cpu.pin(), records))?;
        let gone = match self.check_move(old, source, &wish, from, freed) {
            Ok(gone) => gone,
            Err(error) => {
                // As in Linux, the new place is cleared by then.
                if replaced.is_some() {
                    into.remove(new, true);
                }
                return Err(error);
            }
        };
        let mut ends = Splits::new(mm, cpu, from);
        ends.reserve()?;
        retry_with_memory(cpu, || old.plan(&cpu.pin(), if from.is_empty() { 0 } else { 3 }))?;
        let mut luggage = Luggage::pack(mm, cpu, from, new.start)?;
        let private = source.seen.flags.is_private();
        let moving = match private && !from.is_empty() {
            true => Some(mm.relocations.begin(from, new.start)?),
            false => None,
        };
        // From here on nothing fails.
        if replaced.is_some() {
            into.remove(new, false);
        }
        if !gone.is_empty() {
            old.remove(gone, false);
        }
        if from.is_empty() {
            let pgoff = source.seen.index_of(wish.addr);
            let object = source.object.clone();
            let flags = moved_flags(mm, source.seen.flags);
            into.insert(cpu.pin(), new, flags, pgoff, object);
            // From below, as Linux does.
            into.merge_at(new.start);
            into.merge_at(new.end);
            return Ok(());
        }
        let taken = old.take_out(from);
        ends.cut();
        // SAFETY: taken out of the index, and ours until it is swept.
        let (gone, rest) = (unsafe { taken.vma.as_ref() }, taken.seen);
        let (anon, kin) = (gone.anon_vma(), gone.kin());
        let reset = source.object.is_none() && anon.is_none();
        let pgoff = if reset { new.start >> PAGE_SHIFT } else { rest.index_of(from.start) };
        let flags = moved_flags(mm, rest.flags);
        let made = into.make(new, flags, pgoff, source.object.clone(), anon.map(|anon| (anon, kin)));
        let carrier = Carrier {
            mm,
            cpu,
            from,
            to: new.start,
            object: source.object.as_ref(),
            anon,
            moving: moving.as_ref(),
        };
        carrier.carry(&mut luggage);
        if rest.flags.contains(VmFlags::UFFD_WP) && !flags.contains(VmFlags::UFFD_WP) {
            protect::clear(mm, cpu, new);
        }
        // The old place keeps its anon_vma where the record reaches beyond it, as in Linux.
        let again = keep.then(|| {
            let flags = rest.flags.difference(VmFlags::LOCKED | VmFlags::LOCKONFAULT);
            let anon = anon.filter(|_| !taken.whole);
            old.make(
                from,
                flags,
                rest.index_of(from.start),
                source.object.clone(),
                anon.map(|anon| (anon, kin)),
            )
        });
        old.sweep_removed(from, Some(taken.vma), &[]);
        if let Some(moving) = moving {
            mm.relocations.end(moving);
        }
        if let Some(again) = again {
            old.link(again);
            if rest.flags.contains(VmFlags::LOCKED) {
                // As in Linux, all of the mapping is unlocked, and goes on counting.
                mm.count_locked(cpu.id(), VmFlags::LOCKED, from.pages() as i64);
                let all = outside(source.seen.range, from, replace.then_some(new));
                old.set_flags(all, |flags| flags.difference(VmFlags::LOCKED_MASK));
            }
            // One record again with what it was cut off from; with others, as in Linux, it does not merge.
            if source.seen.range.end > from.end {
                old.merge_at(from.end);
            }
            if source.seen.range.start < from.start {
                old.merge_at(from.start);
            }
        }
        into.link(made);
        into.merge_at(new.start);
        into.merge_at(new.end);
        Ok(())
    }
}

/// The attributes at the new place. As in Linux a user-space handler that did not ask to follow moves loses the range. Not while pinned.
fn moved_flags<H: Host>(mm: &Mm<H>, flags: VmFlags) -> VmFlags {
    let number = flags.user_context();
    let follows = number != 0
        && mm.users.find(number).is_some_and(|one| one.features.contains(UserFeatures::EVENT_REMAP));
    if follows { flags } else { flags.difference(VmFlags::UFFD) }
}

/// A VMA that has been taken out of the index, with its attributes.
struct Taken<H: Host> {
    vma: NonNull<Vma<H>>,
    seen: Snapshot,
    /// The record was just the range, not cut off from a larger one.
    whole: bool,
}

impl<H: Host> Change<'_, H> {
    /// Takes what is mapped in `range`, all of it one VMA, out of the index, and leaves the rest of the VMA. To be swept.
    fn take_out(&mut self, range: AddrRange) -> Taken<H> {
        self.keeps_pieces = true;
        let mut taken = None;
        while taken.is_none() {
            taken = match self.remove_next(range, range.start) {
                Some((_, Gone::All(vma))) => Some((vma, true)),
                Some((_, Gone::Piece(vma))) => Some((vma, false)),
                // Nobody else unmaps it, and pieces are kept.
                _ => {
                    debug_assert!(false, "a mapping that is held is gone");
                    continue;
                }
            };
        }
        self.keeps_pieces = false;
        let Some((vma, whole)) = taken else { unreachable!("the loop has ended") };
        // SAFETY: just taken out; ours until it is swept.
        let record = unsafe { vma.as_ref() };
        record.chain_removed(None);
        Taken { vma, seen: record.snapshot(), whole }
    }

    /// A VMA for `range` that uses `anon`, as one with this [`kin`](Vma::kin) does, in the object's list, and not in the index.
    fn make(
        &mut self,
        range: AddrRange,
        flags: VmFlags,
        pgoff: u64,
        object: Option<Shared<Object<H>>>,
        anon: Option<(&crate::rmap::AnonVma<H>, u32)>,
    ) -> NonNull<Vma<H>> {
        let vma = loop {
            if self.supplies.count() == 0 {
                self.supply();
            }
            if let Some(vma) = self.supplies.create(self.mm, range, flags, pgoff, object.clone()) {
                break vma;
            }
        };
        // SAFETY: just made.
        let record = unsafe { vma.as_ref() };
        if let Some((anon, kin)) = anon {
            anon.use_again();
            record.install_anon(NonNull::from(anon));
            record.set_kin(kin);
        }
        if let Some(mappings) = self.lock_mappings(record.object()) {
            // SAFETY: in no list yet; VMAs do not move.
            unsafe { mappings.insert(&record.link) };
        }
        vma
    }

    /// Puts a VMA that was [made](Self::make) into the index.
    fn link(&mut self, vma: NonNull<Vma<H>>) {
        // SAFETY: made by this call, and in no index, so that nobody else can end it.
        let (range, flags) = unsafe { (vma.as_ref().range(), vma.as_ref().flags()) };
        let pin = self.cpu.pin();
        self.mm.index.insert(&mut self.supplies.nodes, &pin, range, vma);
        self.mm.account(self.cpu.id(), flags, range.pages() as i64);
        self.mm.mapped.add(self.cpu.id(), range.pages() as i64);
    }
}
