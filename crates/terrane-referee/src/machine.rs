//! Terrane's side: the same operations on spaces of a [`HostedMachine`].

use crate::operation::{DATA, NO_FILE, Op, Outcome, byte, word};
use crate::script::{FILES, PROCESSES, READ_ONLY, READ_ONLY_LEN, Setup, USER_END};
use crate::view::{Area, Counts, Present, Shows};
use core::sync::atomic::{AtomicU8, Ordering};
use std::io;
use std::os::fd::OwnedFd;
use terrane::addr::AddrRange;
use terrane::frame::FrameFlags;
use terrane::host::Memory;
use terrane::mm::HugePages;
use terrane::object::{Object, Page};
use terrane::page_table::{Level, Pte, X86_64};
use terrane::space::linux::OpenFile;
use terrane::space::{AddressSpace, MapRequest, SpaceConfig};
use terrane::sync::Shared;
use terrane::vma::{Prot, VmFlags};
use terrane::{Error, FaultError, PAGE_SHIFT, PAGE_SIZE};
use terrane_hosted::{Cpu, HostFile, Hosted, HostedMachine, Interrupted, MachineConfig, Space};

/// Memory of the machine: more than any script needs.
const MEMORY: u64 = 128 << 20;

/// Something that Terrane is made to do wrong, to see that it is noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plant {
    /// `munmap` of more than two pages forgets the last.
    Unmap,
    /// A store of more than 16 bytes forgets the last.
    Store,
    /// `mprotect` that forbids everything says that it did, and does nothing.
    Protect,
}

/// The file whose pages come from a file of the system; the others are memory.
pub const FILED: usize = 2;

/// Terrane, as the kernel is to judge it.
pub struct Terrane {
    cpu: Cpu,
    machine: HostedMachine,
    setup: Setup,
    spaces: [Option<Shared<Space>>; PROCESSES],
    files: Vec<File>,
    plant: Option<Plant>,
    /// Frames that were free before the first script.
    free: usize,
}

struct File {
    object: Shared<Object<Hosted>>,
    /// What the object reads from, if it is a file of the system.
    backing: Option<OwnedFd>,
}

fn broken(error: impl std::fmt::Display) -> String {
    format!("Terrane cannot be set up: {error}")
}

impl Terrane {
    /// A machine.
    ///
    /// # Errors
    /// What is missing for it.
    pub fn new(plant: Option<Plant>) -> Result<Self, String> {
        let config = MachineConfig { memory: MEMORY, cpus: 2, huge_pages: false, ..MachineConfig::default() };
        let machine = HostedMachine::new(config).map_err(broken)?;
        let cpu = machine.cpu().map_err(broken)?;
        let setup = Setup::of_pages(64);
        let free = machine.machine().usage().frames_free;
        Ok(Self { cpu, machine, setup, spaces: Default::default(), files: Vec::new(), plant, free })
    }

    /// Another machine like this one.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn another(&self) -> Result<Self, String> {
        Self::new(self.plant)
    }

    /// A new script: one process, with empty files, that may lock `memlock` bytes.
    ///
    /// # Errors
    /// What is missing for it.
    pub fn begin(&mut self, setup: &Setup, memlock: Option<u64>) -> Result<(), String> {
        self.end();
        self.setup = *setup;
        for number in 0..FILES {
            self.files.push(if number == FILED {
                let backing = rustix::fs::memfd_create("referee", rustix::fs::MemfdFlags::empty());
                let backing = backing.map_err(|error| broken(io::Error::from(error)))?;
                let file = backing.try_clone().map_err(broken)?;
                let file = HostFile::new(file).map_err(broken)?;
                let object = Object::file(self.machine.machine(), file).map_err(broken)?;
                File { object, backing: Some(backing) }
            } else {
                let object = Object::shared_memory(self.machine.machine(), 0).map_err(broken)?;
                File { object, backing: None }
            });
        }
        self.fill_read_only()?;
        let around = USER_END - setup.pages * PAGE_SIZE - PAGE_SIZE;
        let mut config = SpaceConfig::default();
        config.range = AddrRange::new(PAGE_SIZE, USER_END);
        config.huge_pages = HugePages::Never;
        config.address_limit = setup.mapped.map(|pages| around + pages * PAGE_SIZE);
        config.memlock_limit = memlock;
        let space = AddressSpace::try_new(self.cpu.core(), config).map_err(broken)?;
        // As around the kernel's window: nothing in the window can become one with it.
        let edge = Object::shared_memory(self.machine.machine(), 0).map_err(broken)?;
        for (start, end) in [(PAGE_SIZE, setup.start), (setup.end(), USER_END)] {
            let request = MapRequest::object(&edge, 0, end - start, Prot::empty(), true);
            space.map(self.cpu.core(), request.fixed(start)).map_err(broken)?;
        }
        space.set_heap(self.cpu.core(), setup.heap_start()).map_err(broken)?;
        self.spaces[0] = Some(Shared::try_new(space).map_err(broken)?);
        Ok(())
    }

    /// Puts into the file that is open for reading only what is in it.
    fn fill_read_only(&self) -> Result<(), String> {
        let object = &self.files[READ_ONLY].object;
        object.set_len(self.cpu.core(), READ_ONLY_LEN as u64);
        let store = |n: usize| {
            let value = byte(READ_ONLY as u64, n);
            self.with_byte(object, n as u64, true, |place| place.store(value, Ordering::Relaxed))
        };
        (0..READ_ONLY_LEN).try_for_each(store).ok_or_else(|| "Terrane cannot fill a file".to_owned())
    }

    /// Ends all processes.
    pub fn end(&mut self) {
        self.cpu.switch_off();
        for space in &mut self.spaces {
            *space = None;
        }
        self.files.clear();
    }

    /// Frames that the scripts so far have not given back, once all processes have ended.
    pub fn lost_frames(&mut self) -> usize {
        self.end();
        self.cpu.core().quiesce();
        self.free.saturating_sub(self.machine.machine().usage().frames_free)
    }

    fn space(&self, process: usize) -> Result<Shared<Space>, String> {
        self.spaces[process].clone().ok_or_else(|| "there is no such process".to_owned())
    }

    /// Makes process `child`, forked from `parent`.
    ///
    /// # Errors
    /// What is missing for it.
    pub fn fork(&mut self, parent: usize, child: usize) -> Result<(), String> {
        let space = self.space(parent)?.fork(self.cpu.core()).map_err(broken)?;
        self.spaces[child] = Some(Shared::try_new(space).map_err(broken)?);
        Ok(())
    }

    /// Ends a process.
    pub fn exit(&mut self, process: usize) {
        self.cpu.switch_off();
        self.spaces[process] = None;
    }

    /// Has process `process` carry out `op`, which is no fork, switch or exit.
    ///
    /// # Errors
    /// When Terrane does not have the call.
    pub fn act(&mut self, process: usize, op: &Op) -> Result<Outcome, String> {
        let space = self.space(process)?;
        if let Some(outcome) = self.touch(&space, op) {
            return Ok(outcome);
        }
        let cpu = self.cpu.core();
        let done = |result: Result<(), Error>| result.map(|()| 0);
        let result = match *op {
            Op::Map { addr, len, prot, flags, file, offset } => {
                self.map(&space, addr, len, prot, flags, file, offset)
            }
            Op::Unmap { addr, len } => {
                let forget = self.plant == Some(Plant::Unmap) && (3 * PAGE_SIZE..1 << 40).contains(&len);
                done(space.unmap(cpu, addr, if forget { len - PAGE_SIZE } else { len }))
            }
            Op::Protect { addr, len, prot } => {
                if self.plant == Some(Plant::Protect) && prot == 0 && addr % PAGE_SIZE == 0 && len < 1 << 30 {
                    Ok(0)
                } else {
                    done(space.mprotect(cpu, addr, len, prot))
                }
            }
            Op::Brk { end } => Ok(space.brk(cpu, end)),
            Op::Advise { addr, len, advice } => done(space.madvise(cpu, addr, len, advice as i32)),
            Op::ProcessAdvise { addr, len, and, for_len, advice } => {
                space.process_madvise(cpu, &[(addr, len), (and, for_len)], advice as i32, false)
            }
            Op::Remap { addr, old, new, flags, to } => space.mremap(cpu, addr, old, new, flags, to),
            Op::Lock { addr, len } => done(space.mlock(cpu, addr, len)),
            Op::Lock2 { addr, len, flags } => done(space.mlock2(cpu, addr, len, flags as u32)),
            Op::Unlock { addr, len } => done(space.munlock(cpu, addr, len)),
            Op::LockAll { flags } => done(space.mlockall(cpu, flags as u32)),
            Op::UnlockAll {} => {
                space.munlockall(cpu);
                Ok(0)
            }
            Op::Resident { addr, len } => {
                let mut resident = vec![0; (len.div_ceil(PAGE_SIZE) as usize).min(DATA)];
                return Ok(match space.mincore(cpu, addr, len, &mut resident) {
                    Ok(()) => Outcome::Value(0, resident),
                    Err(error) => Outcome::Errno(error.errno()),
                });
            }
            Op::Sync { addr, len, flags } => done(space.msync(cpu, addr, len, flags as u32)),
            Op::Seal { addr, len, flags } => done(space.mseal(cpu, addr, len, flags)),
            _ => return Err(format!("Terrane does not have ‘{}’ yet", Op::NAMES[op.kind()])),
        };
        Ok(match result {
            Ok(value) => Outcome::value(value),
            Err(error) => Outcome::Errno(error.errno()),
        })
    }

    #[allow(clippy::too_many_arguments, reason = "those of the system call")]
    fn map(
        &self,
        space: &Space,
        addr: u64,
        len: u64,
        prot: u64,
        flags: u64,
        file: u64,
        offset: u64,
    ) -> Result<u64, Error> {
        let writable = file as usize != READ_ONLY;
        let file = self.files.get(file as usize).map(|file| OpenFile {
            object: &file.object,
            readable: true,
            writable,
            append_only: false,
        });
        space.mmap(self.cpu.core(), addr, len, prot, flags, file.as_ref(), offset)
    }

    /// Loads, stores, and what concerns files only.
    fn touch(&mut self, space: &Shared<Space>, op: &Op) -> Option<Outcome> {
        if matches!(op, Op::Load { .. } | Op::Store { .. } | Op::LoadWord { .. } | Op::StoreWord { .. }) {
            self.cpu.switch_to(space);
        }
        Some(match *op {
            Op::Load { addr, len } => {
                let mut bytes = vec![0; (len as usize).min(DATA)];
                match self.cpu.read_bytes(addr, &mut bytes) {
                    Ok(()) => Outcome::Value(bytes.len() as u64, bytes),
                    Err(Interrupted { done, error }) => {
                        bytes.truncate(done);
                        signal(error, done, bytes)
                    }
                }
            }
            Op::Store { addr, len, seed } => {
                let mut bytes: Vec<u8> = (0..(len as usize).min(DATA)).map(|n| byte(seed, n)).collect();
                let all = bytes.len();
                if self.plant == Some(Plant::Store) && all > 16 {
                    bytes.pop();
                }
                match self.cpu.write_bytes(addr, &bytes) {
                    Ok(()) => Outcome::value(all as u64),
                    Err(Interrupted { done, error }) => signal(error, done, Vec::new()),
                }
            }
            Op::LoadWord { addr } => match self.cpu.load_u64(addr) {
                Ok(value) => Outcome::Value(8, value.to_le_bytes().into()),
                Err(error) => signal(error, 0, Vec::new()),
            },
            Op::StoreWord { addr, seed } => match self.cpu.store_u64(addr, word(seed)) {
                Ok(()) => Outcome::value(8),
                Err(error) => signal(error, 0, Vec::new()),
            },
            Op::Truncate { file, len } => self.truncate(file, len),
            Op::Write { file, offset, len, seed } => self.write(file, offset, len, seed),
            Op::Read { file, offset, len } => self.read(file, offset, len),
            _ => return None,
        })
    }

    fn truncate(&self, file: u64, len: u64) -> Outcome {
        if len > i64::MAX as u64 || file as usize == READ_ONLY {
            return Outcome::Errno(libc::EINVAL);
        }
        let Some(File { object, backing }) = self.files.get(file as usize) else {
            return Outcome::Errno(libc::EBADF);
        };
        let resize = || backing.as_ref().is_none_or(|file| rustix::fs::ftruncate(file, len).is_ok());
        // The order that `Object::set_len` asks for.
        let grows = len > object.len();
        let grown = !grows || resize();
        object.set_len(self.cpu.core(), len);
        if grown && (grows || resize()) { Outcome::value(0) } else { Outcome::Errno(libc::EIO) }
    }

    /// `pwrite`: through the page cache, as for any file.
    fn write(&self, file: u64, offset: u64, len: u64, seed: u64) -> Outcome {
        let Some(File { object, .. }) = self.files.get(file as usize) else {
            return Outcome::Errno(libc::EBADF);
        };
        if offset > i64::MAX as u64 {
            return Outcome::Errno(libc::EINVAL);
        }
        if file as usize == READ_ONLY {
            return Outcome::Errno(libc::EBADF);
        }
        let len = (len as usize).min(DATA);
        let end = offset + len as u64;
        if len > 0 && end > object.len() {
            self.truncate(file, end);
        }
        for n in 0..len {
            let at = offset + n as u64;
            if self
                .with_byte(object, at, true, |place| place.store(byte(seed, n), Ordering::Relaxed))
                .is_none()
            {
                return Outcome::Errno(libc::EIO);
            }
        }
        Outcome::value(len as u64)
    }

    fn read(&self, file: u64, offset: u64, len: u64) -> Outcome {
        let Some(File { object, .. }) = self.files.get(file as usize) else {
            return Outcome::Errno(libc::EBADF);
        };
        if offset > i64::MAX as u64 {
            return Outcome::Errno(libc::EINVAL);
        }
        let len = object.len().saturating_sub(offset).min(len).min(DATA as u64);
        let load = |at| self.with_byte(object, at, false, |place| place.load(Ordering::Relaxed)).unwrap_or(0);
        Outcome::Value(len, (offset..offset + len).map(load).collect())
    }

    /// Has `act` see the byte of `object` at `at`. Reading a page of memory that nobody has touched makes none: `None`.
    fn with_byte<R>(
        &self,
        object: &Object<Hosted>,
        at: u64,
        write: bool,
        act: impl FnOnce(&AtomicU8) -> R,
    ) -> Option<R> {
        let cpu = self.cpu.core();
        let index = at >> PAGE_SHIFT;
        if object.is_file() || write {
            object.read_in(cpu, index, false).ok()?;
        }
        let pin = cpu.pin();
        let Page::Ready(frame) = object.page(&pin, index) else { return None };
        if write {
            object.mark_dirty(frame);
        }
        let bytes = self.machine.machine().host().bytes(frame).as_ptr();
        // SAFETY: inside the frame, which the page keeps while we are pinned; memory of the machine is touched by atomics only.
        Some(act(unsafe { AtomicU8::from_ptr(bytes.add((at % PAGE_SIZE) as usize)) }))
    }

    /// The mappings in the window of a process.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn areas(&self, process: usize) -> Result<Vec<Area>, String> {
        Ok(self.records(process)?.into_iter().map(|(area, _)| area).collect())
    }

    /// The attributes of the mappings in the window of a process, in Linux's bits, with the addresses where they begin.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn flags(&self, process: usize) -> Result<Vec<(u64, u64)>, String> {
        Ok(self.records(process)?.into_iter().map(|(area, flags)| (area.start, flags)).collect())
    }

    /// What `smaps` would count of the mappings in the window of a process, with the addresses where they begin.
    ///
    /// # Errors
    /// If there is no such process, or no memory.
    pub fn counts(&self, process: usize) -> Result<Vec<(u64, Counts)>, String> {
        let space = self.space(process)?;
        let cpu = self.cpu.core();
        let listing = space.listing(cpu).map_err(broken)?;
        let window = AddrRange::new(self.setup.start, self.setup.end());
        let inside = listing.mappings.iter().filter(|mapping| window.covers(mapping.range));
        let count = |mapping| {
            let found = space.footprint(cpu, mapping);
            let kib = |bytes: u64| bytes >> 10;
            Counts {
                resident: kib(found.resident),
                share: kib(found.share.bytes()),
                shared: kib(found.shared_clean + found.shared_dirty),
                private: kib(found.private_clean + found.private_dirty),
                anonymous: kib(found.anonymous),
                swap: kib(found.swap),
                locked: kib(found.share_locked.bytes()),
            }
        };
        Ok(inside.map(|mapping| (mapping.range.start, count(mapping))).collect())
    }

    fn records(&self, process: usize) -> Result<Vec<(Area, u64)>, String> {
        let space = self.space(process)?;
        let mut records = Vec::new();
        let pin = self.cpu.core().pin();
        let mut at = self.setup.start;
        while let Some((vma, seen)) = space.mm().next_vma(&pin, at, self.setup.end()) {
            if seen.range.start >= self.setup.end() {
                break;
            }
            let shows = match vma.object() {
                None => Shows::Memory,
                Some(object) => {
                    match self.files.iter().position(|file| Shared::ptr_eq(&file.object, object)) {
                        Some(number) => Shows::File(number),
                        None => Shows::Shared(Shared::as_ptr(object).addr() as u64),
                    }
                }
            };
            let offset = if shows == Shows::Memory { 0 } else { seen.pgoff << PAGE_SHIFT };
            let area = Area {
                start: seen.range.start,
                end: seen.range.end,
                prot: seen.flags.prot().bits() as u8,
                shared: !seen.flags.is_private(),
                offset,
                shows,
            };
            // As in Linux, what may never be stored to is shared in name only.
            let only_named = seen.flags & (VmFlags::SHARED | VmFlags::MAYWRITE) == VmFlags::SHARED;
            let hidden = if only_named { VmFlags::SHARED } else { VmFlags::empty() };
            records.push((area, seen.flags.difference(hidden).bits()));
            at = seen.range.end;
        }
        Ok(records)
    }

    /// What is present in the window of a process, by page.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn present(&self, process: usize) -> Result<Vec<Present>, String> {
        let space = self.space(process)?;
        let machine = self.machine.machine();
        let pin = self.cpu.core().pin();
        let ram = space.mm().ram(&pin);
        let look = |addr: u64| {
            let walk = space.mm().page_table.walk(&ram, addr)?;
            if walk.level != Level::PAGE {
                return None;
            }
            match Pte::decode::<X86_64>(walk.raw) {
                Pte::Page { frame, .. } | Pte::NoAccess { frame, .. } => {
                    let own = machine.frames().meta(frame).flags().contains(FrameFlags::ANON);
                    (own || frame == machine.zero_frame()).then_some(Present::Yes)
                }
                Pte::Swap(_) => Some(Present::Yes),
                Pte::Guard => Some(Present::Guard),
                _ => None,
            }
        };
        let pages = (0..self.setup.pages).map(|page| self.setup.start + page * PAGE_SIZE);
        Ok(pages.map(|addr| look(addr).unwrap_or(Present::No)).collect())
    }
}

fn signal(error: FaultError, done: usize, bytes: Vec<u8>) -> Outcome {
    Outcome::Signal { signal: error.signal(), code: error.code(), done: done as u64, bytes }
}

/// Attributes that Terrane keeps, in Linux's bits.
pub fn known_flags() -> u64 {
    VmFlags::all().bits()
}

/// True when the arguments are those of a call: others are not generated.
pub fn is_supported(op: &Op) -> bool {
    match *op {
        Op::Map { flags, file, .. } => {
            flags >> 32 == 0 && (flags as i32 & libc::MAP_ANONYMOUS != 0 || file != NO_FILE)
        }
        _ => true,
    }
}
