//! The reader of ELF files, which gets whatever a program has written there: on the host, where it can be asked more than a boot could.

#![allow(dead_code, reason = "the kernel uses the rest")]

extern crate alloc;

#[path = "../src/errno.rs"]
mod errno;

#[path = "../src/task/elf.rs"]
mod elf;

use elf::{HEADER, Header, Image};
use errno::Errno;
use terrane::vma::Prot;

const PROGRAM_HEADER: usize = 56;

/// A file of two segments: code with the headers, and data with zeros behind it.
fn file() -> Vec<u8> {
    let mut bytes = vec![0; HEADER + 3 * PROGRAM_HEADER];
    bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
    let mut put = |at: usize, value: u64, len: usize| {
        bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
    };
    put(16, 2, 2);
    put(18, 62, 2);
    put(24, 0x40_1000, 8);
    put(32, HEADER as u64, 8);
    put(54, PROGRAM_HEADER as u64, 2);
    put(56, 3, 2);
    let headers = [
        (1, 5, 0, 0x40_0000, 0x1800, 0x1800),
        (1, 6, 0x1800, 0x40_2800, 0x100, 0x3000),
        (0x6474_e551, 6, 0, 0, 0, 0),
    ];
    for (nth, (kind, flags, offset, addr, in_file, in_memory)) in headers.into_iter().enumerate() {
        let at = HEADER + nth * PROGRAM_HEADER;
        put(at, kind, 4);
        put(at + 4, flags, 4);
        put(at + 8, offset, 8);
        put(at + 16, addr, 8);
        put(at + 32, in_file, 8);
        put(at + 40, in_memory, 8);
    }
    bytes
}

fn read(file: &[u8]) -> Result<(Header, Image), Errno> {
    let header = Header::parse(&file[..HEADER.min(file.len())])?;
    let start = usize::try_from(header.headers_at).map_err(|_| Errno::ENOEXEC)?;
    let end = start.checked_add(header.headers_len()).ok_or(Errno::ENOEXEC)?;
    let image = header.image(file.get(start..end).ok_or(Errno::ENOEXEC)?)?;
    Ok((header, image))
}

#[test]
fn what_a_file_says_is_understood() {
    let (header, image) = read(&file()).expect("a good file");
    assert_eq!((header.entry, header.headers, header.is_relative), (0x40_1000, 3, false));
    assert_eq!(image.segments.len(), 2);
    assert_eq!(image.segments[0].prot, Prot::READ | Prot::EXEC);
    assert_eq!(image.segments[1].prot, Prot::READ | Prot::WRITE);
    assert_eq!(image.range(), (0x40_0000, 0x40_5800));
    // Nobody says where the headers are in memory: in the first segment.
    assert_eq!(image.headers_at, 0x40_0000 + HEADER as u64);
    assert!(!image.executable_stack && !image.has_interpreter);
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |at: usize, value: u64, len: usize| {
        let mut file = file();
        file[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
        read(&file).err()
    };
    let segment = HEADER + PROGRAM_HEADER;
    // Another machine, another class, a relocatable file, no headers.
    assert_eq!(refused(18, 183, 2), Some(Errno::ENOEXEC));
    assert_eq!(refused(4, 1, 1), Some(Errno::ENOEXEC));
    assert_eq!(refused(16, 1, 2), Some(Errno::ENOEXEC));
    assert_eq!(refused(56, 0, 2), Some(Errno::ENOEXEC));
    // More in the file than in memory, an offset that no page has, a segment where no program is, one that wraps.
    assert_eq!(refused(segment + 32, 0x4000, 8), Some(Errno::ENOEXEC));
    assert_eq!(refused(segment + 8, 0x1801, 8), Some(Errno::ENOEXEC));
    assert_eq!(refused(segment + 16, 0xffff_8000_0000_0800, 8), Some(Errno::EINVAL));
    assert_eq!(refused(segment + 40, u64::MAX, 8), Some(Errno::EINVAL));
    assert!(read(&file()[..HEADER]).is_err());
}

#[test]
fn noise_does_no_harm() {
    // G. Marsaglia's xorshift.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let good = file();
    for _ in 0..100_000 {
        let mut file = good.clone();
        for _ in 0..1 + random() % 4 {
            let at = random() as usize % file.len();
            // Often the awkward ends of the range.
            file[at] = [0, 1, 0x7f, 0x80, 0xff, random() as u8][random() as usize % 6];
        }
        if let Ok((_, image)) = read(&file) {
            let (start, end) = image.range();
            assert!(start <= end && end <= 0x7fff_ffff_f000);
            for segment in &image.segments {
                assert!(segment.in_file <= segment.in_memory);
                assert_eq!(segment.addr % 4096, segment.offset % 4096);
            }
        }
    }
}
