//! The calls as a program makes them: Linux's numbers in, errors that are its errnos out ([`Error::errno`]).
//!
//! For a kernel that has taken the arguments out of registers. Flags that are unknown, or that contradict one another, are refused or
//! ignored here just as Linux 6.18 does on x86-64; the calls behind take types that leave less to check.

use super::{AddressSpace, MapRequest, place};
use crate::addr::{PAGE_SIZE, page_ceil};
use crate::error::Error;
use crate::host::Host;
use crate::machine::Cpu;
use crate::object::Object;
use crate::sync::Shared;
use crate::vma::{MapFlags, Prot, RemapFlags, VmFlags};

/// `PROT_SEM`: for atomics; has no effect on the machines at hand.
pub const PROT_SEM: u32 = 0x8;
/// `PROT_GROWSDOWN`: from the beginning of a stack.
pub const PROT_GROWSDOWN: u32 = 0x0100_0000;
/// `PROT_GROWSUP`: to the end of a mapping that grows upwards, of which there are none.
pub const PROT_GROWSUP: u32 = 0x0200_0000;

/// The kinds of mappings among the flags of `mmap` (`MAP_TYPE`).
const MAP_TYPE: u64 = 0x0f;
const MAP_SHARED: u64 = 0x01;
const MAP_PRIVATE: u64 = 0x02;
const MAP_SHARED_VALIDATE: u64 = 0x03;
const MAP_DROPPABLE: u64 = 0x08;
const MAP_ANONYMOUS: u64 = 0x20;
const MAP_HUGETLB: u64 = 0x4_0000;
/// The flags that `MAP_SHARED_VALIDATE` takes (`LEGACY_MAP_MASK`): those that were there before it. `MAP_FIXED_NOREPLACE` came later.
const LEGACY: u64 = MAP_SHARED_VALIDATE
    | 0x10
    | MAP_ANONYMOUS
    | 0x40
    | 0x80
    | 0x100
    | 0x800
    | 0x1000
    | 0x2000
    | 0x4000
    | 0x8000
    | 0x1_0000
    | 0x2_0000
    | MAP_HUGETLB
    | 0x400_0000
    | 0x1f << 26;

/// A file as a program has opened it: what `mmap` gets by a descriptor.
pub struct OpenFile<'a, H: Host> {
    /// What it is.
    pub object: &'a Shared<Object<H>>,
    /// Opened for reading.
    pub readable: bool,
    /// Opened for writing.
    pub writable: bool,
    /// The file only grows (`S_APPEND`).
    pub append_only: bool,
}

impl<H: Host> AddressSpace<H> {
    /// `mmap(addr, len, prot, flags, fd, offset)`, where `file` is what the descriptor stands for; see [`map`](Self::map).
    ///
    /// # Errors
    /// As `mmap` of Linux 6.18, in its order. `MAP_HUGETLB` is refused with [`Error::Invalid`], as by a kernel without a pool of huge
    /// pages, and `MAP_SYNC` with [`Error::Unsupported`] where flags are checked (`MAP_SHARED_VALIDATE`); elsewhere it is ignored.
    #[allow(clippy::too_many_arguments, reason = "the arguments of mmap")]
    pub fn mmap(
        &self,
        cpu: &Cpu<H>,
        addr: u64,
        len: u64,
        prot: u64,
        flags: u64,
        file: Option<&OpenFile<'_, H>>,
        offset: u64,
    ) -> Result<u64, Error> {
        if !offset.is_multiple_of(PAGE_SIZE) {
            return Err(Error::Invalid);
        }
        let file = match (flags & MAP_ANONYMOUS != 0, file) {
            (true, _) => None,
            (false, None) => return Err(Error::BadFile),
            (false, file) => file,
        };
        if flags & MAP_HUGETLB != 0 || len == 0 {
            return Err(Error::Invalid);
        }
        let len = page_ceil(len).ok_or(Error::NoMemory)?;
        let map = MapFlags::from_bits_truncate(flags as u32).difference(MapFlags::READ_ONLY);
        // What concerns the address is said before what concerns the mapping.
        if map.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE) {
            let range = place::fixed(self.config(), addr, len)?;
            if map.contains(MapFlags::FIXED_NOREPLACE) {
                let _steady = self.mm().share(cpu, range);
                if self.mm().next_vma(&cpu.pin(), range.start, range.end).is_some() {
                    return Err(Error::Exists);
                }
            }
        } else if len > self.config().range.end {
            return Err(Error::NoMemory);
        }
        let may_lock = if map.contains(MapFlags::LOCKED) { self.may_lock() } else { Ok(()) };
        let future = self.mm().future_flags();
        let locked = if map.contains(MapFlags::LOCKED) { future | VmFlags::LOCKED } else { future };
        let lockable = may_lock.and_then(|()| self.check_memlock(locked, len / PAGE_SIZE));
        let prot = Prot::from_bits_truncate(prot as u32);
        let map = map.difference(MapFlags::SHARED | MapFlags::PRIVATE | MapFlags::DROPPABLE);
        let kind = match file {
            Some(file) => kind_of_file(file, prot, flags, len, offset),
            None => match flags & MAP_TYPE {
                MAP_SHARED => Ok(MapFlags::SHARED),
                MAP_PRIVATE => Ok(MapFlags::PRIVATE),
                MAP_DROPPABLE => Ok(MapFlags::PRIVATE | MapFlags::DROPPABLE),
                _ => Err(Error::Invalid),
            },
        };
        let stack = map.contains(MapFlags::GROWSDOWN);
        let kind = kind.and_then(|kind| {
            let is_memory = file.is_none() && kind == MapFlags::PRIVATE;
            if stack && !is_memory { Err(Error::Invalid) } else { Ok(kind) }
        });
        let kind = lockable.and(kind).map_err(|error| {
            let request = MapRequest { addr, flags: map, ..MapRequest::anonymous(len, prot) };
            let has_room = map.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE)
                || self.candidate(cpu, &request, len).is_some();
            if has_room { error } else { Error::NoMemory }
        })?;
        let map = map | kind;
        let object = file.map(|file| file.object.clone());
        self.map(cpu, MapRequest { addr, len, prot, flags: map, object, offset, align: PAGE_SIZE })
    }

    /// `mremap(addr, old_len, new_len, flags, new_addr)`; see [`remap`](Self::remap).
    ///
    /// # Errors
    /// As [`remap`](Self::remap).
    pub fn mremap(
        &self,
        cpu: &Cpu<H>,
        addr: u64,
        old_len: u64,
        new_len: u64,
        flags: u64,
        new_addr: u64,
    ) -> Result<u64, Error> {
        let flags = u32::try_from(flags).map_err(|_| Error::Invalid)?;
        self.remap(cpu, addr, old_len, new_len, RemapFlags::from_bits_retain(flags), new_addr)
    }

    /// `mprotect(addr, len, prot)`; see [`protect`](Self::protect).
    ///
    /// # Errors
    /// As [`protect`](Self::protect); [`Error::Invalid`] for protections that there are not, or a mapping that does not grow
    /// in the direction that `prot` names.
    pub fn mprotect(&self, cpu: &Cpu<H>, addr: u64, len: u64, prot: u64) -> Result<(), Error> {
        const GROWS: u64 = PROT_GROWSDOWN as u64 | PROT_GROWSUP as u64;
        let (grows, prot) = (prot & GROWS, prot & !GROWS);
        if grows == GROWS || !crate::addr::is_page_aligned(addr) {
            return Err(Error::Invalid);
        }
        if len == 0 {
            return Ok(());
        }
        let end = crate::addr::page_ceil(len).and_then(|len| addr.checked_add(len)).ok_or(Error::NoMemory)?;
        let known = u64::from(Prot::all().bits() | PROT_SEM);
        if prot & !known != 0 {
            return Err(Error::Invalid);
        }
        let prot = Prot::from_bits_truncate(prot as u32);
        if grows == u64::from(PROT_GROWSDOWN) {
            return self.protect_down(cpu, addr, len, prot);
        }
        if grows == u64::from(PROT_GROWSUP) {
            let pin = cpu.pin();
            let first = self.mm().index.find_exact(&pin, addr);
            return Err(if first.is_some() && end > addr { Error::Invalid } else { Error::NoMemory });
        }
        self.protect(cpu, addr, len, prot)
    }
}

/// The kind of a mapping of `file`, if that is allowed.
fn kind_of_file<H: Host>(
    file: &OpenFile<'_, H>,
    prot: Prot,
    flags: u64,
    len: u64,
    offset: u64,
) -> Result<MapFlags, Error> {
    Object::<H>::check_extent(offset, len)?;
    let mut kind = match flags & MAP_TYPE {
        MAP_SHARED_VALIDATE if flags & !LEGACY != 0 => return Err(Error::Unsupported),
        MAP_SHARED | MAP_SHARED_VALIDATE => {
            if prot.contains(Prot::WRITE) && !file.writable || file.append_only && file.writable {
                return Err(Error::Access);
            }
            MapFlags::SHARED
        }
        MAP_PRIVATE => MapFlags::PRIVATE,
        _ => return Err(Error::Invalid),
    };
    if !file.readable {
        return Err(Error::Access);
    }
    if flags & u64::from(MapFlags::GROWSDOWN.bits()) != 0 {
        return Err(Error::Invalid);
    }
    kind.set(MapFlags::READ_ONLY, !file.writable);
    Ok(kind)
}
