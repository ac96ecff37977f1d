//! The calls about descriptors: copies, flags, locks, and those that make what has no name.

use super::abi::{O_APPEND, O_ASYNC, O_CLOEXEC, O_DIRECT, O_NOATIME, O_NONBLOCK, O_RDWR, O_WRONLY};
use super::current;
use super::device;
use super::epoll::Epoll;
use super::event::Event;
use super::inode::{Inode, Kind, Volume};
use super::locks::{self, Lock, Owner};
use super::open::{Open, OpenFile};
use super::pipe::Pipe;
use super::regular::{Nature, SEAL_EXEC, SEAL_FUTURE_WRITE, SEAL_GROW, SEAL_SEAL, SEAL_SHRINK, SEAL_WRITE};
use super::signals::Signals;
use super::timer::{Setting, Timer};
use super::tree;
use crate::arch;
use crate::errno::Errno;
use crate::user;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};

/// `dup`.
pub fn dup(fd: i32) -> Result<u64, Errno> {
    current::add_file(current::files().get_path(fd)?, false)
}

/// `dup2`.
pub fn dup2(from: i32, to: i32) -> Result<u64, Errno> {
    let files = current::files();
    let file = files.get_path(from)?;
    if from == to {
        return Ok(to as u64);
    }
    put(file, false, to)
}

/// `dup3`.
pub fn dup3(from: i32, to: i32, flags: u32) -> Result<u64, Errno> {
    if flags & !O_CLOEXEC != 0 || from == to {
        return Err(Errno::EINVAL);
    }
    let file = current::files().get_path(from)?;
    put(file, flags & O_CLOEXEC != 0, to)
}

fn put(file: Open, close_on_exec: bool, to: i32) -> Result<u64, Errno> {
    let place = usize::try_from(to).map_err(|_| Errno::EBADF)?;
    if place as u64 >= current::file_limit() {
        return Err(Errno::EBADF);
    }
    current::files().put(file, close_on_exec, place)?;
    Ok(to as u64)
}

/// `close`.
pub fn close(fd: i32) -> Result<u64, Errno> {
    let file = current::files().close(fd)?;
    locks::unlock_process(&file.node);
    Ok(0)
}

/// `close_range`.
pub fn close_range(first: u32, last: u32, flags: u32) -> Result<u64, Errno> {
    const UNSHARE: u32 = 2;
    const CLOSE_ON_EXEC: u32 = 4;
    if flags & !(UNSHARE | CLOSE_ON_EXEC) != 0 || first > last {
        return Err(Errno::EINVAL);
    }
    if flags & UNSHARE != 0 {
        current::unshare_files()?;
    }
    current::files().close_range(first as usize, last as usize, flags & CLOSE_ON_EXEC != 0);
    Ok(0)
}

/// The flags that `F_SETFL` changes.
const SETTABLE: u32 = O_APPEND | O_NONBLOCK | O_ASYNC | O_DIRECT | O_NOATIME;

/// `fcntl`.
pub fn fcntl(fd: i32, command: u32, argument: u64) -> Result<u64, Errno> {
    const F_DUPFD: u32 = 0;
    const F_GETFD: u32 = 1;
    const F_SETFD: u32 = 2;
    const F_GETFL: u32 = 3;
    const F_SETFL: u32 = 4;
    const F_GETLK: u32 = 5;
    const F_SETLK: u32 = 6;
    const F_SETLKW: u32 = 7;
    const F_OFD_GETLK: u32 = 36;
    const F_OFD_SETLK: u32 = 37;
    const F_OFD_SETLKW: u32 = 38;
    const F_DUPFD_CLOEXEC: u32 = 1030;
    const F_SETPIPE_SZ: u32 = 1031;
    const F_GETPIPE_SZ: u32 = 1032;
    const F_ADD_SEALS: u32 = 1033;
    const F_GET_SEALS: u32 = 1034;
    let files = current::files();
    let file = files.get_path(fd)?;
    let for_paths = [F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_GETFL];
    if file.is_path() && !for_paths.contains(&command) {
        return Err(Errno::EBADF);
    }
    match command {
        F_DUPFD | F_DUPFD_CLOEXEC => {
            let limit = current::file_limit();
            if argument >= limit {
                return Err(Errno::EINVAL);
            }
            files.add(file, command == F_DUPFD_CLOEXEC, argument as usize, limit).map(|fd| fd as u64)
        }
        F_GETFD => Ok(u64::from(files.closes_on_exec(fd)?)),
        F_SETFD => files.set_close_on_exec(fd, argument & 1 != 0).map(|()| 0),
        F_GETFL => Ok(u64::from(file.flags() & !O_CLOEXEC)),
        F_SETFL => {
            file.set_flags(SETTABLE, argument as u32);
            Ok(0)
        }
        F_GETLK | F_SETLK | F_SETLKW => {
            record_lock(&file, argument, command - F_GETLK, Owner::Process(current::pid()))
        }
        F_OFD_GETLK | F_OFD_SETLK | F_OFD_SETLKW => {
            *file.locked.lock() = true;
            record_lock(&file, argument, command - F_OFD_GETLK, locks::description_owner(&file))
        }
        F_SETPIPE_SZ | F_GETPIPE_SZ => {
            let Kind::Pipe(pipe) = &file.node.kind else { return Err(Errno::EBADF) };
            if command == F_GETPIPE_SZ {
                return Ok(pipe.capacity() as u64);
            }
            pipe.set_capacity(argument & 0xffff_ffff).map(|bytes| bytes as u64)
        }
        F_ADD_SEALS | F_GET_SEALS => {
            let regular = file.node.regular().ok_or(Errno::EINVAL)?;
            if command == F_GET_SEALS {
                return Ok(u64::from(regular.seals()));
            }
            let all = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW | SEAL_WRITE | SEAL_FUTURE_WRITE | SEAL_EXEC;
            let seals = argument as u32;
            if seals & !all != 0 {
                return Err(Errno::EINVAL);
            }
            if !file.writes() {
                return Err(Errno::EPERM);
            }
            if seals & SEAL_WRITE != 0 && current::is_mapped_writable(regular.object()) {
                return Err(Errno::EBUSY);
            }
            regular.seal(seals)?;
            Ok(0)
        }
        // The owner of signals about input: there are none.
        8 => Ok(0),
        9 => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

/// `F_GETLK` and its kin: `action` 0 asks, 1 locks, 2 locks and waits.
fn record_lock(file: &Open, at: u64, action: u32, owner: Owner) -> Result<u64, Errno> {
    const READ: i16 = 0;
    const WRITE: i16 = 1;
    const UNLOCK: i16 = 2;
    // struct flock: type and whence (16 bits each), start, length (behind four bytes of padding), process.
    let [kind, whence]: [i16; 2] = user::read_value(at)?;
    let [start, len]: [i64; 2] = user::read_value(at + 8)?;
    let base = match whence {
        0 => 0,
        1 => *file.position.lock() as i64,
        2 => file.node.len() as i64,
        _ => return Err(Errno::EINVAL),
    };
    let start = base.checked_add(start).ok_or(Errno::EOVERFLOW)?;
    let (start, end) = match len {
        0 => (start, i64::MAX),
        1.. => (start, start.checked_add(len).ok_or(Errno::EOVERFLOW)?),
        _ => (start.checked_add(len).ok_or(Errno::EINVAL)?, start),
    };
    if start < 0 || end < 0 {
        return Err(Errno::EINVAL);
    }
    let lock = Lock::new(&file.node, owner, start as u64, end as u64, kind == WRITE);
    if action == 0 {
        if !matches!(kind, READ | WRITE) {
            return Err(Errno::EINVAL);
        }
        let Some(other) = locks::in_the_way(&lock) else {
            user::write_value(at, UNLOCK)?;
            return Ok(0);
        };
        let len = if other.end == i64::MAX as u64 { 0 } else { other.end - other.start };
        let pid = if let Owner::Process(pid) = other.owner { pid as i32 } else { -1 };
        user::write_value(at, [if other.exclusive { WRITE } else { READ }, 0])?;
        user::write_value(at + 8, [other.start, len])?;
        user::write_value(at + 24, pid)?;
        return Ok(0);
    }
    match kind {
        UNLOCK => locks::unlock(&lock)?,
        READ if !file.reads() => return Err(Errno::EBADF),
        WRITE if !file.writes() => return Err(Errno::EBADF),
        READ | WRITE => locks::lock(lock, action == 2)?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

/// `flock`.
pub fn flock(fd: i32, operation: u32) -> Result<u64, Errno> {
    const SHARED: u32 = 1;
    const EXCLUSIVE: u32 = 2;
    const AT_ONCE: u32 = 4;
    const UNLOCK: u32 = 8;
    let file = current::files().get(fd)?;
    let lock = Lock::new(&file.node, locks::file_owner(&file), 0, u64::MAX, operation & EXCLUSIVE != 0);
    match operation & !AT_ONCE {
        UNLOCK => locks::unlock(&lock)?,
        SHARED | EXCLUSIVE => {
            *file.locked.lock() = true;
            locks::lock(lock, operation & AT_ONCE == 0)?;
        }
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

/// `ioctl`.
pub fn ioctl(fd: i32, request: u32, argument: u64) -> Result<u64, Errno> {
    const TCGETS: u32 = 0x5401;
    const TCSETS: u32 = 0x5402;
    const TCSETSF: u32 = 0x5404;
    const TIOCGPGRP: u32 = 0x540f;
    const TIOCSPGRP: u32 = 0x5410;
    const TIOCGWINSZ: u32 = 0x5413;
    const FIONREAD: u32 = 0x541b;
    const FIONBIO: u32 = 0x5421;
    const FIONCLEX: u32 = 0x5450;
    const FIOCLEX: u32 = 0x5451;
    let files = current::files();
    let file = files.get(fd)?;
    if let Kind::UserFault(fault) = &file.node.kind {
        return fault.ioctl(request, argument);
    }
    match request {
        FIOCLEX | FIONCLEX => return files.set_close_on_exec(fd, request == FIOCLEX).map(|()| 0),
        FIONBIO => {
            let on: i32 = user::read_value(argument)?;
            file.set_flags(O_NONBLOCK, if on != 0 { O_NONBLOCK } else { 0 });
            return Ok(0);
        }
        FIONREAD => {
            let position = || *file.position.lock();
            let count = match &file.node.kind {
                Kind::Pipe(pipe) => pipe.len() as u64,
                Kind::Socket(socket) => socket.input.len() as u64,
                Kind::Regular(regular) => regular.len().saturating_sub(position()),
                Kind::Device(device) if device.is_console() => device::available() as u64,
                _ => return Err(Errno::ENOTTY),
            };
            user::write_value(argument, count.min(i32::MAX as u64) as i32)?;
            return Ok(0);
        }
        _ => {}
    }
    let is_terminal = matches!(&file.node.kind, Kind::Device(device) if device.is_console());
    if !is_terminal || !device::is_terminal() {
        return Err(Errno::ENOTTY);
    }
    match request {
        TCGETS => {
            // As Linux's consoles begin: lines, echo, signals; the terminal at the other end does all that.
            let mut settings = [0u8; 36];
            for (place, word) in settings.chunks_mut(4).zip([0x500u32, 0x5, 0xcbd, 0x8a3b]) {
                place.copy_from_slice(&word.to_ne_bytes());
            }
            user::write(argument, &settings)?;
        }
        TCSETS..=TCSETSF => {
            let mut settings = [0u8; 36];
            user::read(&mut settings, argument)?;
        }
        TIOCGPGRP => user::write_value(argument, current::group() as i32)?,
        TIOCSPGRP => {
            let _: i32 = user::read_value(argument)?;
        }
        TIOCGWINSZ => user::write_value(argument, [24u16, 80, 0, 0])?,
        _ => return Err(Errno::ENOTTY),
    }
    Ok(0)
}

/// Opens what has no name, and gives it a descriptor.
///
/// # Errors
/// `EMFILE`, `ENOMEM`.
pub fn open(kind: Kind, flags: u32, close_on_exec: bool) -> Result<u64, Errno> {
    let node = Inode::try_new(Volume::Anonymous, kind, 0o600)?;
    current::add_file(OpenFile::try_new(node, flags, Vec::new())?, close_on_exec)
}

/// `pipe2`.
pub fn pipe(at: u64, flags: u32) -> Result<u64, Errno> {
    if flags & !(O_CLOEXEC | O_NONBLOCK | O_DIRECT) != 0 {
        return Err(Errno::EINVAL);
    }
    let (status, close_on_exec) = (flags & (O_NONBLOCK | O_DIRECT), flags & O_CLOEXEC != 0);
    let node = Inode::try_new(Volume::Anonymous, Kind::Pipe(Pipe::new()), 0o600)?;
    let reader = OpenFile::try_new(node.clone(), status, Vec::new())?;
    let writer = OpenFile::try_new(node, status | O_WRONLY, Vec::new())?;
    two(reader, writer, close_on_exec, at)
}

/// Gives two files descriptors, and writes those to `at`: both or none.
///
/// # Errors
/// `EMFILE`, `ENOMEM`, `EFAULT`.
pub fn two(one: Open, other: Open, close_on_exec: bool, at: u64) -> Result<u64, Errno> {
    let first = current::add_file(one, close_on_exec)?;
    let second = current::add_file(other, close_on_exec).inspect_err(|_| {
        let _ = current::files().close(first as i32);
    })?;
    user::write_value(at, [first as i32, second as i32]).inspect_err(|_| {
        let _ = (current::files().close(first as i32), current::files().close(second as i32));
    })?;
    Ok(0)
}

/// `eventfd2`.
pub fn eventfd(count: u32, flags: u32) -> Result<u64, Errno> {
    const SEMAPHORE: u32 = 1;
    if flags & !(SEMAPHORE | O_CLOEXEC | O_NONBLOCK) != 0 {
        return Err(Errno::EINVAL);
    }
    let event = Event::new(u64::from(count), flags & SEMAPHORE != 0);
    open(Kind::Event(event), O_RDWR | flags & O_NONBLOCK, flags & O_CLOEXEC != 0)
}

/// `timerfd_create`.
pub fn timerfd_create(clock: u32, flags: u32) -> Result<u64, Errno> {
    if flags & !(O_CLOEXEC | O_NONBLOCK) != 0 {
        return Err(Errno::EINVAL);
    }
    let real = match clock {
        0 | 8 => true,
        1 | 7 | 9 => false,
        _ => return Err(Errno::EINVAL),
    };
    open(Kind::Timer(Timer::new(real)), O_RDWR | flags & O_NONBLOCK, flags & O_CLOEXEC != 0)
}

/// A time in seconds and nanoseconds, in ns.
fn nanoseconds([seconds, nanoseconds]: [i64; 2]) -> Result<u64, Errno> {
    let seconds = u64::try_from(seconds).map_err(|_| Errno::EINVAL)?;
    let nanoseconds = u64::try_from(nanoseconds).ok().filter(|&n| n < 1_000_000_000).ok_or(Errno::EINVAL)?;
    Ok(seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds))
}

fn put_setting(at: u64, setting: Setting) -> Result<(), Errno> {
    let now = arch::now();
    let left = match setting {
        Setting { next: 0, .. } => 0,
        Setting { next, interval } if next <= now && interval > 0 => interval - (now - next) % interval,
        Setting { next, .. } => next.saturating_sub(now),
    };
    let split = |ns: u64| [ns / 1_000_000_000, ns % 1_000_000_000];
    user::write_value(at, split(setting.interval))?;
    user::write_value(at + 16, split(left))
}

/// `timerfd_settime`.
pub fn timerfd_settime(fd: i32, flags: u32, new: u64, old: u64) -> Result<u64, Errno> {
    const ABSOLUTE: u32 = 1;
    const CANCEL_ON_SET: u32 = 2;
    let interval = nanoseconds(user::read_value(new)?)?;
    let value = nanoseconds(user::read_value(new + 16)?)?;
    let file = current::files().get(fd)?;
    let Kind::Timer(timer) = &file.node.kind else { return Err(Errno::EINVAL) };
    if flags & !(ABSOLUTE | CANCEL_ON_SET) != 0 {
        return Err(Errno::EINVAL);
    }
    let now = arch::now();
    let next = match (value, flags & ABSOLUTE != 0, timer.real) {
        (0, ..) => 0,
        (value, false, _) => now.saturating_add(value),
        (value, true, false) => value,
        (value, true, true) => value.saturating_sub(arch::realtime() - now).max(1),
    };
    let before = timer.set(Setting { next, interval });
    if old != 0 {
        put_setting(old, before)?;
    }
    Ok(0)
}

/// `timerfd_gettime`.
pub fn timerfd_gettime(fd: i32, at: u64) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    let Kind::Timer(timer) = &file.node.kind else { return Err(Errno::EINVAL) };
    put_setting(at, timer.get())?;
    Ok(0)
}

/// `signalfd4`.
pub fn signalfd(fd: i32, mask: u64, size: u64, flags: u32) -> Result<u64, Errno> {
    if flags & !(O_CLOEXEC | O_NONBLOCK) != 0 || size != 8 {
        return Err(Errno::EINVAL);
    }
    let set: u64 = user::read_value(mask)?;
    if fd == -1 {
        let signals = Kind::Signals(Signals::new(set));
        return open(signals, O_RDWR | flags & O_NONBLOCK, flags & O_CLOEXEC != 0);
    }
    let file = current::files().get(fd)?;
    let Kind::Signals(signals) = &file.node.kind else { return Err(Errno::EINVAL) };
    signals.set(set);
    Ok(fd as u64)
}

/// `cachestat`: how many pages of a file are in memory.
pub fn cachestat(fd: i32, range: u64, to: u64, flags: u32) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    let [offset, len]: [u64; 2] = user::read_value(range)?;
    let regular = file.node.regular().ok_or(Errno::EOPNOTSUPP)?;
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let end = if len == 0 { regular.len() } else { offset.saturating_add(len).min(regular.len()) };
    let mut pages = 0;
    let mut at = offset & !4095;
    while at < end {
        let Some(next) = regular.next_page(at, true).filter(|&next| next < end) else { break };
        let hole = regular.next_page(next, false).unwrap_or(end).min(end);
        pages += (hole.max(next + 1) - (next & !4095)).div_ceil(4096);
        at = hole.max(next + 1).next_multiple_of(4096);
    }
    // In the cache; dirty, being written, evicted, recently evicted: memory's files are never clean.
    user::write_value(to, [pages, pages, 0, 0, 0])?;
    Ok(0)
}

/// `epoll_create1`.
pub fn epoll_create(flags: u32) -> Result<u64, Errno> {
    if flags & !O_CLOEXEC != 0 {
        return Err(Errno::EINVAL);
    }
    open(Kind::Epoll(Epoll::new()), O_RDWR, flags & O_CLOEXEC != 0)
}

/// `memfd_create`.
pub fn memfd_create(name: u64, flags: u32) -> Result<u64, Errno> {
    const CLOEXEC: u32 = 1;
    const ALLOW_SEALING: u32 = 2;
    const NOEXEC_SEAL: u32 = 8;
    const EXEC: u32 = 16;
    const HUGE: u32 = 4;
    const SIZES: u32 = 0x3f << 26;
    let of_pool = if flags & HUGE != 0 { HUGE | SIZES } else { 0 };
    if flags & !(of_pool | CLOEXEC | ALLOW_SEALING | NOEXEC_SEAL | EXEC) != 0
        || flags & NOEXEC_SEAL != 0 && flags & EXEC != 0
    {
        return Err(Errno::EINVAL);
    }
    let name = user::read_string(name, 250).map_err(|error| match error {
        Errno::ENAMETOOLONG => Errno::EINVAL,
        error => error,
    })?;
    let seals = match flags & (ALLOW_SEALING | NOEXEC_SEAL) {
        0 => SEAL_SEAL,
        ALLOW_SEALING => 0,
        _ => SEAL_EXEC,
    };
    let mode = if flags & NOEXEC_SEAL != 0 { 0o666 } else { 0o777 };
    let nature = match (flags & HUGE, flags >> 26) {
        (0, _) => Nature::Plain,
        (_, 0 | 21) => Nature::Pool(1 << 21),
        (_, 30) => Nature::Pool(1 << 30),
        _ => return Err(Errno::ENODEV),
    };
    let node = tree::nameless_of(nature, seals, mode)?;
    let mut path = Vec::new();
    path.try_reserve_exact(name.len() + 7)?;
    path.extend_from_slice(b"/memfd:");
    path.extend_from_slice(&name);
    let file = OpenFile::try_new(node, O_RDWR | super::abi::O_LARGEFILE, path)?;
    current::add_file(file, flags & CLOEXEC != 0)
}

/// Whether there has been a secret: only then others' memory is looked through for them.
static SECRETS: AtomicBool = AtomicBool::new(false);
/// What the mappings of secrets are called.
const SECRET: &str = "/secretmem";

/// `memfd_secret`.
pub fn memfd_secret(flags: u32) -> Result<u64, Errno> {
    if flags & !super::abi::O_CLOEXEC != 0 {
        return Err(Errno::EINVAL);
    }
    let node = tree::nameless_of(Nature::Secret, SEAL_SEAL, 0o600)?;
    let path = super::directory::copy(SECRET.as_bytes())?;
    let file = OpenFile::try_new(node, O_RDWR, path)?;
    SECRETS.store(true, Ordering::Relaxed);
    current::add_file(file, flags & super::abi::O_CLOEXEC != 0)
}

/// False while there has been no secret.
#[inline]
pub fn may_be_secrets() -> bool {
    SECRETS.load(Ordering::Relaxed)
}

/// True when the object is a secret's, which only those get at who have mapped it.
pub fn is_secret(object: &crate::mm::Object) -> bool {
    object.identity().is_some_and(|identity| identity.path() == SECRET)
}

/// `fsync` and its kin: the pages are all there is.
pub fn fsync(fd: i32) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    let is_file = matches!(file.node.kind, Kind::Regular(_) | Kind::Directory(_));
    if is_file { Ok(0) } else { Err(Errno::EINVAL) }
}

/// `fadvise64`, `readahead`: checked, and nothing to do, for the pages are all there is.
pub fn fadvise(fd: i32, len: i64, advice: u32) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    if matches!(file.node.kind, Kind::Pipe(_)) {
        return Err(Errno::ESPIPE);
    }
    if len < 0 || advice > 5 { Err(Errno::EINVAL) } else { Ok(0) }
}
