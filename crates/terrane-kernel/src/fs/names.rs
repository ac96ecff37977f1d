//! The calls that take paths: opening, making, removing, renaming.

use super::abi::{
    AT_EMPTY_PATH, AT_FDCWD, AT_REMOVEDIR, AT_SYMLINK_FOLLOW, O_ACCMODE, O_APPEND, O_ASYNC, O_CLOEXEC,
    O_CREAT, O_DIRECT, O_DIRECTORY, O_EXCL, O_LARGEFILE, O_NOATIME, O_NOFOLLOW, O_NONBLOCK, O_PATH,
    O_TMPFILE, O_TRUNC, O_WRONLY, PATH_MAX, S_IFCHR, S_IFIFO, S_IFMT, S_IFREG,
};
use super::current;
use super::directory::{FIRST, Listed};
use super::inode::{Kind, Node, Volume};
use super::open::{Open, OpenFile};
use super::path::{self, Found, Last, path_of, walk};
use super::permission::{EXECUTE, READ, WRITE, Who};
use super::pipe::Pipe;
use super::procfs;
use super::regular::{Regular, SEAL_SEAL};
use super::tree;
use crate::errno::Errno;
use crate::user;
use alloc::vec::Vec;

/// A path of the program's.
///
/// # Errors
/// `EFAULT`, `ENAMETOOLONG`, `ENOMEM`.
pub fn user_path(at: u64) -> Result<Vec<u8>, Errno> {
    user::read_string(at, PATH_MAX)
}

/// The directory in which a relative path begins.
///
/// # Errors
/// `EBADF`, `ENOTDIR`.
pub fn start_of(dirfd: i32, path: &[u8]) -> Result<Node, Errno> {
    if dirfd == AT_FDCWD || path.first() == Some(&b'/') {
        return Ok(current::cwd().directory());
    }
    let node = current::files().get_path(dirfd)?.node.clone();
    if node.is_directory() { Ok(node) } else { Err(Errno::ENOTDIR) }
}

/// Walks a path of the program's.
///
/// # Errors
/// As [`walk`], [`start_of`], [`user_path`].
pub fn find(dirfd: i32, at: u64, last: Last) -> Result<Found, Errno> {
    let path = user_path(at)?;
    walk(&start_of(dirfd, &path)?, &path, last)
}

/// What a path leads to, or, with an empty path and `AT_EMPTY_PATH`, the descriptor itself.
///
/// # Errors
/// As [`find`].
pub fn existing(dirfd: i32, at: u64, follow: bool, flags: u32) -> Result<Node, Errno> {
    // As Linux since 6.11: no path at all is an empty one.
    let path = if at == 0 && flags & AT_EMPTY_PATH != 0 { Vec::new() } else { user_path(at)? };
    if path.is_empty() && flags & AT_EMPTY_PATH != 0 {
        if dirfd == AT_FDCWD {
            return Ok(current::cwd().directory());
        }
        return Ok(current::files().get_path(dirfd)?.node.clone());
    }
    walk(&start_of(dirfd, &path)?, &path, Last::following(follow))?.existing()
}

/// How a file is to be opened.
#[derive(Clone, Copy, Default)]
pub struct How {
    pub flags: u32,
    pub mode: u32,
}

/// What a file is called in listings of mappings, if it ever was mapped.
fn last_name(node: &Node) -> Result<Vec<u8>, Errno> {
    let identity = node.object().and_then(|object| object.identity());
    identity.map_or(Ok(Vec::new()), |identity| super::directory::copy(identity.path().as_bytes()))
}

/// Opens a file, or makes it.
///
/// # Errors
/// As `open`.
pub fn open_node(start: &Node, path: &[u8], how: How) -> Result<Open, Errno> {
    let flags = how.flags;
    if flags & O_PATH != 0 {
        let found = walk(start, path, Last::following(flags & O_NOFOLLOW == 0))?;
        let absolute = found.path().unwrap_or_default();
        let node = found.existing()?;
        if flags & O_DIRECTORY != 0 && !node.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        return OpenFile::try_new(node, O_PATH | flags & (O_DIRECTORY | O_NOFOLLOW), absolute);
    }
    let writes = flags & O_ACCMODE != 0;
    let temporary = flags & (O_TMPFILE | O_DIRECTORY) == O_TMPFILE | O_DIRECTORY;
    if flags & O_TMPFILE != 0 && (!temporary || !writes) {
        return Err(Errno::EINVAL);
    }
    if flags & (O_CREAT | O_DIRECTORY) == O_CREAT | O_DIRECTORY {
        return Err(Errno::EINVAL);
    }
    let mode = how.mode & 0o7777 & !current::umask();
    let status = flags & !(O_CREAT | O_EXCL | O_TRUNC | O_CLOEXEC) | O_LARGEFILE;
    if temporary {
        let found = walk(start, path, Last::Follow)?;
        let absolute = found.path()?;
        if !found.existing()?.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        let seals = SEAL_SEAL;
        return OpenFile::try_new(tree::nameless(Volume::Root, seals, mode)?, status, absolute);
    }
    let alone = flags & (O_CREAT | O_EXCL) == O_CREAT | O_EXCL;
    loop {
        let follow = flags & O_NOFOLLOW == 0 && !alone;
        let last = if flags & O_CREAT != 0 { Last::Create(follow) } else { Last::following(follow) };
        let found = walk(start, path, last)?;
        let absolute = match found.path() {
            // Reached by a link of `/proc`'s, without a name on the way: then by the one it had, if any.
            Err(_) if found.parent.is_none() => found.node.as_ref().map_or(Ok(Vec::new()), last_name)?,
            path => path?,
        };
        let Found { parent, name, node, .. } = found;
        let Some(node) = node else {
            if flags & O_CREAT == 0 {
                return Err(Errno::ENOENT);
            }
            let parent = parent.ok_or(Errno::ENOENT)?;
            match tree::create_file(&parent, &name, mode) {
                // Another thread has made it meanwhile.
                Err(Errno::EEXIST) if !alone => continue,
                Err(Errno::EPERM) => return Err(Errno::ENOENT),
                made => return OpenFile::try_new(made?, status, absolute),
            }
        };
        if alone {
            return Err(Errno::EEXIST);
        }
        if node.is_link() {
            return Err(Errno::ELOOP);
        }
        if node.is_directory() && (writes || flags & (O_CREAT | O_TRUNC) != 0) {
            return Err(Errno::EISDIR);
        }
        if flags & O_DIRECTORY != 0 && !node.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        if node.file_type() == 0 {
            return Err(Errno::ENXIO);
        }
        let wanted = match flags & O_ACCMODE {
            0 => READ,
            O_WRONLY => WRITE,
            _ => READ | WRITE,
        } | if flags & O_TRUNC != 0 { WRITE } else { 0 };
        Who::calls().may(&node, wanted)?;
        if flags & O_TRUNC != 0
            && let Kind::Regular(regular) = &node.kind
        {
            regular.set_len(0)?;
            node.touch();
        }
        let file = OpenFile::try_new(node, status, absolute)?;
        if let Kind::Pipe(pipe) = &file.node.kind {
            pipe.meet(file.reads(), file.writes(), file.blocks())?;
        }
        return Ok(file);
    }
}

fn open_how(dirfd: i32, at: u64, how: How) -> Result<u64, Errno> {
    let path = user_path(at)?;
    let file = open_node(&start_of(dirfd, &path)?, &path, how)?;
    current::add_file(file, how.flags & O_CLOEXEC != 0)
}

/// The flags that `open` knows; others it does not see.
const KNOWN: u32 = O_ACCMODE
    | O_CREAT
    | O_EXCL
    | 0o400 // O_NOCTTY
    | O_TRUNC
    | O_APPEND
    | O_NONBLOCK
    | 0o10_000 // O_DSYNC
    | O_ASYNC
    | O_DIRECT
    | O_LARGEFILE
    | O_DIRECTORY
    | O_NOFOLLOW
    | O_NOATIME
    | O_CLOEXEC
    | 0o4_000_000 // O_SYNC
    | O_PATH
    | O_TMPFILE;

/// `openat`, `open`, `creat`.
pub fn open(dirfd: i32, at: u64, flags: u32, mode: u32) -> Result<u64, Errno> {
    open_how(dirfd, at, How { flags: flags & KNOWN, mode })
}

/// `openat2`.
pub fn open2(dirfd: i32, at: u64, how: u64, size: u64) -> Result<u64, Errno> {
    const RESOLVE_NO_MAGICLINKS: u64 = 2;
    const RESOLVE_NO_SYMLINKS: u64 = 4;
    if size < 24 {
        return Err(Errno::EINVAL);
    }
    if size > 4096 {
        return Err(Errno::E2BIG);
    }
    for n in 24..size {
        if user::read_value::<u8>(how + n)? != 0 {
            return Err(Errno::E2BIG);
        }
    }
    let [flags, mode, resolve]: [u64; 3] = user::read_value(how)?;
    let makes = flags & u64::from(O_CREAT | O_TMPFILE) != 0;
    if flags & !u64::from(KNOWN) != 0 || mode & !0o7777 != 0 || !makes && mode != 0 || resolve & !0x3f != 0 {
        return Err(Errno::EINVAL);
    }
    // Beneath a directory, in a root, from a cache: not here, and said so.
    if resolve & !(RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | 1) != 0 {
        return Err(Errno::EINVAL);
    }
    let path = user_path(at)?;
    if resolve & RESOLVE_NO_SYMLINKS != 0 && leads_through_links(&start_of(dirfd, &path)?, &path)? {
        return Err(Errno::ELOOP);
    }
    open_how(dirfd, at, How { flags: flags as u32, mode: mode as u32 })
}

/// True when a link is on the way.
fn leads_through_links(start: &Node, path: &[u8]) -> Result<bool, Errno> {
    for (end, _) in
        path.iter().enumerate().filter(|&(n, &byte)| byte == b'/' && n > 0).chain([(path.len(), &0)])
    {
        if path[end - 1] == b'/' {
            continue;
        }
        match walk(start, &path[..end], Last::Stay)?.node {
            Some(node) if node.is_link() => return Ok(true),
            _ => {}
        }
    }
    Ok(false)
}

/// `mkdirat`.
pub fn mkdir(dirfd: i32, at: u64, mode: u32) -> Result<u64, Errno> {
    let (parent, name) = find(dirfd, at, Last::Entry)?.free()?;
    tree::create_directory(&parent, &name, mode & 0o1777 & !current::umask())?;
    Ok(0)
}

/// `mknodat`: regular files, pipes, and the devices that there are.
pub fn mknod(dirfd: i32, at: u64, mode: u32, device: u64) -> Result<u64, Errno> {
    let found = find(dirfd, at, Last::Entry)?;
    let kind = match mode & S_IFMT {
        0 | S_IFREG => Kind::Regular(Regular::try_new()?),
        S_IFIFO => Kind::Pipe(Pipe::new()),
        S_IFCHR => Kind::Device(super::device::Device::of_number(device).ok_or(Errno::EPERM)?),
        super::abi::S_IFDIR => return Err(Errno::EPERM),
        _ => return Err(Errno::EINVAL),
    };
    let (parent, name) = found.free_for_file()?;
    tree::create(&parent, &name, kind, mode & !current::umask())?;
    Ok(0)
}

/// `unlinkat`.
pub fn unlink(dirfd: i32, at: u64, flags: u32) -> Result<u64, Errno> {
    if flags & !AT_REMOVEDIR != 0 {
        return Err(Errno::EINVAL);
    }
    let found = find(dirfd, at, Last::Entry)?;
    if flags & AT_REMOVEDIR != 0 { tree::remove_directory(&found) } else { tree::unlink(&found) }?;
    Ok(0)
}

/// `renameat2`.
pub fn rename(from_dir: i32, from: u64, to_dir: i32, to: u64, flags: u32) -> Result<u64, Errno> {
    let both = tree::NO_REPLACE | tree::EXCHANGE;
    if flags & !both != 0 || flags == both {
        return Err(Errno::EINVAL);
    }
    tree::rename(&find(from_dir, from, Last::Entry)?, &find(to_dir, to, Last::Entry)?, flags)?;
    Ok(0)
}

/// `linkat`.
pub fn link(from_dir: i32, from: u64, to_dir: i32, to: u64, flags: u32) -> Result<u64, Errno> {
    if flags & !(AT_SYMLINK_FOLLOW | AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let node = existing(from_dir, from, flags & AT_SYMLINK_FOLLOW != 0, flags)?;
    let (parent, name) = find(to_dir, to, Last::Entry)?.free_for_file()?;
    tree::link(&parent, &name, &node)?;
    Ok(0)
}

/// `symlinkat`.
pub fn symlink(target: u64, dirfd: i32, at: u64) -> Result<u64, Errno> {
    let target = user_path(target)?;
    if target.is_empty() {
        return Err(Errno::ENOENT);
    }
    let found = find(dirfd, at, Last::Entry)?;
    let (parent, name) = found.free_for_file()?;
    tree::create(&parent, &name, Kind::Symlink(target), 0o777)?;
    Ok(0)
}

/// `readlinkat`.
pub fn readlink(dirfd: i32, at: u64, to: u64, size: u64) -> Result<u64, Errno> {
    if size as i32 <= 0 {
        return Err(Errno::EINVAL);
    }
    let path = user_path(at)?;
    let node = if path.is_empty() && dirfd != AT_FDCWD {
        current::files().get_path(dirfd)?.node.clone()
    } else {
        walk(&start_of(dirfd, &path)?, &path, Last::Stay)?.existing()?
    };
    let target = match path::read_link(&node) {
        Err(Errno::EINVAL) if path.is_empty() => return Err(Errno::ENOENT),
        target => target?,
    };
    let count = target.len().min(size as usize);
    user::write(to, &target[..count])?;
    Ok(count as u64)
}

/// `chdir`.
pub fn chdir(at: u64) -> Result<u64, Errno> {
    enter(find(AT_FDCWD, at, Last::Follow)?.existing()?)
}

/// `fchdir`.
pub fn fchdir(fd: i32) -> Result<u64, Errno> {
    enter(current::files().get_path(fd)?.node.clone())
}

fn enter(node: Node) -> Result<u64, Errno> {
    if !node.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    Who::calls().may(&node, EXECUTE)?;
    current::cwd().set_directory(node);
    Ok(0)
}

/// `chroot`.
pub fn chroot(at: u64) -> Result<u64, Errno> {
    let node = find(AT_FDCWD, at, Last::Follow)?.existing()?;
    if !node.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    let who = Who::calls();
    who.may(&node, EXECUTE)?;
    if !who.is_superuser() {
        return Err(Errno::EPERM);
    }
    current::cwd().set_root(node);
    Ok(0)
}

/// `getcwd`: the length with the NUL.
pub fn getcwd(at: u64, size: u64) -> Result<u64, Errno> {
    let mut path = path_of(&current::cwd().directory())?;
    path.try_reserve(1)?;
    path.push(0);
    if path.len() as u64 > size {
        return Err(Errno::ERANGE);
    }
    user::write(at, &path)?;
    Ok(path.len() as u64)
}

/// Entries that are looked up at a time.
const BATCH: usize = 64;

/// `getdents64`.
pub fn getdents(fd: i32, at: u64, size: u64) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    if !file.node.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    let mut position = file.position.lock();
    let mut written = 0;
    // True while there is room.
    let mut put = |listed: &Listed, position: &mut u64| -> Result<bool, Errno> {
        let len = (19 + listed.name.len() as u64 + 1).next_multiple_of(8);
        if written + len > size {
            return if written == 0 { Err(Errno::EINVAL) } else { Ok(false) };
        }
        let mut record = Vec::new();
        record.try_reserve_exact(len as usize)?;
        record.extend_from_slice(&listed.inode.to_ne_bytes());
        record.extend_from_slice(&(listed.next as i64).to_ne_bytes());
        record.extend_from_slice(&(len as u16).to_ne_bytes());
        record.push((listed.file_type >> 12) as u8);
        record.extend_from_slice(&listed.name);
        record.resize(len as usize, 0);
        user::write(at + written, &record)?;
        written += len;
        *position = listed.next;
        Ok(true)
    };
    if let Some(directory) = file.node.directory()
        && directory.is_removed()
    {
        return Err(Errno::ENOENT);
    }
    let parent = match &file.node.kind {
        Kind::Directory(directory) => directory.parent().map_or(file.node.number, |parent| parent.number),
        Kind::Proc(entry) => entry.parent()?.number,
        _ => 0,
    };
    for (number, name, inode) in [(1, b".".as_slice(), file.node.number), (FIRST, b"..".as_slice(), parent)] {
        if *position < number {
            let listed = Listed {
                name: super::directory::copy(name)?,
                next: number,
                inode,
                file_type: super::abi::S_IFDIR,
            };
            if !put(&listed, &mut position)? {
                return Ok(written);
            }
        }
    }
    loop {
        let batch = list(&file.node, *position)?;
        if batch.is_empty() {
            return Ok(written);
        }
        for listed in &batch {
            match put(listed, &mut position) {
                Ok(true) => {}
                Ok(false) => return Ok(written),
                Err(error) => return if written == 0 { Err(error) } else { Ok(written) },
            }
        }
    }
}

fn list(node: &Node, from: u64) -> Result<Vec<Listed>, Errno> {
    match &node.kind {
        Kind::Directory(directory) => {
            let listed = directory.list(from, BATCH)?;
            if listed.is_empty() && directory.has_processes {
                return procfs::list_processes(from, BATCH);
            }
            Ok(listed)
        }
        Kind::Proc(entry) => entry.list(from, BATCH),
        _ => Err(Errno::ENOTDIR),
    }
}
