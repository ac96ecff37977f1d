//! Reading `/proc` of a helper, as far as its window goes.

use crate::script::Setup;
use crate::view::{Area, Counts, Present, Shows};
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
    /// Behind the last.
    pub end: u64,
    /// Its attributes (`VmFlags`), in Linux's bits.
    pub flags: u64,
    /// Private memory.
    pub memory: bool,
    /// How much of it is in memory, and with whom it is shared.
    pub counts: Counts,
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
    ("gu", 0x800),
    ("lo", 0x2000),
    ("sr", 0x8000),
    ("rr", 0x1_0000),
    ("dc", 0x2_0000),
    ("de", 0x4_0000),
    ("lf", 0x8_0000),
    ("ac", 0x10_0000),
    ("nr", 0x20_0000),
    ("sf", 0x80_0000),
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

    /// Waits until the process has given its memory back; not for ever. Whoever inherited it may take its time to ask for
    /// its status: a process that only waits for that (`Z`) has no memory any more.
    pub fn await_end(self) {
        for round in 0..1000 {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
            // Behind the name, which may hold anything.
            let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
            if state.is_empty() || state.starts_with(['Z', 'X']) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_micros(50 * (1 + round)));
        }
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
        // Bits of `pagemap`: present, swapped, of a file or of shared memory, guard.
        let look = |word: u64| match word {
            _ if word >> 58 & 1 == 1 => Present::Guard,
            _ if word >> 62 != 0 && word >> 61 & 1 == 0 => Present::Yes,
            _ => Present::No,
        };
        let words = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes));
        Ok(words.map(look).collect())
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
                    let inode = rest.split_ascii_whitespace().nth(3);
                    let (memory, counts) = (inode == Some("0"), Counts::default());
                    details.push(Detail { start, end, flags: 0, memory, counts });
                }
                return start < setup.end();
            }
            if let Some(detail) = details.last_mut().filter(|_| inside) {
                let number = rest.split_ascii_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
                let counts = &mut detail.counts;
                match first {
                    "Rss:" => counts.resident = number,
                    "Pss:" => counts.share = number,
                    "Shared_Clean:" | "Shared_Dirty:" => counts.shared += number,
                    "Private_Clean:" | "Private_Dirty:" => counts.private += number,
                    "Anonymous:" => counts.anonymous = number,
                    "Swap:" => counts.swap = number,
                    "Locked:" => counts.locked = number,
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
