//! The protocol of an entry: the only lock a page fault takes (requirements B1, B3).
//!
//! # What it guarantees
//!
//! A layout change that *sweeps* entries (unmap, protect, move) leaves none behind: whatever a fault publishes is
//! either met by the sweep, or belongs to a VMA that no change has touched. No fault ever waits for another, and
//! no wait can form a circle.
//!
//! # How
//!
//! An entry goes `empty -> busy -> present`, and in the same way from any value to any other:
//!
//! 1. The fault reads the sequence counter of the VMA ([`SeqCount::read`]), and only then walks to the entry.
//! 2. [`Slot::take`] changes the value it saw to [`BUSY`] with one `SeqCst` compare-and-swap. It owns the entry.
//! 3. While it owns the entry it validates the counter ([`SeqCount::unchanged_while_owned`]).
//! 4. [`Taken::publish`] stores the new value with `Release`, or the drop of the [`Taken`] gives the old one back.
//!
//! A sweep first makes the counter odd ([`SeqCount::write_begin`], which ends in a full fence), then looks at
//! every entry of its range, waits while one is busy, and changes it by compare-and-swap ([`Slot::clear`],
//! [`Slot::replace`]).
//!
//! # Why no sweep misses an entry
//!
//! All compare-and-swaps that take, the loads that validate, and the sweep's fence are in the one total order of
//! `SeqCst`. If the sweep reads an entry before the fault takes it, its fence comes before the take in that order,
//! so the fault's validation reads the odd counter and gives the entry back. Otherwise the sweep reads `BUSY` or
//! something later: it waits, and sweeps what the fault published. The same holds when the sweep meets an empty
//! *upper* entry and skips what lies below: a table comes into being by the same protocol (its entry is taken with
//! `SeqCst`), and whoever takes an entry in the new table does so after that.
//!
//! Step 1 must come first: a counter read after the walk could be that of a later state, and the entry one of a
//! table that has been freed in between. Tombstones close that door as well (below).
//!
//! # Why nobody waits in a circle
//!
//! * The owner of a busy entry waits for nothing that another CPU may withhold: it takes no lock, does not block,
//!   and does not wait for another entry. It has its frame before it takes the entry. It may shoot down
//!   translations (copy-on-write must, before it publishes the copy), since answering a shoot-down needs nothing.
//! * A fault never waits for a busy entry, at any level: it drops everything and starts again from scratch. So
//!   whatever it held, a frame say, cannot be what the owner needs.
//! * A sweep waits for busy entries, and may hold locks of the layout. Owners need none of them. It must be able to
//!   answer shoot-downs while it waits ([`Wait::relax`] is where a host with interrupts off would).
//!
//! # Tombstones
//!
//! A table is freed when it is empty. Before it is unlinked it is closed: no entry of a closed table can be taken.
//! To close all 512 entries one by one would take 512 locked instructions, 1.3 µs. Instead, the first entry of
//! each cache line, its *head*, speaks for the line: [`Slot::take`] looks at the head after its compare-and-swap,
//! which costs nothing that can be measured, because the line is its own at that moment. Who closes writes
//! [`TOMBSTONE`] into the empty head by `SeqCst` compare-and-swap, passes a full fence, and reads the rest of the
//! line. Either it sees the entry taken and gives up, or the taker sees the tombstone and gives the entry back.
//! [`free`](super::free) has the rest.
//!
//! # Who may break it
//!
//! Whoever publishes without having validated, or validates a counter read after the walk; whoever makes an empty
//! entry anything else without [`Slot::take`]; whoever sweeps before `write_begin`; whoever blocks while owning.
//!
//! # Source
//!
//! The last validation under the entry's lock is L. Dufour's (speculative page faults v11, 2018), whose entry lock
//! is the spin lock of the table, taken with `trylock` because of requirement B3. The busy state in the entry itself
//! needs no lock word beside it and lets two faults in one table pass each other.
//!
//! [`SeqCount::read`]: crate::sync::SeqCount::read
//! [`SeqCount::unchanged_while_owned`]: crate::sync::SeqCount::unchanged_while_owned
//! [`SeqCount::write_begin`]: crate::sync::SeqCount::write_begin
//! [`Wait::relax`]: crate::host::Wait::relax

use super::format::{Format, PteFlags};
use super::pte::{self, BUSY, EMPTY, GUARD, Pte, Raw, TOMBSTONE, VALID, is_table};
use crate::addr::TABLE_ENTRIES;
use crate::frame::Ram;
use crate::host::Host;
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use core::mem::ManuallyDrop;
use core::ops::ControlFlow;
use core::ptr;

/// Entries that share a tombstone: those of one cache line of 64 bytes.
///
/// On a processor with longer lines this is still right, only the group is smaller than it could be.
const LINE_ENTRIES: usize = if cfg!(terrane_loom) { 2 } else { 8 };
/// Bytes of such a group.
const LINE_BYTES: usize = LINE_ENTRIES * size_of::<Slot>();

/// A table as its 512 entries.
pub type Table = [Slot; TABLE_ENTRIES];

/// One entry of a page table in memory. There are no others: a `Slot` cannot be made, only found in a table.
#[repr(transparent)]
#[derive(Debug)]
pub struct Slot(AtomicU64);

impl Slot {
    /// The entries of a table whose memory is `table`.
    ///
    /// # Safety
    /// `table` is the whole of a frame, aligned to its size.
    #[inline]
    pub(super) unsafe fn of_table(table: &[AtomicU64; TABLE_ENTRIES]) -> &Table {
        // `head` goes from a slot back to its line.
        let _ = ptr::from_ref(table).expose_provenance();
        // SAFETY: `Slot` is a transparent wrapper of `AtomicU64`.
        unsafe { &*ptr::from_ref(table).cast::<Table>() }
    }

    /// The first entry of the same cache line.
    #[inline]
    fn head(&self) -> &Slot {
        let line = ptr::from_ref(self).addr() & !(LINE_BYTES - 1);
        // SAFETY: every slot is in a table, which is aligned to 4096 bytes and 4096 bytes long (`of_table`), so
        // the start of its line is a slot of the same table, alive as long as `self`; the table's provenance was
        // exposed when the slot was found.
        unsafe { &*ptr::with_exposed_provenance::<Slot>(line) }
    }

    /// The entry at this moment. What is behind a valid entry has been written before.
    #[inline]
    pub fn load(&self) -> Raw {
        self.0.load(Ordering::Acquire)
    }

    /// What the entry says at this moment, if it is one of a leaf table.
    #[inline]
    pub fn decode<F: Format>(&self) -> Pte {
        Pte::decode::<F>(self.load())
    }

    /// Takes ownership of the entry if it still is `expected`. `None`, and the entry as it was, when it is not, or
    /// when `expected` is [`BUSY`] or [`TOMBSTONE`], or when the table is being closed: start again from scratch.
    ///
    /// Own it for as short as possible, and see the module head for what the owner may not do.
    #[inline]
    pub fn take(&self, expected: Raw) -> Option<Taken<'_>> {
        if expected == BUSY || expected == TOMBSTONE {
            return None;
        }
        let order = mutant!("take_acquires_only", Ordering::SeqCst, Ordering::AcqRel);
        mutant!(
            "take_without_looking",
            _ = self.0.compare_exchange(expected, BUSY, order, Ordering::Relaxed).ok()?,
            self.0.store(BUSY, Ordering::Release),
        );
        let taken = Taken { slot: self, previous: expected };
        // After the exchange: the other half is in `close`. A returned `None` drops `taken`: given back.
        let order = mutant!(
            "take_looks_relaxed",
            mutant!("validate_relaxed", Ordering::SeqCst, Ordering::Relaxed),
            Ordering::Relaxed
        );
        let closed = mutant!("take_never_looks", self.head().0.load(order) == TOMBSTONE, false);
        (!closed).then_some(taken)
    }

    /// Waits until nobody owns the entry; returns what it is then. For sweeps, never for faults.
    #[inline]
    pub fn wait_not_busy<H: Host>(&self, ram: &Ram<'_, H>) -> Raw {
        let mut raw = self.load();
        let mut rounds = 0;
        while raw == BUSY {
            ram.relax(rounds);
            rounds = rounds.saturating_add(1);
            raw = self.load();
        }
        raw
    }

    /// Empties the entry, waiting while it is busy, and returns what it was: [`EMPTY`] when nothing was there.
    #[inline]
    pub fn clear<H: Host>(&self, ram: &Ram<'_, H>) -> Raw {
        let mut raw = self.load();
        loop {
            match raw {
                EMPTY | TOMBSTONE => return EMPTY,
                BUSY => raw = self.wait_not_busy(ram),
                _ => match self.0.compare_exchange_weak(raw, EMPTY, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return raw,
                    Err(now) => raw = now,
                },
            }
        }
    }

    /// As [`clear`](Self::clear), but an entry that a handler of user faults has protected is left as [`Pte::UserWp`], and a guard stays: for shared
    /// memory, where the protection outlasts the page. Returns what the entry was.
    pub fn clear_but_mark<F: Format, H: Host>(&self, ram: &Ram<'_, H>) -> Raw {
        loop {
            let raw = self.wait_not_busy(ram);
            if !pte::is_user_protected::<F>(raw) {
                match raw {
                    EMPTY | TOMBSTONE | GUARD => return EMPTY,
                    _ if self.replace(raw, EMPTY).is_ok() => return raw,
                    _ => continue,
                }
            }
            let mark = Pte::UserWp.encode::<F>();
            if raw == mark {
                return EMPTY;
            }
            if self.replace(raw, mark).is_ok() {
                return raw;
            }
        }
    }

    /// As [`clear`](Self::clear), but leaves a guard, and returns [`EMPTY`] for it.
    #[inline]
    pub fn clear_but_guard<H: Host>(&self, ram: &Ram<'_, H>) -> Raw {
        let mut raw = self.load();
        loop {
            match raw {
                EMPTY | TOMBSTONE | GUARD => return EMPTY,
                BUSY => raw = self.wait_not_busy(ram),
                _ => match self.0.compare_exchange_weak(raw, EMPTY, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return raw,
                    Err(now) => raw = now,
                },
            }
        }
    }

    /// As [`clear`](Self::clear) for an entry of level 2.
    ///
    /// # Errors
    /// The entry, if it points to a table: that stays.
    pub(super) fn clear_block<F: Format, H: Host>(&self, ram: &Ram<'_, H>) -> Result<Raw, Raw> {
        loop {
            let raw = self.wait_not_busy(ram);
            if matches!(raw, EMPTY | TOMBSTONE) {
                return Ok(EMPTY);
            }
            if is_table::<F>(raw) {
                return Err(raw);
            }
            if self.0.compare_exchange(raw, EMPTY, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Ok(raw);
            }
        }
    }

    /// Changes the entry from `current` to `new` in one step, for sweeps and reverse mapping. Neither may be busy
    /// or a tombstone, and `current` not empty: an empty entry has to be taken.
    ///
    /// # Errors
    /// What the entry is instead of `current`. The processor may have set a flag meanwhile.
    #[inline]
    pub fn replace(&self, current: Raw, new: Raw) -> Result<(), Raw> {
        debug_assert!(!matches!(current, EMPTY | BUSY | TOMBSTONE) && !matches!(new, BUSY | TOMBSTONE));
        self.0.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire).map(drop)
    }

    /// Writes an entry of a space that no fault can reach yet: a child in the making. Not for any other.
    #[inline]
    pub fn fill(&self, new: Raw) {
        debug_assert_eq!(self.load(), EMPTY);
        self.0.store(new, Ordering::Release);
    }

    /// Writes an entry of a table that is linked nowhere yet.
    #[inline]
    pub(super) fn init(&self, raw: Raw) {
        self.0.store(raw, Ordering::Relaxed);
    }

    /// Takes the entry whatever it is, waiting for whoever owns it. `None` when its table is closed, or being closed.
    /// For a call that holds the range and will wait for nobody who may wait for it.
    #[inline]
    pub fn take_any<H: Host>(&self, ram: &Ram<'_, H>) -> Option<Taken<'_>> {
        loop {
            match self.wait_not_busy(ram) {
                TOMBSTONE => return None,
                raw => {
                    if let Some(taken) = self.take(raw) {
                        return Some(taken);
                    }
                    if self.head().load() == TOMBSTONE {
                        return None;
                    }
                }
            }
        }
    }

    /// Resumes the ownership that [`Taken::keep`] left behind; `previous` is what it returned.
    #[inline]
    pub fn resume(&self, previous: Raw) -> Taken<'_> {
        debug_assert_eq!(self.load(), BUSY, "the entry is not owned");
        Taken { slot: self, previous }
    }

    /// Closes for good a table all of whose entries the caller owns.
    ///
    /// The heads first: whoever then takes another entry of the line has read that it is empty, so the tombstone
    /// came before, and [`take`](Self::take) sees it.
    pub(super) fn bury(table: &Table) {
        for line in table.chunks_exact(LINE_ENTRIES) {
            debug_assert!(line.iter().all(|slot| slot.load() == BUSY), "an entry is not owned");
            line[0].0.store(TOMBSTONE, Ordering::SeqCst);
            for slot in &line[1..] {
                slot.0.store(EMPTY, Ordering::Release);
            }
        }
    }

    /// Adds `flags` to a valid entry, as a processor does when it uses it. Writes nothing when they are there.
    ///
    /// # Errors
    /// What the entry is instead of `expected`: look again whether it still allows the access.
    #[inline]
    pub fn set_flags<F: Format>(&self, expected: Raw, flags: PteFlags) -> Result<Raw, Raw> {
        debug_assert!(expected & VALID != 0);
        let old = F::flags(expected);
        if old.contains(flags) {
            return Ok(expected);
        }
        let new = F::with_flags(expected, old | flags);
        self.0.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire).map(|_| new)
    }

    /// Records an access through the valid entry `expected`; see [`set_flags`](Self::set_flags).
    ///
    /// # Errors
    /// What the entry is instead of `expected`.
    #[inline]
    pub fn set_accessed<F: Format>(&self, expected: Raw) -> Result<Raw, Raw> {
        self.set_flags::<F>(expected, PteFlags::ACCESSED)
    }

    /// Records a store through the valid entry `expected`; see [`set_flags`](Self::set_flags).
    ///
    /// # Errors
    /// What the entry is instead of `expected`.
    #[inline]
    pub fn set_dirty<F: Format>(&self, expected: Raw) -> Result<Raw, Raw> {
        self.set_flags::<F>(expected, PteFlags::ACCESSED.union(PteFlags::DIRTY))
    }

    /// Takes `mask` (which is without `READ`) away from a page, accessible or not, and returns the entry before.
    /// Other entries, busy ones among them, stay as they are and are returned too.
    #[inline]
    pub fn clear_flags<F: Format>(&self, mask: PteFlags) -> Raw {
        debug_assert!(!mask.contains(PteFlags::READ));
        let mut raw = self.load();
        loop {
            let new = pte::without::<F>(raw, mask);
            if new == raw {
                return raw;
            }
            match self.0.compare_exchange_weak(raw, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return raw,
                Err(now) => raw = now,
            }
        }
    }

    /// Takes the permission to store away and returns the entry before; see [`clear_flags`](Self::clear_flags).
    #[inline]
    pub fn write_protect<F: Format>(&self) -> Raw {
        self.clear_flags::<F>(PteFlags::WRITE)
    }

    /// Closes a table for good if it is empty: afterwards no entry of it can be taken. False, and the table open as
    /// before, when it is not empty or someone else is closing it.
    pub(super) fn close(table: &Table) -> bool {
        // A look first: most tables that are not empty show it at once, and nothing needs to be undone.
        if !Slot::all_empty(table) {
            return false;
        }
        let heads = table.iter().step_by(LINE_ENTRIES);
        let closed = heads.clone().take_while(|head| head.change_empty(TOMBSTONE)).count();
        if closed == TABLE_ENTRIES / LINE_ENTRIES {
            // Dekker's pattern with `take`: heads written, fence, rest read here; entry taken, head read there.
            mutant!("close_without_fence", fence(Ordering::SeqCst), ());
            if table.chunks_exact(LINE_ENTRIES).all(|line| Slot::all_empty(&line[1..])) {
                return true;
            }
        }
        for head in heads.take(closed) {
            // Ours alone: nothing but `close` changes a tombstone, and two closers do not get past the first head.
            head.0.store(EMPTY, Ordering::Release);
        }
        false
    }

    #[inline]
    fn change_empty(&self, new: Raw) -> bool {
        self.0.compare_exchange(EMPTY, new, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Unlinks what the upper entry `linked` points to, once nobody owns the entry.
    pub(super) fn unlink<H: Host>(&self, ram: &Ram<'_, H>, linked: Raw) {
        while self.0.compare_exchange(linked, EMPTY, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            self.wait_not_busy(ram);
        }
    }

    /// True when none of `slots` holds anything, at the moment each is looked at. Order it by fences.
    #[inline]
    pub fn all_empty(slots: &[Slot]) -> bool {
        let (lines, rest) = slots.as_chunks::<LINE_ENTRIES>();
        lines.iter().all(|line| union(line) == EMPTY) && union(rest) == EMPTY
    }

    /// Calls `visit` for each entry of `slots` that is neither empty nor a tombstone, in order, with its index.
    #[inline]
    pub fn for_each_used<'a>(
        slots: &'a [Slot],
        mut visit: impl FnMut(usize, &'a Slot) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut visit_line = |first: usize, line: &'a [Slot]| {
            for (index, slot) in line.iter().enumerate() {
                if !matches!(slot.0.load(Ordering::Relaxed), EMPTY | TOMBSTONE) {
                    visit(first + index, slot)?;
                }
            }
            ControlFlow::Continue(())
        };
        let (lines, rest) = slots.as_chunks::<LINE_ENTRIES>();
        for (line, entries) in lines.iter().enumerate() {
            if union(entries) != EMPTY {
                visit_line(line * LINE_ENTRIES, entries)?;
            }
        }
        visit_line(slots.len() - rest.len(), rest)
    }
}

/// All bits of all entries: [`EMPTY`] only if each of them is. One branch for a line instead of eight.
#[inline]
fn union(slots: &[Slot]) -> Raw {
    slots.iter().fold(EMPTY, |bits, slot| bits | slot.0.load(Ordering::Relaxed))
}

/// An entry that is owned: it reads as [`BUSY`] to everyone else. Dropping it gives the entry back as it was.
#[must_use = "dropping it gives the entry back"]
#[derive(Debug)]
pub struct Taken<'a> {
    slot: &'a Slot,
    previous: Raw,
}

impl<'a> Taken<'a> {
    /// What the entry was when it was taken.
    #[inline]
    pub fn previous(&self) -> Raw {
        self.previous
    }

    /// The entry that is owned.
    #[inline]
    pub fn slot(&self) -> &'a Slot {
        self.slot
    }

    /// Gives the entry its new value. What was written before, the bytes of the page say, is visible to whoever
    /// finds it. The caller has validated that the change is still wanted.
    #[inline]
    pub fn publish(self, new: Raw) {
        debug_assert!(!matches!(new, BUSY | TOMBSTONE));
        let order = mutant!("publish_relaxed", Ordering::Release, Ordering::Relaxed);
        ManuallyDrop::new(self).slot.0.store(new, order);
    }

    /// Keeps the entry taken beyond this value's life, until [`Slot::resume`]; returns what it was. As long as any of
    /// its entries is taken a table stays, so this may outlast a pin. For a call that holds the range: nobody else can
    /// give the entry back.
    #[inline]
    pub fn keep(self) -> Raw {
        ManuallyDrop::new(self).previous
    }

    /// Gives the entry back as it was, as dropping does.
    #[inline]
    pub fn give_back(self) {}
}

impl Drop for Taken<'_> {
    #[inline]
    fn drop(&mut self) {
        self.slot.0.store(self.previous, Ordering::Release);
    }
}
