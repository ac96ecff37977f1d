//! What layout changes do to the entries of the page table: zap them, shoot them down, free what they held, and change what they
//! allow. The layout itself has been changed before ([`change`](super::change)), so that faults know.

use crate::addr::AddrRange;
use crate::frame::{BLOCK_FRAMES, FrameList, Grace, Ram};
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::mm::rss::{PageKind, Removed};
use crate::mm::{BLOCK_SIZE, BlockFrames, Mm, Parting, block_around};
use crate::page_table::{BUSY, EMPTY, Level, Pte, PteFlags, Slot, swap_slot};
use crate::stats::Counter;
use crate::sync::atomic::Ordering;
use crate::vma::{Prot, Vma};
use core::ops::ControlFlow;

/// A sweep of parts of the page table: all of them are zapped, then shot down once, then freed. Pages that a fork shares are parted with a
/// table's span at a time before that (`mm::parting`), each with a shoot-down of its own.
pub(super) struct Sweep<'a, H: Host> {
    mm: &'a Mm<H>,
    cpu: &'a Cpu<H>,
    pages: FrameList,
    removed: Removed,
    found: bool,
    tables: bool,
    /// Pages of objects are concerned, which live on elsewhere: [`Mm::ending`] is raised.
    ending: bool,
}

/// What a sweep leaves in place.
#[derive(Clone, Copy)]
enum Leave {
    Nothing,
    Guards,
    /// What handlers of user faults have protected stays so.
    Marks,
}

impl<'a, H: Host> Sweep<'a, H> {
    pub(super) fn new(mm: &'a Mm<H>, cpu: &'a Cpu<H>) -> Self {
        Self {
            mm,
            cpu,
            pages: FrameList::new(),
            removed: Removed::default(),
            found: false,
            tables: false,
            ending: false,
        }
    }

    /// Empties the entries of `range`, which no VMA covers any more, or whose pages are to be forgotten.
    /// Blocks at its ends have been divided ([`Splits`](super::splits::Splits)).
    /// `ends_object`: pages of an object are concerned that may be written through these entries, or whose mapping goes.
    pub(super) fn zap(&mut self, range: AddrRange, ends_object: bool) {
        self.end_objects(ends_object);
        self.sweep(range, Leave::Nothing);
    }

    /// The same for pages that are to be forgotten while their mapping stays: guards stay too.
    pub(super) fn forget(&mut self, range: AddrRange, ends_object: bool) {
        self.end_objects(ends_object);
        self.sweep(range, Leave::Guards);
    }

    /// The same for shared memory under the eyes of a handler of user faults: what it has protected stays protected, too.
    pub(super) fn forget_but_marks(&mut self, range: AddrRange, ends_object: bool) {
        self.end_objects(ends_object);
        self.sweep(range, Leave::Marks);
    }

    /// Empties the parts of `range` that have tables, but for what is to be left, and notes what is gone.
    #[inline]
    fn sweep(&mut self, range: AddrRange, leave: Leave) {
        let mm = self.mm;
        if mm.may_share_pages() {
            return mm.for_each_part_with_sharers(self.cpu, range, |ram, part, parting| {
                self.sweep_part(ram, part, leave, Some(parting));
            });
        }
        mm.for_each_part(self.cpu, range, |ram, part| self.sweep_part(ram, part, leave, None));
    }

    #[inline]
    fn sweep_part(
        &mut self,
        ram: &Ram<'_, H>,
        part: AddrRange,
        leave: Leave,
        mut parting: Option<&mut Parting>,
    ) {
        self.tables = true;
        let table = &self.mm.page_table;
        let mut gone = |_, pte| self.gone(ram, pte, parting.as_deref_mut());
        match leave {
            Leave::Nothing => table.zap(ram, part, &mut gone),
            Leave::Guards => table.zap_but_guards(ram, part, &mut gone),
            Leave::Marks => table.zap_but_marks(ram, part, &mut gone),
        }
    }

    /// Says, before an entry changes, whether pages of objects are concerned; see [`zap`](Self::zap).
    pub(super) fn end_objects(&mut self, ends_object: bool) {
        if ends_object && !self.ending {
            self.ending = true;
            self.mm.ending.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// An entry that said `pte` says it no more. What others map too goes to `parting`, where such pages can be.
    pub(super) fn gone(&mut self, ram: &Ram<'_, H>, pte: Pte, parting: Option<&mut Parting>) {
        self.tables = true;
        match pte {
            Pte::Page { frame, .. } | Pte::NoAccess { frame, .. } => {
                self.found = true;
                if frame == self.mm.machine.zero_frame() {
                    return;
                }
                let meta = ram.frames.meta(frame);
                let kind = PageKind::from_flags(meta.flags());
                self.removed.add(kind, 1);
                if kind != Some(PageKind::Anon) || parting.is_some_and(|parting| parting.keep(ram, pte)) {
                    return;
                }
                if meta.dec_references() == 0 {
                    self.pages.push(ram.frames, frame);
                }
            }
            Pte::Block { frame, .. } => {
                self.found = true;
                self.removed.add(Some(PageKind::Anon), BLOCK_FRAMES as u64);
                if !parting.is_some_and(|parting| parting.keep(ram, pte)) {
                    BlockFrames(frame).drop_references(ram, &mut self.pages);
                }
            }
            Pte::Swap(number) => {
                self.removed.add(Some(PageKind::Swap), 1);
                self.found |= self.mm.machine.swap().drop_entry(ram, swap_slot(number), &mut self.pages);
            }
            _ => {}
        }
    }

    /// Shoots `range`, which covers all that was zapped, down; frees the frames once that has passed; with `unmapped`,
    /// also the page tables that nothing is mapped in any more. For a caller that holds the range.
    ///
    /// Pages of objects are counted by nobody, and the object may be written back or gone the next moment. So where
    /// stores to them may be under way, or their mapping goes, it waits until the shoot-down has passed; the VMA is still in
    /// the object's list. (Loads under way do not matter to a write-back, and cutting short shoots down every mapping.)
    pub(super) fn finish(self, range: AddrRange, unmapped: bool) {
        let (mm, cpu, ending) = (self.mm, self.cpu, self.ending);
        let ticket = self.shoot_down_and_free(range, unmapped);
        if ending {
            mutant!("ending_not_awaited", cpu.await_stores(ticket), ());
            mm.ending.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn shoot_down_and_free(self, range: AddrRange, unmapped: bool) -> Ticket {
        if !self.tables {
            self.cpu.count(Counter::TlbFlushSkipped, 1);
            return Ticket::PASSED; // nothing was ever touched there
        }
        let pin = self.cpu.pin();
        let ram = self.mm.ram(&pin);
        self.mm.uncount(&pin, self.removed);
        let mut tables = FrameList::new();
        if unmapped {
            let floor = self.mm.index.last_starting_before(&pin, range.start).map_or(0, Vma::end);
            // As a rule it is small and has a neighbour below in its 2 MiB: then no table can go, whatever is above.
            let first = range.start & !(BLOCK_SIZE - 1);
            if floor <= first || range.end > first + BLOCK_SIZE {
                let above = self.mm.index.first_ending_after(&pin, range.start);
                let ceiling = above.map_or(u64::MAX, Vma::start);
                self.mm.page_table.free_tables(&ram, floor, ceiling, range, &mut tables);
            }
        }
        // The entries of an object may have been taken away a moment ago, with loads through them still under way.
        if !self.found && tables.is_empty() && !self.ending {
            self.cpu.count(Counter::TlbFlushSkipped, 1);
            return Ticket::PASSED;
        }
        let ticket = self.mm.shoot_down(&ram, range);
        if !tables.is_empty() {
            ram.defer(tables, Grace { epoch: Some(pin.epoch().now()), ticket });
        }
        if ticket == Ticket::PASSED {
            ram.free_all(self.pages);
        } else {
            ram.defer(self.pages, Grace { epoch: None, ticket });
        }
        ticket
    }
}

/// Makes the page table allow no more than `prot` in `range`, and as much for pages that were hidden. Entries that
/// allow less than `prot` stay: the next fault raises them, page by page, where sharing lets it. Blocks at the ends of the
/// range have been divided. Returns the ticket of the shoot-down.
pub(super) fn apply_protection<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange, prot: Prot) -> Ticket {
    let mut reduced = false;
    mm.for_each_part(cpu, range, |ram, part| protect_part(mm, ram, part, prot, &mut reduced));
    if !reduced {
        cpu.count(Counter::TlbFlushSkipped, 1);
        return Ticket::PASSED;
    }
    let pin = cpu.pin();
    mm.shoot_down(&mm.ram(&pin), range)
}

/// [`apply_protection`] to what one leaf table or block maps.
fn protect_part<H: Host>(mm: &Mm<H>, ram: &Ram<'_, H>, part: AddrRange, prot: Prot, reduced: &mut bool) {
    let mut divided = true;
    while divided {
        divided = false;
        let _ = mm.page_table.for_each_run(ram, part, |run| {
            if run.level == Level::PAGE {
                return Slot::for_each_used(run.slots, |_, slot| {
                    *reduced |= protect_entry(mm, ram, slot, prot);
                    ControlFlow::Continue(())
                });
            }
            // A block that reaches beyond the part is younger than the change: a first touch.
            if let Some(slot) = run.slots.first().filter(|_| part.covers(block_around(run.addr))) {
                match protect_block::<H>(ram, slot, prot) {
                    Some(less) => *reduced |= less,
                    None => divided = true,
                }
            }
            ControlFlow::Continue(())
        });
    }
}

/// Returns true when the processor may hold a translation that allows more.
fn protect_entry<H: Host>(mm: &Mm<H>, ram: &Ram<'_, H>, slot: &Slot, prot: Prot) -> bool {
    let mut raw = slot.load();
    loop {
        if raw == BUSY {
            raw = slot.wait_not_busy(ram);
            continue;
        }
        let (frame, before, hidden) = match Pte::decode::<H::Format>(raw) {
            Pte::Page { frame, flags } => (frame, flags, false),
            Pte::NoAccess { frame, flags } => (frame, flags, true),
            // It may be on its way out, with translations still in use.
            Pte::Swap(number) => return mm.machine.swap().is_in_memory(ram, swap_slot(number)),
            _ => return false,
        };
        let flags = protected(before, hidden, prot);
        let after = if flags.contains(PteFlags::READ) {
            Pte::Page { frame, flags }
        } else {
            Pte::NoAccess { frame, flags }
        };
        let new = after.encode::<H::Format>();
        if new == raw {
            return false;
        }
        match slot.replace(raw, new) {
            Ok(()) => return !hidden && is_less(before, flags),
            Err(now) => raw = now,
        }
    }
}

/// The same for an entry of level 2. `None` when a fault has divided the block this moment.
fn protect_block<H: Host>(ram: &Ram<'_, H>, slot: &Slot, prot: Prot) -> Option<bool> {
    loop {
        let raw = slot.wait_not_busy(ram);
        if raw == EMPTY {
            return Some(false);
        }
        let (frame, before) = Pte::block::<H::Format>(raw)?;
        let hidden = !before.contains(PteFlags::READ);
        let flags = protected(before, hidden, prot);
        let new = Pte::Block { frame, flags }.encode::<H::Format>();
        if new == raw {
            return Some(false);
        }
        if slot.replace(raw, new).is_ok() {
            return Some(!hidden && is_less(before, flags));
        }
    }
}

const MARKS: PteFlags = PteFlags::ACCESSED.union(PteFlags::DIRTY).union(PteFlags::USER_WP);

/// What an entry that says `before` is to say under `prot`; without `READ` it is hidden from the processor.
fn protected(before: PteFlags, hidden: bool, prot: Prot) -> PteFlags {
    if prot.is_empty() {
        return before & MARKS;
    }
    let mut after = (before & MARKS) | PteFlags::READ;
    after.set(PteFlags::EXEC, prot.contains(Prot::EXEC));
    // Permission to store is never given here: the page may be shared.
    after.set(PteFlags::WRITE, before.contains(PteFlags::WRITE) && prot.contains(Prot::WRITE) && !hidden);
    after
}

/// True when `after` allows less than `before`.
fn is_less(before: PteFlags, after: PteFlags) -> bool {
    !after.contains(before - MARKS)
}
