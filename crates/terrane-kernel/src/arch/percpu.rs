//! What each processor has for itself.
//!
//! GS leads to it while the kernel runs. The kernel is not preempted, so a reference to the own data is good until the thread
//! blocks: it may go on on another processor. What is not atomic here is used by its processor only, and what
//! interrupt handlers use as well, with interrupts off.

use super::gdt::Tables;
use crate::mm::CpuMemory;
use core::arch::asm;
use core::cell::Cell;
use core::mem::offset_of;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// More processors are left asleep. Sets of them are one word.
pub const MAX_CPUS: usize = 64;

/// The data of one processor. Entries know the first four words by their offsets.
#[repr(C, align(128))]
pub struct PerCpu {
    /// At 0: where this is, for finding it by GS.
    this: *const PerCpu,
    /// At 8: where the running thread's kernel stack begins.
    pub kernel_stack: Cell<u64>,
    /// At 16: the program's stack pointer, for the first instructions of a system call.
    scratch: Cell<u64>,
    /// At 24: something may have to be done before the return to user mode. Set by whoever makes it so: an interrupt, a switch to another
    /// thread, a thread that wakes one that is to preempt it; cleared when nothing is left to be done, with interrupts off. What other processors
    /// want of a thread that runs, they tell it by an interrupt: they must, for it may be in user mode.
    pub work: AtomicBool,
    /// Its number.
    pub index: usize,
    /// The number its local APIC goes by.
    pub apic_id: AtomicU32,
    /// The scheduler's pointer to the thread that runs.
    pub thread: Cell<usize>,
    /// Segments and the stacks of traps.
    pub tables: Tables,
    /// Memory's part.
    pub memory: CpuMemory,
}

const _: () = assert!(
    offset_of!(PerCpu, kernel_stack) == 8
        && offset_of!(PerCpu, scratch) == 16
        && offset_of!(PerCpu, work) == 24
);

// SAFETY: what is not atomic is used by the processor whose it is (see the module).
unsafe impl Sync for PerCpu {}

static CPUS: [AtomicPtr<PerCpu>; MAX_CPUS] = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_CPUS];
static COUNT: AtomicUsize = AtomicUsize::new(0);

impl PerCpu {
    /// Makes the data of processor `index`, for ever.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn make(index: usize, apic_id: u32) -> Result<&'static PerCpu, terrane::OutOfMemory> {
        let new = PerCpu {
            this: ptr::null(),
            kernel_stack: Cell::new(0),
            scratch: Cell::new(0),
            work: AtomicBool::new(true),
            index,
            apic_id: AtomicU32::new(apic_id),
            thread: Cell::new(0),
            tables: Tables::try_new()?,
            memory: CpuMemory::new(),
        };
        let place = super::try_leak(new)?;
        place.this = place;
        CPUS[index].store(place, Ordering::Release);
        Ok(place)
    }

    /// Sets the number of its APIC, which the first processor learns late.
    pub fn set_apic_id(&self, id: u32) {
        self.apic_id.store(id, Ordering::Relaxed);
    }

    /// Makes it this processor's.
    ///
    /// # Safety
    /// It is nobody else's.
    pub unsafe fn install(&'static self) {
        // SAFETY: by the caller; entries expect GS so in the kernel.
        unsafe {
            super::cpu::write_msr(super::cpu::msr::GS_BASE, self as *const PerCpu as u64);
            super::cpu::write_msr(super::cpu::msr::KERNEL_GS_BASE, 0);
        }
    }
}

/// This processor's data.
#[inline]
pub fn this() -> &'static PerCpu {
    let this: *const PerCpu;
    // SAFETY: in the kernel GS leads to the data of this processor, which is there for ever.
    unsafe {
        asm!("mov {}, gs:[0]", out(reg) this, options(nostack, preserves_flags, readonly));
        &*this
    }
}

/// The data of processor `index`, if there is one: for what is atomic in it.
#[inline]
pub fn of(index: usize) -> Option<&'static PerCpu> {
    // SAFETY: made by `make`, there for ever.
    unsafe { CPUS.get(index)?.load(Ordering::Acquire).as_ref() }
}

/// How many processors run.
#[inline]
pub fn count() -> usize {
    COUNT.load(Ordering::Relaxed)
}

/// One more runs.
pub fn has_started() {
    COUNT.fetch_add(1, Ordering::Release);
}
