//! What a host provides: the consumer side only, in a few small traits.
//!
//! | trait | what Terrane needs it for |
//! |---|---|
//! | [`Memory`] | which frames there are, and how to reach their bytes |
//! | [`Tlb`] | making other CPUs forget translations |
//! | [`Wait`] | waiting for a word to change, and waking those who wait |
//! | [`Observe`] | sending events somewhere (optional) |
//! | [`File`] | reading and writing the pages of a file |
//! | [`Host`] | the above together, with the page-table format and the locks |
//!
//! All methods take `&self`; nothing is global, so two machines can live in one program. `examples/minimal_host.rs`
//! is a complete host.

use crate::addr::{AddrRange, Frame};
use crate::copy::copy_bytes;
use crate::page_table::Format;
use crate::stats::Event;
use crate::sync::CpuId;
use crate::sync::atomic::AtomicU32;
use core::ptr::NonNull;

/// Has memory, given by address and length (multiples of 2 MiB), backed by huge pages; or does not.
pub type Back = fn(NonNull<u8>, usize);

/// The physical memory of a machine.
///
/// # Safety
/// For as long as the value lives, every frame of [`frames`](Self::frames) is memory of
/// [`PAGE_SIZE`](crate::PAGE_SIZE) bytes that nothing else uses, [`bytes`](Self::bytes) gives its address in the
/// program, aligned to the page size, always the same for the same frame.
pub unsafe trait Memory {
    /// The first frame and how many follow it. Never changes.
    fn frames(&self) -> FrameRange;

    /// Where the bytes of `frame` (inside [`frames`](Self::frames)) are.
    fn bytes(&self, frame: Frame) -> NonNull<u8>;

    /// What has other memory of the program, given by address and length (multiples of 2 MiB), backed by huge pages. `None`, which
    /// is the default, where there is nothing to ask for: a kernel's own memory is in huge pages as it is. Where there is
    /// something, the leaves of large indexes are kept in pieces of that size ([`LeafPool`](crate::index::LeafPool)).
    fn back_by_huge_pages(&self) -> Option<Back> {
        None
    }

    /// Copies `len` bytes from `from` to `to`, of which programs may be using those that are in frames meanwhile: each byte as it
    /// was at some moment during the call, as by relaxed atomic loads and stores.
    ///
    /// The default is right everywhere: on x86-64 the string instruction, which is as fast as `memcpy` there. An emulator takes
    /// it byte by byte; a host that is to run in one has a better way.
    ///
    /// # Safety
    /// The bytes can be read and written, and do not overlap. Others use them only as programs do, or as atomics.
    #[inline]
    unsafe fn copy(&self, from: NonNull<u8>, to: NonNull<u8>, len: usize) {
        // SAFETY: by the caller.
        unsafe { copy_bytes(from, to, len) };
    }

    /// True when the frame that is about to be taken is to be refused although there is one: for a host that tries what becomes
    /// of its programs when memory lacks. Blocks of 2 MiB, and frames of a node that a policy names, are not asked for. The default is never, and costs nothing.
    #[inline]
    fn refuses(&self) -> bool {
        false
    }
}

/// Consecutive frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameRange {
    /// The first of them.
    pub first: Frame,
    /// How many, in frames.
    pub count: usize,
}

/// A shoot-down under way; see [`Tlb::shoot_down`]. Opaque to Terrane, but for one thing: the shoot-downs of one CPU
/// pass in the order in which they were asked for, so a later ticket that has passed speaks for the earlier ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The ticket of a shoot-down that is over already.
    pub const PASSED: Ticket = Ticket(0);
}

/// What a shoot-down came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShootDown {
    /// Tells when it is over.
    pub ticket: Ticket,
    /// How many CPUs other than the calling one were asked.
    pub asked: usize,
}

impl ShootDown {
    /// Nobody else was asked, and it is over.
    pub const PASSED: ShootDown = ShootDown { ticket: Ticket::PASSED, asked: 0 };
}

/// The translation caches of a machine's CPUs.
///
/// Terrane counts the calls that asked others (`nr_tlb_remote_flush`). What the CPUs then do is the host's to count, with
/// [`Cpu::count`](crate::machine::Cpu::count).
///
/// # Safety
/// The contract of [`shoot_down`](Self::shoot_down) and [`has_passed`](Self::has_passed) is what the safety of
/// freed memory rests on.
pub unsafe trait Tlb {
    /// What the host keeps with each address space: as a rule the set of CPUs that may cache its translations.
    type Space: Default + Send + Sync;

    /// Makes every CPU that may hold translations of `range` in `space` drop them, the calling one (`cpu`)
    /// included. The fewer it asks the better: Terrane calls this once for each call that changes entries, with the whole
    /// range, and not at all where nothing was present.
    ///
    /// When it returns, no memory access that *starts* afterwards, on any CPU, uses a translation of the range
    /// that was read from the page table before the call. Accesses already under way may still end; the ticket
    /// tells when they have ([`Ticket::PASSED`]: they have): freed frames wait for it, and so do calls that promise that
    /// no store comes through any more (protect, fork, write-back). A host with inter-processor interrupts that waits
    /// for the answers returns `PASSED` always. Must not take locks that a fault may hold.
    fn shoot_down(&self, cpu: CpuId, space: &Self::Space, range: AddrRange) -> ShootDown;

    /// True when a shoot-down by `cpu` has reached every CPU: none can still be using an old translation.
    /// Cheap; never waits.
    fn has_passed(&self, cpu: CpuId, ticket: Ticket) -> bool;

    /// Waits until the shoot-down has passed. Not called while pinned, perhaps with a range held.
    fn settle(&self, cpu: CpuId, ticket: Ticket);
}

/// Waiting and waking, like a futex.
pub trait Wait {
    /// Blocks while `*word == value`. May return early for no reason. Never called while pinned.
    fn wait(&self, cpu: CpuId, word: &AtomicU32, value: u32);

    /// Wakes everyone who waits on `word`.
    fn wake_all(&self, word: &AtomicU32);

    /// Called in loops that wait for another CPU to finish something that takes nanoseconds, with the number of
    /// rounds so far. The default spins; a host whose CPUs are threads lets others run after some rounds. May be
    /// called while pinned; must not call back into Terrane.
    #[inline]
    fn relax(&self, _cpu: CpuId, _rounds: u32) {
        crate::sync::atomic::spin_loop();
    }
}

/// Where events go. Called while pinned, and perhaps with locks held: must not call back into Terrane.
pub trait Observe {
    /// Something happened on `cpu`. The default ignores it and costs nothing.
    #[inline]
    fn event(&self, _cpu: CpuId, _event: Event) {}
}

/// A file that can be mapped. Offsets are in bytes and, but for the end of the file, page-aligned.
pub trait File: Send + Sync + 'static {
    /// The length of the file, in bytes.
    fn len(&self) -> u64;

    /// True when the file is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads up to `buffer.len()` bytes at `offset` and returns how many there were: fewer only at the end of
    /// the file. May block.
    ///
    /// # Errors
    /// [`IoError`] when the bytes cannot be read.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, IoError>;

    /// Writes `bytes` at `offset`, inside the file. May block.
    ///
    /// # Errors
    /// [`IoError`] when not all could be written.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), IoError>;

    /// True when the file may be written: decides whether a shared mapping may be writable.
    fn is_writable(&self) -> bool;
}

/// A file could not be read or written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoError;

/// Everything a host provides.
pub trait Host: Memory + Tlb + Wait + Observe + Send + Sync + Sized + 'static {
    /// The page-table format of the machine's CPUs.
    type Format: Format;
    /// Files that this host can map.
    type File: File;
    /// A blocking reader-writer lock: of the layout of an address space, and of every fault under
    /// [`Locking::Classic`](crate::space::Locking::Classic). `parking_lot::RawRwLock` where there are threads.
    type RwLock: lock_api::RawRwLock + Send + Sync;
    /// A blocking lock, for reverse mapping and page caches.
    type Mutex: lock_api::RawMutex + Send + Sync;
}
