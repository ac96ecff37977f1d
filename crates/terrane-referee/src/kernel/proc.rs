//! Reading `/proc` of a helper, as far as its window goes.

use crate::script::Setup;
use crate::view::{Area, Present, Shows};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use terrane::PAGE_SIZE;

/// The files of a process.
pub(super) struct Proc {
    pid: u64,
    maps: File,
    pagemap: File,
    buffer: Vec<u8>,
}

/// What `smaps` says of a mapping beside the listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Detail {
    /// The first address.
    pub start: u64,
    /// Its attributes (`VmFlags`), in Linux's bits.
    pub flags: u64,
    /// `Anonymous`, in KiB.
    pub anonymous: u64,
    /// `Locked`, in KiB.
    pub locked: u64,
}

/// The letters of `VmFlags` in `smaps`, with the bits of Linux's `VM_…`.
const FLAGS: &[(&str, u64)] = &[
    ("rd", 0x1),
    ("wr", 0x2),
    ("ex", 0x4),
    ("sh", 0x8),
    ("mr", 0x10),
    ("mw", 0x20),
    ("me", 0x40),
    ("gd", 0x100),
    ("lo", 0x2000),
    ("sr", 0x8000),
    ("rr", 0x1_0000),
    ("dc", 0x2_0000),
    ("de", 0x4_0000),
    ("lf", 0x8_0000),
    ("ac", 0x10_0000),
    ("nr", 0x20_0000),
    ("wf", 0x200_0000),
    ("dd", 0x400_0000),
    ("hg", 0x2000_0000),
    ("nh", 0x4000_0000),
    ("mg", 0x8000_0000),
    ("sl", 1 << 42),
];

/// The bits that [`Detail::flags`] may have: `sh` and `lf` are left to the listing and to `lo`.
pub(crate) const KNOWN_FLAGS: u64 = {
    let mut all = 0;
    let mut n = 0;
    while n < FLAGS.len() {
        all |= FLAGS[n].1;
        n += 1;
    }
    all & !0x8_0000
};

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

impl Proc {
    pub fn open(pid: u64) -> io::Result<Self> {
        let file = |name: &str| File::open(format!("/proc/{pid}/{name}"));
        Ok(Self { pid, maps: file("maps")?, pagemap: file("pagemap")?, buffer: vec![0; 16 << 10] })
    }

    /// Has `visit` see the lines of `file` until it has seen enough.
    fn lines(file: &mut File, buffer: &mut [u8], mut visit: impl FnMut(&str) -> bool) -> io::Result<()> {
        file.seek(SeekFrom::Start(0))?;
        let mut kept = 0;
        loop {
            let got = file.read(&mut buffer[kept..])?;
            if got == 0 {
                return Ok(());
            }
            let len = kept + got;
            let whole = buffer[..len].iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
            for line in buffer[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
                if !visit(core::str::from_utf8(line).unwrap_or_default()) {
                    return Ok(());
                }
            }
            buffer.copy_within(whole..len, 0);
            kept = len - whole;
        }
    }

    pub fn areas(&mut self, setup: &Setup, inodes: &[u64]) -> io::Result<Vec<Area>> {
        let mut areas = Vec::new();
        Self::lines(&mut self.maps, &mut self.buffer, |line| {
            let mut parts = line.split_ascii_whitespace();
            let mut next = || parts.next().unwrap_or_default();
            let (range, marks, offset, _device, inode) = (next(), next(), next(), next(), next());
            let Some((start, end)) = range.split_once('-').and_then(|(a, b)| Some((hex(a)?, hex(b)?))) else {
                return true;
            };
            if start >= setup.end() {
                return false;
            }
            if end <= setup.start {
                return true;
            }
            let marks = marks.as_bytes();
            let mark = |n: usize, letter: u8| marks.get(n) == Some(&letter);
            let inode = inode.parse::<u64>().unwrap_or(0);
            let shows = match inodes.iter().position(|&known| known == inode) {
                _ if inode == 0 => Shows::Memory,
                Some(number) => Shows::File(number),
                None => Shows::Shared(inode),
            };
            areas.push(Area {
                start,
                end,
                prot: u8::from(mark(0, b'r')) | u8::from(mark(1, b'w')) << 1 | u8::from(mark(2, b'x')) << 2,
                shared: mark(3, b's'),
                offset: hex(offset).unwrap_or(0),
                shows,
            });
            true
        })?;
        Ok(areas)
    }

    pub fn present(&mut self, setup: &Setup) -> io::Result<Vec<Present>> {
        let len = 8 * setup.pages as usize;
        self.buffer.resize(self.buffer.len().max(len), 0);
        let bytes = &mut self.buffer[..len];
        self.pagemap.read_exact_at(bytes, 8 * (setup.start / PAGE_SIZE))?;
        // Present, and no page of a file or of shared memory.
        let own = |word: u64| word >> 63 & 1 == 1 && word >> 61 & 1 == 0;
        let words = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes));
        Ok(words.map(|word| if own(word) { Present::Yes } else { Present::No }).collect())
    }

    pub fn details(&mut self, setup: &Setup) -> io::Result<Vec<Detail>> {
        let mut smaps = File::open(format!("/proc/{}/smaps", self.pid))?;
        let mut details: Vec<Detail> = Vec::new();
        let mut inside = false;
        Self::lines(&mut smaps, &mut self.buffer, |line| {
            let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
            if let Some((start, end)) = first.split_once('-').and_then(|(a, b)| Some((hex(a)?, hex(b)?))) {
                inside = end > setup.start;
                if inside && start < setup.end() {
                    details.push(Detail { start, flags: 0, anonymous: 0, locked: 0 });
                }
                return start < setup.end();
            }
            if let Some(detail) = details.last_mut().filter(|_| inside) {
                let number =
                    || rest.split_ascii_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
                match first {
                    "Anonymous:" => detail.anonymous = number(),
                    "Locked:" => detail.locked = number(),
                    "VmFlags:" => {
                        let bit =
                            |name: &str| FLAGS.iter().find(|(known, _)| *known == name).map_or(0, |f| f.1);
                        detail.flags = rest.split_ascii_whitespace().fold(0, |all, name| all | bit(name));
                    }
                    _ => {}
                }
            }
            true
        })?;
        Ok(details)
    }
}
