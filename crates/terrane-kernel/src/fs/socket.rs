//! Pairs of sockets (`AF_UNIX`, streams and packets): two pipes, one for each way. There are no others: nothing here has a name to connect to.

use super::abi::{O_CLOEXEC, O_NONBLOCK, O_RDWR, POLLERR, POLLHUP, POLLIN};
use super::inode::{Inode, Kind, Volume};
use super::open::OpenFile;
use super::pipe::Pipe;
use super::{current, descriptors, io};
use crate::arch;
use crate::errno::Errno;
use crate::user;
use alloc::vec::Vec;
use terrane::sync::Shared;

/// One end.
pub struct Socket {
    /// What the other end has written.
    pub input: Shared<Pipe>,
    /// What it is to read.
    pub output: Shared<Pipe>,
}

impl Socket {
    /// What `poll` says.
    pub fn ready(&self) -> u32 {
        let (input, output) = (self.input.ready(true, false), self.output.ready(false, true));
        // The other end is gone: its last bytes can be read, and then the end.
        let gone = if input & POLLHUP != 0 || output & POLLERR != 0 { POLLIN | POLLHUP } else { 0 };
        input | output & !POLLERR | gone
    }

    /// When that may have changed without the bell of what comes in: room in what goes out.
    pub fn deadline(&self) -> Option<u64> {
        const LOOK_AGAIN: u64 = 1_000_000;
        (self.output.ready(false, true) == 0).then(|| arch::now() + LOOK_AGAIN)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.input.close(true, false);
        self.output.close(false, true);
    }
}

/// `socket`: of no family.
pub fn socket() -> Result<u64, Errno> {
    Err(Errno::EAFNOSUPPORT)
}

/// `socketpair`.
pub fn pair(family: u32, kind: u32, protocol: u32, at: u64) -> Result<u64, Errno> {
    const UNIX: u32 = 1;
    const STREAM: u32 = 1;
    const DATAGRAM: u32 = 2;
    const PACKETS: u32 = 5;
    const NO_SUCH_TYPE: Errno = Errno(94);
    const NO_SUCH_PROTOCOL: Errno = Errno(93);
    let flags = kind & !0xf;
    if flags & !(O_CLOEXEC | O_NONBLOCK) != 0 || kind & 0xf > 10 {
        return Err(Errno::EINVAL);
    }
    match (family, kind & 0xf, protocol) {
        (UNIX, STREAM | DATAGRAM | PACKETS, 0 | 1) => {}
        (UNIX, STREAM | DATAGRAM | PACKETS, _) => return Err(NO_SUCH_PROTOCOL),
        (UNIX, ..) => return Err(NO_SUCH_TYPE),
        _ => return Err(Errno::EAFNOSUPPORT),
    }
    let pipe = || if kind & 0xf == STREAM { Pipe::new() } else { Pipe::of_packets() };
    let (there, back) = (Shared::try_new(pipe())?, Shared::try_new(pipe())?);
    let end = |input: &Shared<Pipe>, output: &Shared<Pipe>| {
        input.open(true, false);
        output.open(false, true);
        let kind = Kind::Socket(Socket { input: input.clone(), output: output.clone() });
        let node = Inode::try_new(Volume::Anonymous, kind, 0o777)?;
        OpenFile::try_new(node, O_RDWR | flags & O_NONBLOCK, Vec::new())
    };
    let (one, other) = (end(&back, &there)?, end(&there, &back)?);
    descriptors::two(one, other, flags & O_CLOEXEC != 0, at)
}

/// The file, if it is a socket.
fn check(fd: i32) -> Result<(), Errno> {
    match current::files().get(fd)?.node.kind {
        Kind::Socket(_) => Ok(()),
        _ => Err(Errno::ENOTSOCK),
    }
}

const PEEK: u32 = 2;
const DO_NOT_WAIT: u32 = 0x40;
const WAIT_FOR_ALL: u32 = 0x100;
const NO_SIGNAL: u32 = 0x4000;

/// Whether a call with `DO_NOT_WAIT` would wait for `events`.
fn would_wait(fd: i32, events: u32, flags: u32) -> Result<bool, Errno> {
    Ok(flags & DO_NOT_WAIT != 0 && current::files().get(fd)?.ready() & events == 0)
}

/// `sendto`: to the other end.
pub fn send(fd: i32, at: u64, len: u64, flags: u32) -> Result<u64, Errno> {
    check(fd)?;
    if flags & !(DO_NOT_WAIT | NO_SIGNAL) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if would_wait(fd, super::abi::POLLOUT | POLLHUP, flags)? {
        return Err(Errno::EAGAIN);
    }
    io::send(fd, at, len, flags & NO_SIGNAL == 0)
}

/// `recvfrom`: from the other end, which has no name.
pub fn receive(fd: i32, at: u64, len: u64, flags: u32, name_len: u64) -> Result<u64, Errno> {
    check(fd)?;
    if flags & !(DO_NOT_WAIT | WAIT_FOR_ALL | PEEK | NO_SIGNAL) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if would_wait(fd, POLLIN, flags)? {
        return Err(Errno::EAGAIN);
    }
    if name_len != 0 {
        user::write_value(name_len, 0u32)?;
    }
    if flags & PEEK != 0 {
        return io::peek(fd, at, len);
    }
    let mut done = io::read(fd, at, len)?;
    while flags & WAIT_FOR_ALL != 0 && done < len {
        match io::read(fd, at + done, len - done) {
            Ok(0) | Err(_) => break,
            Ok(more) => done += more,
        }
    }
    Ok(done)
}

/// `sendmsg` and `recvmsg`, without what goes beside the bytes.
pub fn message(fd: i32, at: u64, flags: u32, sends: bool) -> Result<u64, Errno> {
    check(fd)?;
    let [_, _, parts, count, _, control] = user::read_value::<[u64; 6]>(at)?;
    if would_wait(fd, if sends { super::abi::POLLOUT | POLLHUP } else { POLLIN }, flags)? {
        return Err(Errno::EAGAIN);
    }
    if sends {
        return if control != 0 { Err(Errno::EINVAL) } else { io::writev(fd, parts, count) };
    }
    let got = io::readv(fd, parts, count)?;
    user::write_value(at + 8, 0u32)?;
    user::write_value(at + 40, [0u64; 2])?;
    Ok(got)
}

/// `shutdown`: both ways end with the last descriptor; one alone does not end before.
pub fn shut_down(fd: i32, how: u32) -> Result<u64, Errno> {
    check(fd)?;
    let file = current::files().get(fd)?;
    let Kind::Socket(socket) = &file.node.kind else { return Err(Errno::ENOTSOCK) };
    if how > 2 {
        return Err(Errno::EINVAL);
    }
    if how != 1 {
        socket.input.stop();
    }
    if how != 0 {
        socket.output.stop();
    }
    Ok(0)
}
