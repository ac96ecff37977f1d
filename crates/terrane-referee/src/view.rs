//! What the two sides show of a window: the same form for both, so that they compare.

use crate::script::Setup;
use core::fmt;

/// What a mapping shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Shows {
    /// Private memory.
    Memory,
    /// A file of the script.
    File(usize),
    /// Shared memory of its own: some number, the same for mappings that show the same.
    Shared(u64),
}

/// One mapping in the window, as a listing shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Area {
    /// The first address.
    pub start: u64,
    /// Behind the last.
    pub end: u64,
    /// `PROT_…`.
    pub prot: u8,
    /// Stores reach what it shows.
    pub shared: bool,
    /// Bytes from the start of what it shows; 0 for private memory.
    pub offset: u64,
    /// What it shows.
    pub shows: Shows,
}

/// Gives shared memories numbers in the order in which they are met, so that two listings compare.
pub fn canonical(areas: &mut [Area]) {
    let mut seen = Vec::new();
    for area in areas {
        if let Shows::Shared(key) = &mut area.shows {
            let number = seen.iter().position(|known| known == key).unwrap_or_else(|| {
                seen.push(*key);
                seen.len() - 1
            });
            *key = number as u64;
        }
    }
}

impl Area {
    /// As a line of a listing, with addresses from the start of the window.
    pub fn line(&self, setup: &Setup) -> String {
        let mark = |bit: u8, letter: char| if self.prot & bit != 0 { letter } else { '-' };
        format!(
            "w+{:#x}-w+{:#x} {}{}{}{} {:#x} {}",
            self.start.wrapping_sub(setup.start),
            self.end.wrapping_sub(setup.start),
            mark(1, 'r'),
            mark(2, 'w'),
            mark(4, 'x'),
            if self.shared { 's' } else { 'p' },
            self.offset,
            self.shows
        )
    }
}

impl fmt::Display for Shows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shows::Memory => f.write_str("memory"),
            Shows::File(number) => write!(f, "file {number}"),
            Shows::Shared(number) => write!(f, "shared memory {number}"),
        }
    }
}

/// What the page table holds for a page of the window, as far as both sides tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Present {
    /// Nothing, or a page of a file or of shared memory, which may be mapped ahead of use.
    No,
    /// A page of its own, in memory or in swap, or the page of zeros.
    Yes,
    /// A guard.
    Guard,
}

/// What `smaps` counts of a mapping, in KiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// `Rss`.
    pub resident: u64,
    /// `Pss`.
    pub share: u64,
    /// `Shared_Clean` and `Shared_Dirty`.
    pub shared: u64,
    /// `Private_Clean` and `Private_Dirty`.
    pub private: u64,
    /// `Anonymous`.
    pub anonymous: u64,
    /// `Swap`.
    pub swap: u64,
    /// `Locked`.
    pub locked: u64,
}

impl Counts {
    /// What is the same on both sides: all for private memory; of others only the copies, because pages of files are mapped ahead of use.
    pub fn stable(self, memory: bool) -> Self {
        let Self { anonymous, .. } = self;
        if memory { self } else { Self { anonymous, ..Self::default() } }
    }
}
