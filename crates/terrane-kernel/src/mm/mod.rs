//! Memory: the machine that Terrane manages, and its processors.
//!
//! # Handles
//!
//! Every call of Terrane takes a [`KernelCpu`], which one thread uses at a time. Each processor has one; [`with_cpu`] takes it from the
//! processor's data, with no more than a load and a store since the kernel is not preempted, and puts it back at the end. A thread
//! that blocks in between (on a lock of a space under classic locking, on a range, on a page that is being read) keeps the handle, and whoever
//! comes next on that processor takes a spare one. Where a handle is put back is where the thread happens to run then; if there
//! is one already, it goes to the spares.

mod heap;
mod host;
mod layout;
mod swap;
mod tlb;

pub use heap::size as heap_bytes;
pub use host::KernelHost;
pub use layout::{direct, physical};

use crate::arch::{StartInfo, interrupts, percpu};
use crate::errno::Errno;
use crate::sync::SpinLock;
use crate::{log, options};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::Cell;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use layout::{Piece, Pieces};
use terrane::commit::Overcommit;
use terrane::host::FrameRange;
use terrane::machine::{Cpu, Machine};
use terrane::object::Object as TerraneObject;
use terrane::space::{AddressSpace, Locking, Placement, SpaceConfig};
use terrane::stats::Counter;
use terrane::sync::Shared;
use terrane::vma::Access;
use terrane::{FaultError, Frame, OutOfMemory, PAGE_SIZE};

/// Terrane's machine.
pub type KernelMachine = Machine<KernelHost>;
/// One of its processors: what every call of Terrane takes.
pub type KernelCpu = Cpu<KernelHost>;
/// An object: shared memory, which is also what files are made of.
pub type Object = Shared<TerraneObject<KernelHost>>;

/// Handles besides those of the processors: for threads that block and keep theirs.
const SPARE: usize = 192;

/// What a processor has of memory's.
pub struct CpuMemory {
    /// Its handle; null while it is in use.
    handle: Cell<*mut KernelCpu>,
    /// Its translations.
    tlb: tlb::CpuTlb,
}

impl CpuMemory {
    /// Of a processor that has none yet.
    pub const fn new() -> Self {
        Self { handle: Cell::new(ptr::null_mut()), tlb: tlb::CpuTlb::new() }
    }
}

static MACHINE: AtomicPtr<Shared<KernelMachine>> = AtomicPtr::new(ptr::null_mut());

/// Handles that nobody uses.
struct Spares(Vec<*mut KernelCpu>);

// SAFETY: a handle may go from thread to thread, and these are nobody's.
unsafe impl Send for Spares {}

static SPARES: SpinLock<Spares> = SpinLock::new(Spares(Vec::new()));

/// The machine.
#[inline]
pub fn machine() -> &'static Shared<KernelMachine> {
    // SAFETY: set at the start, before anybody asks, for ever.
    unsafe { &*MACHINE.load(Ordering::Relaxed) }
}

/// Runs `act` with a handle: this processor's as a rule. `act` may block.
#[inline]
pub fn with_cpu<R>(act: impl FnOnce(&KernelCpu) -> R) -> R {
    let own = percpu::this().memory.handle.replace(ptr::null_mut());
    let handle = if own.is_null() { take_spare() } else { own };
    // SAFETY: it was in its place, or among the spares, and is not now: nobody else uses it.
    let result = act(unsafe { &*handle });
    let there = percpu::this().memory.handle.replace(handle);
    if !there.is_null() {
        // There is room for all.
        SPARES.lock().0.push(there);
    }
    result
}

#[cold]
fn take_spare() -> *mut KernelCpu {
    loop {
        let spare = SPARES.lock().0.pop();
        if let Some(handle) = spare {
            return handle;
        }
        if let Ok(handle) = new_handle() {
            return handle;
        }
        // So many threads are blocked inside Terrane: until one is through.
        crate::task::yield_now();
    }
}

fn new_handle() -> Result<*mut KernelCpu, terrane::Error> {
    let handle = Cpu::try_new(machine())?;
    Ok(crate::arch::try_leak(handle)?)
}

/// Resolves a page fault of the program that runs here. May block.
///
/// # Errors
/// What the program gets a signal for.
#[inline]
pub fn fault(addr: u64, access: Access) -> Result<(), FaultError> {
    let space = percpu::this().memory.tlb.active();
    if space.is_null() {
        return Err(FaultError::NotMapped);
    }
    // SAFETY: a thread whose space runs here owns the space, until it is through with this.
    let space = unsafe { &*space };
    with_cpu(|cpu| space.fault(cpu, addr, access)).map(|_| ())
}

/// True when another processor waits until this one has dropped translations.
#[inline]
pub fn is_asked() -> bool {
    percpu::this().memory.tlb.is_asked()
}

/// Drops what others ask this processor to drop.
pub fn answer_shoot_downs() {
    tlb::answer();
}

/// The counters, those of the translations included that each processor keeps for itself.
pub fn counters() -> terrane::stats::Snapshot {
    with_cpu(|cpu| {
        // Another processor's counts are taken by it alone: those that it has not handed over yet are left out.
        let [received, all, one] = interrupts::without(|| percpu::this().memory.tlb.take_counts());
        cpu.count(Counter::TlbRemoteFlushReceived, received);
        cpu.count(Counter::TlbLocalFlushAll, all);
        cpu.count(Counter::TlbLocalFlushOne, one);
    });
    machine().stats().snapshot()
}

/// An address space that processors can run.
pub struct Space {
    inner: AddressSpace<KernelHost>,
}

impl core::ops::Deref for Space {
    type Target = AddressSpace<KernelHost>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.inner
    }
}

impl Space {
    /// Gives `inner`, which is new, the kernel in its upper half.
    fn new(inner: AddressSpace<KernelHost>) -> Result<Arc<Self>, Errno> {
        let (kernel, table) = (crate::arch::kernel_root(), inner.root_table().address());
        for entry in TABLE / 2..TABLE {
            // SAFETY: root tables, by the direct map. No processor has loaded the new one, and Terrane uses its lower half only. The
            // kernel's own does not change any more.
            unsafe {
                let entry_of = |table: u64| direct(table).cast::<u64>().add(entry);
                entry_of(table).write(entry_of(kernel).read());
            }
        }
        try_arc(Self { inner })
    }
}

/// Entries of a table.
const TABLE: usize = 512;

impl Drop for Space {
    fn drop(&mut self) {
        // The last thread of it may still be here; and a processor that has just left it may be about to say so.
        if ptr::eq(percpu::this().memory.tlb.active(), self) {
            activate(None);
        }
        while !self.inner.host_state().is_nowhere() {
            crate::arch::relax();
        }
    }
}

/// A new, empty space with the kernel in its upper half.
///
/// # Errors
/// `ENOMEM`; `EINVAL` for a configuration that makes no sense.
pub fn new_space(cpu: &KernelCpu, config: SpaceConfig) -> Result<Arc<Space>, Errno> {
    Space::new(AddressSpace::try_new(cpu, config)?)
}

/// A copy of `parent`, with the kernel in its upper half: for fork.
///
/// # Errors
/// `ENOMEM`.
pub fn fork_space(cpu: &KernelCpu, parent: &Space) -> Result<Arc<Space>, Errno> {
    Space::new(parent.fork(cpu)?)
}

/// An `Arc`; `Arc::try_new` is not stable, and a small allocation that fails where all others have succeeded ends the kernel.
fn try_arc<T>(value: T) -> Result<Arc<T>, Errno> {
    // Room for it was there a moment ago: a look, so that it fails here rather than inside `Arc`.
    let mut room = Vec::<u8>::new();
    room.try_reserve_exact(size_of::<T>() + 64)?;
    drop(room);
    Ok(Arc::new(value))
}

/// Runs `space` on this processor from now on; `None`: only the kernel. The threads of a space own it while they run it.
#[inline]
pub fn activate(space: Option<&Arc<Space>>) {
    tlb::activate(space.map(|space| &**space));
}

/// The configuration that the command line asks for.
pub fn space_config() -> SpaceConfig {
    let mut config = SpaceConfig::default();
    match options::value("locking") {
        Some("classic") => config.locking = Locking::Classic,
        None | Some("speculative") => {}
        Some(other) => log!("not a way of locking: {other}"),
    }
    match options::value("placement") {
        Some("percpu") => config.placement = Placement::PerCpu,
        None | Some("linux") => {}
        Some(other) => log!("not a placement: {other}"),
    }
    config
}

/// What the memory map gives to Terrane, from [`set_up_heap`] to [`start`].
static FRAMES: SpinLock<(Piece, Piece)> =
    SpinLock::new((Piece { start: 0, end: 0 }, Piece { start: 0, end: 0 }));

/// Divides the memory, and makes the heap. First of all that allocates. False when there is too little.
pub fn set_up_heap(info: &StartInfo, kernel_end: u64) -> bool {
    let mut pieces = Pieces::new();
    for (start, len) in info.ram() {
        pieces.add(Piece { start, end: start.saturating_add(len) });
    }
    pieces.remove(Piece { start: 0, end: 1 << 20 });
    pieces.remove(Piece { start: 1 << 20, end: kernel_end });
    if let Some((start, len)) = info.archive() {
        pieces.remove(Piece { start, end: start + len });
    }
    let mut largest = pieces.largest();
    let whole = largest;
    let total = largest.len();
    // Tables for the direct map come from below 4 GiB, before there is anything else.
    let mut low = pieces
        .iter()
        .filter(|piece| piece.end <= 4 << 30)
        .max_by_key(|piece| piece.len())
        .unwrap_or_default();
    let low_whole = low;
    layout::extend_direct_map(pieces.end(), || low.cut(PAGE_SIZE).start);
    if low_whole == whole {
        largest = low;
    } else {
        pieces.remove(low_whole);
        pieces.add(low);
    }
    const LEAST: u64 = 24 << 20;
    if total < LEAST + (8 << 20) {
        return false;
    }
    let heap = largest.cut((total / 8).max(LEAST));
    let swap = options::bytes("swap").map(|bytes| largest.cut(bytes.min(largest.len() / 2)));
    if let Some(limit) = options::bytes("memory-limit") {
        let keep = limit.min(largest.len());
        largest.cut(largest.len() - keep);
    }
    largest.start = largest.start.next_multiple_of(2 << 20).min(largest.end);
    // SAFETY: each piece is RAM that nobody else uses, and the direct map reaches it by now.
    unsafe {
        heap::add(heap);
        for piece in pieces.iter().filter(|&piece| piece != whole && piece.len() >= 1 << 20) {
            heap::add(piece);
        }
    }
    *FRAMES.lock() = (largest, swap.unwrap_or_default());
    true
}

/// Makes the machine. After the processors are counted.
///
/// # Errors
/// When there is no memory.
pub fn start(cpus: usize) -> Result<(), OutOfMemory> {
    let (memory, swap) = *FRAMES.lock();
    let frames = FrameRange {
        first: Frame((memory.start / PAGE_SIZE) as u32),
        count: (memory.len() / PAGE_SIZE) as usize,
    };
    let machine = Machine::try_new(KernelHost { frames, refuser: host::Refuser::new() }, cpus + SPARE)?;
    // As Linux does unless it is told otherwise.
    machine.commit().set_mode(Overcommit::Guess);
    MACHINE.store(crate::arch::try_leak(machine)?, Ordering::Release);
    SPARES.lock().0.try_reserve(cpus + SPARE).map_err(|_| OutOfMemory)?;
    if swap.len() > 0 && self::machine().swap_on(Box::new(swap::Region::new(swap))).is_err() {
        log!("no memory for the tables of the swap region");
    }
    Ok(())
}

/// From now on frames are refused, if the command line says so (`inject=frame:N`): there is a program.
pub fn begin_refusing() {
    machine().host().refuser.begin();
}

/// Gives this processor a handle. The first one's after [`start`].
pub fn start_cpu() {
    match new_handle() {
        Ok(handle) => percpu::this().memory.handle.set(handle),
        Err(error) => panic!("no handle for a processor: {error}"),
    }
}
