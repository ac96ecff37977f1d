//! A small host: memory, no TLB, files in memory; and an allocator that fails on demand.

use std::alloc::{GlobalAlloc, Layout, System, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use terrane::host::{File, FrameRange, Host, IoError, Memory, Observe, ShootDown, Ticket, Tlb, Wait};
use terrane::page_table::X86_64;
use terrane::sync::CpuId;
use terrane::sync::atomic::{AtomicU32, Ordering};
use terrane::{AddrRange, Frame, PAGE_SIZE};

/// The system's allocator, but for allocations of threads that asked for failures.
pub struct Failing;

thread_local! {
    /// Allocations of this thread that still succeed; `None` for all.
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    static FAILED: Cell<bool> = const { Cell::new(false) };
}

fn refuses() -> bool {
    match LEFT.get() {
        None => false,
        Some(0) => {
            FAILED.set(true);
            // One failure, then all is well: what follows must not be spoiled by it.
            LEFT.set(None);
            true
        }
        Some(left) => {
            LEFT.set(Some(left - 1));
            false
        }
    }
}

// SAFETY: passed on to the system's allocator, or refused.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        if refuses() { std::ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        if refuses() { std::ptr::null_mut() } else { unsafe { System.alloc_zeroed(layout) } }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        if refuses() { std::ptr::null_mut() } else { unsafe { System.realloc(at, layout, size) } }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) };
    }
}

/// Calls `act` while allocation number `n` (from 0) of this thread fails; returns also whether it came to that.
pub fn failing_at<R>(n: u64, act: impl FnOnce() -> R) -> (R, bool) {
    FAILED.set(false);
    LEFT.set(Some(n));
    let result = act();
    LEFT.set(None);
    (result, FAILED.get())
}

/// Memory, numbered from 1.
pub struct TestHost {
    base: NonNull<u8>,
    count: usize,
}

// SAFETY: the memory belongs to the host alone.
unsafe impl Send for TestHost {}
// SAFETY: as above.
unsafe impl Sync for TestHost {}

impl TestHost {
    /// A host with `count` frames.
    pub fn new(count: usize) -> Self {
        // SAFETY: the layout has a size.
        let base = NonNull::new(unsafe { alloc_zeroed(Self::layout(count)) }).unwrap();
        Self { base, count }
    }

    fn layout(count: usize) -> Layout {
        Layout::from_size_align(count * PAGE_SIZE as usize, PAGE_SIZE as usize).unwrap()
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), Self::layout(self.count)) };
    }
}

// SAFETY: each frame is a page of `base` of its own, for as long as the host lives.
unsafe impl Memory for TestHost {
    fn frames(&self) -> FrameRange {
        FrameRange { first: Frame(1), count: self.count }
    }

    fn bytes(&self, frame: Frame) -> NonNull<u8> {
        assert!((1..=self.count).contains(&(frame.0 as usize)));
        // SAFETY: inside the allocation, as just checked.
        unsafe { self.base.add((frame.0 as usize - 1) * PAGE_SIZE as usize) }
    }
}

// SAFETY: nothing caches translations.
unsafe impl Tlb for TestHost {
    type Space = ();

    fn shoot_down(&self, _: CpuId, _: &(), _: AddrRange) -> ShootDown {
        ShootDown::PASSED
    }

    fn has_passed(&self, _: CpuId, _: Ticket) -> bool {
        true
    }

    fn settle(&self, _: CpuId, _: Ticket) {}
}

impl Wait for TestHost {
    fn wait(&self, _: CpuId, word: &AtomicU32, value: u32) {
        while word.load(Ordering::Acquire) == value {
            std::thread::yield_now();
        }
    }

    fn wake_all(&self, _: &AtomicU32) {}
}

impl Observe for TestHost {}

impl Host for TestHost {
    type Format = X86_64;
    type File = TestFile;
    type RwLock = parking_lot::RawRwLock;
    type Mutex = parking_lot::RawMutex;
}

/// A file in memory; clones are handles of one file.
#[derive(Clone)]
pub struct TestFile(pub Arc<Mutex<Vec<u8>>>);

impl File for TestFile {
    fn len(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, IoError> {
        let contents = self.0.lock().unwrap();
        let rest = contents.get(offset as usize..).unwrap_or(&[]);
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        let range = offset as usize..offset as usize + bytes.len();
        self.0.lock().unwrap().get_mut(range).ok_or(IoError)?.copy_from_slice(bytes);
        Ok(())
    }

    fn is_writable(&self) -> bool {
        true
    }
}
