//! ELF files: what a program asks to be mapped.
//!
//! For static x86-64 programs, at fixed addresses or position-independent. Everything in a file is what somebody wrote there, so every number is checked.

use crate::errno::Errno;
use alloc::vec::Vec;
use terrane::page_table::{Format, X86_64};
use terrane::vma::Prot;
use terrane::{PAGE_SIZE, addr};

/// Bytes of the file's header.
pub const HEADER: usize = 64;
/// Bytes of a program header.
const PROGRAM_HEADER: usize = 56;
/// Program headers at most, as Linux has it: 64 KiB.
const PROGRAM_HEADERS: usize = 65_536 / PROGRAM_HEADER;

const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PT_INTERP: u32 = 3;
const PT_PHDR: u32 = 6;
const PT_GNU_STACK: u32 = 0x6474_e551;

/// What the file's header says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// It can be anywhere.
    pub is_relative: bool,
    pub entry: u64,
    /// Where the program headers are in the file, and how many.
    pub headers_at: u64,
    pub headers: usize,
}

/// A part of the file to be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    pub addr: u64,
    pub offset: u64,
    pub in_file: u64,
    pub in_memory: u64,
    pub prot: Prot,
}

/// What is to be mapped.
#[derive(Debug)]
pub struct Image {
    pub segments: Vec<Segment>,
    /// Where the program headers are in memory.
    pub headers_at: u64,
    pub executable_stack: bool,
    /// It wants a program that loads it: it is dynamic.
    pub has_interpreter: bool,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map_or(0, u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

impl Header {
    /// Reads the first [`HEADER`] bytes.
    ///
    /// # Errors
    /// `ENOEXEC` for what is no program for this machine.
    pub fn parse(bytes: &[u8]) -> Result<Self, Errno> {
        let kind = u16_at(bytes, 16);
        let headers = usize::from(u16_at(bytes, 56));
        let fits = bytes.len() >= HEADER
            && bytes.starts_with(b"\x7fELF\x02\x01")
            && u16_at(bytes, 18) == EM_X86_64
            && (kind == ET_EXEC || kind == ET_DYN)
            && usize::from(u16_at(bytes, 54)) == PROGRAM_HEADER
            && (1..=PROGRAM_HEADERS).contains(&headers);
        if !fits {
            return Err(Errno::ENOEXEC);
        }
        Ok(Self {
            is_relative: kind == ET_DYN,
            entry: u64_at(bytes, 24),
            headers_at: u64_at(bytes, 32),
            headers,
        })
    }

    /// Bytes of the program headers.
    pub fn headers_len(&self) -> usize {
        self.headers * PROGRAM_HEADER
    }

    /// Reads the program headers.
    ///
    /// # Errors
    /// `ENOEXEC` for segments that cannot be; `EINVAL` for those at addresses that no program has; `ENOMEM`.
    pub fn image(&self, bytes: &[u8]) -> Result<Image, Errno> {
        let mut segments = Vec::new();
        segments.try_reserve_exact(self.headers)?;
        let mut image = Image { segments, headers_at: 0, executable_stack: false, has_interpreter: false };
        for header in bytes.chunks_exact(PROGRAM_HEADER) {
            let flags = u32_at(header, 4);
            match u32_at(header, 0) {
                PT_INTERP => image.has_interpreter = true,
                PT_PHDR => image.headers_at = u64_at(header, 16),
                PT_GNU_STACK => image.executable_stack = flags & 1 != 0,
                PT_LOAD => image.segments.push(segment(header, flags)?),
                _ => {}
            }
        }
        if image.segments.iter().all(|segment| segment.in_memory == 0) {
            return Err(Errno::ENOEXEC);
        }
        if image.headers_at == 0 {
            let holds = |segment: &&Segment| {
                segment.offset <= self.headers_at && self.headers_at - segment.offset < segment.in_file
            };
            let segment = image.segments.iter().find(holds);
            image.headers_at = segment.map_or(0, |segment| segment.addr + (self.headers_at - segment.offset));
        }
        Ok(image)
    }
}

fn segment(header: &[u8], flags: u32) -> Result<Segment, Errno> {
    let (offset, addr) = (u64_at(header, 8), u64_at(header, 16));
    let (in_file, in_memory) = (u64_at(header, 32), u64_at(header, 40));
    if in_file > in_memory || addr % PAGE_SIZE != offset % PAGE_SIZE {
        return Err(Errno::ENOEXEC);
    }
    let end = addr.checked_add(in_memory).and_then(addr::page_ceil).ok_or(Errno::EINVAL)?;
    if end > X86_64::USER_END || offset.checked_add(in_file).is_none() {
        return Err(Errno::EINVAL);
    }
    let mut prot = Prot::empty();
    prot.set(Prot::READ, flags & 4 != 0);
    prot.set(Prot::WRITE, flags & 2 != 0);
    prot.set(Prot::EXEC, flags & 1 != 0);
    Ok(Segment { addr, offset, in_file, in_memory, prot })
}

impl Image {
    /// From the first page to behind the last.
    pub fn range(&self) -> (u64, u64) {
        let start = self.segments.iter().map(|segment| addr::page_floor(segment.addr)).min();
        let end = self.segments.iter().map(|segment| segment.addr + segment.in_memory).max();
        (start.unwrap_or(0), end.unwrap_or(0))
    }
}
