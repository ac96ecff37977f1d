//! What is in a page: every byte follows from where it is and who wrote it last.
//!
//! A page is made of cells. A store gives a cell a new *generation*, a number that no other store of the run has; its words then
//! hold the generation and a check of address and generation. So a word tells by itself whether it belongs where it is
//! found, and whoever knows the generations of a page knows each of its bytes.

use std::fmt;

/// Bytes of a cell.
pub const CELL: usize = 512;
/// Cells of a page.
pub const CELLS: usize = 4096 / CELL;

const WORD: usize = 8;

/// Who wrote a cell, and when: a number that is used once.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Generation(u32);

impl Generation {
    /// The generation of what nobody has written.
    pub const NONE: Self = Self(0);

    /// Number `count` of thread `thread`.
    pub fn new(thread: usize, count: u32) -> Self {
        // Counts begin anew after sixteen millions: then a store that is lost for so long is not noticed.
        Self((thread as u32 + 1) << 24 | count & 0xff_ffff)
    }

    /// The thread that wrote.
    pub fn thread(self) -> Option<usize> {
        (self.0 >> 24).checked_sub(1).map(|thread| thread as usize)
    }

    /// The word at `address`.
    pub fn word(self, address: u64) -> u64 {
        u64::from(self.0) << 32 | u64::from(check(address, self.0))
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.thread() {
            Some(thread) => write!(f, "store {} of thread {thread}", self.0 & 0xff_ffff),
            None => f.write_str("nobody's"),
        }
    }
}

/// 32 bits that depend on all of both.
fn check(address: u64, generation: u32) -> u32 {
    let mixed = (address ^ u64::from(generation) << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
}

/// What is there before anybody writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Base {
    /// Zeros.
    Zeros,
    /// A file: the page begins at this offset of it.
    File(u64),
}

impl Base {
    /// The same for what lies `bytes` further on.
    pub fn after(self, bytes: u64) -> Self {
        match self {
            Self::Zeros => Self::Zeros,
            Self::File(offset) => Self::File(offset + bytes),
        }
    }

    fn word(self) -> u64 {
        match self {
            Self::Zeros => 0,
            Self::File(offset) => file_word(offset),
        }
    }
}

/// The word at `offset` of a file that is filled with them.
pub fn file_word(offset: u64) -> u64 {
    (offset ^ 0x0074_6572_7261_6e65).wrapping_mul(0x2545_f491_4f6c_dd1d) | 1
}

/// What a cell holds: the first words from one generation, the others from the one before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cell {
    generation: Generation,
    under: Generation,
    /// Words of `generation`.
    upto: u8,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_whole() {
            return write!(f, "{:?}", self.generation);
        }
        write!(f, "{:?} up to word {}, then {:?}", self.generation, self.upto, self.under)
    }
}

/// Words of a cell.
const WORDS: usize = CELL / WORD;

impl Cell {
    /// A cell that nobody has written.
    pub const NEW: Self = Self::whole(Generation::NONE);

    /// All of one generation.
    pub const fn whole(generation: Generation) -> Self {
        Self { generation, under: generation, upto: WORDS as u8 }
    }

    /// True if a part of it can be overwritten and the cell can still be told.
    pub fn is_whole(self) -> bool {
        usize::from(self.upto) == WORDS
    }

    /// The cell after its first `bytes`, whole words, have been overwritten. Only a cell that is whole can be overwritten in
    /// part.
    pub fn overwritten(self, generation: Generation, bytes: usize) -> Self {
        match bytes / WORD {
            0 => self,
            WORDS => Self::whole(generation),
            words => Self { generation, under: self.generation, upto: words as u8 },
        }
    }

    /// Writes what the cell at `address` holds into `bytes`. `base` is that of the cell.
    pub fn fill(self, bytes: &mut [u8], address: u64, base: Base) {
        for (n, bytes) in bytes.chunks_exact_mut(WORD).enumerate() {
            let generation = if n < usize::from(self.upto) { self.generation } else { self.under };
            let at = (n * WORD) as u64;
            let word = match generation {
                Generation::NONE => base.after(at).word(),
                generation => generation.word(address + at),
            };
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
    }
}

/// Whether a word found at `address`, in a page that somebody else may be writing to, can be there at all: what was there at
/// first (`base` is that of the word), or the word of some generation. Stores write whole words.
pub fn is_possible(value: u64, address: u64, base: Base) -> bool {
    let generation = Generation((value >> 32) as u32);
    value == base.word() || generation.thread().is_some() && generation.word(address) == value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(cell: Cell, address: u64, base: Base) -> [u8; CELL] {
        let mut bytes = [0xee; CELL];
        cell.fill(&mut bytes, address, base);
        bytes
    }

    #[test]
    fn cells_differ_by_place_and_generation_and_keep_what_is_not_overwritten() {
        let (a, b) = (Generation::new(0, 1), Generation::new(1, 1));
        let base = Base::File(8192);
        let new = filled(Cell::NEW, 0x1000, base);
        assert_eq!(u64::from_ne_bytes(new[8..16].try_into().unwrap()), file_word(8200));
        assert_eq!(filled(Cell::NEW, 0x1000, Base::Zeros), [0; CELL]);
        let (of_a, of_b) = (filled(Cell::whole(a), 0x1000, base), filled(Cell::whole(b), 0x1000, base));
        assert_ne!(of_a, of_b);
        assert_ne!(of_a, filled(Cell::whole(a), 0x1200, base));
        for bytes in [0, 8, 16, 296, 504, 512] {
            let both = filled(Cell::whole(a).overwritten(b, bytes), 0x1000, base);
            assert_eq!(both[..bytes], of_b[..bytes], "{bytes}");
            assert_eq!(both[bytes..], of_a[bytes..], "{bytes}");
        }
    }

    #[test]
    fn a_word_tells_whether_it_is_at_home() {
        let a = Generation::new(3, 77);
        assert_eq!(a.thread(), Some(3));
        let value = a.word(0x2008);
        assert!(is_possible(value, 0x2008, Base::Zeros));
        assert!(!is_possible(value, 0x2010, Base::Zeros), "a word of a neighbour");
        assert!(!is_possible(value ^ 1 << 63, 0x2008, Base::Zeros));
        assert!(is_possible(0, 0x2008, Base::Zeros));
        assert!(is_possible(file_word(8), 0x2008, Base::File(8)));
        assert!(!is_possible(file_word(16), 0x2008, Base::File(8)));
    }
}
