//! Threads of one process that do the same, each for itself: what the kernel's own lock of an address space does to them.
//!
//! The shapes are those of will-it-scale (<https://github.com/antonblanchard/will-it-scale>) in its mode with threads: what is mapped,
//! how it is touched, and what counts as one. The loops are ours.

use super::calls::churn;
use super::memory::{Memory, page_size};
use super::{can_populate, file_failure, folder};
use crate::failure::Failure;
use crate::measure::Sample;
use crate::measure::plan::Runner;
use crate::measure::rate::{Done, rates};
use crate::measure::threads::beside;
use crate::measure::timing::timed;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What a thread repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// First touches, in parts of one mapping or in mappings of their own; the pages are given back untimed.
    Fault {
        /// In mappings of their own.
        own: bool,
    },
    /// mmap and munmap of a page.
    Map {
        /// A byte is stored into it in between.
        touched: bool,
    },
    /// mprotect of a page, forbidding stores and allowing them again; two calls.
    Protect {
        /// A byte is stored into it in between.
        touched: bool,
    },
    /// `MADV_POPULATE_WRITE`.
    Populate,
    /// fork of the process they share, and the child's end.
    Fork,
    /// A shape of will-it-scale, with mappings of so many bytes.
    Shape(Shape, u64),
}

/// A shape of will-it-scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shape {
    /// Map private memory, store into every page, unmap; a page.
    PageFault1,
    /// The same with a private mapping of a file; a page.
    PageFault2,
    /// The same with a shared mapping of a file; a page.
    PageFault3,
    /// Map private memory, unmap; both.
    Mmap1,
    /// The same with a private mapping of a file; both.
    Mmap2,
    /// Store into a page of a private mapping of a file, `MADV_DONTNEED` it, load from it; a page.
    TlbFlush1,
    /// Grow the heap by a page and shrink it; a call.
    Brk1,
}

impl Shape {
    /// All of them, in will-it-scale's order.
    pub const ALL: [Self; 7] = [
        Self::PageFault1,
        Self::PageFault2,
        Self::PageFault3,
        Self::Mmap1,
        Self::Mmap2,
        Self::TlbFlush1,
        Self::Brk1,
    ];

    /// The name in will-it-scale.
    pub fn name(self) -> &'static str {
        match self {
            Self::PageFault1 => "page_fault1",
            Self::PageFault2 => "page_fault2",
            Self::PageFault3 => "page_fault3",
            Self::Mmap1 => "mmap1",
            Self::Mmap2 => "mmap2",
            Self::TlbFlush1 => "tlb_flush1",
            Self::Brk1 => "brk1",
        }
    }

    /// What is counted.
    pub fn unit(self) -> &'static str {
        match self {
            Self::PageFault1 | Self::PageFault2 | Self::PageFault3 | Self::TlbFlush1 => "pages/s",
            Self::Mmap1 | Self::Mmap2 => "pairs/s",
            Self::Brk1 => "calls/s",
        }
    }

    /// Whether it maps a file.
    pub fn maps_file(self) -> bool {
        matches!(self, Self::PageFault2 | Self::PageFault3 | Self::Mmap2 | Self::TlbFlush1)
    }

    /// Whether stores reach the file.
    pub fn is_shared(self) -> bool {
        self == Self::PageFault3
    }

    /// Bytes that each of `threads` maps: will-it-scale's 128 MiB, less where many threads would need too much memory.
    pub fn length(threads: usize) -> u64 {
        ((512 << 20) / threads.max(4) as u64) >> 21 << 21
    }
}

/// Bytes of first touches between two looks at the clock. The same figures as Terrane's loops have.
pub const TOUCHED: u64 = 256 << 10;
/// Bytes of an area.
pub const AREA: u64 = 2 << 20;
/// Bytes that are populated by a call.
pub const POPULATED: u64 = 1 << 20;
/// Calls between two looks at the clock.
pub const CALLS: u64 = 16;
/// Bytes that are touched before a fork.
pub const FORKED: u64 = 1 << 20;

/// Sets threads up; each sample is a rate of all of them.
pub fn set_up(work: Work, threads: usize, with_churn: bool) -> Result<Runner<'static>, Failure> {
    let things = Things::new(work, threads)?;
    Ok(Box::new(move |time| {
        let seats = threads + usize::from(with_churn);
        let all = || rates(threads, seats, time, |_| Ok(()), |index, ()| things.step(index));
        let all = if with_churn { beside(threads, seats, churn, all)?.0 } else { all()? };
        Ok(Sample::from(all.rate()))
    }))
}

/// What the threads work on.
struct Things {
    work: Work,
    areas: Vec<Memory>,
    /// What keeps the areas from becoming one mapping.
    _apart: Vec<Memory>,
    files: Vec<File>,
    length: usize,
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Things {
    fn new(work: Work, threads: usize) -> Result<Self, Failure> {
        let length = match work {
            Work::Fault { own: false } => AREA as usize * (threads + 1),
            // Room to align in.
            Work::Fault { own: true } | Work::Populate => 2 * AREA as usize,
            Work::Protect { .. } => page_size(),
            Work::Fork => FORKED as usize,
            Work::Map { .. } | Work::Shape(..) => 0,
        };
        let (mut areas, mut apart) = (Vec::new(), Vec::new());
        let count = if matches!(work, Work::Fault { own: false } | Work::Fork) { 1 } else { threads };
        for _ in 0..if length > 0 { count } else { 0 } {
            areas.push(Memory::anonymous(length, READ_WRITE)?);
            apart.push(Memory::anonymous(page_size(), ProtFlags::empty())?);
        }
        match work {
            Work::Fork => areas[0].write_pages(0, length),
            Work::Populate => can_populate(areas[0].advise_part(0, page_size(), Advice::LinuxPopulateWrite))?,
            _ => {}
        }
        let mut files = Vec::new();
        let mut length = 0;
        if let Work::Shape(shape, bytes) = work {
            length = bytes as usize;
            for _ in 0..if shape.maps_file() { threads } else { 0 } {
                files.push(sparse_file(bytes)?);
            }
        }
        Ok(Self { work, areas, _apart: apart, files, length })
    }

    /// Where thread `index` works: the memory, and the offset of an aligned area in it.
    fn area(&self, index: usize) -> (&Memory, usize) {
        let shared = self.areas.len() == 1;
        let memory = &self.areas[if shared { 0 } else { index }];
        (memory, memory.at(0).align_offset(AREA as usize) + if shared { index * AREA as usize } else { 0 })
    }

    fn step(&self, index: usize) -> Result<Done, Failure> {
        let repeat = |things: u64, call: &dyn Fn() -> Result<(), Failure>| {
            let (took, result) = timed(|| (0..CALLS).try_for_each(|_| call()));
            result.map(|()| Done::new(CALLS * things, took))
        };
        match self.work {
            Work::Fault { .. } => {
                let (memory, offset) = self.area(index);
                let (took, ()) = timed(|| memory.write_pages(offset, TOUCHED as usize));
                give_back(memory, offset, TOUCHED as usize)?;
                Ok(Done::new(TOUCHED / page_size() as u64, took))
            }
            Work::Map { touched: false } => repeat(1, &churn),
            Work::Map { touched: true } => repeat(1, &|| {
                Memory::anonymous_as_it_comes(page_size(), READ_WRITE)
                    .map(|memory| memory.write_pages(0, page_size()))
            }),
            Work::Protect { touched } => repeat(2, &|| {
                let memory = &self.areas[index];
                if touched {
                    memory.write_pages(0, page_size());
                }
                memory.protect(0, page_size(), MprotectFlags::READ)?;
                memory.protect(0, page_size(), MprotectFlags::READ | MprotectFlags::WRITE)
            }),
            Work::Populate => {
                let (memory, offset) = self.area(index);
                let (took, result) =
                    timed(|| memory.advise_part(offset, POPULATED as usize, Advice::LinuxPopulateWrite));
                can_populate(result)?;
                give_back(memory, offset, POPULATED as usize)?;
                Ok(Done::new(POPULATED / page_size() as u64, took))
            }
            Work::Fork => super::forks::fork_once().map(|took| Done::new(1, took)),
            Work::Shape(Shape::Brk1, _) => repeat(2, &brk1),
            Work::Shape(shape, _) => self.shape(shape, index),
        }
    }

    fn shape(&self, shape: Shape, index: usize) -> Result<Done, Failure> {
        let start = Instant::now();
        let map = || match self.files.get(index) {
            // In pages of the ordinary size: huge ones would be measured for something else.
            None if shape == Shape::PageFault1 => Memory::anonymous(self.length, READ_WRITE),
            None => Memory::anonymous_as_it_comes(self.length, READ_WRITE),
            Some(file) if shape.is_shared() => {
                Memory::of_file(file, self.length, READ_WRITE, MapFlags::SHARED)
            }
            Some(file) => Memory::of_file(file, self.length, READ_WRITE, MapFlags::PRIVATE),
        };
        let pages = (self.length / page_size()) as u64;
        let things = match shape {
            Shape::Mmap1 | Shape::Mmap2 => {
                for _ in 0..CALLS {
                    drop(map()?);
                }
                CALLS
            }
            Shape::TlbFlush1 => {
                let memory = map()?;
                // All the pages of a mapping would take the time of several samples.
                let pages = pages.min(2048);
                for page in 0..pages as usize {
                    memory.write_pages(page * page_size(), page_size());
                    give_back(&memory, page * page_size(), page_size())?;
                    if memory.read_byte(page * page_size()) != 0 {
                        return Err(Failure::Broken("a page is still there".into()));
                    }
                }
                pages
            }
            _ => {
                map()?.write_pages(0, self.length);
                pages
            }
        };
        Ok(Done::new(things, start.elapsed()))
    }
}

fn give_back(memory: &Memory, offset: usize, length: usize) -> Result<(), Failure> {
    memory
        .advise_part(offset, length, Advice::LinuxDontNeed)
        .map_err(|e| Failure::broken("cannot give pages back", e))
}

/// A file of so many zeros without a name, gone when closed.
pub fn sparse_file(length: u64) -> Result<File, Failure> {
    let folder = folder();
    let file = tempfile::tempfile_in(&folder).map_err(|e| file_failure(&folder, &e))?;
    file.set_len(length).map_err(|e| file_failure(&folder, &e))?;
    Ok(file)
}

/// Grows the heap by a page and shrinks it again, beside other threads that do the same to the one heap: each goes by what it
/// finds, and neither call need have its way.
fn brk1() -> Result<(), Failure> {
    /// So far beyond the end as it was found that what the C library does with the heap meanwhile stays below.
    const BEYOND: usize = 64 << 20;
    static END: OnceLock<usize> = OnceLock::new();
    // SAFETY: asking for the end of the heap at 0 changes nothing.
    let end = END.get_or_init(|| BEYOND + unsafe { libc::syscall(libc::SYS_brk, 0usize) } as usize);
    for wanted in [end + page_size(), *end] {
        // SAFETY: both ends lie beyond everything that anybody in this process has on the heap.
        unsafe { libc::syscall(libc::SYS_brk, wanted) };
    }
    Ok(())
}

/// Reads the list of mappings of this process, of which there are `mappings` more than usual, while a thread maps and unmaps a
/// page: nanoseconds for its two calls, beside a thread that reads if `read`, else alone.
pub fn listing(mappings: usize, read: bool) -> Result<Runner<'static>, Failure> {
    // Protections alternate so that neighbours do not merge.
    let others: Vec<Memory> = (0..mappings)
        .map(|index| {
            let prot = if index % 2 == 0 { ProtFlags::READ } else { ProtFlags::empty() };
            Memory::anonymous_as_it_comes(page_size(), prot)
        })
        .collect::<Result<_, _>>()?;
    Ok(Box::new(move |time: Duration| {
        let _alive = &others;
        let work = || {
            rates(
                1,
                2,
                time,
                |_| Ok(()),
                |_, ()| {
                    let (took, result) = timed(|| (0..CALLS).try_for_each(|_| churn()));
                    result.map(|()| Done::new(CALLS, took))
                },
            )
        };
        let all = if read {
            let list = || {
                let text = std::fs::read("/proc/self/maps");
                text.map(drop).map_err(|e| Failure::broken("cannot list the mappings", e))
            };
            beside(1, 2, list, work)?.0
        } else {
            work()?
        };
        Ok(Sample::from(1e9 / all.rate()))
    }))
}
