//! A swap device in a file.

use crate::error::HostedError;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, fstat, ftruncate, open};
use rustix::io::{pread, pwrite, retry_on_intr};
use std::path::Path;
use terrane::PAGE_SIZE;
use terrane::host::IoError;
use terrane::swap::SwapDevice;

/// A file that takes the pages for which there is no memory. What it holds is of no use to anybody when the machine has
/// gone.
#[derive(Debug)]
pub struct SwapFile {
    fd: OwnedFd,
    slots: u32,
}

impl SwapFile {
    /// Opens the file at `path`, or makes it, readable by its owner only, for `bytes` bytes, rounded up to pages. It gets that
    /// length at once, and takes room on the disk as it is written.
    ///
    /// # Errors
    /// [`HostedError::System`] when the system refuses, [`HostedError::NotAFile`] when it is no regular file.
    pub fn create(path: impl AsRef<Path>, bytes: u64) -> Result<Self, HostedError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let mode = Mode::RUSR | Mode::WUSR;
        Self::new(retry_on_intr(|| open(path.as_ref(), flags, mode))?, bytes)
    }

    /// Takes over a file that is open for reading and writing; see [`create`](Self::create).
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn new(file: impl Into<OwnedFd>, bytes: u64) -> Result<Self, HostedError> {
        let fd = file.into();
        if FileType::from_raw_mode(fstat(&fd)?.st_mode) != FileType::RegularFile {
            return Err(HostedError::NotAFile);
        }
        // Slot numbers are of 32 bits: 16 TiB.
        let slots = u32::try_from(bytes.div_ceil(PAGE_SIZE)).unwrap_or(u32::MAX);
        retry_on_intr(|| ftruncate(fd.as_fd(), u64::from(slots) * PAGE_SIZE))?;
        Ok(Self { fd, slots })
    }
}

impl SwapDevice for SwapFile {
    fn slots(&self) -> u32 {
        self.slots
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), IoError> {
        let offset = u64::from(slot) * PAGE_SIZE;
        let mut done = 0;
        while done < page.len() {
            match retry_on_intr(|| pread(&self.fd, &mut page[done..], offset + done as u64)) {
                Ok(0) | Err(_) => return Err(IoError),
                Ok(more) => done += more,
            }
        }
        Ok(())
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), IoError> {
        let offset = u64::from(slot) * PAGE_SIZE;
        let mut done = 0;
        while done < page.len() {
            match retry_on_intr(|| pwrite(&self.fd, &page[done..], offset + done as u64)) {
                Ok(0) | Err(_) => return Err(IoError),
                Ok(more) => done += more,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_keep_what_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let swap = SwapFile::create(directory.path().join("swap"), 3 * PAGE_SIZE - 1).unwrap();
        assert_eq!(swap.slots(), 3);
        for slot in [2, 0] {
            swap.write(slot, &[slot as u8 + 1; PAGE_SIZE as usize]).unwrap();
        }
        let mut page = [9; PAGE_SIZE as usize];
        for (slot, byte) in [(0, 1), (2, 3), (1, 0)] {
            swap.read(slot, &mut page).unwrap();
            assert!(page.iter().all(|&b| b == byte), "slot {slot}");
        }
        assert_eq!(swap.read(3, &mut page), Err(IoError));
        assert_eq!(SwapFile::create(directory.path(), 1).err().map(|_| ()), Some(()));
    }
}
