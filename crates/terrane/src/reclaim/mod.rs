//! Reclaim: memory is found where it is not in use (issue 4, point 2).
//!
//! # What it guarantees
//!
//! Nothing that was stored is lost: a page is freed when it is in its file, in swap, or in nobody's interest. No space is stopped;
//! a fault waits, if at all, for the page that it needs. Reclaim allocates nothing, neither frames nor memory of the allocator, so it works
//! when there is none. Pages locked in memory stay, and so do page tables and what is being read or written.
//!
//! # Which pages
//!
//! A hand goes round the metadata of all frames, as in a clock. There are no lists of pages: the hand finds kind and owner of a
//! page in its metadata, and its entries by reverse mapping. Faults therefore write nothing for reclaim. A page whose mark of
//! having been accessed is set in some entry loses the mark and stays until the next round (a second chance; so two
//! generations: used since the last round, or not). A page without the mark goes:
//!
//! | page | goes |
//! |---|---|
//! | private | to swap (`anon`) |
//! | of a file, clean | nowhere: it can be read again (`file`) |
//! | of a file, dirty | to its file first |
//! | of shared memory | to swap |
//! | of a block of 2 MiB | the block is divided when it has not been used for a round; then page by page |
//!
//! Several CPUs reclaim at the same time, each a stretch of the array after the other, which it takes by moving the hand. They meet in pages
//! that are found in two stretches never, and in locks of reverse mapping sometimes.
//!
//! # Who calls
//!
//! Whoever finds no frame ([`Cpu::find_memory`]), for some pages; and, if the host has a thread for it, [`balance`], between two marks,
//! so that the others seldom have to.
//!
//! # Locks
//!
//! Those of reverse mapping, one at a time, and an object's lock for write-back and truncation, only if it is free. Never a range. So
//! reclaim may be called with ranges held, but not with a lock of reverse mapping held.
//!
//! # Who may break it
//!
//! Whoever frees a page of an object without [`FrameMeta::dismiss`](crate::frame::FrameMeta::dismiss); whoever relies on a private page
//! because its entry said so a moment ago (see [`swap`](crate::swap)).
//!
//! Sources: F. J. Corbató, "A paging experiment with the Multics system" (1968) for the clock; R. van Riel's reverse mapping (Linux
//! 2.5) for finding entries instead of walking spaces.

mod advice;
mod anon;
mod file;
mod migrate;
mod swapoff;

pub use advice::page_out;
pub use migrate::migrate;

use crate::addr::Frame;
use crate::frame::{FrameFlags, NodeMask};
use crate::host::Host;
use crate::machine::Cpu;
use crate::stats::Counter;
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use crossbeam_utils::CachePadded;

/// Frames that a CPU takes under the hand at a time.
const STRETCH: usize = 32;
/// Pages that one who is short of memory frees: some for what it is about to do next.
const ENOUGH: usize = 32;
/// "No frame", for the table in reserve.
const NO_FRAME: u32 = u32::MAX;

/// Where reclaim stands, for one machine.
pub(crate) struct Reclaim {
    /// The next frame to look at, counted from the machine's first, rounds included.
    hand: CachePadded<AtomicUsize>,
    /// A frame for dividing a block when there is no other.
    table: AtomicU32,
}

describe!([] Reclaim { hand, table });

impl Reclaim {
    pub(crate) const fn new() -> Self {
        Self { hand: CachePadded::new(AtomicUsize::new(0)), table: AtomicU32::new(NO_FRAME) }
    }

    /// Takes the table in reserve.
    fn take_table(&self) -> Option<Frame> {
        let number = self.table.swap(NO_FRAME, Ordering::AcqRel);
        (number != NO_FRAME).then_some(Frame(number))
    }

    /// Frames kept in reserve: not free, and no one's.
    pub(crate) fn reserved(&self) -> usize {
        usize::from(self.table.load(Ordering::Relaxed) != NO_FRAME)
    }
}

/// What looking for memory came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Progress {
    /// Pages freed, or on their way.
    pub(crate) freed: usize,
    /// There were pages that somebody else is at work on: later there may be more.
    pub(crate) busy: bool,
}

/// Who reclaims, and how much it asks of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    /// Memory is short.
    Direct,
    /// Memory will be short.
    Background,
    /// The program has said that it does not need these pages now: their marks do not matter. Shared pages stay.
    Advised,
    /// The page moves to another frame.
    Moved,
}

/// What became of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Its frame is free, or will be soon.
    Freed,
    /// It is in use, or must stay.
    Stays,
    /// Somebody else is at work on it.
    Busy,
}

/// Frees some pages for who is short of memory. Not while pinned; see the [module](self).
pub(crate) fn find_memory<H: Host>(cpu: &Cpu<H>) -> Progress {
    {
        let pin = cpu.pin();
        cpu.machine().stats().count(&pin, Counter::AllocStall);
    }
    // Twice round: the first time may take nothing but marks.
    shrink(cpu, ENOUGH, 2 * cpu.machine().frames().total() + STRETCH, Why::Direct)
}

/// The same in the memory of some nodes.
pub(crate) fn find_memory_on<H: Host>(cpu: &Cpu<H>, nodes: NodeMask) -> Progress {
    let frames = cpu.machine().frames();
    let mut progress = Progress::default();
    // Twice over, as above. Each CPU begins at the beginning: who is bound to a node is seldom short.
    for node in nodes.iter().chain(nodes.iter()) {
        let Some(range) = frames.range_of(node) else { continue };
        for number in range.first.0..range.first.0 + range.count as u32 {
            match look(cpu, Frame(number), Why::Direct) {
                Verdict::Freed => progress.freed += 1,
                Verdict::Stays => {}
                Verdict::Busy => progress.busy = true,
            }
            if progress.freed >= ENOUGH {
                return progress;
            }
        }
    }
    progress
}

/// Frees pages in the background until `high` frames are free, if fewer than `low` are; looks at every frame twice at most. Returns how
/// many pages were freed. For a thread of the host's, now and then. May read and write files and swap. Not while pinned.
pub fn balance<H: Host>(cpu: &Cpu<H>, low: usize, high: usize) -> usize {
    let frames = cpu.machine().frames();
    if frames.free_frames() >= low {
        return 0;
    }
    let mut freed = 0;
    let mut left = 2 * frames.total() + STRETCH;
    while left > 0 && frames.free_frames() < high {
        // A few at a time: others free memory too.
        let turn = left.min(8 * STRETCH);
        let found = shrink(cpu, high, turn, Why::Background).freed;
        freed += found;
        left -= turn;
        // It writes words of other CPUs, whose faults do, too.
        if found > 0 {
            cpu.quiesce();
        }
    }
    freed
}

/// Looks at up to `budget` frames from the hand on, until `want` pages are freed.
fn shrink<H: Host>(cpu: &Cpu<H>, want: usize, budget: usize, why: Why) -> Progress {
    let machine = &**cpu.machine();
    let range = machine.frames().range();
    let mut progress = Progress::default();
    let mut looked = 0;
    while looked < budget && progress.freed < want && range.count > 0 {
        let from = machine.reclaim().hand.fetch_add(STRETCH, Ordering::Relaxed);
        for n in from..from.saturating_add(STRETCH) {
            let frame = Frame(range.first.0 + (n % range.count) as u32);
            match look(cpu, frame, why) {
                Verdict::Freed => progress.freed += 1,
                Verdict::Stays => {}
                Verdict::Busy => progress.busy = true,
            }
        }
        looked += STRETCH;
    }
    if progress.freed > 0 {
        keep_table(cpu);
    }
    progress
}

/// Looks at one frame, and frees its page if it may go.
pub(crate) fn look<H: Host>(cpu: &Cpu<H>, frame: Frame, why: Why) -> Verdict {
    let flags = cpu.machine().frames().meta(frame).flags();
    if flags.intersects(FrameFlags::FREE | FrameFlags::TABLE | FrameFlags::UNEVICTABLE) {
        return Verdict::Stays;
    }
    let (verdict, scan, steal) = if flags.contains(FrameFlags::ANON) {
        (anon::look(cpu, frame, why), Counter::PgScanAnon, Counter::PgStealAnon)
    } else if flags.contains(FrameFlags::CACHE) {
        (file::look(cpu, frame, why), Counter::PgScanFile, Counter::PgStealFile)
    } else {
        return Verdict::Stays;
    };
    let pin = cpu.pin();
    let stats = cpu.machine().stats();
    let (by_scan, by_steal) = match why {
        Why::Background => (Counter::PgScanKswapd, Counter::PgStealKswapd),
        Why::Direct | Why::Advised | Why::Moved => (Counter::PgScanDirect, Counter::PgStealDirect),
    };
    stats.count(&pin, scan);
    stats.count(&pin, by_scan);
    if verdict == Verdict::Freed {
        stats.count(&pin, steal);
        stats.count(&pin, by_steal);
    }
    verdict
}

/// Keeps a frame for dividing a block, now that some have come free.
fn keep_table<H: Host>(cpu: &Cpu<H>) {
    let machine = &**cpu.machine();
    // Where there have been no blocks there will be none to divide.
    let blocks = [Counter::ThpFaultAlloc, Counter::ThpCollapseAlloc];
    if machine.reclaim().reserved() > 0 || blocks.iter().all(|&made| machine.stats().sum(made) == 0) {
        return;
    }
    let pin = cpu.pin();
    let ram = machine.ram(&pin);
    if let Some(frame) = ram.allocate() {
        let before = machine.reclaim().table.swap(frame.0, Ordering::AcqRel);
        if before != NO_FRAME {
            ram.free(Frame(before));
        }
    }
}
