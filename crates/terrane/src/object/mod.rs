//! Objects: what a mapping shows besides private memory.
//!
//! An [`Object`] is a sequence of pages that several mappings, in several spaces, may show: a file, or memory
//! shared between them. It knows nothing of mappings but a list of opaque links, so that the reverse-mapping
//! layer above can find them.
//!
//! # Pages without reference counts
//!
//! A page-table entry that maps a page of an object does *not* count as a reference, so that two processors that
//! map pages of one file write nothing in common. What keeps the page alive is that whoever takes a page out of
//! the cache first clears its slot, then removes every mapping it finds through reverse mapping, waiting
//! out entries that are taken, and only then gives the frame up, through the epoch. A fault that has taken an
//! entry looks at the slot once more before it publishes ([`Object::still_holds`]): Dekker's pattern again, as
//! between the sequence counter and a sweep.
//!
//! Reclaim finds a page by its frame's number, and so must find the object without owning it: it *holds* the page for a moment
//! ([`FrameFlags::HELD`]), by compare-and-swap from flags that only a page of an object has. Whoever takes a page out waits for that
//! ([`FrameMeta::dismiss`](crate::frame::FrameMeta::dismiss)); the end of the object takes out all of its pages, so it stays meanwhile, and reclaim
//! becomes one of its owners, unless there are none any more.
//!
//! # A page on its way out
//!
//! Reclaim first takes [`FrameFlags::UPTODATE`] away and sets [`FrameFlags::LOCKED`], as if the page were being read: faults wait for it.
//! (A fault that had found it before looks once more when it owns the entry, at the slot and at this flag.) Then it removes the mappings, writes what must
//! be written, empties the slot, or, for memory without a file, makes it name a slot of the swap device, and wakes who waits. If the page
//! cannot be written it is given back as it was. All of this under the object's lock for write-back and truncation.
//!
//! # The length
//!
//! Whoever cuts an object short sets the length, counts the cut, waits for the pages beyond that are being read, then empties the slots, then
//! sweeps the mappings.
//!
//! Whoever reads a page looks at the count, then at the length, fills the slot, and looks at the count again, before it reads (Dekker's pattern: slot
//! filled, count read; count raised, slots read). If it is the same, whoever cuts the object short after this finds the page and waits for it. If it has
//! moved, the slot is emptied, which nobody could map yet, and all begins anew. Lengths alone would not do: an object that is cut short and
//! grows again has the length that it had, but not the bytes.
//!
//! Whoever fills a slot with a page that is ready at once looks at the length
//! after: if it has become too short, the other may have passed the slot already, and so the cut is made once more, which finds
//! the page and whatever maps it by then. (It would not do to take just the page out again: a fault that saw the length before
//! may have found it, and be mapping it.)
//!
//! # Reading
//!
//! A page that is being read stands in its slot with [`FrameFlags::LOCKED`] set. Whoever needs it waits on its
//! flags, holding nothing, and looks again.

mod bytes;
mod cache;
mod charge;
mod identity;
mod io;
mod out;
mod policy;

pub use cache::Slots;

use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE};
use crate::error::{Error, FaultError, OutOfMemory};
use crate::frame::{FrameFlags, Ram};
use crate::host::{File, FrameRange, Host};
use crate::machine::Machine;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence, note_write};
use crate::sync::once::SetOnce;
use crate::sync::{Pin, Shared};
use cache::{PageCache, Place};
use charge::Charge;
use core::cell::Cell;
use core::ptr;

/// What an object's pages come from.
enum Source<F> {
    /// Memory: a page starts as zeros and exists nowhere else.
    Memory,
    /// A file.
    File(F),
    /// Device memory: these frames, which are not the machine's.
    Device(FrameRange),
}

/// Why a page cannot be put into an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InsertError {
    /// There is one.
    Exists,
    /// The object has become too short for it.
    BeyondEnd,
    /// No more memory may be promised.
    Refused,
}

/// A sequence of pages that mappings show: a file or shared memory.
pub struct Object<H: Host> {
    machine: Shared<Machine<H>>,
    source: Source<H::File>,
    pages: PageCache,
    /// Length in bytes; pages beyond cannot be touched.
    len: AtomicU64,
    /// How often it has been cut short. Beside the length, which is written at the same times.
    cuts: AtomicU64,
    /// The mappings that show this object, for the reverse-mapping layer.
    mappings: lock_api::Mutex<H::Mutex, MappingList>,
    /// Held while dirty pages are written, or the object is cut short: by one at a time.
    io: lock_api::Mutex<H::Mutex, ()>,
    /// A page could not be written, and nobody has been told yet.
    failed: AtomicBool,
    number: u64,
    /// The machine's table knows a name for it.
    named: AtomicBool,
    /// How it counts in the account of what programs have been promised.
    charge: Charge,
    /// Where the pages of shared memory come from, where that has been said.
    policies: SetOnce<policy::RangePolicies>,
}

/// A page of an object, as a fault finds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Page {
    /// In memory and valid.
    Ready(Frame),
    /// Being read: wait with [`Object::wait_for`].
    Reading(Frame),
    /// Not in memory: [`Object::read_in`] brings it.
    Absent,
    /// In swap: [`Object::read_in`] brings it.
    Swapped,
    /// Beyond the end of the object.
    BeyondEnd,
}

impl<H: Host> Object<H> {
    /// Memory of `len` bytes, shared by those who map it, as `memfd_create` and `ftruncate` make it. Pages are made when first
    /// touched, and count as promised from then on ([`Machine::commit`]).
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn shared_memory(machine: &Shared<Machine<H>>, len: u64) -> Result<Shared<Self>, OutOfMemory> {
        Self::try_new(machine, Source::Memory, len, Charge::Pages)
    }

    /// The same as shared anonymous memory is made, and System V's: all of it counts as promised from now on, and no more is
    /// asked later. What [`set_len`](Self::set_len) adds counts, too, and is not refused.
    ///
    /// # Errors
    /// [`OutOfMemory`], also when so much may not be promised.
    pub fn anonymous_memory(machine: &Shared<Machine<H>>, len: u64) -> Result<Shared<Self>, OutOfMemory> {
        if !machine.commit().allows(charge::pages(len)) {
            return Err(OutOfMemory);
        }
        let object = Self::try_new(machine, Source::Memory, len, Charge::Whole)?;
        machine.epoch().pin_any(|pin| object.charge_len(pin, 0, len));
        Ok(object)
    }

    /// Device memory: `frames`, in order, which are nobody's to allocate, count or copy. Mappings of it are shared, and are
    /// filled in by faults only.
    ///
    /// # Errors
    /// [`Error::Invalid`] when one of the frames is the machine's memory, or there are none or too many for their numbers;
    /// [`Error::NoMemory`].
    pub fn device(machine: &Shared<Machine<H>>, frames: FrameRange) -> Result<Shared<Self>, Error> {
        let (first, memory) = (u64::from(frames.first.0), machine.frames().range());
        let (own, count) = (u64::from(memory.first.0), frames.count as u64);
        let numbers = first.checked_add(count).is_some_and(|end| end <= 1 << 32);
        let apart = first >= own + memory.count as u64 || first.saturating_add(count) <= own;
        if count == 0 || !numbers || !apart {
            return Err(Error::Invalid);
        }
        Ok(Self::try_new(machine, Source::Device(frames), count << PAGE_SHIFT, Charge::None)?)
    }

    /// A file with its page cache. A file should have one object: two have caches of their own.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn file(machine: &Shared<Machine<H>>, file: H::File) -> Result<Shared<Self>, OutOfMemory> {
        let len = file.len();
        Self::try_new(machine, Source::File(file), len, Charge::None)
    }

    fn try_new(
        machine: &Shared<Machine<H>>,
        source: Source<H::File>,
        len: u64,
        charge: Charge,
    ) -> Result<Shared<Self>, OutOfMemory> {
        let object = Shared::try_new(Self {
            machine: machine.clone(),
            source,
            pages: PageCache::new(),
            len: AtomicU64::new(len),
            cuts: AtomicU64::new(0),
            mappings: lock_api::Mutex::new(MappingList::new()),
            io: lock_api::Mutex::new(()),
            failed: AtomicBool::new(false),
            number: machine.new_object_number(),
            named: AtomicBool::new(false),
            charge,
            policies: SetOnce::new(),
        })?;
        // Its pages lead to it: see `of_page`.
        Shared::expose(&object);
        Ok(object)
    }

    /// The machine whose frames it uses.
    pub fn machine(&self) -> &Shared<Machine<H>> {
        &self.machine
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// True for a length of zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Length in pages, the last perhaps partly beyond the end.
    #[inline]
    pub fn pages(&self) -> u64 {
        (self.len() >> PAGE_SHIFT) + u64::from(self.len() & (PAGE_SIZE - 1) != 0)
    }

    /// True when stores are to reach a file, and so must be noticed page by page.
    #[inline]
    pub fn is_file(&self) -> bool {
        matches!(self.source, Source::File(_))
    }

    /// True for device memory.
    #[inline]
    pub fn is_device(&self) -> bool {
        matches!(self.source, Source::Device(_))
    }

    /// The frame of page `index` of device memory.
    #[cold]
    fn device_frame(&self, index: u64) -> Option<Frame> {
        match self.source {
            Source::Device(frames) if index < frames.count as u64 => {
                Some(Frame(frames.first.0 + index as u32))
            }
            _ => None,
        }
    }

    /// True when shared mappings may be writable.
    pub fn is_writable(&self) -> bool {
        match &self.source {
            Source::Memory | Source::Device(_) => true,
            Source::File(file) => file.is_writable(),
        }
    }

    /// Pages in memory. O(pages in memory).
    pub fn resident(&self) -> usize {
        let mut count = 0;
        self.pages.for_each_until(0, |_, slot| {
            count += usize::from(slot.get().is_some());
            true
        });
        count
    }

    /// Page `index`, if it is in memory. Lock-free; writes nothing.
    #[inline]
    pub fn page(&self, pin: &Pin<'_>, index: u64) -> Page {
        if index >= self.pages() {
            return Page::BeyondEnd;
        }
        match self.pages.place(pin, index) {
            Place::None => self.device_frame(index).map_or(Page::Absent, Page::Ready),
            Place::Frame(frame) => self.state(frame),
            Place::Swap(_) => Page::Swapped,
        }
    }

    #[inline]
    fn state(&self, frame: Frame) -> Page {
        let flags = self.machine.frames().meta(frame).flags();
        if flags.contains(FrameFlags::UPTODATE) { Page::Ready(frame) } else { Page::Reading(frame) }
    }

    /// The 64 slots around page `index` (aligned), for work on many pages; `None` when none was ever filled.
    #[inline]
    pub fn slots<'p>(&'p self, pin: &'p Pin<'_>, index: u64) -> Option<Slots<'p>> {
        self.pages.slots(pin, index)
    }

    /// True when `frame` is valid: for use with [`slots`](Self::slots).
    #[inline]
    pub fn is_ready(&self, frame: Frame) -> bool {
        self.machine.frames().meta(frame).flags().contains(FrameFlags::UPTODATE)
    }

    /// True when page `index` is still `frame`, and to be mapped. For a caller that has just taken a page-table entry with a
    /// `SeqCst` read-modify-write; see the head of the module.
    #[inline]
    pub fn still_holds(&self, pin: &Pin<'_>, index: u64, frame: Frame) -> bool {
        self.pages.get(pin, index) == Some(frame)
            && mutant!("object_maps_leaving", self.is_still_ready(frame), true)
            || self.device_frame(index) == Some(frame)
    }

    /// True when `frame`, which a slot still holds, is to be mapped, and not on its way out. As
    /// [`still_holds`](Self::still_holds).
    #[inline]
    pub fn is_still_ready(&self, frame: Frame) -> bool {
        self.machine.frames().meta(frame).flags_while_owned().contains(FrameFlags::UPTODATE)
    }

    /// A page of shared memory that does not exist yet: makes it, or finds what another made meanwhile; `None` when that is
    /// elsewhere by now.
    ///
    /// # Errors
    /// [`FaultError::OutOfMemory`]; [`FaultError::Refused`] when no more memory may be promised; [`FaultError::BeyondEnd`] when the object
    /// has been cut short meanwhile: [`read_in`](Self::read_in) settles that.
    pub fn make_page(&self, pin: &Pin<'_>, index: u64) -> Result<Option<Frame>, FaultError> {
        self.make_page_of(pin, index, |ram| ram.allocate_zeroed())
    }

    /// The same with a frame, all zeros, from `allocate`.
    pub(crate) fn make_page_of(
        &self,
        pin: &Pin<'_>,
        index: u64,
        allocate: impl FnOnce(&Ram<'_, H>) -> Option<Frame>,
    ) -> Result<Option<Frame>, FaultError> {
        debug_assert!(!self.is_file());
        if !self.may_charge() {
            return Err(FaultError::Refused);
        }
        let ram = self.machine.ram(pin);
        let slot = self.pages.make_slot(pin, index)?;
        let frame = allocate(&ram).ok_or(OutOfMemory)?;
        let meta = ram.frames.meta(frame);
        meta.set_owner(ptr::from_ref(self).cast_mut().cast());
        meta.set_index(index);
        meta.init_flags(FrameFlags::CACHE | FrameFlags::SHMEM | FrameFlags::UPTODATE);
        let found = match slot.fill(frame) {
            Ok(()) => {
                self.charge_pages(pin, 1);
                Some(frame)
            }
            Err(winner) => {
                // Reclaim may have found the frame by its number, and be looking at its owner.
                meta.dismiss();
                ram.free(frame);
                if let Place::Frame(winner) = winner { Some(winner) } else { None }
            }
        };
        if self.is_still_long_enough(index) { Ok(found) } else { Err(FaultError::BeyondEnd) }
    }

    /// For who has just filled the slot of page `index`: see the head of the module.
    fn is_still_long_enough(&self, index: u64) -> bool {
        fence(Ordering::SeqCst);
        index < self.pages()
    }

    /// Makes room in the cache for page `index`, so that [`insert_page`](Self::insert_page) needs no memory.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn prepare_page(&self, pin: &Pin<'_>, index: u64) -> Result<(), OutOfMemory> {
        self.pages.make_slot(pin, index).map(drop)
    }

    /// Makes `frame`, which is the caller's alone and holds the bytes, page `index` of this shared memory.
    /// [`prepare_page`](Self::prepare_page) has been called. With [`InsertError::BeyondEnd`] the frame is the cache's all the same, and the
    /// caller cuts the object short again ([`cut_again`](Self::cut_again)); with the other errors it is still the caller's.
    ///
    /// # Errors
    /// [`InsertError`].
    pub(crate) fn insert_page(&self, pin: &Pin<'_>, index: u64, frame: Frame) -> Result<(), InsertError> {
        debug_assert!(!self.is_file());
        if !self.may_charge() {
            return Err(InsertError::Refused);
        }
        let ram = self.machine.ram(pin);
        let Ok(slot) = self.pages.make_slot(pin, index) else { return Err(InsertError::Exists) };
        let meta = ram.frames.meta(frame);
        meta.set_owner(ptr::from_ref(self).cast_mut().cast());
        meta.set_index(index);
        meta.init_flags(FrameFlags::CACHE | FrameFlags::SHMEM | FrameFlags::UPTODATE);
        if slot.fill(frame).is_err() {
            // Reclaim may have found the frame by its number, and be looking at its owner.
            meta.dismiss();
            meta.init_flags(FrameFlags::empty());
            return Err(InsertError::Exists);
        }
        self.charge_pages(pin, 1);
        if self.is_still_long_enough(index) { Ok(()) } else { Err(InsertError::BeyondEnd) }
    }

    /// Says that page `index`, `frame`, is about to be written through a mapping.
    #[inline]
    pub fn mark_dirty(&self, frame: Frame) {
        if self.is_device() {
            return;
        }
        let meta = self.machine.frames().meta(frame);
        // Looked at first: threads that write one page share no line until one of them must.
        if !meta.flags().contains(FrameFlags::DIRTY) {
            meta.set_flags(FrameFlags::DIRTY);
        }
    }

    /// The list of mappings, locked. Whoever takes it counts `rmap_lock`.
    pub fn lock_mappings(&self) -> lock_api::MutexGuard<'_, H::Mutex, MappingList> {
        self.mappings.lock()
    }

    pub(crate) fn lock_io(&self) -> lock_api::MutexGuard<'_, H::Mutex, ()> {
        self.io.lock()
    }

    /// The same, if nobody holds it.
    pub(crate) fn try_lock_io(&self) -> Option<lock_api::MutexGuard<'_, H::Mutex, ()>> {
        self.io.try_lock()
    }

    /// Under the lock for write-back and truncation.
    pub(crate) fn store_len(&self, len: u64) {
        let cuts = len < self.len();
        self.len.store(len, Ordering::SeqCst);
        if cuts {
            // Behind the length: whoever sees this cut as one that has been sees the length that it left.
            self.cuts.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// How often the object has been cut short. For who asks for the length next, fills a slot, and then compares.
    fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::SeqCst)
    }

    /// Checks that `len` bytes at `offset` can be named in pages.
    ///
    /// # Errors
    /// [`Error::Overflow`] when they cannot, [`Error::Invalid`] for an offset off the page boundary.
    pub fn check_extent(offset: u64, len: u64) -> Result<(), Error> {
        if offset & (PAGE_SIZE - 1) != 0 {
            return Err(Error::Invalid);
        }
        // As in Linux: the last page's number must fit the file's index.
        offset.checked_add(len).filter(|&end| end <= i64::MAX as u64).map(|_| ()).ok_or(Error::Overflow)
    }
}

/// A mapping's place in the list of its object: part of the VMA record.
pub struct MappingLink {
    prev: Cell<*const MappingLink>,
    next: Cell<*const MappingLink>,
}

impl MappingLink {
    /// A link in no list.
    #[inline]
    pub const fn new() -> Self {
        Self { prev: Cell::new(ptr::null()), next: Cell::new(ptr::null()) }
    }
}

impl Default for MappingLink {
    fn default() -> Self {
        Self::new()
    }
}

/// The mappings of an object: a list through their records. Used under the object's mapping lock only.
pub struct MappingList {
    first: Cell<*const MappingLink>,
    len: Cell<usize>,
}

// SAFETY: the list is reached only through its lock, and so are the links while they are in it.
unsafe impl Send for MappingList {}

impl MappingList {
    fn new() -> Self {
        Self { first: Cell::new(ptr::null()), len: Cell::new(0) }
    }

    /// Mappings in the list.
    pub fn len(&self) -> usize {
        self.len.get()
    }

    /// True when nothing maps the object.
    pub fn is_empty(&self) -> bool {
        self.len.get() == 0
    }

    /// Adds a link. O(1).
    ///
    /// # Safety
    /// `link` is in no list, and stays where it is until [`remove`](Self::remove) takes it out.
    pub unsafe fn insert(&self, link: *const MappingLink) {
        let first = self.first.get();
        note_write(link, 1);
        note_write(&self.first, 1);
        if !first.is_null() {
            note_write(first, 1);
        }
        // SAFETY: the caller's promise; links in the list are valid by the same promise.
        unsafe {
            (*link).prev.set(ptr::null());
            (*link).next.set(first);
            if !first.is_null() {
                (*first).prev.set(link);
            }
        }
        self.first.set(link);
        self.len.set(self.len.get() + 1);
    }

    /// Takes a link out. O(1).
    ///
    /// # Safety
    /// `link` is in this list.
    pub unsafe fn remove(&self, link: *const MappingLink) {
        // SAFETY: the caller's promise.
        unsafe {
            let (prev, next) = ((*link).prev.get(), (*link).next.get());
            for neighbour in [prev, next].into_iter().filter(|link| !link.is_null()) {
                note_write(neighbour, 1);
            }
            note_write(&self.first, 1);
            if prev.is_null() {
                self.first.set(next);
            } else {
                (*prev).next.set(next);
            }
            if !next.is_null() {
                (*next).prev.set(prev);
            }
        }
        self.len.set(self.len.get() - 1);
    }

    /// The links, newest first; valid while the lock is held.
    pub fn iter(&self) -> impl Iterator<Item = *const MappingLink> + '_ {
        let mut next = self.first.get();
        core::iter::from_fn(move || {
            if next.is_null() {
                return None;
            }
            let link = next;
            // SAFETY: links in the list are valid, and the borrow of `self` keeps the lock held.
            next = unsafe { (*link).next.get() };
            Some(link)
        })
    }
}

describe!([] MappingLink { prev, next });

#[cfg(terrane_watch)]
impl<H: Host> Object<H> {
    /// The names of its fields and of the slots of its pages, for the cache-line audit.
    pub fn describe(&self, names: &mut crate::names::Names) {
        names.leaf(self);
        names.field("len", &self.len);
        names.field("cuts", &self.cuts);
        names.field("mappings", &self.mappings);
        names.field("io", &self.io);
        names.field("failed", &self.failed);
        names.field("pages", &self.pages);
    }
}
