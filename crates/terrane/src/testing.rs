//! A small machine for unit tests: zeroed memory, threads as CPUs, no TLB.
//!
//! # Accesses and shoot-downs
//!
//! Nothing caches translations: every access walks the page table. What a shoot-down has to wait for are accesses
//! that have walked and not yet touched the page. A test whose threads access memory while others unmap it makes the host
//! [`with_tickets`](TestHost::with_tickets) and each access under [`TestHost::access`], which announces the time of
//! a clock; a shoot-down moves the clock on, and has passed when no access announces an earlier time. So
//! tickets pass late, as on a machine that posts its shoot-downs, and deferred frames really wait in limbo.
#![allow(dead_code, reason = "each layer's tests use the part they need")]

use crate::addr::{AddrRange, Frame, PAGE_SIZE};
use crate::frame::{Frames, Ram};
use crate::host::{File, FrameRange, Host, IoError, Memory, Observe, ShootDown, Ticket, Tlb, Wait};
use crate::page_table::{Format, PteFlags};
use crate::stats::Stats;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{CpuId, Epoch, Pin};
use alloc::alloc::{Layout, alloc_zeroed, dealloc};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::NonNull;
use crossbeam_utils::CachePadded;
use parking_lot::Mutex;

/// A host with memory and nothing else: shoot-downs have passed at once.
pub struct TestHost {
    range: FrameRange,
    base: NonNull<u8>,
    tickets: Option<Tickets>,
    /// Shoot-downs asked for so far.
    shoot_downs: AtomicU64,
}

/// CPUs that may access memory at once, on a host with tickets.
const CPUS: usize = 64;

/// The clock of shoot-downs, and when the access under way on each CPU began; 0 when there is none.
struct Tickets {
    clock: AtomicU64,
    accesses: [CachePadded<AtomicU64>; CPUS],
}

/// An access to memory under way, on a host with tickets.
pub struct Accessing<'a>(Option<&'a AtomicU64>);

impl Drop for Accessing<'_> {
    fn drop(&mut self) {
        if let Some(access) = self.0 {
            access.store(0, Ordering::Release);
        }
    }
}

// SAFETY: the memory belongs to the host, and the host to no thread.
unsafe impl Send for TestHost {}
// SAFETY: as above; who may touch which bytes is settled by whoever allocates frames.
unsafe impl Sync for TestHost {}

impl TestHost {
    /// A host with `count` frames from number `first` on, all zero.
    pub fn new(first: u32, count: usize) -> Self {
        // SAFETY: the layout holds at least a page.
        let base = NonNull::new(unsafe { alloc_zeroed(Self::layout(count)) }).expect("memory for the test");
        Self {
            range: FrameRange { first: Frame(first), count },
            base,
            tickets: None,
            shoot_downs: AtomicU64::new(0),
        }
    }

    /// The same, with shoot-downs that pass when the accesses of their time have ended.
    pub fn with_tickets(first: u32, count: usize) -> Self {
        let accesses = [const { CachePadded::new(AtomicU64::new(0)) }; CPUS];
        let mut host = Self::new(first, count);
        host.tickets = Some(Tickets { clock: AtomicU64::new(1), accesses });
        host
    }

    /// Shoot-downs asked for so far.
    pub fn shoot_downs(&self) -> u64 {
        self.shoot_downs.load(Ordering::Relaxed)
    }

    /// Begins an access by `cpu`: translations made from now on may be used until the result is dropped. Not twice at
    /// a time by one CPU, and without calls into the library but for `translate`.
    pub fn access(&self, cpu: CpuId) -> Accessing<'_> {
        Accessing(self.tickets.as_ref().map(|tickets| {
            let access = &*tickets.accesses[cpu.index()];
            let now = tickets.clock.load(Ordering::SeqCst);
            assert_eq!(access.swap(now, Ordering::SeqCst), 0, "two accesses of one CPU");
            access
        }))
    }

    fn layout(count: usize) -> Layout {
        Layout::from_size_align(count.max(1) * PAGE_SIZE as usize, PAGE_SIZE as usize).unwrap()
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), Self::layout(self.range.count)) };
    }
}

// SAFETY: every frame has its own page of `base`, which lives as long as the host and is used for nothing else.
unsafe impl Memory for TestHost {
    fn frames(&self) -> FrameRange {
        self.range
    }

    fn bytes(&self, frame: Frame) -> NonNull<u8> {
        let offset = frame.0.wrapping_sub(self.range.first.0) as usize;
        assert!(offset < self.range.count, "frame {frame:?} is none of the machine's");
        // SAFETY: inside the allocation, as just checked.
        unsafe { self.base.add(offset * PAGE_SIZE as usize) }
    }
}

// SAFETY: nothing caches translations, and an access under way is waited for (see the head). An access that began
// after the clock moved on walks page tables as they were after it, because all of these are `SeqCst`.
unsafe impl Tlb for TestHost {
    type Space = ();

    fn shoot_down(&self, _: CpuId, _: &(), _: AddrRange) -> ShootDown {
        self.shoot_downs.fetch_add(1, Ordering::Relaxed);
        match &self.tickets {
            Some(tickets) => {
                ShootDown { ticket: Ticket(tickets.clock.fetch_add(1, Ordering::SeqCst) + 1), asked: 1 }
            }
            None => ShootDown::PASSED,
        }
    }

    fn has_passed(&self, _: CpuId, ticket: Ticket) -> bool {
        self.tickets.as_ref().is_none_or(|tickets| {
            fence(Ordering::SeqCst);
            tickets.accesses.iter().all(|access| {
                let began = access.load(Ordering::SeqCst);
                began == 0 || began >= ticket.0
            })
        })
    }

    fn settle(&self, cpu: CpuId, ticket: Ticket) {
        while !self.has_passed(cpu, ticket) {
            std::thread::yield_now();
        }
    }
}

impl Wait for TestHost {
    fn wait(&self, _: CpuId, word: &AtomicU32, value: u32) {
        while word.load(Ordering::Acquire) == value {
            std::thread::yield_now();
        }
    }

    fn wake_all(&self, _: &AtomicU32) {}

    fn relax(&self, _: CpuId, _: u32) {
        std::thread::yield_now();
    }
}

impl Observe for TestHost {}

impl Host for TestHost {
    type Format = TestFormat;
    type File = TestFile;
    type RwLock = parking_lot::RawRwLock;
    type Mutex = parking_lot::RawMutex;
}

/// A page-table format of no processor: valid, block or page, six flags, the frame from bit 12.
pub struct TestFormat;

const VALID: u64 = 1;
const TABLE: u64 = 1 << 1;
const FLAGS_SHIFT: u32 = 4;

impl Format for TestFormat {
    const NAME: &'static str = "test";
    const LEVELS: u32 = 4;
    const USER_END: u64 = 1 << 47;

    fn page(frame: Frame, flags: PteFlags) -> u64 {
        frame.address() | u64::from(flags.bits()) << FLAGS_SHIFT | VALID
    }

    fn block(frame: Frame, flags: PteFlags) -> u64 {
        Self::page(frame, flags)
    }

    fn table(frame: Frame) -> u64 {
        frame.address() | TABLE | VALID
    }

    fn is_block(raw: u64) -> bool {
        raw & TABLE == 0
    }

    fn frame(raw: u64) -> Frame {
        Frame::containing(raw)
    }

    fn flags(raw: u64) -> PteFlags {
        PteFlags::from_bits_truncate((raw >> FLAGS_SHIFT) as u8)
    }

    fn with_flags(raw: u64, flags: PteFlags) -> u64 {
        Self::page(Self::frame(raw), flags)
    }
}

/// A file in memory. Clones are handles of one file.
#[derive(Clone)]
pub struct TestFile(Arc<FileState>);

struct FileState {
    bytes: Mutex<Vec<u8>>,
    writable: bool,
    refuses_reads: AtomicBool,
    refuses_writes: AtomicBool,
    /// Called by each read with its offset, after the bytes have been read and before it returns.
    after_read: Mutex<Option<AfterRead>>,
}

/// See [`TestFile::after_read`].
pub type AfterRead = Arc<dyn Fn(u64) + Send + Sync>;

impl TestFile {
    /// A file with these contents, which may be written.
    pub fn new(contents: &[u8]) -> Self {
        Self::make(contents, true)
    }

    /// The same, not to be written.
    pub fn read_only(contents: &[u8]) -> Self {
        Self::make(contents, false)
    }

    fn make(contents: &[u8], writable: bool) -> Self {
        Self(Arc::new(FileState {
            bytes: Mutex::new(contents.into()),
            writable,
            refuses_reads: AtomicBool::new(false),
            refuses_writes: AtomicBool::new(false),
            after_read: Mutex::new(None),
        }))
    }

    /// What is in the file now.
    pub fn contents(&self) -> Vec<u8> {
        self.0.bytes.lock().clone()
    }

    /// True when the file holds exactly `bytes`.
    pub fn holds(&self, bytes: &[u8]) -> bool {
        *self.0.bytes.lock() == bytes
    }

    /// Cuts the file short or makes it longer, by zeros.
    pub fn set_len(&self, len: usize) {
        let mut bytes = self.0.bytes.lock();
        bytes.truncate(len);
        while bytes.len() < len {
            // In pieces: without optimisation, `resize` goes byte by byte.
            let more = (len - bytes.len()).min(PAGE_SIZE as usize);
            bytes.extend_from_slice(&[0; PAGE_SIZE as usize][..more]);
        }
    }

    /// Whether reads fail from now on.
    pub fn refuse_reads(&self, refuse: bool) {
        self.0.refuses_reads.store(refuse, Ordering::SeqCst);
    }

    /// Whether writes fail from now on.
    pub fn refuse_writes(&self, refuse: bool) {
        self.0.refuses_writes.store(refuse, Ordering::SeqCst);
    }

    /// Has `act` called by each read with its offset, after the bytes have been read and before it returns.
    pub fn after_read(&self, act: impl Fn(u64) + Send + Sync + 'static) {
        *self.0.after_read.lock() = Some(Arc::new(act));
    }
}

impl File for TestFile {
    fn len(&self) -> u64 {
        self.0.bytes.lock().len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, IoError> {
        if self.0.refuses_reads.load(Ordering::SeqCst) {
            return Err(IoError);
        }
        let count = {
            let contents = self.0.bytes.lock();
            let rest = contents.get(offset as usize..).unwrap_or(&[]);
            let count = rest.len().min(buffer.len());
            buffer[..count].copy_from_slice(&rest[..count]);
            count
        };
        let after = self.0.after_read.lock().clone();
        if let Some(after) = after {
            after(offset);
        }
        Ok(count)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        if self.0.refuses_writes.load(Ordering::SeqCst) {
            return Err(IoError);
        }
        let mut contents = self.0.bytes.lock();
        let range = offset as usize..offset as usize + bytes.len();
        contents.get_mut(range).ok_or(IoError)?.copy_from_slice(bytes);
        Ok(())
    }

    fn is_writable(&self) -> bool {
        self.0.writable
    }
}

/// What a machine is made of, below page tables: host, epoch, frames, counters.
pub struct Rig {
    /// The host.
    pub host: TestHost,
    /// The epoch.
    pub epoch: Epoch,
    /// The frames.
    pub frames: Frames,
    /// The counters.
    pub stats: Stats,
}

impl Rig {
    /// A machine of `frames` frames, from an odd number on so that its ends are no blocks, and `cpus` CPUs.
    pub fn new(frames: usize, cpus: usize) -> Self {
        Self::starting_at(Frame(0x12345), frames, cpus)
    }

    /// A machine of `count` frames from `first` on.
    pub fn starting_at(first: Frame, count: usize, cpus: usize) -> Self {
        let host = TestHost::new(first.0, count);
        let frames = Frames::try_new(host.frames(), cpus).unwrap();
        Self { host, epoch: Epoch::try_new(cpus).unwrap(), frames, stats: Stats::try_new(cpus).unwrap() }
    }

    /// The memory as the pinned CPU sees it.
    pub fn ram<'a>(&'a self, pin: &'a Pin<'a>) -> Ram<'a, TestHost> {
        Ram { host: &self.host, frames: &self.frames, stats: &self.stats, pin }
    }
}

/// A swap device in memory, which can be told to fail. Clones are handles of one device.
#[derive(Clone)]
pub struct TestSwap(Arc<SwapInside>);

struct SwapInside {
    pages: Mutex<Vec<Option<Vec<u8>>>>,
    /// Reads and writes of which one in so many fails; 0: none.
    failing_reads: AtomicU32,
    failing_writes: AtomicU32,
    calls: AtomicU64,
}

impl TestSwap {
    /// A device of `slots` slots.
    pub fn new(slots: usize) -> Self {
        let mut pages = Vec::new();
        pages.resize_with(slots, || None);
        Self(Arc::new(SwapInside {
            pages: Mutex::new(pages),
            failing_reads: AtomicU32::new(0),
            failing_writes: AtomicU32::new(0),
            calls: AtomicU64::new(0),
        }))
    }

    /// One in `n` reads fails from now on; all for 1, none for 0.
    pub fn fail_reads(&self, n: u32) {
        self.0.failing_reads.store(n, Ordering::SeqCst);
    }

    /// One in `n` writes fails from now on.
    pub fn fail_writes(&self, n: u32) {
        self.0.failing_writes.store(n, Ordering::SeqCst);
    }

    fn fails(&self, one_in: &AtomicU32) -> bool {
        let n = one_in.load(Ordering::SeqCst);
        n > 0 && self.0.calls.fetch_add(1, Ordering::SeqCst).is_multiple_of(u64::from(n))
    }
}

impl crate::swap::SwapDevice for TestSwap {
    fn slots(&self) -> u32 {
        self.0.pages.lock().len() as u32
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), IoError> {
        if self.fails(&self.0.failing_reads) {
            return Err(IoError);
        }
        let pages = self.0.pages.lock();
        page.copy_from_slice(pages[slot as usize].as_ref().expect("a slot is read that was not written"));
        Ok(())
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), IoError> {
        if self.fails(&self.0.failing_writes) {
            return Err(IoError);
        }
        self.0.pages.lock()[slot as usize] = Some(page.to_vec());
        Ok(())
    }
}
