//! Plots: runs of pages that one thread owns, between those of others, and what it knows of them.

use super::content::{Base, CELL, CELLS, Cell};
use super::world::World;
use parking_lot::Mutex;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use terrane::addr::AddrRange;
use terrane::space::MapRequest;
use terrane::vma::{Access, Prot};
use terrane::{FaultError, PAGE_SIZE};
use terrane_hosted::{Hosted, Interrupted};

/// Bytes of a page.
pub const PAGE: usize = PAGE_SIZE as usize;

/// Readable and writable.
pub const READ_WRITE: Prot = Prot::READ.union(Prot::WRITE);

/// What is mapped in a plot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Private memory.
    Anonymous,
    /// Private memory in runs that fill aligned blocks of 2 MiB, so that huge pages come and are split.
    Block,
    /// A private mapping of a file that nobody changes.
    PrivateFile,
    /// Shared memory.
    Shared,
    /// A shared mapping of a file.
    SharedFile,
    /// The heap, which `brk` grows and shrinks.
    Heap,
    /// Private memory where the space has placed it.
    Float,
}

impl Kind {
    /// Those that lie at fixed addresses, one plot beside the other.
    pub const FIXED: [Self; 5] =
        [Self::Anonymous, Self::Block, Self::PrivateFile, Self::Shared, Self::SharedFile];

    /// Whether all spaces see the same bytes.
    pub fn is_shared(self) -> bool {
        matches!(self, Self::Shared | Self::SharedFile)
    }

    /// Pages of a plot.
    pub fn pages(self) -> usize {
        match self {
            Self::Block => 64,
            _ => 24,
        }
    }

    /// Plots of each thread.
    pub fn plots(self) -> usize {
        match self {
            Self::Block => 3,
            _ => 2,
        }
    }

    /// Where the first plot begins; a multiple of 2 MiB.
    pub fn base(self) -> u64 {
        0x1000_0000 * (1 + self as u64)
    }
}

/// What the owner knows of a page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// What may be done with it; `None` where nothing is mapped.
    pub prot: Option<Prot>,
    /// A fork leaves it out.
    pub dont_fork: bool,
    /// A fork begins it anew.
    pub wipe: bool,
}

impl Page {
    /// Just mapped.
    pub fn mapped(prot: Prot) -> Self {
        Self { prot: Some(prot), ..Self::HOLE }
    }

    /// Nothing there.
    pub const HOLE: Self = Self { prot: None, dont_fork: false, wipe: false };
}

/// A run of pages, as its owner knows it.
pub struct Plot {
    /// What is mapped.
    pub kind: Kind,
    /// Which one of its kind, over all threads.
    pub number: usize,
    /// Where it begins.
    pub start: u64,
    /// Its pages.
    pub pages: Vec<Page>,
    /// What the cells hold. Of shared plots there is one, whichever space is looked at.
    cells: Arc<Mutex<Vec<[Cell; CELLS]>>>,
}

impl Plot {
    /// A plot of which nothing is mapped.
    pub fn new(kind: Kind, number: usize, start: u64, pages: usize) -> Self {
        let cells = Arc::new(Mutex::new(vec![[Cell::NEW; CELLS]; pages]));
        Self { kind, number, start, pages: vec![Page::HOLE; pages], cells }
    }

    /// Plot `number` of a kind that lies at fixed addresses.
    pub fn fixed(kind: Kind, number: usize) -> Self {
        let start = kind.base() + (number * kind.pages() * PAGE) as u64;
        Self::new(kind, number, start, kind.pages())
    }

    /// Where page `page` begins.
    pub fn address(&self, page: usize) -> u64 {
        self.start + (page * PAGE) as u64
    }

    /// The addresses of `pages`.
    pub fn range(&self, pages: &Range<usize>) -> AddrRange {
        AddrRange::new(self.address(pages.start), self.address(pages.end))
    }

    /// Where the plot lies in its object.
    pub fn offset(&self) -> u64 {
        (self.number * self.kind.pages() * PAGE) as u64
    }

    /// What is at byte `at` of the plot before anybody writes.
    pub fn base(&self, at: usize) -> Base {
        match self.kind {
            Kind::PrivateFile => Base::File(self.offset() + at as u64),
            _ => Base::Zeros,
        }
    }

    /// The plot in a child, with contents of its own if it is private.
    pub fn fork(&self) -> Self {
        let shared = self.kind.is_shared();
        let cells = if shared { self.cells.clone() } else { Arc::new(Mutex::new(self.cells.lock().clone())) };
        let mut child = Self { cells, pages: self.pages.clone(), ..*self };
        for page in 0..self.pages.len() {
            if child.pages[page].dont_fork {
                child.pages[page] = Page::HOLE;
                child.reset(page..page + 1);
            } else if child.pages[page].wipe {
                child.reset(page..page + 1);
            }
        }
        child
    }

    /// What `access` to `page` ends in.
    pub fn verdict(&self, page: usize, access: Access) -> Result<(), FaultError> {
        let prot = self.pages[page].prot.ok_or(FaultError::NotMapped)?;
        let allowed = match access {
            Access::Read => !prot.is_empty(),
            Access::Write => prot.contains(Prot::WRITE),
            Access::Execute => prot.contains(Prot::EXEC),
        };
        if allowed { Ok(()) } else { Err(FaultError::NotAllowed) }
    }

    /// What a transfer of `len` bytes from byte `from` on ends in.
    pub fn expect(&self, from: usize, len: usize, access: Access) -> Result<(), Interrupted> {
        for page in from / PAGE..(from + len).div_ceil(PAGE) {
            let done = (page * PAGE).saturating_sub(from);
            self.verdict(page, access).map_err(|error| Interrupted { done, error })?;
        }
        Ok(())
    }

    /// Private pages are forgotten, or mapped anew: they begin again.
    pub fn reset(&self, pages: Range<usize>) {
        if !self.kind.is_shared() {
            self.cells.lock()[pages].fill([Cell::NEW; CELLS]);
        }
    }

    /// What cell `cell` of the plot holds.
    pub fn cell(&self, cell: usize) -> Cell {
        self.cells.lock()[cell / CELLS][cell % CELLS]
    }

    /// The same, changed.
    pub fn set_cell(&self, cell: usize, new: Cell) {
        self.cells.lock()[cell / CELLS][cell % CELLS] = new;
    }

    /// What `bytes.len()` bytes from byte `from` on must be.
    pub fn fill(&self, from: usize, bytes: &mut [u8]) {
        let cells = self.cells.lock();
        let mut whole = [0; CELL];
        let mut done = 0;
        while done < bytes.len() {
            let (cell, inside) = ((from + done) / CELL, (from + done) % CELL);
            let part = (CELL - inside).min(bytes.len() - done);
            let start = cell * CELL;
            cells[cell / CELLS][cell % CELLS].fill(&mut whole, self.start + start as u64, self.base(start));
            bytes[done..done + part].copy_from_slice(&whole[inside..inside + part]);
            done += part;
        }
    }

    /// The request that maps `pages` where they belong.
    pub fn request(&self, world: &World, pages: &Range<usize>, prot: Prot) -> MapRequest<Hosted> {
        let range = self.range(pages);
        let offset = self.offset() + (pages.start * PAGE) as u64;
        let request = match self.kind {
            Kind::PrivateFile => MapRequest::object(&world.private_file, offset, range.len(), prot, false),
            Kind::Shared => MapRequest::object(&world.shared_memory, offset, range.len(), prot, true),
            Kind::SharedFile => MapRequest::object(&world.shared_file, offset, range.len(), prot, true),
            Kind::Anonymous | Kind::Block | Kind::Heap | Kind::Float => {
                MapRequest::anonymous(range.len(), prot)
            }
        };
        request.fixed(range.start)
    }

    /// Whether all of `pages` are mapped.
    pub fn is_whole(&self, pages: &Range<usize>) -> bool {
        self.pages[pages.clone()].iter().all(|page| page.prot.is_some())
    }
}

impl fmt::Display for Plot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} plot {} at {:#x} [", self.kind, self.number, self.start)?;
        for page in &self.pages {
            let letter = match page.prot {
                None => '.',
                Some(prot) if prot.is_empty() => '0',
                Some(prot) if prot.contains(Prot::WRITE) => 'w',
                Some(prot) if prot.contains(Prot::EXEC) => 'x',
                Some(_) => 'r',
            };
            write!(f, "{letter}")?;
        }
        f.write_str("]")
    }
}
