//! A machine just large enough for page tables.

use crate::addr::{AddrRange, Frame, PAGE_SIZE};
use crate::frame::{FrameList, Frames, Grace, Ram};
use crate::host::{File, FrameRange, Host, IoError, Memory, Observe, ShootDown, Ticket, Tlb, Wait};
use crate::page_table::{Format, PageTable};
use crate::stats::Stats;
use crate::sync::atomic::AtomicU32;
use crate::sync::{CpuId, Epoch, Participant, Pin};
use core::marker::PhantomData;
use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc};

/// The first frame number: not 0, so that mix-ups show.
const FIRST: u32 = 0x4_0000;

pub(super) struct TestHost<F> {
    memory: NonNull<u8>,
    count: usize,
    format: PhantomData<F>,
}

// SAFETY: the memory is used through frames, which the allocator hands to one owner each.
unsafe impl<F: Format> Send for TestHost<F> {}
// SAFETY: as above.
unsafe impl<F: Format> Sync for TestHost<F> {}

impl<F> TestHost<F> {
    fn layout(count: usize) -> Layout {
        Layout::from_size_align(count * PAGE_SIZE as usize, PAGE_SIZE as usize).unwrap()
    }

    fn new(count: usize) -> Self {
        // SAFETY: the size is not zero.
        let memory = NonNull::new(unsafe { alloc_zeroed(Self::layout(count)) }).unwrap();
        Self { memory, count, format: PhantomData }
    }
}

impl<F> Drop for TestHost<F> {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.memory.as_ptr(), Self::layout(self.count)) };
    }
}

// SAFETY: `count` frames of memory that nothing else uses, each at a fixed, aligned place.
unsafe impl<F: Format> Memory for TestHost<F> {
    fn frames(&self) -> FrameRange {
        FrameRange { first: Frame(FIRST), count: self.count }
    }

    fn bytes(&self, frame: Frame) -> NonNull<u8> {
        let index = (frame.0 - FIRST) as usize;
        assert!(index < self.count);
        // SAFETY: inside the allocation.
        unsafe { self.memory.add(index * PAGE_SIZE as usize) }
    }
}

// SAFETY: nobody translates addresses on this machine.
unsafe impl<F: Format> Tlb for TestHost<F> {
    type Space = ();

    fn shoot_down(&self, _: CpuId, _: &(), _: AddrRange) -> ShootDown {
        ShootDown::PASSED
    }

    fn has_passed(&self, _: CpuId, _: Ticket) -> bool {
        true
    }

    fn settle(&self, _: CpuId, _: Ticket) {}
}

impl<F: Format> Wait for TestHost<F> {
    fn wait(&self, _: CpuId, _: &AtomicU32, _: u32) {
        std::thread::yield_now();
    }

    fn wake_all(&self, _: &AtomicU32) {}

    fn relax(&self, _: CpuId, rounds: u32) {
        if rounds > 16 {
            std::thread::yield_now();
        }
    }
}

impl<F: Format> Observe for TestHost<F> {}

pub(super) struct NoFile;

impl File for NoFile {
    fn len(&self) -> u64 {
        0
    }

    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<usize, IoError> {
        Err(IoError)
    }

    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), IoError> {
        Err(IoError)
    }

    fn is_writable(&self) -> bool {
        false
    }
}

impl<F: Format> Host for TestHost<F> {
    type Format = F;
    type File = NoFile;
    type RwLock = parking_lot::RawRwLock;
    type Mutex = parking_lot::RawMutex;
}

pub(super) struct TestMachine<F: Format> {
    pub host: TestHost<F>,
    pub frames: Frames,
    pub stats: Stats,
    pub epoch: Epoch,
}

pub(super) const CPUS: usize = 4;

impl<F: Format> TestMachine<F> {
    pub fn new(count: usize) -> Self {
        let host = TestHost::new(count);
        let frames = Frames::try_new(host.frames(), CPUS).unwrap();
        Self { host, frames, stats: Stats::try_new(CPUS).unwrap(), epoch: Epoch::try_new(CPUS).unwrap() }
    }

    pub fn ram<'a>(&'a self, pin: &'a Pin<'a>) -> Ram<'a, TestHost<F>> {
        Ram { host: &self.host, frames: &self.frames, stats: &self.stats, pin }
    }

    /// Runs `work` on a fresh tree, destroys it, and checks that every frame has come back.
    pub fn with_tree(count: usize, work: impl FnOnce(&Self, &Participant<'_>, &PageTable<F>)) {
        let machine = Self::new(count);
        let cpu = machine.epoch.register().unwrap();
        let free = machine.frames.free_frames();
        let mut tree = {
            let pin = cpu.pin();
            PageTable::<F>::try_new(&machine.ram(&pin)).unwrap()
        };
        work(&machine, &cpu, &tree);
        {
            let pin = cpu.pin();
            let ram = machine.ram(&pin);
            tree.destroy(&ram);
            assert!(tree.lookup(&ram, 0x1000).is_none() && tree.slot(&ram, 0x1000).is_err());
            assert!(
                !tree.for_each_run(&ram, AddrRange::new(0, F::USER_END), |_| panic!("destroyed")).is_break()
            );
            tree.destroy(&ram);
        }
        assert_eq!(tree.tables(), 0);
        machine.settle(&cpu);
        assert_eq!(machine.frames.free_frames(), free);
    }

    /// `free_tables`, with the frames deferred behind the epoch. Returns how many tables were freed.
    pub fn free_tables(
        &self,
        ram: &Ram<'_, TestHost<F>>,
        tree: &PageTable<F>,
        bounds: AddrRange,
        range: AddrRange,
    ) -> usize {
        let mut sink = FrameList::new();
        tree.free_tables(ram, bounds.start, bounds.end, range, &mut sink);
        let freed = sink.len();
        if freed != 0 {
            let grace = Grace { epoch: Some(self.epoch.now()), ticket: Ticket::PASSED };
            self.frames.defer(ram.pin, sink, grace);
        }
        freed
    }

    /// Frees everything deferred. Nobody is pinned.
    pub fn settle(&self, cpu: &Participant<'_>) {
        while !self.epoch.try_advance() || !self.epoch.try_advance() {}
        for id in 0..self.epoch.used() {
            if let Some(pin) = self.epoch.try_pin_other(CpuId(id as u32)) {
                self.frames.settle(&pin, &|_, _| true);
            }
        }
        let _ = cpu;
    }
}
