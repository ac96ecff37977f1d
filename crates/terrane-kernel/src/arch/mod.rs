//! The processor: start, traps, interrupts, time, switching between threads.
//!
//! | module | what |
//! |---|---|
//! | `boot`, `smp` | the first instructions of the first processor, and of the others |
//! | `gdt`, `entry`, `trap`, `frame` | segments; first and last instructions of traps and system calls; what follows them |
//! | `percpu` | what each processor has for itself |
//! | `context`, `stack`, `fpu` | threads of the kernel: switching, stacks, vector registers |
//! | `acpi`, `apic`, `clock`, `interrupts` | the machine's tables, interrupt controllers and timers, time |
//! | `serial`, `port`, `exit`, `backtrace` | bytes out and in; the end |
//! | `memory` | `memcpy` and its sisters |
//! | `measure` | what an empty page fault costs |

mod acpi;
mod apic;
mod backtrace;
mod boot;
mod clock;
mod context;
pub mod cpu;
mod entry;
mod exit;
mod fpu;
mod frame;
mod gdt;
pub mod interrupts;
mod measure;
mod memory;
pub mod percpu;
mod port;
pub mod serial;
mod smp;
mod stack;
mod trap;

pub use apic::{interrupt, timer};
pub use backtrace::panic;
pub use boot::StartInfo;
pub use clock::{now, realtime, set_realtime, timestamp_at};
pub use context::{Context, enter_user, set_fs_base, set_gs_base, set_thread, switch};
pub use entry::vector;
pub use exit::exit;
pub use fpu::FpuState;
pub use frame::TrapFrame;
pub use memory::copy_used_bytes;
pub use stack::{KernelStack, most_used as most_used_stack};

use alloc::alloc::{Layout, alloc};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use terrane::OutOfMemory;

/// Interrupts from one processor to another.
pub mod ipi {
    /// Makes `cpu` look at its run queue: [`on_reschedule`](crate::task::on_reschedule) is called there, with interrupts off.
    #[inline]
    pub fn reschedule(cpu: usize) {
        super::apic::interrupt(cpu, super::vector::RESCHEDULE);
    }
}

/// The number of this processor.
#[inline]
pub fn cpu_index() -> usize {
    percpu::this().index
}

/// How many processors there are.
#[inline]
pub fn cpu_count() -> usize {
    percpu::count()
}

/// The word of this processor that holds the scheduler's pointer to the thread that runs here; 0 at the start.
#[inline]
pub fn current_thread() -> usize {
    percpu::this().thread.get()
}

/// Sets it.
#[inline]
pub fn set_current_thread(thread: usize) {
    percpu::this().thread.set(thread);
}

/// Makes this processor look for what is to be done ([`before_user`](crate::task::before_user)) before it returns to user mode, also from a fault that was
/// resolved.
#[inline]
pub fn look_before_user() {
    percpu::this().work.store(true, Ordering::Relaxed);
}

/// One round of waiting for another processor: answers shoot-downs, since that one may be waiting for the answer.
#[inline]
pub fn relax() {
    if cpu::has(cpu::Feature::Pause) {
        core::hint::spin_loop();
    }
    if crate::mm::is_asked() {
        crate::mm::answer_shoot_downs();
    }
}

/// A number that is hard to guess where the processor has a generator, and is different each time where not.
pub fn random() -> u64 {
    static STATE: AtomicU64 = AtomicU64::new(0x9e37_79b9_7f4a_7c15);
    cpu::random().unwrap_or_else(|| {
        // S. Vigna's splitmix64.
        let mut z = STATE.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed) ^ cpu::timestamp();
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    })
}

/// Moves a value to memory of its own, for ever.
///
/// # Errors
/// When there is no memory.
pub fn try_leak<T>(value: T) -> Result<&'static mut T, OutOfMemory> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the layout has a size; the memory is written before it is referred to, and never freed.
    unsafe {
        let place = alloc(Layout::new::<T>()).cast::<T>();
        if place.is_null() {
            return Err(OutOfMemory);
        }
        place.write(value);
        Ok(&mut *place)
    }
}

unsafe extern "C" {
    static boot_pml4: [u64; 512];
    static boot_pdpt_low: [u64; 512];
}

/// The root table of the kernel alone.
#[inline]
pub fn kernel_root() -> u64 {
    // A physical address, as the linker script has it.
    (&raw const boot_pml4) as u64
}

/// Sets the entry of the direct map for gigabyte `index`.
pub fn set_direct_map(index: usize, entry: u64) {
    // SAFETY: the table of the direct map; nothing uses what is not mapped yet.
    unsafe {
        crate::mm::direct((&raw const boot_pdpt_low) as u64).cast::<u64>().add(index).write_volatile(entry)
    };
}

/// Takes the first gigabytes out of the lower half, where the processors started: from now on address 0 is not mapped.
fn unmap_low() {
    // SAFETY: nothing runs there any more.
    unsafe { crate::mm::direct(kernel_root()).cast::<u64>().write_volatile(0) };
    cpu::drop_all_translations();
}

/// Set when all processors have started.
static ALL_STARTED: AtomicBool = AtomicBool::new(false);

/// Waits until the machine is complete: for the processors that are ready early.
fn wait_for_all() {
    while !ALL_STARTED.load(Ordering::Acquire) {
        relax();
    }
    cpu::drop_all_translations();
}

/// Everything from the first Rust function to the first thread.
fn start(info: &'static StartInfo) -> ! {
    clock::start();
    crate::console::set_up();
    crate::log!("terrane-kernel {}", env!("CARGO_PKG_VERSION"));
    cpu::find_features();
    crate::options::set(info.command_line());
    if !info.is_valid() {
        panic(format_args!("not started by PVH"));
    }
    acpi::read(info.rsdp());
    if !crate::mm::set_up_heap(info, boot::kernel_end()) {
        crate::report!("@panic too little memory");
        exit(1);
    }
    apic::find();
    let no_memory = |OutOfMemory| -> ! { panic(format_args!("too little memory")) };
    stack::set_up(crate::options::value("stat") == Some("1")).unwrap_or_else(|error| no_memory(error));
    let first = percpu::PerCpu::make(0, 0).unwrap_or_else(|error| no_memory(error));
    smp::set_up_this(first);
    first.set_apic_id(apic::id());
    trap::make_gates();
    percpu::has_started();
    clock::set_up();
    apic::calibrate();
    let cpus = acpi::processors().count().max(1);
    crate::mm::start(cpus).unwrap_or_else(|error| no_memory(error));
    crate::mm::start_cpu();
    smp::start_others().unwrap_or_else(|error| no_memory(error));
    unmap_low();
    ALL_STARTED.store(true, Ordering::Release);
    apic::route_serial();
    crate::console::start_input();
    crate::log!("{} processors, {} frames", cpu_count(), crate::mm::machine().frames().total());
    measure::measure();
    crate::fs::init(info.archive_bytes());
    crate::task::start()
}
