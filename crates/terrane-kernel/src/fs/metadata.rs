//! The calls about inodes: `stat` and its kin, permissions, owners, times, lengths.

use super::abi::{AT_EACCESS, AT_EMPTY_PATH, AT_FDCWD, AT_NO_AUTOMOUNT, AT_SYMLINK_NOFOLLOW, S_IFIFO};
use super::buffers::is_users;
use super::current;
use super::inode::{Attributes, Inode, Kind, Node, Time, Volume};
use super::names::existing;
use super::permission::{WRITE, Who};
use super::procfs::Memory;
use crate::errno::Errno;
use crate::mm;
use crate::user;
use terrane::PAGE_SIZE;

/// Writes numbers one behind the other into a record that programs get.
struct Record<const N: usize> {
    bytes: [u8; N],
    at: usize,
}

impl<const N: usize> Record<N> {
    fn new() -> Self {
        Self { bytes: [0; N], at: 0 }
    }

    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn time(&mut self, time: Time) -> &mut Self {
        self.u64(time.seconds as u64).u64(u64::from(time.nanoseconds))
    }
}

/// Blocks of 512 bytes that it has.
fn blocks(node: &Inode) -> u64 {
    node.object().map_or(0, |object| object.resident() as u64 * (PAGE_SIZE / 512))
}

fn mode_of(node: &Inode, attributes: &Attributes) -> u32 {
    let anonymous = node.file_type() == 0;
    if anonymous { 0o600 } else { node.file_type() | attributes.mode }
}

/// Writes `struct stat`.
fn put_stat(node: &Inode, at: u64) -> Result<u64, Errno> {
    let attributes = *node.attributes.lock();
    let block = if matches!(node.kind, Kind::Device(device) if device.is_console()) { 1024 } else { 4096 };
    let mut record = Record::<144>::new();
    record.u64(node.volume as u64).u64(node.number).u64(u64::from(attributes.links));
    record.u32(mode_of(node, &attributes)).u32(attributes.uid).u32(attributes.gid).u32(0);
    record.u64(node.device_number()).u64(node.len()).u64(block).u64(blocks(node));
    record.time(attributes.accessed).time(attributes.modified).time(attributes.changed);
    user::write(at, &record.bytes)?;
    Ok(0)
}

/// `newfstatat`.
pub fn statat(dirfd: i32, path: u64, at: u64, flags: u32) -> Result<u64, Errno> {
    if flags & !(AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let node = existing(dirfd, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags)?;
    put_stat(&node, at)
}

/// `fstat`.
pub fn fstat(fd: i32, at: u64) -> Result<u64, Errno> {
    put_stat(&current::files().get_path(fd)?.node, at)
}

/// `statx`.
pub fn statx(dirfd: i32, path: u64, flags: u32, mask: u32, at: u64) -> Result<u64, Errno> {
    const SYNC: u32 = 0x6000;
    /// What there is: all of the basic ones, and when it was made is not known.
    const GIVEN: u32 = 0x7ff;
    if mask & 1 << 31 != 0 || flags & SYNC == SYNC {
        return Err(Errno::EINVAL);
    }
    if flags & !(AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_EMPTY_PATH | SYNC) != 0 {
        return Err(Errno::EINVAL);
    }
    let node = existing(dirfd, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags)?;
    let attributes = *node.attributes.lock();
    let mut record = Record::<256>::new();
    record.u32(GIVEN).u32(4096).u64(0);
    record.u32(attributes.links).u32(attributes.uid).u32(attributes.gid);
    record.u16(mode_of(&node, &attributes) as u16).u16(0);
    record.u64(node.number).u64(node.len()).u64(blocks(&node)).u64(0);
    let times = [attributes.accessed, Time::default(), attributes.changed, attributes.modified];
    for time in times {
        record.u64(time.seconds as u64).u32(time.nanoseconds).u32(0);
    }
    let device = node.device_number();
    record.u32((device >> 8) as u32).u32(device as u32 & 0xff).u32(0).u32(node.volume as u32);
    user::write(at, &record.bytes)?;
    Ok(0)
}

/// `faccessat2`.
pub fn access(dirfd: i32, path: u64, mode: u32, flags: u32) -> Result<u64, Errno> {
    if mode & !7 != 0 || flags & !(AT_EACCESS | AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let node = existing(dirfd, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags)?;
    let who = if flags & AT_EACCESS != 0 { Who::calls() } else { Who::really_calls() };
    who.may(&node, mode)?;
    Ok(0)
}

fn set_mode(node: &Node, mode: u32) -> Result<u64, Errno> {
    if node.is_link() {
        return Err(Errno::EOPNOTSUPP);
    }
    Who::calls().owns(node)?;
    node.attributes.lock().mode = mode & 0o7777;
    node.touch_attributes();
    Ok(0)
}

/// `fchmod`.
pub fn fchmod(fd: i32, mode: u32) -> Result<u64, Errno> {
    set_mode(&current::files().get(fd)?.node, mode)
}

/// `fchmodat2`.
pub fn chmodat(dirfd: i32, path: u64, mode: u32, flags: u32) -> Result<u64, Errno> {
    if flags & !(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    set_mode(&existing(dirfd, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags)?, mode)
}

fn set_owner(node: &Node, uid: u32, gid: u32) -> Result<u64, Errno> {
    let who = Who::calls();
    let owner = node.attributes.lock().uid;
    let stays = uid == u32::MAX || uid == owner;
    let mine = gid == u32::MAX || gid == who.gid;
    if !(who.is_superuser() || who.uid == owner && stays && mine) {
        return Err(Errno::EPERM);
    }
    {
        let mut attributes = node.attributes.lock();
        if uid != u32::MAX {
            attributes.uid = uid;
        }
        if gid != u32::MAX {
            attributes.gid = gid;
        }
        if !node.is_directory() && (uid & gid) != u32::MAX {
            attributes.mode &= !0o6000;
        }
    }
    node.touch_attributes();
    Ok(0)
}

/// `fchown`.
pub fn fchown(fd: i32, uid: u32, gid: u32) -> Result<u64, Errno> {
    set_owner(&current::files().get(fd)?.node, uid, gid)
}

/// `fchownat`.
pub fn chownat(dirfd: i32, path: u64, uid: u32, gid: u32, flags: u32) -> Result<u64, Errno> {
    if flags & !(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    set_owner(&existing(dirfd, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags)?, uid, gid)
}

/// What to do with a time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Keep,
    Now,
    To(Time),
}

fn set_times(node: &Node, accessed: Change, modified: Change) -> Result<u64, Errno> {
    let who = Who::calls();
    if [accessed, modified] == [Change::Now; 2] {
        who.owns(node).or_else(|_| who.may(node, WRITE))?;
    } else {
        who.owns(node)?;
    }
    let now = Time::now();
    let mut attributes = node.attributes.lock();
    for (change, time) in [(accessed, 0), (modified, 1)] {
        let to = match change {
            Change::Keep => continue,
            Change::Now => now,
            Change::To(to) => to,
        };
        if time == 0 {
            attributes.accessed = to;
        } else {
            attributes.modified = to;
        }
    }
    attributes.changed = now;
    Ok(0)
}

/// `utimensat`.
pub fn utimensat(dirfd: i32, path: u64, times: u64, flags: u32) -> Result<u64, Errno> {
    const NOW: i64 = 0x3fff_ffff;
    const OMIT: i64 = 0x3fff_fffe;
    let mut changes = [Change::Now; 2];
    if times != 0 {
        for (n, change) in changes.iter_mut().enumerate() {
            let [seconds, nanoseconds]: [i64; 2] = user::read_value(times + 16 * n as u64)?;
            *change = match nanoseconds {
                NOW => Change::Now,
                OMIT => Change::Keep,
                0..1_000_000_000 => Change::To(Time { seconds, nanoseconds: nanoseconds as u32 }),
                _ => return Err(Errno::EINVAL),
            };
        }
        if changes == [Change::Keep; 2] {
            return Ok(0);
        }
    }
    if flags & !(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let node = if path == 0 && dirfd != AT_FDCWD {
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        current::files().get(dirfd)?.node.clone()
    } else {
        existing(dirfd, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags)?
    };
    set_times(&node, changes[0], changes[1])
}

/// `futimesat`, `utimes`: in microseconds.
pub fn utimes(dirfd: i32, path: u64, times: u64) -> Result<u64, Errno> {
    let mut changes = [Change::Now; 2];
    if times != 0 {
        for (n, change) in changes.iter_mut().enumerate() {
            let [seconds, micros]: [i64; 2] = user::read_value(times + 16 * n as u64)?;
            if !(0..1_000_000).contains(&micros) {
                return Err(Errno::EINVAL);
            }
            *change = Change::To(Time { seconds, nanoseconds: micros as u32 * 1000 });
        }
    }
    let node = existing(dirfd, path, true, 0)?;
    set_times(&node, changes[0], changes[1])
}

/// `utime`: in seconds.
pub fn utime(path: u64, times: u64) -> Result<u64, Errno> {
    let mut changes = [Change::Now; 2];
    if times != 0 {
        let seconds: [i64; 2] = user::read_value(times)?;
        changes = seconds.map(|seconds| Change::To(Time { seconds, nanoseconds: 0 }));
    }
    let node = existing(AT_FDCWD, path, true, 0)?;
    set_times(&node, changes[0], changes[1])
}

fn set_len(node: &Node, len: i64) -> Result<u64, Errno> {
    let len = u64::try_from(len).map_err(|_| Errno::EINVAL)?;
    match &node.kind {
        Kind::Regular(regular) => {
            if len > regular.len() && len > current::file_size_limit() {
                current::send_signal(current::SIGXFSZ);
                return Err(Errno::EFBIG);
            }
            regular.set_len(len)?;
            node.touch();
            Ok(0)
        }
        Kind::Directory(_) => Err(Errno::EISDIR),
        _ => Err(Errno::EINVAL),
    }
}

/// `truncate`.
pub fn truncate(path: u64, len: i64) -> Result<u64, Errno> {
    if len < 0 {
        return Err(Errno::EINVAL);
    }
    let node = existing(AT_FDCWD, path, true, 0)?;
    Who::calls().may(&node, WRITE)?;
    set_len(&node, len)
}

/// `ftruncate`.
pub fn ftruncate(fd: i32, len: i64) -> Result<u64, Errno> {
    if len < 0 {
        return Err(Errno::EINVAL);
    }
    let file = current::files().get(fd)?;
    if !file.writes() || file.node.regular().is_none() {
        return Err(Errno::EINVAL);
    }
    set_len(&file.node, len)
}

/// `fallocate`.
pub fn fallocate(fd: i32, mode: u32, offset: i64, len: i64) -> Result<u64, Errno> {
    const KEEP_SIZE: u32 = 1;
    const PUNCH_HOLE: u32 = 2;
    let file = current::files().get(fd)?;
    if offset < 0 || len <= 0 {
        return Err(Errno::EINVAL);
    }
    if mode & !(KEEP_SIZE | PUNCH_HOLE) != 0 || mode & (KEEP_SIZE | PUNCH_HOLE) == PUNCH_HOLE {
        return Err(Errno::EOPNOTSUPP);
    }
    if !file.writes() {
        return Err(Errno::EBADF);
    }
    let (offset, len) = (offset as u64, len as u64);
    match &file.node.kind {
        Kind::Regular(regular) => {
            if mode & PUNCH_HOLE != 0 {
                regular.punch(offset, len)?;
            } else {
                regular.allocate(offset, len, mode & KEEP_SIZE != 0)?;
            }
            file.node.touch();
            Ok(0)
        }
        Kind::Directory(_) => Err(Errno::EISDIR),
        _ if file.node.file_type() == S_IFIFO => Err(Errno::ESPIPE),
        _ => Err(Errno::ENODEV),
    }
}

/// Writes `struct statfs`.
fn put_statfs(node: &Inode, at: u64) -> Result<u64, Errno> {
    const TMPFS: u64 = 0x0102_1994;
    const PROC: u64 = 0x9fa0;
    const PIPE: u64 = 0x5049_5045;
    if !is_users(at, 120) {
        return Err(Errno::EFAULT);
    }
    let (magic, memory) = match node.volume {
        Volume::Proc => (PROC, None),
        Volume::Anonymous => (PIPE, None),
        Volume::Root | Volume::Memory => (TMPFS, Some(Memory::count())),
    };
    let (total, free) = memory.map_or((0, 0), |memory| (memory.total / PAGE_SIZE, memory.free / PAGE_SIZE));
    let files = mm::machine().frames().total() as u64;
    let mut record = Record::<120>::new();
    record.u64(magic).u64(PAGE_SIZE).u64(total).u64(free).u64(free);
    record.u64(files).u64(files).u64(0).u64(255).u64(PAGE_SIZE).u64(0);
    user::write(at, &record.bytes)?;
    Ok(0)
}

/// `statfs`.
pub fn statfs(path: u64, at: u64) -> Result<u64, Errno> {
    let node = existing(AT_FDCWD, path, true, 0)?;
    put_statfs(&node, at)
}

/// `fstatfs`.
pub fn fstatfs(fd: i32, at: u64) -> Result<u64, Errno> {
    put_statfs(&current::files().get_path(fd)?.node, at)
}
