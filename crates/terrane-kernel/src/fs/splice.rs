//! `splice`, `vmsplice` and `tee`: between pipes and files. Bytes are copied; nothing is given away.

use super::abi::{MAX_TRANSFER, O_NONBLOCK};
use super::buffers::PIECE;
use super::current;
use super::inode::Kind;
use super::io;
use super::open::Open;
use crate::errno::Errno;
use alloc::vec::Vec;

const NONBLOCK: u32 = 2;
/// `SPLICE_F_MOVE`, `_NONBLOCK`, `_MORE`, `_GIFT`.
const FLAGS: u32 = 15;

fn is_pipe(file: &Open) -> bool {
    matches!(file.node.kind, Kind::Pipe(_))
}

/// `vmsplice`: writes to a pipe from memory, or reads from it into memory.
pub fn vmsplice(fd: i32, at: u64, count: u64, flags: u32) -> Result<u64, Errno> {
    if flags & !FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    let file = current::files().get(fd)?;
    if !is_pipe(&file) {
        return Err(Errno::EBADF);
    }
    if count == 0 {
        return Ok(0);
    }
    let Kind::Pipe(pipe) = &file.node.kind else { return Err(Errno::EBADF) };
    if !file.writes() {
        if flags & NONBLOCK != 0 && pipe.len() == 0 && pipe.ready(true, false) == 0 {
            return Err(Errno::EAGAIN);
        }
        return io::readv(fd, at, count);
    }
    if flags & NONBLOCK != 0 && pipe.ready(false, true) == 0 {
        return Err(Errno::EAGAIN);
    }
    io::writev(fd, at, count)
}

/// `splice`.
pub fn splice(input: i32, from_at: u64, out: i32, to_at: u64, len: u64, flags: u32) -> Result<u64, Errno> {
    if len == 0 {
        return Ok(0);
    }
    if flags & !FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    let (from, to) = (current::files().get(input)?, current::files().get(out)?);
    if !from.reads() || !to.writes() {
        return Err(Errno::EBADF);
    }
    if !is_pipe(&from) && !is_pipe(&to) {
        return Err(Errno::EINVAL);
    }
    if is_pipe(&from) && from_at != 0 || is_pipe(&to) && to_at != 0 {
        return Err(Errno::ESPIPE);
    }
    if super::tree::same(&from.node, &to.node) || to.appends() || from.node.is_directory() {
        return Err(Errno::EINVAL);
    }
    let blocks = flags & NONBLOCK == 0;
    for (file, reads) in [(&from, true), (&to, false)] {
        if let Kind::Pipe(pipe) = &file.node.kind
            && !(blocks && file.flags() & O_NONBLOCK == 0)
            && pipe.ready(reads, !reads) == 0
        {
            return Err(Errno::EAGAIN);
        }
    }
    io::splice(&from, from_at, &to, to_at, len)
}

/// `tee`: copies what is in a pipe to another, and leaves it there.
pub fn tee(input: i32, out: i32, len: u64, flags: u32) -> Result<u64, Errno> {
    if flags & !FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    if len == 0 {
        return Ok(0);
    }
    let (from, to) = (current::files().get(input)?, current::files().get(out)?);
    if !from.reads() || !to.writes() {
        return Err(Errno::EBADF);
    }
    let (Kind::Pipe(source), Kind::Pipe(target)) = (&from.node.kind, &to.node.kind) else {
        return Err(Errno::EINVAL);
    };
    if super::tree::same(&from.node, &to.node) {
        return Err(Errno::EINVAL);
    }
    let blocks = flags & NONBLOCK == 0 && from.blocks() && to.blocks();
    let mut bytes = Vec::new();
    let most = len.min(MAX_TRANSFER).min(PIECE as u64) as usize;
    bytes.try_reserve_exact(most)?;
    bytes.resize(most, 0);
    let got = source.peek(&mut bytes, blocks)?;
    if got == 0 {
        return Ok(0);
    }
    target.write(&bytes[..got], false, blocks).map(|count| count as u64).inspect_err(|&error| {
        if error == Errno::EPIPE {
            current::send_signal(current::SIGPIPE);
        }
    })
}
