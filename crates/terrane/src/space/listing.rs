//! Showing the mappings: one consistent state, and nobody waits for it.
//!
//! The protocol is [`history`](crate::history)'s. Here is what reads the index for it: the images and notes that calls
//! write, and the listing itself.

use super::AddressSpace;
use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::error::{Error, OutOfMemory};
use crate::history::{Log, Piece, Recording, restore};
use crate::host::Host;
use crate::identity::Identity;
use crate::index::Reserve;
use crate::machine::Cpu;
use crate::mm::{Exclusive, Layout, Locking, Mm};
use crate::sync::{Pin, Shared};
use crate::vma::{Prot, Snapshot, VmFlags, Vma};
use alloc::vec::Vec;
use core::fmt;
use core::ops::ControlFlow;

/// What a mapping shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Backing {
    /// Private memory.
    Anonymous,
    /// Private memory that `brk` moves the end of.
    Heap,
    /// Private memory that grows downwards.
    Stack,
    /// Memory shared between spaces.
    Shared,
    /// A file.
    File,
}

/// One VMA, as it was when the listing was made. Prints as a line of `/proc/pid/maps`, without device, inode and
/// path: a [`Listing`] knows these.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// Addresses, in bytes.
    pub range: AddrRange,
    /// What is allowed.
    pub prot: Prot,
    /// True when stores reach the object.
    pub shared: bool,
    /// Where in the object it starts, in bytes; 0 for private memory.
    pub offset: u64,
    /// What it shows.
    pub backing: Backing,
    /// All attributes.
    pub flags: VmFlags,
    /// The [number](crate::object::Object::number) of the object; 0 for private memory.
    pub object: u64,
}

impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = |set: bool, c: char| if set { c } else { '-' };
        write!(
            f,
            "{:08x}-{:08x} {}{}{}{} {:08x} 00:00 0",
            self.range.start,
            self.range.end,
            mark(self.prot.contains(Prot::READ), 'r'),
            mark(self.prot.contains(Prot::WRITE), 'w'),
            mark(self.prot.contains(Prot::EXEC), 'x'),
            if self.shared { 's' } else { 'p' },
            self.offset,
        )?;
        match self.backing {
            Backing::Heap => f.write_str("    [heap]"),
            Backing::Stack => f.write_str("    [stack]"),
            _ => Ok(()),
        }
    }
}

/// Set in [`Piece::object`] for files; the rest is the object's number.
const IS_FILE: u64 = 1;

/// Looks at a record that is being changed before it is read under the lock of its leaf.
const LOOKS: u32 = 16;

/// VMAs read under one pin.
const A_PIN: usize = 256;

/// Attempts to list beside calls before they are kept out, each with more room for what they write.
const ATTEMPTS: u32 = 3;

/// The record of `vma`, which says `seen`.
fn piece_of<H: Host>(vma: &Vma<H>, seen: Snapshot) -> Piece {
    let object =
        vma.object().map_or(0, |object| object.number() << 1 | if object.is_file() { IS_FILE } else { 0 });
    Piece { range: seen.range, flags: seen.flags.bits(), pgoff: seen.pgoff, object }
}

impl<H: Host> Mm<H> {
    /// Tells the listing under way, if there is one, what a call's ranges hold. The call has locked all of them and changed
    /// nothing yet. Not while pinned.
    #[inline]
    pub(crate) fn enter(&self, cpu: &Cpu<H>, holds: &[&Exclusive<'_, H>]) {
        let number = self.history.active();
        if number != 0 {
            self.enter_listed(cpu, holds, number);
        }
    }

    #[cold]
    fn enter_listed(&self, cpu: &Cpu<H>, holds: &[&Exclusive<'_, H>], number: u64) {
        for hold in holds {
            let Exclusive::Range(held) = hold else { continue };
            held.aware_of(number);
            let range = held.range();
            if cpu.images().contains(number, range) {
                continue;
            }
            let pin = cpu.pin();
            let Some(log) = self.history.log(&pin, number) else { return };
            log.image(range, |visit| self.read_range(&pin, range, visit));
            cpu.images().add(number, range);
        }
    }

    /// Tells the listing under way what the record of `vma` is like, which a call is about to change beyond its range. Under the
    /// lock of the leaf, outside of any bracket.
    #[inline]
    pub(crate) fn note(&self, cpu: &Cpu<H>, pin: &Pin<'_>, vma: &Vma<H>) {
        let number = self.history.reading();
        if number != 0 {
            self.note_listed(cpu, pin, vma, number);
        }
    }

    #[cold]
    fn note_listed(&self, cpu: &Cpu<H>, pin: &Pin<'_>, vma: &Vma<H>, number: u64) {
        let piece = piece_of(vma, vma.snapshot());
        if !cpu.notes().contains(number, piece.range)
            && let Some(log) = self.history.log(pin, number)
        {
            log.note(piece);
            cpu.notes().add(number, piece.range);
        }
    }

    /// Tells the listing under way what the heap is, which a call that has entered is about to move. Not while pinned.
    pub(crate) fn note_heap(&self, cpu: &Cpu<H>) {
        let number = self.history.active();
        if number != 0
            && let Some(log) = self.history.log(&cpu.pin(), number)
        {
            log.heap(self.heap.range());
        }
    }

    /// Visits what is mapped in `range`, which the caller has locked: whole VMAs, as far as neighbours leave them alone.
    fn read_range(&self, pin: &Pin<'_>, range: AddrRange, visit: &mut dyn FnMut(Piece)) {
        let mut at = range.start;
        while at < range.end
            && let Some((vma, seen)) = self.next_vma(pin, at, range.end)
        {
            visit(piece_of(vma, seen));
            at = seen.range.end;
        }
    }

    /// What the record of `vma`, found for `at` or above, says: all of it at one moment. `None` when it has left the index.
    fn read_record(&self, pin: &Pin<'_>, vma: &Vma<H>, at: u64) -> Option<Piece> {
        for round in 0..LOOKS {
            if vma.seq.is_dead() {
                return None;
            }
            if let Some(seen) = vma.read() {
                return Some(piece_of(vma, seen));
            }
            self.machine.host().relax(pin.cpu(), round);
        }
        // Fork and collapse keep the bracket open for long. They do not change the record, and those that do hold the leaf.
        let at = at.max(vma.start());
        self.index.edit(&mut Reserve::new(), pin, at, 0, |vma, _| piece_of(vma, vma.snapshot()))
    }

    /// Reads all records, in any order, at different times, and some perhaps twice or not at all: those that are being changed.
    fn read_all(&self, cpu: &Cpu<H>, mut visit: impl FnMut(Piece) -> ControlFlow<()>) {
        let mut at = Some(0);
        while let Some(from) = at.take() {
            let pin = cpu.pin();
            let mut count = 0;
            self.index.for_each(&pin, AddrRange::new(from, u64::MAX), |vma| {
                let Some(piece) = self.read_record(&pin, vma, from) else { return ControlFlow::Continue(()) };
                visit(piece)?;
                count += 1;
                if count < A_PIN {
                    return ControlFlow::Continue(());
                }
                at = Some(piece.range.end.max(from));
                ControlFlow::Break(())
            });
        }
    }

    /// Adds what [`read_all`](Self::read_all) reads to `list`.
    fn collect_all(&self, cpu: &Cpu<H>, list: &mut Vec<Piece>) -> Result<(), OutOfMemory> {
        list.try_reserve(self.index.len()).map_err(|_| OutOfMemory)?;
        let mut result = Ok(());
        self.read_all(cpu, |piece| {
            result = push(list, piece);
            if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        result
    }

    /// The layout, and the heap, of the moment when calls began to write; `None` when there was no room for what they wrote.
    fn read_beside_calls(
        &self,
        cpu: &Cpu<H>,
        recording: &Recording<'_, H::Mutex>,
    ) -> Result<Option<(Vec<Piece>, AddrRange)>, OutOfMemory> {
        let host = self.machine.host();
        let log: &Log = recording.log();
        self.ranges.await_aware(host, cpu.id(), log.number());
        recording.begin_reading(&cpu.participant(), |rounds| host.relax(cpu.id(), rounds));
        let heap = self.heap.range();
        let mut seen = Vec::new();
        self.collect_all(cpu, &mut seen)?;
        for piece in log.notes() {
            push(&mut seen, piece)?;
        }
        let heap = log.first_heap().unwrap_or(heap);
        let list = restore(seen, log)?;
        // Looked at last: what was left out may be needed for what was read.
        Ok((!log.has_overflowed()).then_some((list, heap)))
    }
}

fn push<T>(list: &mut Vec<T>, value: T) -> Result<(), OutOfMemory> {
    list.try_reserve(1).map_err(|_| OutOfMemory)?;
    list.push(value);
    Ok(())
}

/// The mappings of a space at one moment between calls, with what they are called: what
/// [`text`](crate::text) prints.
#[derive(Debug, Default)]
pub struct Listing {
    /// The mappings, ascending.
    pub mappings: Vec<Mapping>,
    /// What the host has said about the program.
    pub layout: Layout,
    /// By number, ascending.
    names: Vec<(u64, Shared<Identity>)>,
}

impl Listing {
    /// What an object is called, if the host has said it.
    pub fn identity(&self, object: u64) -> Option<&Identity> {
        let place = self.names.binary_search_by_key(&object, |&(number, _)| number).ok()?;
        Some(&self.names[place].1)
    }
}

impl<H: Host> AddressSpace<H> {
    /// The mappings with the names of what they show: the state of one moment between calls. Keeps no call and no fault
    /// waiting. O(n log n).
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub fn listing(&self, cpu: &Cpu<H>) -> Result<Listing, Error> {
        let kept = cpu.machine().identities().keep();
        let mappings = self.mappings(cpu)?;
        let numbers = mappings.iter().map(|mapping| mapping.object).filter(|&number| number != 0);
        let names = kept.names_of(numbers)?;
        Ok(Listing { mappings, layout: self.mm().layout.get(), names })
    }

    /// Says where the program's code and its first stack are, as a program loader does once; see [`Layout`]. A fork has the
    /// same.
    pub fn set_layout(&self, layout: Layout) {
        self.mm().layout.set(layout);
    }

    /// What the host has said about the program.
    pub fn layout(&self) -> Layout {
        self.mm().layout.get()
    }

    /// The mappings, ascending: the state of one moment between calls. Keeps no call and no fault waiting. O(n).
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub fn mappings(&self, cpu: &Cpu<H>) -> Result<Vec<Mapping>, Error> {
        let (pieces, heap) = self.read_layout(cpu)?;
        let mut list = Vec::new();
        list.try_reserve_exact(pieces.len()).map_err(|_| OutOfMemory)?;
        list.extend(pieces.iter().map(|piece| Mapping::new(piece, heap)));
        Ok(list)
    }

    fn read_layout(&self, cpu: &Cpu<H>) -> Result<(Vec<Piece>, AddrRange), OutOfMemory> {
        let mm = self.mm();
        for attempt in 0..ATTEMPTS {
            if mm.locking == Locking::Classic {
                break;
            }
            // As much as calls write while a listing of this size is made, as a rule; it is not much memory.
            let entries = (64 + mm.index.len() / 4) << (3 * attempt);
            let listings = cpu.machine().listings();
            let read = mm.history.record(&cpu.participant(), listings, entries, |recording| {
                mm.read_beside_calls(cpu, recording)
            });
            cpu.participant().collect_now();
            match read {
                Ok(Ok(Some(layout))) => return Ok(layout),
                Ok(Ok(None)) => {}
                // Less memory will do below.
                Ok(Err(OutOfMemory)) | Err(OutOfMemory) => break,
            }
        }
        let _all = mm.share(cpu, self.config().range);
        let heap = mm.heap.range();
        let mut list = Vec::new();
        mm.collect_all(cpu, &mut list)?;
        Ok((list, heap))
    }
}

impl Mapping {
    fn new(piece: &Piece, heap: AddrRange) -> Self {
        let (range, flags) = (piece.range, VmFlags::from_bits_retain(piece.flags));
        // As in Linux: a mapping that only touches the heap is none of it.
        let is_heap = range.start < heap.end && heap.start < range.end;
        let backing = match piece.object {
            0 if is_heap => Backing::Heap,
            0 if flags.contains(VmFlags::GROWSDOWN) => Backing::Stack,
            0 => Backing::Anonymous,
            object if object & IS_FILE != 0 => Backing::File,
            _ => Backing::Shared,
        };
        let offset = if piece.object == 0 { 0 } else { piece.pgoff << PAGE_SHIFT };
        let object = piece.object >> 1;
        Mapping { range, prot: flags.prot(), shared: !flags.is_private(), offset, backing, flags, object }
    }
}
