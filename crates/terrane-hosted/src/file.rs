//! Files: real ones of the system.

use crate::error::HostedError;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fstat, open};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};
use std::path::Path;
use terrane::Error;
use terrane::host::{File, IoError};
use terrane::identity::Identity;

/// A regular file of the system, read with `pread` and written with `pwrite`.
///
/// Its length is asked for each time, so a file that grows or shrinks is seen as it is.
#[derive(Debug)]
pub struct HostFile {
    fd: OwnedFd,
    writable: bool,
}

impl HostFile {
    /// Opens the file at `path` for reading, and for writing too if `writable`.
    ///
    /// # Errors
    /// [`HostedError::System`] when the system refuses, [`HostedError::NotAFile`] when it is no regular file.
    pub fn open(path: impl AsRef<Path>, writable: bool) -> Result<Self, HostedError> {
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        // Without NONBLOCK, a pipe would keep us waiting for its other end before we can refuse it.
        let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Self::new(retry_on_intr(|| open(path.as_ref(), flags, Mode::empty()))?)
    }

    /// Takes over an open file; it can be written if it was opened for both reading and writing.
    ///
    /// # Errors
    /// [`HostedError::NotAFile`] when it is no regular file; [`HostedError::Refused`] with [`Error::Access`] when
    /// it was opened for writing only, as pages that are mapped must be read.
    pub fn new(file: impl Into<OwnedFd>) -> Result<Self, HostedError> {
        let fd = file.into();
        if FileType::from_raw_mode(fstat(&fd)?.st_mode) != FileType::RegularFile {
            return Err(HostedError::NotAFile);
        }
        let mode = fcntl_getfl(&fd)? & OFlags::RWMODE;
        if mode == OFlags::WRONLY {
            return Err(HostedError::Refused(Error::Access));
        }
        Ok(Self { fd, writable: mode == OFlags::RDWR })
    }
}

impl HostFile {
    /// What listings are to call the file: its device and inode, and `path`.
    ///
    /// # Errors
    /// [`HostedError::System`], [`HostedError::OutOfMemory`].
    pub fn identity(&self, path: &Path) -> Result<Identity, HostedError> {
        let stat = fstat(&self.fd)?;
        let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        Ok(Identity::try_new(major, minor, stat.st_ino, &path.to_string_lossy())?)
    }
}

impl AsFd for HostFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl File for HostFile {
    fn len(&self) -> u64 {
        // An open regular file can always be asked; if not, a file of no pages is the harmless answer.
        fstat(&self.fd).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0))
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, IoError> {
        let mut done = 0;
        while done < buffer.len() {
            match pread(&self.fd, &mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(Errno::INTR) => {}
                Err(_) => return Err(IoError),
            }
        }
        Ok(done)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        let mut done = 0;
        while done < bytes.len() {
            match pwrite(&self.fd, &bytes[done..], offset + done as u64) {
                Ok(0) => return Err(IoError),
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(_) => return Err(IoError),
            }
        }
        Ok(())
    }

    fn is_writable(&self) -> bool {
        self.writable
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn reads_to_the_end_and_writes_in_place() {
        let mut temporary = tempfile::NamedTempFile::new().unwrap();
        temporary.write_all(&[7; 5000]).unwrap();
        let file = HostFile::open(temporary.path(), true).unwrap();
        assert_eq!((file.len(), file.is_empty(), file.is_writable()), (5000, false, true));
        let mut page = [0; 4096];
        assert_eq!(file.read_at(4096, &mut page), Ok(904));
        assert_eq!((page[903], page[904]), (7, 0));
        assert_eq!(file.read_at(8192, &mut page), Ok(0));
        file.write_at(4096, &[9; 904]).unwrap();
        let bytes = std::fs::read(temporary.path()).unwrap();
        assert_eq!((bytes.len(), bytes[4095], bytes[4096]), (5000, 7, 9));
    }

    #[test]
    fn the_open_mode_decides_what_may_be_written() {
        let temporary = tempfile::NamedTempFile::new().unwrap();
        let file = HostFile::open(temporary.path(), false).unwrap();
        assert!(!file.is_writable());
        assert_eq!(file.write_at(0, b"no"), Err(IoError));
        let write_only = std::fs::OpenOptions::new().write(true).open(temporary.path()).unwrap();
        assert_eq!(HostFile::new(write_only).err(), Some(HostedError::Refused(Error::Access)));
    }

    #[test]
    fn what_is_no_file_is_refused() {
        assert_eq!(HostFile::open("/", false).err(), Some(HostedError::NotAFile));
        assert_eq!(HostFile::open("/dev/null", true).err(), Some(HostedError::NotAFile));
        assert_eq!(HostFile::open("/nonexistent", false).err(), Some(HostedError::System(Errno::NOENT)));
    }
}
