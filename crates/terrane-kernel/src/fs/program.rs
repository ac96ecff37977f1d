//! Files for the other parts of the kernel: what `execve` and `mmap` get.

use super::abi::{AT_EMPTY_PATH, AT_SYMLINK_NOFOLLOW};
use super::current;
use super::device::Device;
use super::inode::{Kind, Node, Time};
use super::names::start_of;
use super::path::{Last, walk};
use super::permission::{EXECUTE, Who};
use super::regular::{Nature, SEAL_EXEC, SEAL_FUTURE_WRITE, SEAL_WRITE};
use super::tree;
use crate::errno::Errno;
use crate::mm::Object;
use alloc::vec::Vec;

/// What a descriptor gives to `mmap`: a file's pages and what may be done with them; `None` for `/dev/zero`, which is memory.
pub type Mapped = Option<MappedFile>;

/// A file that can be mapped.
pub struct MappedFile {
    /// Its pages.
    pub object: Object,
    /// Opened for reading.
    pub readable: bool,
    /// Opened for writing, and not sealed against it.
    pub writable: bool,
    /// Of `memfd_secret`: locked as long as it is mapped.
    pub secret: bool,
}

/// What `fd` gives to `mmap` with this protection and these flags.
///
/// # Errors
/// `EBADF`, `ENODEV` for what cannot be mapped, `EPERM` for what a seal forbids, `EACCES` for what nobody may run, `ENOMEM`.
pub fn mapping_of(fd: u64, prot: u64, flags: u64) -> Result<Mapped, Errno> {
    const WRITE: u64 = 2;
    const EXEC: u64 = 4;
    const TYPE: u64 = 0xf;
    const PRIVATE: u64 = 2;
    let file = current::files().get(fd as i32)?;
    match &file.node.kind {
        Kind::Regular(regular) => {
            let (readable, mut writable) = (file.reads(), file.writes());
            match regular.nature {
                Nature::Plain => {}
                Nature::Pool(_) => return Err(Errno::ENOMEM),
                Nature::Secret if flags & TYPE == PRIVATE => return Err(Errno::EINVAL),
                Nature::Secret => {}
            }
            let secret = regular.nature == Nature::Secret;
            let sealed = regular.seals() & (SEAL_WRITE | SEAL_FUTURE_WRITE) != 0;
            if sealed && flags & TYPE != PRIVATE {
                if prot & WRITE != 0 && writable {
                    return Err(Errno::EPERM);
                }
                // Nor may it become writable later.
                writable = false;
            }
            if prot & EXEC != 0
                && regular.seals() & SEAL_EXEC != 0
                && file.node.attributes.lock().mode & 0o111 == 0
            {
                return Err(Errno::EACCES);
            }
            let object = regular.object().clone();
            if object.identity().is_none() {
                tree::name_object(&file.node, &file.path)?;
            }
            file.node.attributes.lock().accessed = Time::now();
            Ok(Some(MappedFile { object, readable, writable, secret }))
        }
        Kind::Device(Device::Zero) => Ok(None),
        // As Linux: how it was opened is looked at before what it is.
        _ if !file.reads() => Err(Errno::EACCES),
        _ => Err(Errno::ENODEV),
    }
}

/// The program at `path`, from `dirfd`, and its absolute path; `flags` are those of `execveat`.
///
/// # Errors
/// `EACCES` when it is not to be run, `ELOOP`, and as any walk.
pub fn open_program_at(dirfd: u64, path: &[u8], flags: u64) -> Result<(Node, Vec<u8>), Errno> {
    let (dirfd, flags) = (dirfd as i32, flags as u32);
    if flags & !(AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) != 0 {
        return Err(Errno::EINVAL);
    }
    let (node, path) = if path.is_empty() && flags & AT_EMPTY_PATH != 0 {
        let file = current::files().get_path(dirfd)?;
        (file.node.clone(), super::directory::copy(&file.path)?)
    } else {
        let found = walk(&start_of(dirfd, path)?, path, Last::following(flags & AT_SYMLINK_NOFOLLOW == 0))?;
        let mut path = found.path().unwrap_or_default();
        let node = found.existing()?;
        // Behind a link the program has another name.
        if let Some(identity) = node.object().and_then(|object| object.identity()) {
            path = super::directory::copy(identity.path().as_bytes())?;
        }
        (node, path)
    };
    if node.is_link() {
        return Err(Errno::ELOOP);
    }
    let Some(object) = node.object() else { return Err(Errno::EACCES) };
    Who::calls().may(&node, EXECUTE)?;
    if object.identity().is_none() {
        tree::name_object(&node, &path)?;
    }
    Ok((node, path))
}

/// The program at `path`, from the directory of the thread that asks.
///
/// # Errors
/// As [`open_program_at`].
pub fn open_program(path: &[u8]) -> Result<(Node, Vec<u8>), Errno> {
    open_program_at(super::abi::AT_FDCWD as u64, path, 0)
}
