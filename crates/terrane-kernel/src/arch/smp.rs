//! Starting the other processors.
//!
//! A processor that gets INIT and then SIPI begins in 16-bit mode at a page below 1 MiB, where a copy of some instructions lies
//! that lead it to the same way into long mode as the first one's (`boot`). They start one at a time, since they share the word that
//! says where their stack is.

use super::gdt::Tables;
use super::percpu::{self, PerCpu};
use super::stack::KernelStack;
use super::{acpi, apic, clock, cpu, fpu, trap};
use crate::mm::direct;
use core::arch::global_asm;
use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use terrane::OutOfMemory;

/// Where the 16-bit code lies. The firmware's data is below, its code far above.
const TRAMPOLINE: u64 = 0x8000;

global_asm!(
    r#"
    .pushsection .rodata.trampoline, "a", @progbits
    .code16
    .global trampoline
    .global trampoline_end
trampoline:
    cli
    cld
    xorl %eax, %eax
    movw %cs, %ax
    movw %ax, %ds
    lgdtl trampoline_gdt - trampoline
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $0x18, $next_processor
trampoline_gdt:
    .word 31
    .long boot_gdt
trampoline_end:
    .popsection

    .pushsection .boot.text, "ax", @progbits
    .code32
next_processor:
    movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $1, %ebp
    jmp long_mode
    .popsection
    .code64
"#,
    options(att_syntax)
);

unsafe extern "C" {
    static trampoline: u8;
    static trampoline_end: u8;
}

/// The stack of the processor that starts, for `boot`.
#[unsafe(no_mangle)]
static next_stack: AtomicU64 = AtomicU64::new(0);
/// Its number.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Makes this processor ready for traps: what is done on each.
pub fn set_up_this(this: &'static PerCpu) {
    // SAFETY: made for this processor.
    unsafe { this.install() };
    Tables::load(this);
    trap::load_gates();
    let mut bits = cpu::read_cr4();
    for (feature, bit) in [
        (cpu::Feature::Smep, cpu::cr4::SMEP),
        (cpu::Feature::Smap, cpu::cr4::SMAP),
        (cpu::Feature::Pcid, cpu::cr4::PCIDE),
    ] {
        if cpu::has(feature) {
            bits |= bit;
        }
    }
    // SAFETY: the processor has them; the current table's tag is 0, as turning tags on asks for.
    unsafe { cpu::write_cr4(bits) };
    fpu::set_up();
    apic::enable();
}

/// Starts all other processors, up to what there is memory and numbers for.
///
/// # Errors
/// When there is no memory.
pub fn start_others() -> Result<(), OutOfMemory> {
    let me = apic::id();
    // SAFETY: the page is RAM below 1 MiB, which the memory map leaves out; the code between the two symbols.
    unsafe {
        let (from, to) = (&raw const trampoline, &raw const trampoline_end);
        direct(TRAMPOLINE).copy_from_nonoverlapping(from, to as usize - from as usize);
    }
    for id in acpi::processors().filter(|&id| id != me) {
        apic::initialise(id);
    }
    // The processor's manual asks for 10 ms; what is emulated needs none.
    clock::pause(1_000_000);
    for id in acpi::processors().filter(|&id| id != me) {
        let index = percpu::count();
        PerCpu::make(index, id)?;
        // It starts and idles on it, for ever.
        next_stack.store(ManuallyDrop::new(KernelStack::try_new()?).top(), Ordering::Relaxed);
        NEXT.store(index, Ordering::Release);
        let mut tries = 0;
        while percpu::count() == index {
            if tries == 3 {
                crate::log!("processor {id} does not start");
                return Ok(());
            }
            tries += 1;
            apic::start_up(id, TRAMPOLINE);
            let until = clock::now() + 300_000_000;
            while percpu::count() == index && clock::now() < until {
                core::hint::spin_loop();
            }
        }
    }
    Ok(())
}

/// The first Rust function of another processor.
#[unsafe(no_mangle)]
extern "C" fn start_next() -> ! {
    let Some(this) = percpu::of(NEXT.load(Ordering::Acquire)) else { super::exit(1) };
    set_up_this(this);
    crate::mm::start_cpu();
    percpu::has_started();
    super::wait_for_all();
    super::measure::take_part();
    crate::task::idle()
}
