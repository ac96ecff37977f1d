//! Files: a tree in memory, descriptors, and the calls about both.
//!
//! | module | what |
//! |---|---|
//! | [`cpio`] | the boot archive, from which the tree is filled |
//! | [`inode`], [`directory`], [`regular`], [`device`], [`pipe`], [`event`], [`timer`], [`epoll`] | what there is |
//! | [`path`], [`tree`] | from names to inodes; what changes names |
//! | [`permission`] | who may do what |
//! | [`open`], [`table`], [`locks`] | open files, descriptors, locks of files |
//! | [`procfs`] | `/proc` and `/sys` |
//! | [`names`], [`metadata`], [`io`], [`descriptors`], [`poll`] | the calls |
//! | [`program`] | what `execve` and `mmap` get |
//! | [`current`] | what all of it asks of `task` |
//!
//! The bytes of a regular file are the pages of a shared object of Terrane's: `mmap`, `read`, `write` and `ftruncate` meet there, and
//! reclaim finds them.
//!
//! Locks: `tree`'s for changes of names; a file's position and its `writing` lock are held while a call copies from or to a program, and
//! so block; all others are spin locks that are held for a look or a change. No lock is held while something rings a bell, but those that no condition of a
//! waiter takes.

mod abi;
mod bell;
pub mod buffers;
mod cpio;
pub mod current;
mod descriptors;
mod device;
mod directory;
mod epoll;
mod event;
mod inject;
mod inode;
mod io;
mod locks;
mod metadata;
mod names;
mod open;
mod path;
mod permission;
mod pidfd;
mod pipe;
mod poll;
mod procfs;
mod program;
mod random;
mod regular;
mod signals;
mod socket;
mod splice;
mod table;
mod timer;
mod tree;
pub mod userfault;

pub use current::Cwd;
pub use inode::Node;
pub use locks::process_ended;
pub use pidfd::{open_process, process_of};
pub use program::{mapping_of, open_program, open_program_at};
pub use table::Files;

use crate::errno::Errno;
use crate::log;
use abi::{AT_FDCWD, AT_REMOVEDIR, AT_SYMLINK_NOFOLLOW, O_CREAT, O_TRUNC, O_WRONLY, nr};
use abi::{S_IFDIR, S_IFLNK, S_IFMT, S_IFREG};
use alloc::vec::Vec;
use device::Device;
use inode::Kind;
use regular::Regular;

/// Makes the tree, and fills it from the archive, whose memory is not needed any more afterwards. What there is no memory for is left
/// out, with a line in the report.
pub fn init(archive: &[u8]) {
    if let Err(errno) = fill(archive) {
        log!("the boot archive does not fit into memory: error {}", errno.0);
    }
}

fn fill(archive: &[u8]) -> Result<(), Errno> {
    inject::set_up();
    tree::set_up()?;
    let root = tree::root();
    procfs::set_up()?;
    for (name, mode) in [("dev", 0o755), ("tmp", 0o1777), ("root", 0o700), ("var", 0o755), ("etc", 0o755)] {
        tree::create_directory(root, name.as_bytes(), mode)?;
    }
    let dev = root.directory().and_then(|root| root.get(b"dev")).ok_or(Errno::ENOENT)?;
    tree::create_directory(&dev, b"shm", 0o1777)?;
    let devices = [
        ("null", Device::Null),
        ("zero", Device::Zero),
        ("full", Device::Full),
        ("random", Device::Random),
        ("urandom", Device::UnlimitedRandom),
        ("tty", Device::Terminal),
        ("console", Device::Console),
    ];
    for (name, device) in devices {
        tree::create(&dev, name.as_bytes(), Kind::Device(device), 0o666)?;
    }
    let links = [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ];
    for (name, target) in links {
        tree::create(&dev, name.as_bytes(), Kind::Symlink(directory::copy(target.as_bytes())?), 0o777)?;
    }
    for member in cpio::members(archive) {
        unpack(&member)?;
    }
    // Programs look users up; the archive may bring its own.
    let etc = root.directory().and_then(|root| root.get(b"etc")).ok_or(Errno::ENOENT)?;
    for (name, text) in [("passwd", PASSWD), ("group", GROUP)] {
        if etc.directory().is_some_and(|etc| etc.get(name.as_bytes()).is_none()) {
            let node = tree::create_file(&etc, name.as_bytes(), 0o644)?;
            node.regular().map(|regular| regular.fill(text.as_bytes())).transpose()?;
        }
    }
    Ok(())
}

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n";
const GROUP: &str = "root:x:0:\nnogroup:x:65534:\n";

/// Makes what a member of the archive describes, and the directories on the way.
fn unpack(member: &cpio::Member<'_>) -> Result<(), Errno> {
    let mut here = tree::root().clone();
    let mut names =
        member.name.split(|&byte| byte == b'/').filter(|name| !name.is_empty() && *name != b".").peekable();
    while let Some(name) = names.next() {
        let directory = here.directory().ok_or(Errno::ENOTDIR)?;
        let there = directory.get(name);
        if names.peek().is_some() {
            here = match there {
                Some(there) => there,
                None => tree::create_directory(&here, name, 0o755)?,
            };
            continue;
        }
        if let Some(there) = there {
            if member.mode & S_IFMT == S_IFDIR && there.is_directory() {
                there.attributes.lock().mode = member.mode & 0o7777;
                return Ok(());
            }
            // A later member takes the place of an earlier one.
            directory.remove(name);
        }
        match member.mode & S_IFMT {
            S_IFDIR => drop(tree::create_directory(&here, name, member.mode)?),
            S_IFLNK => {
                let target = directory::copy(member.bytes)?;
                tree::create(&here, name, Kind::Symlink(target), 0o777)?;
            }
            S_IFREG => {
                let node = tree::create_file(&here, name, member.mode)?;
                let bytes = node.regular().map(|regular: &Regular| regular.fill(member.bytes));
                bytes.transpose()?;
                node.attributes.lock().modified.seconds = i64::from(member.modified);
            }
            // Devices are the kernel's to make.
            _ => {}
        }
    }
    Ok(())
}

/// A file without a name for a segment of shared memory with this key (System V).
///
/// # Errors
/// `ENOMEM`.
pub fn shared_memory(key: u32, len: u64) -> Result<Node, Errno> {
    let node = tree::nameless(inode::Volume::Memory, regular::SEAL_SEAL, 0o600)?;
    let mut name = procfs::Text::default();
    core::fmt::Write::write_fmt(&mut name, format_args!("/SYSV{key:08x}")).map_err(|_| Errno::ENOMEM)?;
    node.regular().map(|regular| regular.set_len(len)).transpose()?;
    tree::name_object(&node, &name.bytes)?;
    Ok(node)
}

/// The bytes of a regular file, by its absolute path.
///
/// # Errors
/// As any walk; `EINVAL` when it is no regular file; `ENOMEM`, `EIO`.
pub fn read_whole(path: &[u8]) -> Result<Vec<u8>, Errno> {
    let node = path::walk(tree::root(), path, path::Last::Follow)?.existing()?;
    let regular = node.regular().ok_or(Errno::EINVAL)?;
    let mut bytes = Vec::new();
    let len = regular.len() as usize;
    bytes.try_reserve_exact(len)?;
    bytes.resize(len, 0);
    let got = regular.read(0, &mut bytes)?;
    bytes.truncate(got);
    Ok(bytes)
}

/// A call about files; `None` when it is not one.
pub fn syscall(number: u64, args: &[u64; 6]) -> Option<Result<u64, Errno>> {
    let [a, b, c, d, e, f] = *args;
    let (fd, int) = (a as i32, |value: u64| value as u32);
    Some(match number {
        nr::READ => io::read(fd, b, c),
        nr::WRITE => io::write(fd, b, c),
        nr::PREAD64 => io::pread(fd, b, c, d),
        nr::PWRITE64 => io::pwrite(fd, b, c, d),
        nr::READV => io::readv(fd, b, c),
        nr::WRITEV => io::writev(fd, b, c),
        nr::PREADV if d == u64::MAX => Err(Errno::EINVAL),
        nr::PWRITEV if d == u64::MAX => Err(Errno::EINVAL),
        nr::PREADV => io::preadv2(fd, b, c, d, 0),
        nr::PWRITEV => io::pwritev2(fd, b, c, d, 0),
        nr::PREADV2 => io::preadv2(fd, b, c, d, int(f)),
        nr::PWRITEV2 => io::pwritev2(fd, b, c, d, int(f)),
        nr::LSEEK => io::lseek(fd, b as i64, int(c)),
        nr::SENDFILE => io::sendfile(fd, b as i32, c, d),
        nr::COPY_FILE_RANGE => io::copy_file_range(fd, b, c as i32, d, e, int(f)),

        nr::OPEN => names::open(AT_FDCWD, a, int(b), int(c)),
        nr::CREAT => names::open(AT_FDCWD, a, O_CREAT | O_WRONLY | O_TRUNC, int(b)),
        nr::OPENAT => names::open(fd, b, int(c), int(d)),
        nr::OPENAT2 => names::open2(fd, b, c, d),
        nr::MKDIR => names::mkdir(AT_FDCWD, a, int(b)),
        nr::MKDIRAT => names::mkdir(fd, b, int(c)),
        nr::MKNOD => names::mknod(AT_FDCWD, a, int(b), c),
        nr::MKNODAT => names::mknod(fd, b, int(c), d),
        nr::UNLINK => names::unlink(AT_FDCWD, a, 0),
        nr::RMDIR => names::unlink(AT_FDCWD, a, AT_REMOVEDIR),
        nr::UNLINKAT => names::unlink(fd, b, int(c)),
        nr::RENAME => names::rename(AT_FDCWD, a, AT_FDCWD, b, 0),
        nr::RENAMEAT => names::rename(fd, b, c as i32, d, 0),
        nr::RENAMEAT2 => names::rename(fd, b, c as i32, d, int(e)),
        nr::LINK => names::link(AT_FDCWD, a, AT_FDCWD, b, 0),
        nr::LINKAT => names::link(fd, b, c as i32, d, int(e)),
        nr::SYMLINK => names::symlink(a, AT_FDCWD, b),
        nr::SYMLINKAT => names::symlink(a, b as i32, c),
        nr::READLINK => names::readlink(AT_FDCWD, a, b, c),
        nr::READLINKAT => names::readlink(fd, b, c, d),
        nr::CHDIR => names::chdir(a),
        nr::FCHDIR => names::fchdir(fd),
        nr::CHROOT => names::chroot(a),
        nr::GETCWD => names::getcwd(a, b),
        nr::GETDENTS64 => names::getdents(fd, b, c & 0xffff_ffff),
        nr::UMASK => Ok(u64::from(current::cwd().set_umask(int(a)))),

        nr::STAT => metadata::statat(AT_FDCWD, a, b, 0),
        nr::LSTAT => metadata::statat(AT_FDCWD, a, b, AT_SYMLINK_NOFOLLOW),
        nr::FSTAT => metadata::fstat(fd, b),
        nr::NEWFSTATAT => metadata::statat(fd, b, c, int(d)),
        nr::STATX => metadata::statx(fd, b, int(c), int(d), e),
        nr::ACCESS => metadata::access(AT_FDCWD, a, int(b), 0),
        nr::FACCESSAT => metadata::access(fd, b, int(c), 0),
        nr::FACCESSAT2 => metadata::access(fd, b, int(c), int(d)),
        nr::CHMOD => metadata::chmodat(AT_FDCWD, a, int(b), 0),
        nr::FCHMOD => metadata::fchmod(fd, int(b)),
        nr::FCHMODAT => metadata::chmodat(fd, b, int(c), 0),
        nr::FCHMODAT2 => metadata::chmodat(fd, b, int(c), int(d)),
        nr::CHOWN => metadata::chownat(AT_FDCWD, a, int(b), int(c), 0),
        nr::LCHOWN => metadata::chownat(AT_FDCWD, a, int(b), int(c), AT_SYMLINK_NOFOLLOW),
        nr::FCHOWN => metadata::fchown(fd, int(b), int(c)),
        nr::FCHOWNAT => metadata::chownat(fd, b, int(c), int(d), int(e)),
        nr::UTIMENSAT => metadata::utimensat(fd, b, c, int(d)),
        nr::FUTIMESAT => metadata::utimes(fd, b, c),
        nr::UTIMES => metadata::utimes(AT_FDCWD, a, b),
        nr::UTIME => metadata::utime(a, b),
        nr::TRUNCATE => metadata::truncate(a, b as i64),
        nr::FTRUNCATE => metadata::ftruncate(fd, b as i64),
        nr::FALLOCATE => metadata::fallocate(fd, int(b), c as i64, d as i64),
        nr::STATFS => metadata::statfs(a, b),
        nr::FSTATFS => metadata::fstatfs(fd, b),

        nr::CLOSE => descriptors::close(fd),
        nr::CLOSE_RANGE => descriptors::close_range(int(a), int(b), int(c)),
        nr::DUP => descriptors::dup(fd),
        nr::DUP2 => descriptors::dup2(fd, b as i32),
        nr::DUP3 => descriptors::dup3(fd, b as i32, int(c)),
        nr::FCNTL => descriptors::fcntl(fd, int(b), c),
        nr::FLOCK => descriptors::flock(fd, int(b)),
        nr::IOCTL => descriptors::ioctl(fd, int(b), c),
        nr::PIPE => descriptors::pipe(a, 0),
        nr::PIPE2 => descriptors::pipe(a, int(b)),
        nr::EVENTFD => descriptors::eventfd(int(a), 0),
        nr::EVENTFD2 => descriptors::eventfd(int(a), int(b)),
        nr::TIMERFD_CREATE => descriptors::timerfd_create(int(a), int(b)),
        nr::TIMERFD_SETTIME => descriptors::timerfd_settime(fd, int(b), c, d),
        nr::TIMERFD_GETTIME => descriptors::timerfd_gettime(fd, b),
        nr::SIGNALFD => descriptors::signalfd(fd, b, c, 0),
        nr::SIGNALFD4 => descriptors::signalfd(fd, b, c, int(d)),
        nr::USERFAULTFD => userfault::userfaultfd(int(a)),
        nr::CACHESTAT => descriptors::cachestat(fd, b, c, int(d)),
        nr::SPLICE => splice::splice(fd, b, c as i32, d, e, int(f)),
        nr::TEE => splice::tee(fd, b as i32, c, int(d)),
        nr::VMSPLICE => splice::vmsplice(fd, b, c, int(d)),
        nr::MEMFD_SECRET => descriptors::memfd_secret(int(a)),
        nr::MEMFD_CREATE => descriptors::memfd_create(a, int(b)),
        nr::FSYNC | nr::FDATASYNC | nr::SYNCFS | nr::SYNC_FILE_RANGE => descriptors::fsync(fd),
        nr::SYNC => Ok(0),
        nr::FADVISE64 => descriptors::fadvise(fd, c as i64, int(d)),
        nr::READAHEAD => descriptors::fadvise(fd, 0, 0),

        nr::POLL => poll::poll(a, b & 0xffff_ffff, c as i32),
        nr::PPOLL => poll::ppoll(a, b & 0xffff_ffff, c, d, e),
        nr::SELECT => poll::select(a as i32, [b, c, d], e),
        nr::PSELECT6 => poll::pselect(a as i32, [b, c, d], e, f),
        nr::EPOLL_CREATE if fd <= 0 => Err(Errno::EINVAL),
        nr::EPOLL_CREATE => descriptors::epoll_create(0),
        nr::EPOLL_CREATE1 => descriptors::epoll_create(int(a)),
        nr::EPOLL_CTL => poll::epoll_ctl(fd, int(b), c as i32, d),
        nr::EPOLL_WAIT => poll::epoll_wait(fd, b, c as i32, d as i32, 0, 8),
        nr::EPOLL_PWAIT => poll::epoll_wait(fd, b, c as i32, d as i32, e, f),
        nr::EPOLL_PWAIT2 => poll::epoll_wait2(fd, b, c as i32, d, e, f),

        nr::SOCKET => socket::socket(),
        nr::SOCKETPAIR => socket::pair(int(a), int(b), int(c), d),
        nr::SENDTO => socket::send(fd, b, c, int(d)),
        nr::RECVFROM => socket::receive(fd, b, c, int(d), f),
        nr::SENDMSG => socket::message(fd, b, int(c), true),
        nr::RECVMSG => socket::message(fd, b, int(c), false),
        nr::SHUTDOWN => socket::shut_down(fd, int(b)),
        _ => return None,
    })
}
