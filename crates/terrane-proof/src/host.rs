//! A small machine whose processors are threads of a model.
//!
//! Whatever waits, waits by [`spin_loop`], which is where a model checker lets others run. Locks are words of the
//! library's own atomics, so each of their operations is a step of the model as well.
//!
//! # Translations
//!
//! Every processor remembers the translations it has used, and goes on using them without a look at the page table
//! until a shoot-down takes them away: that is the moment at which a missing one is noticed. A shoot-down posts its
//! ticket late: an access that is under way may still use what it has translated, and the ticket has passed
//! when no access in that space that began before is left.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use terrane::host::{File, FrameRange, Host, IoError, Memory, Observe, ShootDown, Ticket, Tlb, Wait};
use terrane::page_table::{Format, PteFlags};
use terrane::swap::SwapDevice;
use terrane::sync::CpuId;
use terrane::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence, spin_loop};
use terrane::sync::mutation;
use terrane::{AddrRange, Frame, PAGE_SIZE};
#[cfg(terrane_watch)]
use terrane::{FaultError, machine::Cpu, space::AddressSpace, sync::atomic::AtomicU64, vma::Access};

/// Levels of the page tables. Under loom a table has four entries, and two levels cover 64 KiB.
const LEVELS: u32 = if cfg!(terrane_loom) { 2 } else { 3 };
/// First address that no program has.
pub const USER_END: u64 = if cfg!(terrane_loom) { 1 << 16 } else { 1 << 39 };

/// Steps of a model between the translation of an access and its touch of the memory.
const LINGERS: u32 = if cfg!(terrane_loom) { 1 } else { 8 };

/// The host.
pub struct Model {
    range: FrameRange,
    base: NonNull<u8>,
    tlb: Mutex<State>,
    /// Shoot-downs end at once, and nothing remembers translations.
    prompt: bool,
    /// Counts calls that wake.
    wakes: AtomicU32,
}

#[derive(Default)]
struct State {
    /// Each shoot-down so far: which processor made it, of which space.
    asked: Vec<(u32, usize)>,
    /// The access under way on each processor: how many shoot-downs there had been, and in which space it is.
    under_way: BTreeMap<u32, (usize, usize)>,
    /// What each processor remembers: by processor, space and page.
    known: BTreeMap<(u32, usize, u64), (Frame, bool)>,
}

/// What the host keeps with a space: its address tells spaces apart.
#[derive(Default)]
pub struct Tag(#[allow(dead_code, reason = "only its address counts")] u64);

// SAFETY: the memory belongs to the host, and the host to no thread.
unsafe impl Send for Model {}
// SAFETY: as above; who may touch which bytes is settled by whoever allocates frames.
unsafe impl Sync for Model {}

impl Model {
    /// A host with `count` frames, all zero. `prompt`: translations are not remembered and tickets pass at once.
    pub fn new(count: usize, prompt: bool) -> Self {
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(Self::layout(count)) }).expect("memory for the model");
        let range = FrameRange { first: Frame(1), count };
        let host = Self { range, base, tlb: Mutex::default(), prompt, wakes: AtomicU32::new(0) };
        #[cfg(terrane_loom)]
        host.wakes.load(Ordering::Relaxed);
        host
    }

    fn layout(count: usize) -> Layout {
        Layout::from_size_align(count.max(1) * PAGE_SIZE as usize, PAGE_SIZE as usize)
            .expect("a small machine")
    }

    /// The first word of `frame`.
    #[cfg(terrane_watch)]
    fn word(&self, frame: Frame, addr: u64) -> &AtomicU64 {
        // SAFETY: a word of a frame, aligned, alive as long as the host.
        unsafe {
            AtomicU64::from_ptr(self.bytes(frame).as_ptr().add((addr % PAGE_SIZE) as usize & !7).cast())
        }
    }

    /// One access of a processor to the word at `addr`, through what it remembers or the page table, with the
    /// faults that it takes.
    ///
    /// # Errors
    /// Those of the fault.
    #[cfg(terrane_watch)]
    pub fn access<R>(
        cpu: &Cpu<Model>,
        space: &AddressSpace<Model>,
        addr: u64,
        access: Access,
        act: impl Fn(&AtomicU64) -> R,
    ) -> Result<R, FaultError> {
        let host = cpu.machine().host();
        let key = (cpu.id().0, std::ptr::from_ref(space.host_state()).addr(), addr / PAGE_SIZE);
        loop {
            let (began, known) = {
                let mut state = host.tlb.lock().expect("no panic inside");
                let began = state.asked.len();
                let access = (began, key.1);
                assert!(state.under_way.insert(key.0, access).is_none(), "two accesses of one processor");
                (began, state.known.get(&key).copied())
            };
            let frame = match known {
                Some((frame, writable)) if writable || access != Access::Write => Some(frame),
                _ => space.translate(cpu, addr, access).map(|found| {
                    let mut state = host.tlb.lock().expect("no panic inside");
                    // A processor does not remember what was shot down while it walked.
                    if state.asked.len() == began && !host.prompt {
                        state.known.insert(key, (found.frame, found.flags.contains(PteFlags::WRITE)));
                    }
                    found.frame
                }),
            };
            let result = frame.map(|frame| {
                // The processor is interrupted between translation and touch, as a rule: that is where bugs are.
                for _ in 0..LINGERS {
                    host.wakes.load(Ordering::Relaxed);
                }
                act(host.word(frame, addr))
            });
            host.tlb.lock().expect("no panic inside").under_way.remove(&key.0);
            match result {
                Some(result) => return Ok(result),
                None => drop(space.fault(cpu, addr, access)?),
            }
        }
    }

    /// Loads the word at `addr`.
    ///
    /// # Errors
    /// Those of the fault.
    #[cfg(terrane_watch)]
    pub fn load(cpu: &Cpu<Model>, space: &AddressSpace<Model>, addr: u64) -> Result<u64, FaultError> {
        Self::access(cpu, space, addr, Access::Read, |word| word.load(Ordering::SeqCst))
    }

    /// Stores `value` at `addr`.
    ///
    /// # Errors
    /// Those of the fault.
    #[cfg(terrane_watch)]
    pub fn store(
        cpu: &Cpu<Model>,
        space: &AddressSpace<Model>,
        addr: u64,
        value: u64,
    ) -> Result<(), FaultError> {
        Self::access(cpu, space, addr, Access::Write, |word| word.store(value, Ordering::SeqCst))
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), Self::layout(self.range.count)) };
    }
}

// SAFETY: every frame has its own page of `base`, which lives as long as the host and is used for nothing else.
unsafe impl Memory for Model {
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

// SAFETY: a shoot-down takes what is remembered away before it returns, and its ticket waits for accesses under way.
unsafe impl Tlb for Model {
    type Space = Tag;

    fn shoot_down(&self, cpu: CpuId, space: &Tag, range: AddrRange) -> ShootDown {
        if self.prompt || mutation::is("no_shoot_down") {
            return ShootDown::PASSED;
        }
        let space = std::ptr::from_ref(space).addr();
        let mut state = self.tlb.lock().expect("no panic inside");
        state.known.retain(|&(_, of, page), _| of != space || !range.contains(page * PAGE_SIZE));
        state.asked.push((cpu.0, space));
        ShootDown { ticket: Ticket(state.asked.len() as u64), asked: 1 }
    }

    // No more than a host must know: others' shoot-downs, and accesses in other spaces, do not count.
    fn has_passed(&self, cpu: CpuId, ticket: Ticket) -> bool {
        let state = self.tlb.lock().expect("no panic inside");
        state.under_way.values().all(|&(began, space)| {
            let upto = ticket.0 as usize;
            began >= upto || !state.asked[began..upto].contains(&(cpu.0, space))
        })
    }

    fn settle(&self, cpu: CpuId, ticket: Ticket) {
        while !self.has_passed(cpu, ticket) {
            spin_loop();
        }
    }
}

impl Wait for Model {
    // A real sleep: only a call to `wake_all` ends it. That the look at the word and the sleep are one step, as
    // in a futex, is what the fences stand for.
    fn wait(&self, _: CpuId, word: &AtomicU32, value: u32) {
        let wakes = self.wakes.load(Ordering::Acquire);
        fence(Ordering::SeqCst);
        if word.load(Ordering::Acquire) == value {
            while self.wakes.load(Ordering::Acquire) == wakes {
                spin_loop();
            }
        }
    }

    fn wake_all(&self, _: &AtomicU32) {
        fence(Ordering::SeqCst);
        self.wakes.fetch_add(1, Ordering::AcqRel);
    }
}

impl Observe for Model {}

impl Host for Model {
    type Format = ModelFormat;
    type File = Disk;
    type RwLock = RwSpin;
    type Mutex = Spin;
}

/// A lock that waits by [`spin_loop`].
pub struct Spin(AtomicUsize);

// SAFETY: one holder at a time: the word goes from 0 to 1 by compare-and-swap, and back by the holder.
unsafe impl lock_api::RawMutex for Spin {
    #[allow(clippy::declare_interior_mutable_const, reason = "lock_api asks for a constant")]
    const INIT: Self = Spin(AtomicUsize::new(0));
    type GuardMarker = lock_api::GuardNoSend;

    fn lock(&self) {
        while !self.try_lock() {
            spin_loop();
        }
    }

    fn try_lock(&self) -> bool {
        self.0.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    unsafe fn unlock(&self) {
        self.0.store(0, Ordering::Release);
    }
}

/// A lock for readers and writers that waits by [`spin_loop`].
pub struct RwSpin(AtomicUsize);

const WRITER: usize = usize::MAX;

// SAFETY: a writer changes 0 to `WRITER`, readers count below it: none of either beside a writer.
unsafe impl lock_api::RawRwLock for RwSpin {
    #[allow(clippy::declare_interior_mutable_const, reason = "lock_api asks for a constant")]
    const INIT: Self = RwSpin(AtomicUsize::new(0));
    type GuardMarker = lock_api::GuardNoSend;

    fn lock_shared(&self) {
        while !self.try_lock_shared() {
            spin_loop();
        }
    }

    fn try_lock_shared(&self) -> bool {
        let more = |count| if count == WRITER { None } else { Some(count + 1) };
        self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
    }

    unsafe fn unlock_shared(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    fn lock_exclusive(&self) {
        while !self.try_lock_exclusive() {
            spin_loop();
        }
    }

    fn try_lock_exclusive(&self) -> bool {
        self.0.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    unsafe fn unlock_exclusive(&self) {
        self.0.store(0, Ordering::Release);
    }
}

/// A device of some pages: a file, or what is swapped to. Reading and writing take a while. Clones are the same device.
#[derive(Clone)]
pub struct Disk(Arc<Pages>);

struct Pages {
    bytes: Mutex<Vec<u8>>,
    fails: AtomicBool,
    /// Steps of a model are operations on it.
    steps: AtomicU32,
}

impl Disk {
    /// A device of `pages` pages, all zero.
    pub fn new(pages: usize) -> Self {
        let bytes = Mutex::new(vec![0; pages * PAGE_SIZE as usize]);
        let disk = Self(Arc::new(Pages { bytes, fails: AtomicBool::new(false), steps: AtomicU32::new(0) }));
        disk.linger();
        disk
    }

    /// From now on reading and writing fail, or not.
    pub fn fail(&self, fails: bool) {
        self.0.fails.store(fails, Ordering::Relaxed);
    }

    /// The first word of page `n`.
    pub fn word(&self, n: usize) -> u64 {
        let at = n * PAGE_SIZE as usize;
        let bytes = self.0.bytes.lock().expect("no panic inside");
        u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    }

    /// Makes page `n` zeros.
    pub fn clear(&self, n: usize) {
        let at = n * PAGE_SIZE as usize;
        self.0.bytes.lock().expect("no panic inside")[at..at + PAGE_SIZE as usize].fill(0);
    }

    fn linger(&self) {
        for _ in 0..LINGERS {
            self.0.steps.load(Ordering::Relaxed);
        }
    }

    /// Copies what both have, the first word some time before the rest.
    fn copy(
        &self,
        at: usize,
        len: usize,
        mut copy: impl FnMut(&mut [u8], Range<usize>),
    ) -> Result<(), IoError> {
        self.linger();
        if self.0.fails.load(Ordering::Relaxed) {
            return Err(IoError);
        }
        let first = len.min(8);
        copy(&mut self.0.bytes.lock().expect("no panic inside")[at..at + first], 0..first);
        self.linger();
        copy(&mut self.0.bytes.lock().expect("no panic inside")[at + first..at + len], first..len);
        Ok(())
    }
}

impl File for Disk {
    fn len(&self) -> u64 {
        self.0.bytes.lock().expect("no panic inside").len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, IoError> {
        let len = buffer.len().min(File::len(self).saturating_sub(offset) as usize);
        self.copy(offset as usize, len, |bytes, part| buffer[part].copy_from_slice(bytes))?;
        Ok(len)
    }

    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), IoError> {
        self.copy(offset as usize, from.len(), |bytes, part| bytes.copy_from_slice(&from[part]))
    }

    fn is_writable(&self) -> bool {
        true
    }
}

impl SwapDevice for Disk {
    fn slots(&self) -> u32 {
        (File::len(self) / PAGE_SIZE) as u32
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), IoError> {
        self.read_at(u64::from(slot) * PAGE_SIZE, page).map(drop)
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), IoError> {
        self.write_at(u64::from(slot) * PAGE_SIZE, page)
    }
}

/// A page-table format of no processor: valid, table, five flags, the frame from bit 12.
pub struct ModelFormat;

const VALID: u64 = 1;
const TABLE: u64 = 1 << 1;
const FLAGS_SHIFT: u32 = 4;

impl Format for ModelFormat {
    const NAME: &'static str = "model";
    const LEVELS: u32 = LEVELS;
    const USER_END: u64 = USER_END;

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
