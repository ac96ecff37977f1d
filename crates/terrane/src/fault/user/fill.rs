//! Putting pages into empty entries for a handler: many under one pin, by the protocol of faults.
//!
//! A batch is what one attempt does: found once, walked once, up to 64 pages of one table in one VMA. Its frames are allocated and filled
//! before, with nothing held, for the bytes come from the caller's memory and reading them may take its time. Each entry is
//! taken while it is empty, the VMA validated, the page published: as a first touch does it, and beside first touches, unmaps and
//! forks it is as safe. What has been published stays when a later page cannot be.
//!
//! Pages of shared memory go into the object first, while the entry is owned: a slot that is filled already is `EEXIST`,
//! however the entry looks. If the object has been cut short meanwhile, the page is taken out again (Dekker's pattern, with the object's length).

use super::super::{Attempt, Course, Stop, private};
use super::is_clean;
use crate::addr::{AddrRange, Frame, PAGE_SHIFT, PAGE_SIZE, TABLE_ENTRIES};
use crate::error::{Error, FaultError};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::mm::rss::PageKind;
use crate::object::{InsertError, Object, Page};
use crate::page_table::{BUSY, Level, Pte, PteFlags, Raw, Slot, SlotError, TOMBSTONE};
use crate::stats::Counter;
use crate::sync::Shared;
use crate::vma::{Access, VmFlags};

/// What to put into the entries.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// These bytes, of as many pages as the range has.
    Bytes(&'a [u8]),
    /// Zeros.
    Zeros,
    /// What the object has in memory.
    Cached,
    /// The mark that the page is lost.
    Poison,
}

/// Pages in a batch at most: a pin is to be short, and the entries' cost is some 50 ns each.
const BATCH: usize = 64;

/// Bytes that one leaf table maps.
const TABLE_SPAN: u64 = PAGE_SIZE * TABLE_ENTRIES as u64;

/// Frames of a batch that are mapped nowhere yet. Those that are left are given back when it is dropped, not while pinned.
struct Spare<'a, H: Host> {
    cpu: &'a Cpu<H>,
    frames: [Frame; BATCH],
    next: usize,
    end: usize,
    /// An object that has become too short for a page that was put into it.
    late: Option<Shared<Object<H>>>,
}

impl<'a, H: Host> Spare<'a, H> {
    fn new(cpu: &'a Cpu<H>) -> Self {
        Self { cpu, frames: [Frame(0); BATCH], next: 0, end: 0, late: None }
    }

    fn len(&self) -> usize {
        self.end - self.next
    }

    fn peek(&self) -> Option<Frame> {
        self.frames[self.next..self.end].first().copied()
    }

    /// The first is used.
    fn advance(&mut self) {
        self.next += 1;
    }

    /// Gets up to `count` frames, at least one. For one that is empty; not while pinned.
    fn fill_up(&mut self, count: usize) -> Result<(), Error> {
        const TRIES: u32 = 3;
        for _ in 0..TRIES {
            {
                let pin = self.cpu.pin();
                let ram = self.cpu.machine().ram(&pin);
                (self.next, self.end) = (0, 0);
                while self.end < count.min(BATCH)
                    && let Some(frame) = ram.allocate()
                {
                    self.frames[self.end] = frame;
                    self.end += 1;
                }
            }
            if self.end > 0 {
                return Ok(());
            }
            self.cpu.find_memory();
        }
        Err(Error::NoMemory)
    }

    /// Gives back all but the first.
    fn keep_one(&mut self) {
        let pin = self.cpu.pin();
        let ram = self.cpu.machine().ram(&pin);
        while self.len() > 1 {
            self.end -= 1;
            ram.free(self.frames[self.end]);
        }
    }

    /// Writes `bytes`, of at least as many pages, into the frames, or zeros. Not pinned: the bytes may have to be fetched.
    fn write(&self, bytes: Option<&[u8]>) {
        let size = PAGE_SIZE as usize;
        for (n, &frame) in self.frames[self.next..self.end].iter().enumerate() {
            let to = self.cpu.machine().host().bytes(frame).as_ptr();
            match bytes.and_then(|bytes| bytes.get(n * size..(n + 1) * size)) {
                // SAFETY: the frame is a page, and ours alone until it is published; a reference of the caller's cannot be to
                // a frame that was free.
                Some(page) => unsafe { to.copy_from_nonoverlapping(page.as_ptr(), size) },
                // SAFETY: as above.
                None => unsafe { to.write_bytes(0, size) },
            }
        }
    }
}

impl<H: Host> Drop for Spare<'_, H> {
    fn drop(&mut self) {
        if let Some(object) = self.late.take() {
            object.cut_again(self.cpu);
        }
        if self.len() > 0 {
            let pin = self.cpu.pin();
            let ram = self.cpu.machine().ram(&pin);
            for &frame in &self.frames[self.next..self.end] {
                ram.free(frame);
            }
        }
    }
}

/// What an attempt came to.
enum Step {
    /// Filled up to here.
    Next(u64),
    /// Frames are needed.
    Frames,
    /// Filled up to here, and then this.
    Failed(u64, Error),
}

/// A call under way.
struct Fill<'a> {
    range: AddrRange,
    source: Source<'a>,
    /// Mapped write-protected.
    protect: bool,
}

/// Fills `range` from its start on, as far as it goes: returns the bytes filled, and why no more. Blocks; not while pinned.
pub(crate) fn fill<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    source: Source<'_>,
    protect: bool,
) -> (u64, Result<(), Error>) {
    let fill = Fill { range, source, protect };
    let mut at = range.start;
    let mut spare = Spare::new(cpu);
    let mut wants_frames = matches!(source, Source::Bytes(_));
    while at < range.end {
        let end = range.end.min((at & !(TABLE_SPAN - 1)).saturating_add(TABLE_SPAN));
        let mut course = Course::quiet(mm, at, end);
        at = loop {
            if wants_frames && spare.len() == 0 {
                if let Err(error) = spare.fill_up(((end - at) >> PAGE_SHIFT) as usize) {
                    return (at - range.start, Err(error));
                }
                let bytes = match source {
                    Source::Bytes(bytes) => bytes.get((at - range.start) as usize..),
                    _ => None,
                };
                spare.write(bytes);
            }
            match course.attempt(cpu, |attempt| fill.batch(attempt, at, end, &mut spare)) {
                Ok(Step::Next(next)) => break next,
                Ok(Step::Frames) => wants_frames = true,
                Ok(Step::Failed(reached, error)) => return (reached - range.start, Err(error)),
                Err(stop) => {
                    if let Err(error) = course.recover(cpu, stop) {
                        if error == FaultError::OutOfMemory && spare.len() > 1 {
                            // The frames set aside may be the last ones, and a page table is needed.
                            spare.keep_one();
                            course = Course::quiet(mm, at, end);
                            continue;
                        }
                        let error = match error {
                            FaultError::NotMapped => Error::NotFound,
                            FaultError::OutOfMemory => Error::NoMemory,
                            _ => Error::BadAddress,
                        };
                        return (at - range.start, Err(error));
                    }
                }
            }
        };
    }
    (range.len(), Ok(()))
}

impl Fill<'_> {
    /// Fills from `start` on up to `end` or less. The frames are those for `start` and the pages that follow.
    fn batch<H: Host>(
        &self,
        attempt: &Attempt<'_, H>,
        start: u64,
        end: u64,
        spare: &mut Spare<'_, H>,
    ) -> Result<Step, Stop<H>> {
        let object = match self.check(attempt, start) {
            Ok(object) => object,
            Err(error) => return Ok(Step::Failed(start, error)),
        };
        let needs_frames = match self.source {
            Source::Bytes(_) => true,
            Source::Zeros => !attempt.seen.flags.is_private(),
            Source::Cached | Source::Poison => false,
        };
        if needs_frames && spare.len() == 0 {
            return Ok(Step::Frames);
        }
        let ram = &attempt.ram;
        let table = match attempt.mm.page_table.make_leaf_table(ram, start) {
            Ok(table) => table,
            Err(SlotError::OutOfMemory) => return Err(Stop::Fail(FaultError::OutOfMemory)),
            Err(SlotError::Changed) => {
                let walk = attempt.mm.page_table.walk(ram, start);
                let is_block = walk.is_some_and(|walk| {
                    walk.level == Level::BLOCK && Pte::block::<H::Format>(walk.raw).is_some()
                });
                if is_block {
                    return Ok(Step::Failed(start, Error::Exists));
                }
                return Err(if attempt.seq.is_some() {
                    Stop::GiveUp(Counter::SpfPmdChanged)
                } else {
                    Stop::Again
                });
            }
        };
        let end = end.min(attempt.seen.range.end).min(start + BATCH as u64 * PAGE_SIZE);
        let mut at = start;
        while at < end {
            if needs_frames && spare.len() == 0 {
                break;
            }
            let slot = &table[(at >> PAGE_SHIFT) as usize % TABLE_ENTRIES];
            match self.page(attempt, at, slot, object, spare) {
                Ok(Ok(())) => at += PAGE_SIZE,
                Ok(Err(error)) => return Ok(Step::Failed(at, error)),
                // What was done stays done; the rest is met again as the first page of the next attempt.
                Err(_) if at > start => break,
                Err(stop) => return Err(stop),
            }
        }
        Ok(Step::Next(at))
    }

    /// Whether the attempt's VMA is one for this call. Its attributes are those of one moment, so an error is true of that.
    fn check<'v, H: Host>(
        &self,
        attempt: &Attempt<'v, H>,
        start: u64,
    ) -> Result<Option<&'v Shared<Object<H>>>, Error> {
        let seen = &attempt.seen;
        let whole = start != self.range.start || self.range.end <= seen.range.end;
        if !whole || seen.flags.user_context() == 0 {
            return Err(Error::NotFound);
        }
        if self.protect && !seen.flags.contains(VmFlags::UFFD_WP) {
            return Err(Error::Invalid);
        }
        match attempt.vma.object() {
            Some(object) if object.is_file() => Err(Error::Invalid),
            None if matches!(self.source, Source::Cached) => Err(Error::Invalid),
            object => Ok(object),
        }
    }

    /// Fills one entry.
    fn page<H: Host>(
        &self,
        attempt: &Attempt<'_, H>,
        addr: u64,
        slot: &Slot,
        object: Option<&Shared<Object<H>>>,
        spare: &mut Spare<'_, H>,
    ) -> Result<Result<(), Error>, Stop<H>> {
        let raw = slot.load();
        if raw == BUSY || raw == TOMBSTONE {
            return Err(Stop::Again);
        }
        let is_private = attempt.seen.flags.is_private();
        let beyond = object.is_some_and(|object| attempt.seen.index_of(addr) >= object.pages());
        if beyond {
            // As in Linux, whose errors differ.
            let is_cached = matches!(self.source, Source::Cached);
            return Ok(Err(if is_cached { Error::Invalid } else { Error::BadAddress }));
        }
        // As in Linux: a page may come where nothing but a mark is, but neither the frame of zeros nor poison.
        let strict =
            matches!(self.source, Source::Poison) || is_private && matches!(self.source, Source::Zeros);
        let is_mark = matches!(Pte::decode::<H::Format>(raw), Pte::UserWp | Pte::Poison | Pte::Guard);
        if !(is_clean(raw) || is_mark && !strict) {
            return Ok(Err(Error::Exists));
        }
        match (self.source, object) {
            (Source::Poison, _) => publish(attempt, slot, raw, || Ok(Pte::Poison.encode::<H::Format>())),
            (Source::Zeros, _) if is_private => publish(attempt, slot, raw, || {
                let zeros = attempt.mm.machine.zero_frame();
                Ok(self.entry::<H>(attempt, zeros, false, PteFlags::empty()))
            }),
            (Source::Cached, Some(object)) => {
                let index = attempt.seen.index_of(addr);
                let Page::Ready(frame) = object.page(attempt.ram.pin, index) else {
                    return Ok(Err(Error::BadAddress));
                };
                publish(attempt, slot, raw, || {
                    if !object.still_holds(attempt.ram.pin, index, frame) {
                        return Err(Error::BadAddress);
                    }
                    count(attempt, frame);
                    Ok(self.entry::<H>(attempt, frame, !is_private, PteFlags::DIRTY))
                })
            }
            (_, object) => {
                let Some(frame) = spare.peek() else { return Err(Stop::Again) };
                match object {
                    Some(object) if !is_private => {
                        self.page_of_object(attempt, addr, (slot, raw), object, spare)
                    }
                    // As in Linux, a page for a private mapping of an object is not seen by others.
                    _ => {
                        let anon = private::prepare_anon(attempt)?;
                        publish(attempt, slot, raw, || {
                            spare.advance();
                            private::own(attempt, frame, anon, addr);
                            count(attempt, frame);
                            Ok(self.entry::<H>(attempt, frame, true, PteFlags::DIRTY))
                        })
                    }
                }
            }
        }
    }

    /// Puts a frame into the object as the page at `addr`, and maps it.
    fn page_of_object<H: Host>(
        &self,
        attempt: &Attempt<'_, H>,
        addr: u64,
        (slot, raw): (&Slot, Raw),
        object: &Shared<Object<H>>,
        spare: &mut Spare<'_, H>,
    ) -> Result<Result<(), Error>, Stop<H>> {
        let Some(frame) = spare.peek() else { return Err(Stop::Again) };
        let (pin, index) = (attempt.ram.pin, attempt.seen.index_of(addr));
        // Allocates, so before the entry is taken.
        if object.prepare_page(pin, index).is_err() {
            return Err(Stop::Fail(FaultError::OutOfMemory));
        }
        publish(attempt, slot, raw, || match object.insert_page(pin, index, frame) {
            Ok(()) => {
                spare.advance();
                count(attempt, frame);
                Ok(self.entry::<H>(attempt, frame, true, PteFlags::DIRTY))
            }
            Err(InsertError::Exists) => Err(Error::Exists),
            Err(InsertError::Refused) => Err(Error::NoMemory),
            Err(InsertError::BeyondEnd) => {
                spare.advance();
                spare.late = Some(object.clone());
                Err(Error::BadAddress)
            }
        })
    }

    /// The entry for `frame`: what the VMA allows, without the permission to store if it must not be had yet.
    fn entry<H: Host>(&self, attempt: &Attempt<'_, H>, frame: Frame, writable: bool, marks: PteFlags) -> Raw {
        let vm = attempt.seen.flags;
        let mut flags = vm.read_only_pte().union(marks);
        flags.set(PteFlags::WRITE, writable && !self.protect && vm.contains(VmFlags::WRITE));
        flags.set(PteFlags::USER_WP, self.protect);
        let pte = if vm.allows(Access::Read) {
            Pte::Page { frame, flags }
        } else {
            Pte::NoAccess { frame, flags: flags.intersection(marks.union(PteFlags::USER_WP)) }
        };
        pte.encode::<H::Format>()
    }
}

/// Counts `frame`, which the caller is about to map in an entry that it owns.
fn count<H: Host>(attempt: &Attempt<'_, H>, frame: Frame) {
    if let Some(kind) = PageKind::from_flags(attempt.ram.frames.meta(frame).flags()) {
        attempt.mm.count_page(attempt.ram.pin, kind);
    }
}

/// Takes the entry, validates the VMA, and publishes what `entry` gives; with an error, gives the entry back as it was.
fn publish<H: Host>(
    attempt: &Attempt<'_, H>,
    slot: &Slot,
    raw: Raw,
    entry: impl FnOnce() -> Result<Raw, Error>,
) -> Result<Result<(), Error>, Stop<H>> {
    let taken = slot.take(raw).ok_or(Stop::Again)?;
    if !attempt.still_valid() {
        drop(taken);
        return Err(Stop::GiveUp(Counter::SpfVmaChanged));
    }
    Ok(entry().map(|raw| taken.publish(raw)))
}
