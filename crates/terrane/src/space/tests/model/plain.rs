//! The plain model: what an address space is, a page at a time, without anything clever.

use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE, page_ceil, page_floor};
use crate::error::{Error, FaultError};
use crate::mm::STACK_GUARD_GAP;
use crate::space::MapRequest;
use crate::testing::TestHost;
use crate::vma::{Access, Advice, MapFlags, Prot, VmFlags};
use alloc::collections::BTreeSet;
use alloc::rc::Rc;
use alloc::vec::Vec;

/// Pages of the spaces: few, so that operations meet, and on both sides of a page table's end and of 1 GiB, where
/// `LOW_2GIB` begins.
pub(super) const PAGES: u64 = 96;
pub(super) const BASE: u64 = (1 << 30) - 48 * PAGE_SIZE;
pub(super) const LIMITS: AddrRange = AddrRange { start: BASE, end: BASE + PAGES * PAGE_SIZE };
const LOW: u64 = 1 << 30;

const SIZE: usize = PAGE_SIZE as usize;
type Bytes = Rc<[u8; SIZE]>;

/// What a mapped page is.
#[derive(Clone)]
pub(super) struct Page {
    pub(super) flags: VmFlags,
    /// Which object, and which page of it.
    pub(super) shows: Option<(usize, u64)>,
    /// The private content, once there is one.
    pub(super) own: Option<Bytes>,
    /// Every access raises a signal.
    pub(super) guard: bool,
}

/// A file or shared memory.
pub(super) struct Object {
    pub(super) len: u64,
    /// What mappings show: whole pages.
    pub(super) data: Vec<u8>,
    /// What the file holds; `None` for memory.
    pub(super) file: Option<Vec<u8>>,
    pub(super) writable: bool,
    /// Pages that may differ from the file's.
    pub(super) dirty: BTreeSet<u64>,
    /// A page was not taken, and nobody has been told.
    failed: bool,
}

impl Object {
    pub(super) fn memory(len: u64) -> Self {
        Self { len, data: Vec::new(), file: None, writable: true, dirty: BTreeSet::new(), failed: false }
            .whole()
    }

    pub(super) fn file(bytes: &[u8], writable: bool) -> Self {
        let (len, data) = (bytes.len() as u64, bytes.into());
        Self { len, data, file: Some(bytes.into()), writable, dirty: BTreeSet::new(), failed: false }.whole()
    }

    fn whole(mut self) -> Self {
        resize(&mut self.data, (self.len.div_ceil(PAGE_SIZE) as usize) * SIZE);
        self
    }

    pub(super) fn pages(&self) -> u64 {
        self.len.div_ceil(PAGE_SIZE)
    }

    fn page(&self, index: u64) -> Option<&[u8]> {
        (index < self.pages()).then(|| &self.data[index as usize * SIZE..][..SIZE])
    }

    /// Makes a page zeros, in the file too.
    fn punch(&mut self, index: u64) {
        if index < self.pages() {
            let start = index as usize * SIZE;
            let end = (start + SIZE).min(self.len as usize);
            self.data[start..start + SIZE].fill(0);
            self.dirty.remove(&index);
            if let Some(file) = &mut self.file {
                file[start..end].fill(0);
            }
        }
    }

    /// Writes the dirty pages among `pages`; returns whether there were any.
    fn write_back(&mut self, pages: core::ops::Range<u64>, fails: bool) -> bool {
        let Some(file) = &mut self.file else { return false };
        let found: Vec<u64> = self.dirty.range(pages).copied().collect();
        self.failed |= fails && !found.is_empty();
        if !fails {
            for index in &found {
                let start = *index as usize * SIZE;
                let end = (start + SIZE).min(self.len as usize);
                file[start..end].copy_from_slice(&self.data[start..end]);
                self.dirty.remove(index);
            }
        }
        !found.is_empty()
    }

    fn set_len(&mut self, len: u64) {
        if len <= self.len {
            self.data.truncate(len as usize);
            self.dirty = self.dirty.iter().copied().filter(|index| index * PAGE_SIZE < len).collect();
        }
        self.len = len;
        resize(&mut self.data, (len.div_ceil(PAGE_SIZE) as usize) * SIZE);
        if let Some(file) = &mut self.file {
            resize(file, len as usize);
        }
    }
}

/// A space: its pages, and its heap in bytes.
#[derive(Clone)]
pub(super) struct Plain {
    pub(super) pages: Vec<Option<Page>>,
    pub(super) heap: (u64, u64),
    /// It has been a parent or a child.
    pub(super) forked: bool,
    pub(super) top_down: bool,
}

/// `Vec::resize` with zeros, in pieces: without optimisation that goes byte by byte.
fn resize(bytes: &mut Vec<u8>, len: usize) {
    bytes.truncate(len);
    while bytes.len() < len {
        bytes.extend_from_slice(&[0; SIZE][..(len - bytes.len()).min(SIZE)]);
    }
}

fn number(addr: u64) -> usize {
    ((addr - BASE) >> PAGE_SHIFT) as usize
}

fn address(number: usize) -> u64 {
    BASE + ((number as u64) << PAGE_SHIFT)
}

impl Plain {
    pub(super) fn new(top_down: bool) -> Self {
        Self { pages: (0..PAGES).map(|_| None).collect(), heap: (0, 0), forked: false, top_down }
    }

    pub(super) fn page(&self, addr: u64) -> Option<&Page> {
        if LIMITS.contains(addr) { self.pages[number(addr)].as_ref() } else { None }
    }

    pub(super) fn pages_of(&self, range: AddrRange) -> &[Option<Page>] {
        &self.pages[number(range.start)..number(range.end)]
    }

    pub(super) fn mapped(&self) -> u64 {
        self.pages.iter().flatten().count() as u64
    }

    /// What a touch of the page ends in; on success the page is as the touch leaves it.
    fn touch(&mut self, objects: &mut [Object], addr: u64, access: Access) -> Result<&mut Page, FaultError> {
        let page = LIMITS.contains(addr).then(|| self.pages[number(addr)].as_mut()).flatten();
        let page = page.ok_or(FaultError::NotMapped)?;
        if !page.flags.allows(access) {
            return Err(FaultError::NotAllowed);
        }
        if page.guard {
            return Err(FaultError::Guard);
        }
        if page.own.is_some() {
            return Ok(page);
        }
        let content = match page.shows {
            Some((object, index)) => Some(objects[object].page(index).ok_or(FaultError::BeyondEnd)?),
            None => None,
        };
        if access == Access::Write {
            if page.flags.is_private() {
                let mut own = [0; SIZE];
                own.copy_from_slice(content.unwrap_or(&[0; SIZE]));
                page.own = Some(Rc::new(own));
            } else if let Some((object, index)) = page.shows {
                objects[object].dirty.insert(index);
            }
        }
        Ok(page)
    }

    /// What a fault does below a stack.
    fn grow(&mut self, addr: u64) {
        if !LIMITS.contains(addr) || self.page(addr).is_some() {
            return;
        }
        let n = number(addr);
        let Some(first) = (n..PAGES as usize).find(|&n| self.pages[n].is_some()) else { return };
        let Some(stack) = self.pages[first].clone().filter(|page| page.flags.contains(VmFlags::GROWSDOWN))
        else {
            return;
        };
        let below = (0..n).rev().find(|&n| self.pages[n].is_some());
        let near = below.is_some_and(|below| {
            let flags = self.pages[below].as_ref().map_or(VmFlags::empty(), |page| page.flags);
            let distance = addr - address(below + 1);
            flags.intersects(VmFlags::PROT)
                && !flags.contains(VmFlags::GROWSDOWN)
                && distance < STACK_GUARD_GAP
        });
        if !near {
            self.pages[n..first].fill(Some(Page { own: None, guard: false, ..stack }));
        }
    }

    pub(super) fn load(
        &mut self,
        objects: &mut [Object],
        addr: u64,
        access: Access,
    ) -> Result<u64, FaultError> {
        self.grow(addr);
        let page = self.touch(objects, addr, access)?;
        let within = (addr % PAGE_SIZE) as usize;
        let content = match (&page.own, page.shows) {
            (Some(own), _) => &own[..],
            (None, Some((object, index))) => &objects[object].data[index as usize * SIZE..],
            (None, None) => return Ok(0),
        };
        Ok(u64::from_le_bytes(content[within..][..8].try_into().unwrap()))
    }

    pub(super) fn store(&mut self, objects: &mut [Object], addr: u64, value: u64) -> Result<(), FaultError> {
        self.grow(addr);
        let page = self.touch(objects, addr, Access::Write)?;
        let within = (addr % PAGE_SIZE) as usize;
        let content = match (&mut page.own, page.shows) {
            (Some(own), _) => &mut Rc::make_mut(own)[..],
            (None, Some((object, index))) => &mut objects[object].data[index as usize * SIZE..],
            (None, None) => unreachable!("a private page that was stored to is its own"),
        };
        content[within..][..8].copy_from_slice(&value.to_le_bytes());
        Ok(())
    }

    /// Touches the pages of the range as `populate` does.
    pub(super) fn populate(
        &mut self,
        objects: &mut [Object],
        range: AddrRange,
        access: Access,
    ) -> Result<(), FaultError> {
        for at in (range.start..range.end).step_by(SIZE) {
            self.touch(objects, at, access)?;
        }
        Ok(())
    }

    fn is_free(&self, range: AddrRange) -> bool {
        self.pages[number(range.start)..number(range.end)].iter().all(Option::is_none)
    }

    /// True when the range is free and keeps its distance from a stack above.
    fn fits(&self, range: AddrRange) -> bool {
        self.is_free(range) && range.end <= self.guard_above(range)
    }

    /// Where the guard gap of the stack above begins, if a stack is what lies above.
    fn guard_above(&self, range: AddrRange) -> u64 {
        let above = (number(range.end)..PAGES as usize).find(|&n| self.pages[n].is_some());
        let stack = above
            .filter(|&n| self.pages[n].as_ref().is_some_and(|page| page.flags.contains(VmFlags::GROWSDOWN)));
        stack.map_or(u64::MAX, |n| address(n).saturating_sub(STACK_GUARD_GAP))
    }

    fn place(&self, request: &MapRequest<TestHost>, len: u64) -> Result<u64, Error> {
        let pages = len / PAGE_SIZE;
        if pages > PAGES {
            return Err(Error::NoMemory);
        }
        let fits = |addr: &u64| self.fits(AddrRange::new(*addr, *addr + len));
        if request.flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE) {
            let end = request.addr.checked_add(len).ok_or(Error::NoMemory)?;
            if end > LIMITS.end {
                return Err(Error::NoMemory);
            }
            if !request.addr.is_multiple_of(PAGE_SIZE) {
                return Err(Error::Invalid);
            }
            if request.addr < BASE {
                return Err(Error::NotPermitted);
            }
            if request.flags.contains(MapFlags::FIXED_NOREPLACE)
                && !self.is_free(AddrRange::new(request.addr, end))
            {
                return Err(Error::Exists);
            }
            return Ok(request.addr);
        }
        let low = request.flags.contains(MapFlags::LOW_2GIB);
        if request.addr != 0 {
            let hint = Some(page_floor(request.addr).max(BASE));
            let inside = |hint: &u64| hint.checked_add(len).is_some_and(|end| end <= LIMITS.end);
            if let Some(hint) = hint.filter(inside).filter(fits) {
                return Ok(hint);
            }
        }
        let mut places = (0..=PAGES - pages).map(|n| address(n as usize));
        if low {
            return places.filter(|&addr| addr >= LOW).find(fits).ok_or(Error::NoMemory);
        }
        if !self.top_down {
            return places.find(fits).ok_or(Error::NoMemory);
        }
        // As in Linux: where the highest free place reaches into the guard gap of a stack, the search goes on below all of that.
        let mut high = LIMITS.end;
        let found = places.rev().find(|&addr| {
            let range = AddrRange::new(addr, addr + len);
            if range.end > high || !self.is_free(range) {
                return false;
            }
            let gap = self.guard_above(range);
            high = high.min(gap);
            range.end <= gap
        });
        found.ok_or(Error::NoMemory)
    }

    /// `mmap`. `object` is the number of the request's object; without one a shared mapping makes one.
    pub(super) fn map(
        &mut self,
        objects: &mut Vec<Object>,
        request: &MapRequest<TestHost>,
        object: Option<usize>,
    ) -> Result<u64, Error> {
        let len = match request.len {
            0 => return Err(Error::Invalid),
            len => page_ceil(len).ok_or(Error::NoMemory)?,
        };
        let shared = request.flags.contains(MapFlags::SHARED);
        if shared == request.flags.contains(MapFlags::PRIVATE) {
            return Err(Error::Invalid);
        }
        let mut flags = (VmFlags::MAYREAD | VmFlags::MAYWRITE | VmFlags::MAYEXEC).with_prot(request.prot);
        flags.set(VmFlags::SHARED, shared);
        flags.set(VmFlags::GROWSDOWN, request.flags.contains(MapFlags::GROWSDOWN));
        flags.set(VmFlags::NORESERVE, request.flags.contains(MapFlags::NORESERVE));
        flags.set(VmFlags::NOHUGEPAGE, request.flags.contains(MapFlags::STACK));
        if flags.contains(VmFlags::GROWSDOWN) && (object.is_some() || shared) {
            return Err(Error::Invalid);
        }
        if object.is_some() {
            if !request.offset.is_multiple_of(PAGE_SIZE) {
                return Err(Error::Invalid);
            }
            if request.offset.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
                return Err(Error::Overflow);
            }
        }
        if shared && object.is_some_and(|object| !objects[object].writable) {
            if request.prot.contains(Prot::WRITE) {
                return Err(Error::Access);
            }
            flags.remove(VmFlags::MAYWRITE);
        }
        let addr = self.place(request, len)?;
        let (object, first) = match object {
            Some(object) => (Some(object), request.offset / PAGE_SIZE),
            None if shared => {
                objects.push(Object::memory(len));
                (Some(objects.len() - 1), 0)
            }
            None => (None, 0),
        };
        for n in 0..len / PAGE_SIZE {
            let shows = object.map(|object| (object, first + n));
            self.pages[number(addr) + n as usize] = Some(Page { flags, shows, own: None, guard: false });
        }
        if request.flags.contains(MapFlags::POPULATE) && !request.prot.is_empty() {
            let write = !shared && request.prot.contains(Prot::WRITE);
            let access = if write { Access::Write } else { Access::Read };
            let _ = self.populate(objects, AddrRange::new(addr, addr + len), access);
        }
        Ok(addr)
    }

    pub(super) fn unmap(&mut self, addr: u64, len: u64) -> Result<(), Error> {
        let range = page_range(addr, len)?;
        if range.is_empty() || range.end > LIMITS.end {
            return Err(Error::Invalid);
        }
        for at in (range.start.max(BASE)..range.end).step_by(SIZE) {
            self.pages[number(at)] = None;
        }
        Ok(())
    }

    pub(super) fn protect(&mut self, addr: u64, len: u64, prot: Prot) -> Result<(), Error> {
        if !addr.is_multiple_of(PAGE_SIZE) {
            return Err(Error::Invalid);
        }
        let range = page_range(addr, len).map_err(|_| Error::NoMemory)?;
        let forbidden = |page: &Page| prot.contains(Prot::WRITE) && !page.flags.contains(VmFlags::MAYWRITE);
        for at in (range.start..range.end).step_by(SIZE) {
            let page = self.page(at).ok_or(Error::NoMemory)?;
            if forbidden(page) {
                return Err(Error::Access);
            }
            // What lies before an obstacle is changed.
            if let Some(page) = &mut self.pages[number(at)] {
                page.flags = page.flags.with_prot(prot);
            }
        }
        Ok(())
    }

    pub(super) fn advise(
        &mut self,
        objects: &mut [Object],
        addr: u64,
        len: u64,
        advice: Advice,
    ) -> Result<(), Error> {
        let range = page_range(addr, len)?;
        let pattern = VmFlags::RAND_READ | VmFlags::SEQ_READ;
        let (set, clear) = match advice {
            Advice::PopulateRead | Advice::PopulateWrite => {
                let write = advice == Advice::PopulateWrite;
                let access = if write { Access::Write } else { Access::Read };
                // Loads need the permission here, which they need nowhere else.
                let needs = if write { VmFlags::WRITE } else { VmFlags::READ };
                for at in (range.start..range.end).step_by(SIZE) {
                    if self.page(at).is_some_and(|page| !page.flags.contains(needs)) {
                        return Err(Error::Invalid);
                    }
                    let one = AddrRange::new(at, at + PAGE_SIZE);
                    self.populate(objects, one, access).map_err(FaultError::as_populate_error)?;
                }
                return Ok(());
            }
            Advice::Normal => (VmFlags::empty(), pattern),
            Advice::Random => (VmFlags::RAND_READ, pattern),
            Advice::Sequential => (VmFlags::SEQ_READ, pattern),
            Advice::DontFork => (VmFlags::DONTCOPY, VmFlags::empty()),
            Advice::DoFork => (VmFlags::empty(), VmFlags::DONTCOPY),
            Advice::WipeOnFork => (VmFlags::WIPEONFORK, VmFlags::empty()),
            Advice::KeepOnFork => (VmFlags::empty(), VmFlags::WIPEONFORK),
            Advice::HugePage => (VmFlags::HUGEPAGE, VmFlags::NOHUGEPAGE),
            Advice::NoHugePage => (VmFlags::NOHUGEPAGE, VmFlags::HUGEPAGE),
            Advice::DontDump => (VmFlags::DONTDUMP, VmFlags::empty()),
            Advice::DoDump => (VmFlags::empty(), VmFlags::DONTDUMP),
            _ => (VmFlags::empty(), VmFlags::empty()),
        };
        let mut hole = false;
        for at in (range.start..range.end).step_by(SIZE) {
            let page = LIMITS.contains(at).then(|| self.pages[number(at)].as_mut()).flatten();
            let Some(page) = page else {
                hole = true;
                continue;
            };
            match advice {
                Advice::WipeOnFork | Advice::Free if page.shows.is_some() => return Err(Error::Invalid),
                // No aligned 2 MiB fit into the arena: see `huge` for those.
                Advice::Collapse => return Err(Error::Invalid),
                Advice::DontNeed | Advice::DontNeedLocked => page.own = None,
                Advice::GuardInstall => (page.own, page.guard) = (None, true),
                Advice::GuardRemove => page.guard = false,
                Advice::Remove => {
                    let (object, index) = page.shows.ok_or(Error::Invalid)?;
                    if !page.flags.contains(VmFlags::SHARED | VmFlags::MAYWRITE) {
                        return Err(Error::Access);
                    }
                    objects[object].punch(index);
                }
                _ => page.flags = page.flags.difference(clear).union(set),
            }
        }
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }

    pub(super) fn brk(&mut self, end: u64) -> u64 {
        let (start, now) = self.heap;
        let (Some(old), Some(new)) = (page_ceil(now), page_ceil(end)) else { return now };
        if end < start || start == 0 {
            return now;
        }
        if new < old {
            if self.is_free(AddrRange::new(new, old)) {
                return now;
            }
            let _ = self.unmap(new, old - new);
        } else if new > old {
            let grown = AddrRange::new(old, new.saturating_add(PAGE_SIZE).min(LIMITS.end));
            if new > LIMITS.end || !self.fits(grown) {
                return now;
            }
            let flags =
                (VmFlags::MAYREAD | VmFlags::MAYWRITE | VmFlags::MAYEXEC).with_prot(Prot::READ | Prot::WRITE);
            for page in &mut self.pages[number(old)..number(new)] {
                *page = Some(Page { flags, shows: None, own: None, guard: false });
            }
        }
        self.heap.1 = end;
        end
    }

    pub(super) fn fork(&mut self) -> Self {
        self.forked = true;
        let mut child = self.clone();
        for place in &mut child.pages {
            match place {
                Some(page) if page.flags.contains(VmFlags::DONTCOPY) => *place = None,
                Some(page) if page.flags.contains(VmFlags::WIPEONFORK) => {
                    (page.own, page.guard) = (None, false)
                }
                _ => {}
            }
        }
        child
    }

    /// `ends`: where mappings end. What fails ends the call behind the mapping in which it does.
    pub(super) fn sync(
        &self,
        objects: &mut [Object],
        addr: u64,
        len: u64,
        fails: bool,
        ends: &BTreeSet<u64>,
    ) -> Result<(), Error> {
        if !addr.is_multiple_of(PAGE_SIZE) {
            return Err(Error::Invalid);
        }
        let range = page_range(addr, len).map_err(|_| Error::NoMemory)?;
        let mut hole = false;
        for at in (range.start..range.end).step_by(SIZE) {
            let last = ends.contains(&(at + PAGE_SIZE)) || at + PAGE_SIZE == range.end;
            match self.page(at) {
                Some(Page { flags, shows: Some((object, index)), .. }) if !flags.is_private() => {
                    let object = &mut objects[*object];
                    object.write_back(*index..index + 1, fails);
                    if last && core::mem::take(&mut object.failed) {
                        return Err(Error::Io);
                    }
                }
                Some(_) => {}
                None => hole = true,
            }
        }
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }
}

/// `ftruncate`.
pub(super) fn set_len(objects: &mut [Object], spaces: &mut [&mut Plain], object: usize, len: u64) {
    objects[object].set_len(len);
    let pages = objects[object].pages();
    for page in spaces.iter_mut().flat_map(|space| space.pages.iter_mut().flatten()) {
        if page.shows.is_some_and(|(shown, index)| shown == object && index >= pages) {
            page.own = None;
        }
    }
}

/// Writes all dirty pages of an object.
pub(super) fn write_back(objects: &mut [Object], object: usize, fails: bool) -> Result<(), Error> {
    if objects[object].write_back(0..u64::MAX, fails) && fails { Err(Error::Io) } else { Ok(()) }
}

fn page_range(addr: u64, len: u64) -> Result<AddrRange, Error> {
    let len = page_ceil(len).ok_or(Error::Invalid)?;
    AddrRange::of_len(addr, len).filter(|_| addr.is_multiple_of(PAGE_SIZE)).ok_or(Error::Invalid)
}
