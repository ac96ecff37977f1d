//! Preparing the helper: filling its address space but for the window, and setting what the script asks for.
//!
//! Nothing here allocates, because it runs in processes that must not move what they have.

use crate::operation::byte;
use crate::script::{ARENA, FILES, READ_ONLY, READ_ONLY_LEN, Setup, USER_END};
use core::ptr;
use terrane::PAGE_SIZE;

/// The descriptor of file 0; the others follow.
pub(super) const FIRST_FILE: i32 = 100;

/// What could not be done, with the errno.
pub(super) type Unable = (&'static str, i32);

pub(super) fn errno() -> i32 {
    // SAFETY: `errno` of this thread.
    unsafe { *libc::__errno_location() }
}

fn check(what: &'static str, result: i64) -> Result<i64, Unable> {
    if result < 0 { Err((what, errno())) } else { Ok(result) }
}

/// Maps addresses so that nothing else is put there: with nothing allowed and nothing reserved.
fn fill(start: u64, end: u64, file: Option<i32>) -> Result<(), Unable> {
    if start >= end {
        return Ok(());
    }
    let flags = libc::MAP_FIXED_NOREPLACE
        | libc::MAP_NORESERVE
        | if file.is_some() { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
    // SAFETY: nothing is mapped there, else the call fails.
    let at = unsafe {
        libc::mmap(
            ptr::without_provenance_mut(start as usize),
            (end - start) as usize,
            libc::PROT_NONE,
            flags,
            file.unwrap_or(-1),
            0,
        )
    };
    check("filling the address space around the window", if at == libc::MAP_FAILED { -1 } else { 0 })
        .map(drop)
}

/// Reads a file into `buffer`, as far as it has room.
fn read_file<'b>(path: &core::ffi::CStr, buffer: &'b mut [u8]) -> Result<&'b [u8], Unable> {
    // SAFETY: a C string, and a buffer of the given length.
    unsafe {
        let fd = check("opening a file of /proc", libc::open(path.as_ptr(), libc::O_RDONLY).into())? as i32;
        let mut len = 0;
        loop {
            let rest = &mut buffer[len..];
            let got = libc::read(fd, rest.as_mut_ptr().cast(), rest.len());
            if got <= 0 {
                break;
            }
            len += got as usize;
        }
        libc::close(fd);
        Ok(&buffer[..len])
    }
}

fn decimal(text: &[u8]) -> u64 {
    text.iter()
        .take_while(|byte| byte.is_ascii_digit())
        .fold(0, |all, &byte| all * 10 + u64::from(byte - b'0'))
}

fn hex(text: &[u8]) -> u64 {
    let digits = text.iter().map_while(|&byte| (byte as char).to_digit(16));
    digits.fold(0, |all, digit| all << 4 | u64::from(digit))
}

/// Touches more of the stack than the helper will ever need: what lies below it is filled, so that it cannot grow any more.
#[inline(never)]
fn touch_stack() {
    let mut stack = [0u8; 128 << 10];
    core::hint::black_box(&mut stack);
}

/// Fills everything but the arena.
pub(super) fn fill_around_arena(buffer: &mut [u8]) -> Result<(), Unable> {
    // From a function of its own, so that all that is called from here finds the stack as large as it will be: one that grew by a page between
    // the look at what is mapped and the filling would be in its way.
    touch_stack();
    let least = decimal(read_file(c"/proc/sys/vm/mmap_min_addr", buffer)?).max(PAGE_SIZE);
    let mut attempts = 0;
    loop {
        match fill_holes(least, buffer) {
            // The system has mapped something meanwhile: another look says what.
            Err((_, libc::EEXIST)) if attempts < 3 => attempts += 1,
            result => return result,
        }
    }
}

/// Fills what is free at this moment, but the arena.
fn fill_holes(least: u64, buffer: &mut [u8]) -> Result<(), Unable> {
    let text = read_file(c"/proc/self/maps", buffer)?;
    let mut from = least;
    let hole = |from: u64, to: u64| -> Result<(), Unable> {
        fill(from, to.min(ARENA.start), None)?;
        fill(from.max(ARENA.end), to, None)
    };
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let start = hex(line);
        let end = line.iter().position(|&byte| byte == b'-').map_or(0, |dash| hex(&line[dash + 1..]));
        if start >= USER_END {
            break;
        }
        hole(from, start)?;
        from = end;
    }
    hole(from, USER_END)
}

/// `/proc/self/fd/…` of a descriptor below 1000, as a C string.
fn proc_path(fd: i32) -> [u8; 18] {
    let mut path = *b"/proc/self/fd/000\0";
    for (place, unit) in path[14..17].iter_mut().zip([100, 10, 1]) {
        *place = b'0' + (fd / unit % 10) as u8;
    }
    path
}

/// Prepares a process for a script; returns the numbers of its files, and how many bytes it may lock.
pub(super) fn begin(setup: &Setup, buffer: &mut [u8]) -> Result<([u64; FILES], u64), Unable> {
    let mut inodes = [0; FILES];
    let memfd = |name: &core::ffi::CStr| {
        // SAFETY: a C string.
        check("making a memfd", unsafe { libc::memfd_create(name.as_ptr(), 0) }.into()).map(|fd| fd as i32)
    };
    for (number, inode) in inodes.iter_mut().enumerate() {
        let fd = memfd(c"referee")?;
        let own = FIRST_FILE + number as i32;
        // SAFETY: descriptors of this process, a C string, and a buffer of the given length; `stat` is filled in before it is read.
        unsafe {
            check("numbering a memfd", libc::dup2(fd, own).into())?;
            libc::close(fd);
            if number == READ_ONLY {
                let bytes = &mut buffer[..READ_ONLY_LEN];
                bytes.iter_mut().enumerate().for_each(|(n, place)| *place = byte(READ_ONLY as u64, n));
                check("filling a memfd", libc::write(own, bytes.as_ptr().cast(), bytes.len()) as i64)?;
                let path = proc_path(own);
                let fd = libc::open(path.as_ptr().cast(), libc::O_RDONLY);
                check("opening a memfd for reading", fd.into())?;
                check("numbering a memfd", libc::dup2(fd, own).into())?;
                libc::close(fd);
            }
            let mut stat = core::mem::zeroed::<libc::stat>();
            check("asking for a memfd's inode", libc::fstat(own, &mut stat).into())?;
            *inode = stat.st_ino;
        }
    }
    // A shared mapping: nothing in the window can become one with it.
    let edge = memfd(c"edge")?;
    fill(ARENA.start, setup.start, Some(edge))?;
    fill(setup.end(), ARENA.end, Some(edge))?;
    // SAFETY: a descriptor of this process.
    unsafe { libc::close(edge) };
    set_heap(setup.heap_start())?;
    let limit = |what, resource, value: u64| {
        let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
        // SAFETY: a limit, filled in.
        check(what, unsafe { libc::setrlimit(resource, &limit) }.into()).map(drop)
    };
    match setup.memlock {
        Some(pages) => limit("setting RLIMIT_MEMLOCK", libc::RLIMIT_MEMLOCK, pages * PAGE_SIZE)?,
        None => {
            // Without the privilege the limit stays what it is, and Terrane gets the same.
            let _ = limit("setting RLIMIT_MEMLOCK", libc::RLIMIT_MEMLOCK, libc::RLIM_INFINITY);
        }
    }
    if let Some(pages) = setup.mapped {
        let mapped = decimal(read_file(c"/proc/self/statm", buffer)?);
        limit("setting RLIMIT_AS", libc::RLIMIT_AS, (mapped + pages) * PAGE_SIZE)?;
    }
    drop_privileges();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: filled in by the call.
    check("asking for RLIMIT_MEMLOCK", unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) }.into())?;
    Ok((inodes, limit.rlim_cur))
}

/// `struct prctl_mm_map` of Linux.
#[repr(C)]
struct MmMap {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    auxv: u64,
    auxv_size: u32,
    exe_fd: i32,
}

/// Has the heap begin at `start`: the C library has used its own for the last time.
fn set_heap(start: u64) -> Result<(), Unable> {
    // What programs are told of their code and arguments, and nothing depends on.
    let low = 16 * PAGE_SIZE;
    let map = MmMap {
        start_code: low,
        end_code: low + 1,
        start_data: low + 2,
        end_data: low + 3,
        start_brk: start,
        brk: start,
        start_stack: USER_END - PAGE_SIZE,
        arg_start: low,
        arg_end: low,
        env_start: low,
        env_end: low,
        auxv: 0,
        auxv_size: 0,
        exe_fd: -1,
    };
    const PR_SET_MM_MAP: i32 = 14;
    // SAFETY: the map lives through the call.
    let result =
        unsafe { libc::prctl(libc::PR_SET_MM, PR_SET_MM_MAP, ptr::from_ref(&map), size_of::<MmMap>(), 0) };
    check("moving the heap into the window", result.into()).map(drop)
}

/// Gives all capabilities up, so that limits hold for root too. Where that is refused there were none.
fn drop_privileges() {
    const VERSION: u32 = 0x2008_0522;
    let header = [VERSION, 0];
    let data = [0u32; 6];
    // SAFETY: the header names this process, and the data is as long as this version says.
    unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()) };
}
