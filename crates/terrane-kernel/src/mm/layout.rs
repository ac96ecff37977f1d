//! Which memory there is, and what it is for.
//!
//! | addresses | what |
//! |---|---|
//! | lower half | the program's: Terrane's |
//! | from `0xffff_8000_0000_0000` | the direct map: all physical memory, byte by byte |
//! | from `0xffff_ffff_8000_0000` | the kernel itself |
//!
//! Of the RAM above 1 MiB, less the kernel and the archive that the loader put somewhere: the largest piece gives the kernel's
//! heap its share and is Terrane's otherwise, since frames are numbered without holes; the other pieces go to the heap.

use crate::arch::{cpu, cpu::Feature, set_direct_map};
use terrane::PAGE_SIZE;

/// Where physical memory begins in the kernel's addresses.
const DIRECT: u64 = 0xffff_8000_0000_0000;

/// Where the byte at the physical address `addr` is.
#[inline]
pub const fn direct(addr: u64) -> *mut u8 {
    (DIRECT + addr) as *mut u8
}

/// Where in physical memory the byte at `at` is, an address that [`direct`] gave.
#[inline]
pub fn physical(at: *const u8) -> u64 {
    at as u64 - DIRECT
}

/// Physical addresses from `start` to before `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Piece {
    /// The first.
    pub start: u64,
    /// Behind the last.
    pub end: u64,
}

impl Piece {
    /// How many bytes.
    pub const fn len(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Cuts `len` bytes off its end.
    pub fn cut(&mut self, len: u64) -> Piece {
        let start = self.end - len.min(self.len());
        let cut = Piece { start, end: self.end };
        self.end = start;
        cut
    }
}

const PIECES: usize = 32;

/// Pieces of memory, disjoint.
pub struct Pieces {
    pieces: [Piece; PIECES],
    count: usize,
}

impl Pieces {
    /// None.
    pub const fn new() -> Self {
        Self { pieces: [Piece { start: 0, end: 0 }; PIECES], count: 0 }
    }

    /// One more, rounded to whole pages. More than there is room for are left out.
    pub fn add(&mut self, piece: Piece) {
        let start = piece.start.next_multiple_of(PAGE_SIZE);
        let end = piece.end / PAGE_SIZE * PAGE_SIZE;
        if start < end && self.count < PIECES {
            self.pieces[self.count] = Piece { start, end };
            self.count += 1;
        }
    }

    /// Takes `hole` out.
    pub fn remove(&mut self, hole: Piece) {
        let hole =
            Piece { start: hole.start / PAGE_SIZE * PAGE_SIZE, end: hole.end.next_multiple_of(PAGE_SIZE) };
        for index in 0..self.count {
            let piece = self.pieces[index];
            if hole.start < piece.end && piece.start < hole.end {
                self.pieces[index] = Piece { start: piece.start, end: hole.start.max(piece.start) };
                self.add(Piece { start: hole.end.min(piece.end), end: piece.end });
            }
        }
    }

    /// All of them that are not empty.
    pub fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        self.pieces[..self.count].iter().copied().filter(|piece| piece.len() > 0)
    }

    /// The largest one.
    pub fn largest(&self) -> Piece {
        self.iter().max_by_key(|piece| piece.len()).unwrap_or_default()
    }

    /// The end of the highest.
    pub fn end(&self) -> u64 {
        self.iter().map(|piece| piece.end).max().unwrap_or(0)
    }
}

/// Extends the direct map, which reaches to 4 GiB at the start, to `end`. `page` gives pages for tables, zeroed, below 4 GiB.
pub fn extend_direct_map(end: u64, mut page: impl FnMut() -> u64) {
    const GIGABYTE: u64 = 1 << 30;
    // Present, writable, large, global.
    const LARGE: u64 = 0x183;
    for start in (4 * GIGABYTE..end).step_by(GIGABYTE as usize) {
        let index = (start / GIGABYTE) as usize;
        if index >= 512 {
            return;
        }
        let entry = if cpu::has(Feature::HugePages) {
            start | LARGE
        } else {
            let table = page();
            for (slot, at) in (start..start + GIGABYTE).step_by(2 << 20).enumerate() {
                // SAFETY: a page of the caller's, in the part of the direct map that is there.
                unsafe { direct(table).cast::<u64>().add(slot).write(at | LARGE) };
            }
            table | 3
        };
        set_direct_map(index, entry);
    }
}
