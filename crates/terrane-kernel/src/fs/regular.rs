//! Regular files: their bytes are the pages of a shared object of Terrane's, so that `read`, `write`, `ftruncate` and mappings meet there.

use super::inject;
use crate::errno::Errno;
use crate::mm::{self, KernelCpu, Object};
use crate::sync::Mutex;
use core::sync::atomic::{AtomicU32, Ordering};
use terrane::PAGE_SIZE;
use terrane::object::Page;

/// `F_SEAL_SEAL`: no more seals.
pub const SEAL_SEAL: u32 = 1;
/// `F_SEAL_SHRINK`.
pub const SEAL_SHRINK: u32 = 2;
/// `F_SEAL_GROW`.
pub const SEAL_GROW: u32 = 4;
/// `F_SEAL_WRITE`.
pub const SEAL_WRITE: u32 = 8;
/// `F_SEAL_FUTURE_WRITE`.
pub const SEAL_FUTURE_WRITE: u32 = 16;
/// `F_SEAL_EXEC`.
pub const SEAL_EXEC: u32 = 32;

/// The longest file (`MAX_LFS_FILESIZE`).
pub const MAX_LENGTH: u64 = i64::MAX as u64;

/// What files there are beyond ordinary ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Nature {
    /// Bytes that can be read, written and mapped.
    Plain,
    /// Of a pool of huge pages of this size (`MFD_HUGETLB`): there are no such pages, so it never has any.
    Pool(u64),
    /// Of `memfd_secret`: it can only be mapped, and nobody gets at it but by that.
    Secret,
}

/// A regular file.
pub struct Regular {
    object: Object,
    pub nature: Nature,
    /// Held by who writes or changes the length, so that `O_APPEND` appends.
    pub writing: Mutex<()>,
    seals: AtomicU32,
}

/// What a page that could not be had means to a writer.
fn no_space(error: terrane::Error) -> Errno {
    if error == terrane::Error::NoMemory { Errno::ENOSPC } else { error.into() }
}

impl Regular {
    /// An empty file that cannot be sealed.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Self, Errno> {
        Self::with_seals(SEAL_SEAL)
    }

    /// An empty file with these seals.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn with_seals(seals: u32) -> Result<Self, Errno> {
        Self::of_nature(Nature::Plain, seals)
    }

    /// An empty file of this nature, with these seals.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn of_nature(nature: Nature, seals: u32) -> Result<Self, Errno> {
        let object = terrane::object::Object::shared_memory(mm::machine(), 0)?;
        Ok(Self { object, nature, writing: Mutex::new(()), seals: AtomicU32::new(seals) })
    }

    /// The object.
    pub fn object(&self) -> &Object {
        &self.object
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.object.len()
    }

    /// The seals.
    pub fn seals(&self) -> u32 {
        self.seals.load(Ordering::Acquire)
    }

    /// Adds seals.
    ///
    /// # Errors
    /// `EPERM` when there are to be no more.
    pub fn seal(&self, seals: u32) -> Result<(), Errno> {
        let _steady = self.writing.lock();
        if self.seals() & SEAL_SEAL != 0 {
            return Err(Errno::EPERM);
        }
        self.seals.fetch_or(seals, Ordering::AcqRel);
        Ok(())
    }

    /// Reads from `offset`; fewer bytes at the end of the file.
    ///
    /// # Errors
    /// `EIO`, `ENOMEM`, `EINVAL` for a secret.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
        inject::file()?;
        if self.nature == Nature::Secret {
            return Err(Errno::EINVAL);
        }
        Ok(mm::with_cpu(|cpu| self.object.read(cpu, offset, buffer))?)
    }

    /// Writes to `offset`, and makes the file longer if need be. `writing` is held.
    ///
    /// # Errors
    /// `EPERM` for a sealed file, `EFBIG`, `ENOSPC`, `EIO`, `EINVAL` for what can only be mapped.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        inject::file()?;
        if self.nature != Nature::Plain {
            return Err(Errno::EINVAL);
        }
        if bytes.is_empty() {
            return Ok(0);
        }
        if self.seals() & (SEAL_WRITE | SEAL_FUTURE_WRITE) != 0 {
            return Err(Errno::EPERM);
        }
        if offset >= MAX_LENGTH {
            return Err(Errno::EFBIG);
        }
        let end = (offset + bytes.len() as u64).min(MAX_LENGTH);
        let bytes = &bytes[..(end - offset) as usize];
        mm::with_cpu(|cpu| {
            let before = self.len();
            if end > before {
                if self.seals() & SEAL_GROW != 0 {
                    return Err(Errno::EPERM);
                }
                self.grow(cpu, before, end);
            }
            let result = self.object.write(cpu, offset, bytes).map_err(no_space);
            let reached = offset + *result.as_ref().unwrap_or(&0) as u64;
            if end > before && reached < end {
                self.object.set_len(cpu, before.max(reached));
            }
            result
        })
    }

    /// Makes these its bytes: of a new file, at start, when no errors are injected.
    ///
    /// # Errors
    /// `ENOSPC`.
    pub fn fill(&self, bytes: &[u8]) -> Result<(), Errno> {
        mm::with_cpu(|cpu| {
            self.object.set_len(cpu, bytes.len() as u64);
            let written = self.object.write(cpu, 0, bytes).map_err(no_space)?;
            if written == bytes.len() { Ok(()) } else { Err(Errno::ENOSPC) }
        })
    }

    /// Sets the length.
    ///
    /// # Errors
    /// `EPERM` for a sealed file, `EFBIG`; `EINVAL` for parts of huge pages, or a secret that has a length.
    pub fn set_len(&self, len: u64) -> Result<(), Errno> {
        if len > MAX_LENGTH {
            return Err(Errno::EFBIG);
        }
        let _alone = self.writing.lock();
        let before = self.len();
        match self.nature {
            Nature::Pool(size) if !len.is_multiple_of(size) => return Err(Errno::EINVAL),
            Nature::Secret if before != 0 => return Err(Errno::EINVAL),
            _ => {}
        }
        let forbidden = if len < before { SEAL_SHRINK } else { SEAL_GROW };
        if len != before && self.seals() & forbidden != 0 {
            return Err(Errno::EPERM);
        }
        mm::with_cpu(|cpu| {
            if len > before {
                self.grow(cpu, before, len);
            } else if len < before {
                self.object.set_len(cpu, len);
            }
        });
        Ok(())
    }

    /// Makes the file longer. What a mapping has stored behind its end reads as zeros.
    fn grow(&self, cpu: &KernelCpu, before: u64, len: u64) {
        self.object.set_len(cpu, len);
        self.clear(cpu, before, len.min(before.next_multiple_of(PAGE_SIZE)));
    }

    /// Makes bytes zeros that lie in one page, if that page is there.
    fn clear(&self, cpu: &KernelCpu, start: u64, end: u64) {
        const ZEROS: [u8; 256] = [0; 256];
        let absent = {
            let pin = cpu.pin();
            self.object.page(&pin, start / PAGE_SIZE) == Page::Absent
        };
        let mut at = start;
        while at < end && !absent {
            let part = (end - at).min(ZEROS.len() as u64) as usize;
            // What cannot be brought back from swap is lost in any case.
            if !matches!(self.object.write(cpu, at, &ZEROS[..part]), Ok(1..)) {
                break;
            }
            at += part as u64;
        }
    }

    /// The first offset from `offset` on that lies in a page that there is, or in one that there is not: where bytes are, and where
    /// holes are. `None` when there is none before the end. O(pages between).
    pub fn next_page(&self, offset: u64, there: bool) -> Option<u64> {
        let pages = self.object.pages();
        mm::with_cpu(|cpu| {
            (offset / PAGE_SIZE..pages).find(|&index| {
                let pin = cpu.pin();
                (self.object.page(&pin, index) != Page::Absent) == there
            })
        })
        .map(|index| offset.max(index * PAGE_SIZE))
    }

    /// `fallocate`: makes the pages of a range, and the file longer unless `keep_size`.
    ///
    /// # Errors
    /// `EFBIG`, `EPERM` for a sealed file, `ENOSPC`.
    pub fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> Result<(), Errno> {
        let end = offset.checked_add(len).filter(|&end| end <= MAX_LENGTH).ok_or(Errno::EFBIG)?;
        match self.nature {
            Nature::Plain => {}
            Nature::Pool(_) => return Err(Errno::ENOSPC),
            Nature::Secret => return Err(Errno::EOPNOTSUPP),
        }
        let _alone = self.writing.lock();
        mm::with_cpu(|cpu| {
            let before = self.len();
            if end > before && !keep_size {
                if self.seals() & SEAL_GROW != 0 {
                    return Err(Errno::EPERM);
                }
                // More than the machine has: do not try.
                if (end - before) / PAGE_SIZE > mm::machine().frames().total() as u64 {
                    return Err(Errno::ENOSPC);
                }
                self.grow(cpu, before, end);
            }
            for index in offset / PAGE_SIZE..end.min(self.len()).div_ceil(PAGE_SIZE) {
                while let Err(error) = self.object.read_in(cpu, index, false) {
                    if error != terrane::FaultError::OutOfMemory || !cpu.find_memory() {
                        self.object.set_len(cpu, before.min(self.len()));
                        return Err(Errno::ENOSPC);
                    }
                }
            }
            Ok(())
        })
    }

    /// `fallocate` with `PUNCH_HOLE`: makes bytes zeros and gives whole pages back.
    ///
    /// # Errors
    /// `EPERM` for a sealed file.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let _alone = self.writing.lock();
        if self.seals() & (SEAL_WRITE | SEAL_FUTURE_WRITE) != 0 {
            return Err(Errno::EPERM);
        }
        let end = offset.saturating_add(len).min(self.len());
        if offset >= end {
            return Ok(());
        }
        mm::with_cpu(|cpu| {
            let first = offset.next_multiple_of(PAGE_SIZE);
            // The rest of the last page, if the file ends in it, may go as well.
            let last =
                if end == self.len() { end.next_multiple_of(PAGE_SIZE) } else { end & !(PAGE_SIZE - 1) };
            if first > end {
                self.clear(cpu, offset, end);
                return Ok(());
            }
            self.clear(cpu, offset, first.min(end));
            if last > first {
                self.object.punch(cpu, first / PAGE_SIZE..last / PAGE_SIZE)?;
            }
            if last < end {
                self.clear(cpu, last, end);
            }
            Ok(())
        })
    }
}
