//! Reading and writing: the calls that move bytes.

use super::abi::MAX_TRANSFER;
use super::buffers::{Buffers, PIECE};
use super::current;
use super::inode::{Kind, Time};
use super::open::{Open, OpenFile};
use super::pipe::{ATOMIC, Pipe};
use crate::errno::Errno;
use crate::user;
use core::ops::ControlFlow;

/// Where a call reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Where {
    /// At the file's position, which moves.
    Position,
    /// At this offset.
    Offset(u64),
}

/// Reads once into a buffer of the kernel's.
fn read_piece(file: &OpenFile, offset: u64, buffer: &mut [u8], blocks: bool) -> Result<usize, Errno> {
    let blocks = blocks && file.blocks();
    match &file.node.kind {
        Kind::Regular(regular) => regular.read(offset, buffer),
        Kind::Directory(_) => Err(Errno::EISDIR),
        Kind::Device(device) => device.read(buffer, blocks),
        Kind::Pipe(pipe) => pipe.read(buffer, blocks),
        Kind::Event(event) => put_count(buffer, || event.read(blocks)),
        Kind::Timer(timer) => put_count(buffer, || timer.read(blocks)),
        Kind::Socket(socket) => socket.input.read(buffer, blocks),
        Kind::Signals(signals) => signals.read(buffer, blocks),
        Kind::UserFault(fault) => fault.read(buffer, blocks),
        Kind::Proc(entry) if entry.is_memory() => entry.read_memory(offset, buffer),
        Kind::Proc(entry) => {
            let mut text = file.text.lock();
            if offset == 0 || text.is_new() {
                *text = entry.text()?;
            }
            let from = usize::try_from(offset).map_err(|_| Errno::EINVAL)?;
            let found = text.read(from, buffer.len())?;
            buffer[..found.len()].copy_from_slice(found);
            Ok(found.len())
        }
        Kind::Symlink(_) | Kind::Epoll(_) | Kind::Process(_) => Err(Errno::EINVAL),
    }
}

/// A counter's value as eight bytes.
fn put_count(buffer: &mut [u8], read: impl FnOnce() -> Result<u64, Errno>) -> Result<usize, Errno> {
    let place = buffer.first_chunk_mut::<8>().ok_or(Errno::EINVAL)?;
    *place = read()?.to_ne_bytes();
    Ok(8)
}

/// Writes once from a buffer of the kernel's. `whole`: these are all the bytes of the call.
fn write_piece(
    file: &OpenFile,
    offset: u64,
    bytes: &[u8],
    whole: bool,
    blocks: bool,
) -> Result<usize, Errno> {
    let blocks = blocks && file.blocks();
    match &file.node.kind {
        Kind::Regular(regular) => regular.write(offset, bytes),
        Kind::Directory(_) => Err(Errno::EISDIR),
        Kind::Device(device) => device.write(bytes),
        Kind::Socket(socket) => match socket.output.write(bytes, false, blocks) {
            Err(Errno::EPIPE) => {
                current::send_signal(current::SIGPIPE);
                Err(Errno::EPIPE)
            }
            result => result,
        },
        Kind::Pipe(pipe) => match pipe.write(bytes, whole && bytes.len() <= ATOMIC, blocks) {
            Err(Errno::EPIPE) => {
                current::send_signal(current::SIGPIPE);
                Err(Errno::EPIPE)
            }
            result => result,
        },
        Kind::Event(event) => {
            let value = bytes.first_chunk::<8>().ok_or(Errno::EINVAL)?;
            event.write(u64::from_ne_bytes(*value), blocks)?;
            Ok(8)
        }
        Kind::Proc(entry) if entry.is_memory() => entry.write_memory(offset, bytes),
        Kind::Proc(entry) => {
            entry.store(bytes)?;
            Ok(bytes.len())
        }
        Kind::Symlink(_)
        | Kind::Timer(_)
        | Kind::Epoll(_)
        | Kind::Signals(_)
        | Kind::UserFault(_)
        | Kind::Process(_) => Err(Errno::EINVAL),
    }
}

/// The pipe that it reads from.
fn source_of(file: &OpenFile) -> Option<&Pipe> {
    match &file.node.kind {
        Kind::Pipe(pipe) => Some(pipe),
        Kind::Socket(socket) => Some(&socket.input),
        _ => None,
    }
}

/// True when there is a position in it.
pub fn has_position(file: &OpenFile) -> bool {
    match &file.node.kind {
        Kind::Regular(_) | Kind::Directory(_) | Kind::Proc(_) => true,
        Kind::Device(device) => !device.is_console(),
        _ => false,
    }
}

/// True when a call ends with the first piece that comes, however small.
fn is_stream(file: &OpenFile) -> bool {
    match &file.node.kind {
        Kind::Regular(_) | Kind::Proc(_) => false,
        Kind::Device(device) => device.is_console(),
        _ => true,
    }
}

/// Reads into `buffers` from the offset on.
fn read_all(file: &OpenFile, mut offset: u64, buffers: &Buffers) -> Result<u64, Errno> {
    if buffers.len() == 0 {
        // As Linux: nothing is looked at, but for what cannot be read at all.
        return if matches!(file.node.kind, Kind::Directory(_)) { Err(Errno::EISDIR) } else { Ok(0) };
    }
    let mut piece = buffers.piece(PIECE)?;
    let mut done = 0;
    while done < buffers.len() {
        let want = (buffers.len() - done).min(piece.len() as u64) as usize;
        let got = match read_piece(file, offset, &mut piece[..want], done == 0) {
            Ok(got) => got,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        };
        let taken = buffers.write(done, &piece[..got]);
        if taken < got
            && let Some(pipe) = source_of(file)
        {
            pipe.put_back(&piece[taken..got]);
        }
        done += taken as u64;
        offset += taken as u64;
        if taken < got {
            return if done == 0 { Err(Errno::EFAULT) } else { Ok(done) };
        }
        if got < want || is_stream(file) || current::has_signal() && done >= PIECE as u64 {
            break;
        }
    }
    if matches!(file.node.kind, Kind::Regular(_)) && done > 0 {
        file.node.attributes.lock().accessed = Time::now();
    }
    Ok(done)
}

/// Writes `buffers` from the offset on.
fn write_all(file: &OpenFile, mut offset: u64, buffers: &Buffers) -> Result<u64, Errno> {
    let is_pipe = matches!(file.node.kind, Kind::Pipe(_) | Kind::Socket(_));
    if buffers.len() == 0 && !matches!(file.node.kind, Kind::Event(_)) {
        return Ok(0);
    }
    let mut piece = buffers.piece(if is_pipe { ATOMIC } else { PIECE })?;
    let mut done = 0;
    while done < buffers.len() {
        let want = (buffers.len() - done).min(piece.len() as u64) as usize;
        let got = buffers.read(done, &mut piece[..want]);
        if got == 0 || is_pipe && got < want && done == 0 && buffers.len() <= ATOMIC as u64 {
            return if done == 0 { Err(Errno::EFAULT) } else { Ok(done) };
        }
        let whole = got as u64 == buffers.len();
        let put = match write_piece(file, offset, &piece[..got], whole, true) {
            Ok(put) => put,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        };
        done += put as u64;
        offset += put as u64;
        if put < got && !(is_pipe && file.blocks()) || matches!(file.node.kind, Kind::Event(_)) {
            break;
        }
    }
    if matches!(file.node.kind, Kind::Regular(_)) && done > 0 {
        file.node.touch();
    }
    Ok(done)
}

fn read_to(fd: i32, place: Where, buffers: impl FnOnce() -> Result<Buffers, Errno>) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    if !file.reads() {
        return Err(Errno::EBADF);
    }
    let buffers = buffers()?;
    match place {
        Where::Offset(_) if !has_position(&file) => Err(Errno::ESPIPE),
        Where::Offset(offset) => read_all(&file, offset, &buffers),
        Where::Position if !has_position(&file) => read_all(&file, 0, &buffers),
        Where::Position => {
            let mut position = file.position.lock();
            let done = read_all(&file, *position, &buffers)?;
            *position += done;
            Ok(done)
        }
    }
}

/// Leaves of what is to be written at `offset` only what the limit of the size of files allows.
fn limit(file: &OpenFile, offset: u64, buffers: &mut Buffers) -> Result<(), Errno> {
    let limit = current::file_size_limit();
    if matches!(file.node.kind, Kind::Regular(_)) && buffers.len() > 0 {
        if offset >= limit {
            current::send_signal(current::SIGXFSZ);
            return Err(Errno::EFBIG);
        }
        buffers.shorten(limit - offset);
    }
    Ok(())
}

fn write_from(
    fd: i32,
    place: Where,
    appends: bool,
    buffers: impl FnOnce() -> Result<Buffers, Errno>,
) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    if !file.writes() {
        return Err(Errno::EBADF);
    }
    let mut buffers = buffers()?;
    let Kind::Regular(regular) = &file.node.kind else {
        return match (place, &file.node.kind) {
            (Where::Offset(offset), Kind::Proc(entry)) if entry.is_memory() => {
                write_all(&file, offset, &buffers)
            }
            (Where::Position, Kind::Proc(entry)) if entry.is_memory() => {
                let mut position = file.position.lock();
                let done = write_all(&file, *position, &buffers)?;
                *position += done;
                Ok(done)
            }
            (Where::Offset(_), _) if !has_position(&file) => Err(Errno::ESPIPE),
            _ => write_all(&file, 0, &buffers),
        };
    };
    let mut position = match place {
        Where::Position => Some(file.position.lock()),
        Where::Offset(_) => None,
    };
    let _alone = regular.writing.lock();
    let offset = match (place, &position) {
        _ if appends || file.appends() => regular.len(),
        (Where::Offset(offset), _) => offset,
        (Where::Position, position) => position.as_ref().map_or(0, |position| **position),
    };
    limit(&file, offset, &mut buffers)?;
    let done = write_all(&file, offset, &buffers)?;
    if let Some(position) = &mut position {
        **position = offset + done;
    }
    Ok(done)
}

/// An offset of a program's.
///
/// # Errors
/// `EINVAL` for a negative one.
fn offset(value: u64) -> Result<Where, Errno> {
    if value > i64::MAX as u64 { Err(Errno::EINVAL) } else { Ok(Where::Offset(value)) }
}

/// `read`.
pub fn read(fd: i32, at: u64, len: u64) -> Result<u64, Errno> {
    read_to(fd, Where::Position, || Buffers::one(at, len))
}

/// `write`.
pub fn write(fd: i32, at: u64, len: u64) -> Result<u64, Errno> {
    write_from(fd, Where::Position, false, || Buffers::one(at, len))
}

/// `send`: a write that may do without the signal when nobody reads.
pub fn send(fd: i32, at: u64, len: u64, signals: bool) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    if let Kind::Socket(socket) = &file.node.kind
        && !signals
        && socket.output.ready(false, true) & super::abi::POLLERR != 0
    {
        return Err(Errno::EPIPE);
    }
    write(fd, at, len)
}

/// A read of a pipe or socket that leaves the bytes where they are.
pub fn peek(fd: i32, at: u64, len: u64) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    let buffers = Buffers::one(at, len)?;
    let mut piece = buffers.piece(PIECE)?;
    let got = source_of(&file).ok_or(Errno::EINVAL)?.peek(&mut piece, file.blocks())?;
    let done = buffers.write(0, &piece[..got]);
    if done == 0 && got > 0 { Err(Errno::EFAULT) } else { Ok(done as u64) }
}

/// `pread64`.
pub fn pread(fd: i32, at: u64, len: u64, place: u64) -> Result<u64, Errno> {
    read_to(fd, offset(place)?, || Buffers::one(at, len))
}

/// `pwrite64`.
pub fn pwrite(fd: i32, at: u64, len: u64, place: u64) -> Result<u64, Errno> {
    write_from(fd, offset(place)?, false, || Buffers::one(at, len))
}

/// `readv`.
pub fn readv(fd: i32, at: u64, count: u64) -> Result<u64, Errno> {
    read_to(fd, Where::Position, || Buffers::vector(at, count))
}

/// `writev`.
pub fn writev(fd: i32, at: u64, count: u64) -> Result<u64, Errno> {
    write_from(fd, Where::Position, false, || Buffers::vector(at, count))
}

/// `preadv2`; with no flags and an offset, `preadv`.
pub fn preadv2(fd: i32, at: u64, count: u64, place: u64, flags: u32) -> Result<u64, Errno> {
    let place = flagged(place, flags, false)?;
    read_to(fd, place, || Buffers::vector(at, count))
}

/// `pwritev2`; with no flags and an offset, `pwritev`.
pub fn pwritev2(fd: i32, at: u64, count: u64, place: u64, flags: u32) -> Result<u64, Errno> {
    let appends = flags & RWF_APPEND != 0;
    let place = flagged(place, flags, true)?;
    write_from(fd, place, appends, || Buffers::vector(at, count))
}

const RWF_APPEND: u32 = 0x10;

fn flagged(place: u64, flags: u32, writes: bool) -> Result<Where, Errno> {
    // Urgent, or to stable storage: as always here. Without waiting: there is none for pages.
    let known = 0x1 | 0x2 | 0x4 | 0x8 | if writes { RWF_APPEND } else { 0 };
    if flags & !known != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if place == u64::MAX { Ok(Where::Position) } else { offset(place) }
}

/// `lseek`.
pub fn lseek(fd: i32, offset: i64, whence: u32) -> Result<u64, Errno> {
    let file = current::files().get(fd)?;
    if !has_position(&file) {
        return Err(Errno::ESPIPE);
    }
    let mut position = file.position.lock();
    let len = file.node.len();
    let base = match whence {
        0 => 0,
        1 => *position as i64,
        _ if file.node.is_directory() => return Err(Errno::EINVAL),
        2 if matches!(file.node.kind, Kind::Regular(_)) => len as i64,
        2 => 0,
        // To the next bytes, and to the next hole.
        3 | 4 => {
            let offset = u64::try_from(offset).ok().filter(|&offset| offset < len).ok_or(Errno::ENXIO)?;
            let Kind::Regular(regular) = &file.node.kind else { return Err(Errno::EINVAL) };
            *position = if whence == 3 {
                regular.next_page(offset, true).filter(|&at| at < len).ok_or(Errno::ENXIO)?
            } else {
                regular.next_page(offset, false).map_or(len, |at| at.min(len))
            };
            return Ok(*position);
        }
        _ => return Err(Errno::EINVAL),
    };
    if let Kind::Device(_) = file.node.kind {
        return Ok(0);
    }
    let to = base.checked_add(offset).ok_or(Errno::EOVERFLOW)?;
    *position = u64::try_from(to).map_err(|_| Errno::EINVAL)?;
    Ok(*position)
}

/// The position that a call gets by address, or the file's own.
enum Position {
    At(u64, u64),
    Own,
}

impl Position {
    fn of(at: u64) -> Result<Self, Errno> {
        if at == 0 {
            return Ok(Position::Own);
        }
        let offset: i64 = user::read_value(at)?;
        Ok(Position::At(at, u64::try_from(offset).map_err(|_| Errno::EINVAL)?))
    }

    fn get(&self, file: &OpenFile) -> u64 {
        match *self {
            Position::At(_, offset) => offset,
            Position::Own => *file.position.lock(),
        }
    }

    /// Says where the next bytes are. The two files of a call may have one position.
    fn set(&self, file: &OpenFile, to: u64) -> Result<(), Errno> {
        match *self {
            Position::At(at, _) => user::write_value(at, to),
            Position::Own => {
                *file.position.lock() = to;
                Ok(())
            }
        }
    }
}

/// Copies from one file to another, piece by piece, without a program's memory.
fn transfer(from: &Open, mut read_at: u64, to: &Open, mut write_at: u64, len: u64) -> Result<u64, Errno> {
    let buffers = Buffers::one(0, len.min(MAX_TRANSFER))?;
    let mut piece = buffers.piece(PIECE)?;
    let mut done = 0;
    while done < buffers.len() {
        let want = (buffers.len() - done).min(piece.len() as u64) as usize;
        let mut step = || -> Result<ControlFlow<u64, u64>, Errno> {
            let got = read_piece(from, read_at, &mut piece[..want], done == 0)?;
            if got == 0 {
                return Ok(ControlFlow::Break(0));
            }
            let alone = to.node.regular().map(|regular| regular.writing.lock());
            if to.appends()
                && let Some(regular) = to.node.regular()
            {
                write_at = regular.len();
            }
            let mut put = 0;
            while put < got {
                match write_piece(to, write_at + put as u64, &piece[put..got], false, true) {
                    Ok(0) => break,
                    Ok(n) => put += n,
                    Err(error) if put == 0 => return Err(error),
                    Err(_) => break,
                }
            }
            drop(alone);
            Ok(if put < got { ControlFlow::Break(put as u64) } else { ControlFlow::Continue(put as u64) })
        };
        match step() {
            Ok(ControlFlow::Continue(count)) => {
                done += count;
                read_at += count;
                write_at += count;
            }
            Ok(ControlFlow::Break(count)) => {
                done += count;
                break;
            }
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    if done > 0 {
        to.node.touch();
    }
    Ok(done)
}

/// `sendfile`.
pub fn sendfile(out: i32, input: i32, place: u64, count: u64) -> Result<u64, Errno> {
    let (from, to) = (current::files().get(input)?, current::files().get(out)?);
    if !from.reads() || !to.writes() {
        return Err(Errno::EBADF);
    }
    if to.appends() || matches!(from.node.kind, Kind::Pipe(_) | Kind::Directory(_)) {
        return Err(Errno::EINVAL);
    }
    let position = Position::of(place)?;
    let write_at = if has_position(&to) { *to.position.lock() } else { 0 };
    let read_at = position.get(&from);
    let done = transfer(&from, read_at, &to, write_at, count)?;
    if has_position(&to) {
        *to.position.lock() = write_at + done;
    }
    position.set(&from, read_at + done)?;
    Ok(done)
}

/// `splice`, once it is known that one of the two is a pipe.
pub fn splice(from: &Open, from_at: u64, to: &Open, to_at: u64, len: u64) -> Result<u64, Errno> {
    let (input, output) = (Position::of(from_at)?, Position::of(to_at)?);
    // Of a pipe not more than there is, which then fits: what was taken must not be lost.
    let len = match &from.node.kind {
        Kind::Pipe(pipe) => {
            let mut byte = [0];
            if pipe.peek(&mut byte, from.blocks())? == 0 {
                return Ok(0);
            }
            len.min(pipe.len().max(1) as u64)
        }
        _ => len.min(PIECE as u64),
    };
    let place = |file: &Open, position: &Position| if has_position(file) { position.get(file) } else { 0 };
    let (read_at, write_at) = (place(from, &input), place(to, &output));
    let done = transfer(from, read_at, to, write_at, len)?;
    if has_position(from) {
        input.set(from, read_at + done)?;
    }
    if has_position(to) {
        output.set(to, write_at + done)?;
    }
    Ok(done)
}

/// `copy_file_range`.
pub fn copy_file_range(
    input: i32,
    from_at: u64,
    out: i32,
    to_at: u64,
    len: u64,
    flags: u32,
) -> Result<u64, Errno> {
    let (from, to) = (current::files().get(input)?, current::files().get(out)?);
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    if [&from, &to].iter().any(|file| file.node.is_directory()) {
        return Err(Errno::EISDIR);
    }
    if [&from, &to].iter().any(|file| file.node.regular().is_none()) {
        return Err(Errno::EINVAL);
    }
    if !from.reads() || !to.writes() || to.appends() {
        return Err(Errno::EBADF);
    }
    let (read_position, write_position) = (Position::of(from_at)?, Position::of(to_at)?);
    let (read_at, write_at) = (read_position.get(&from), write_position.get(&to));
    let overlap = read_at < write_at.saturating_add(len) && write_at < read_at.saturating_add(len);
    if super::tree::same(&from.node, &to.node) && overlap {
        return Err(Errno::EINVAL);
    }
    // Not beyond the end that it has now: the file may be the same, and become longer by this.
    let len = len.min(from.node.len().saturating_sub(read_at));
    let done = transfer(&from, read_at, &to, write_at, len)?;
    read_position.set(&from, read_at + done)?;
    write_position.set(&to, write_at + done)?;
    Ok(done)
}
