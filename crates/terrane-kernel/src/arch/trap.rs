//! Traps and interrupts, behind their [entries](super::entry).

use super::entry::vector;
use super::frame::TrapFrame;
use super::gdt::{KERNEL_CODE, TrapStack, USER_CODE, USER_DATA};
use super::{apic, cpu, interrupts, percpu};
use crate::{mm, task, user};
use core::arch::asm;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, Ordering};
use terrane::vma::Access;

/// The page fault's error code: a store.
const WRITE: u64 = 1 << 1;
/// An instruction fetch.
const FETCH: u64 = 1 << 4;
/// Flags that a program may set: the arithmetic ones, direction, overflow, trap, alignment check, identification.
const USER_FLAGS: u64 = 0x24_0dd5;
const IF: u64 = 1 << 9;

#[derive(Clone, Copy)]
#[repr(C)]
struct Gate {
    low: u16,
    selector: u16,
    stack: u8,
    kind: u8,
    middle: u16,
    high: u32,
    _reserved: u32,
}

struct Gates(UnsafeCell<[Gate; 256]>);

// SAFETY: written by the first processor before the others start, read by hardware.
unsafe impl Sync for Gates {}

static GATES: Gates = Gates(UnsafeCell::new(
    [Gate { low: 0, selector: 0, stack: 0, kind: 0, middle: 0, high: 0, _reserved: 0 }; 256],
));

unsafe extern "C" {
    static exception_gates: u8;
    static interrupt_gates: u8;
    fn syscall_entry();
}

/// Fills in the table of gates; once.
pub fn make_gates() {
    // Each is 16 bytes: see `entry`.
    let (exceptions, interrupts) = (&raw const exception_gates as u64, &raw const interrupt_gates as u64);
    for number in 0..256u64 {
        let address = if number < 32 { exceptions + number * 16 } else { interrupts + (number - 32) * 16 };
        let stack = match number {
            2 => TrapStack::NonMaskable,
            8 => TrapStack::Double,
            18 => TrapStack::Machine,
            32.. => TrapStack::Interrupt,
            _ => TrapStack::Interrupted,
        };
        // Breakpoints and overflow are instructions that programs may use.
        let level = if number == 3 || number == 4 { 3 << 5 } else { 0 };
        let gate = Gate {
            low: address as u16,
            selector: KERNEL_CODE,
            stack: stack as u8,
            kind: 0x8e | level,
            middle: (address >> 16) as u16,
            high: (address >> 32) as u32,
            _reserved: 0,
        };
        // SAFETY: only the first processor runs.
        unsafe { (*GATES.0.get())[number as usize] = gate };
    }
}

/// Where page faults lead from now on, on all processors; returns where they led. For [`measure`](super::measure), while no processor faults.
pub fn exchange_page_fault_gate(address: u64) -> u64 {
    // SAFETY: only the first processor changes gates, and none uses this one meanwhile.
    let gate = unsafe { &mut (*GATES.0.get())[14] };
    let before = u64::from(gate.low) | u64::from(gate.middle) << 16 | u64::from(gate.high) << 32;
    (gate.low, gate.middle, gate.high) = (address as u16, (address >> 16) as u16, (address >> 32) as u32);
    before
}

/// Makes this processor take traps and system calls by the gates.
pub fn load_gates() {
    #[repr(C, packed)]
    struct Pointer(u16, u64);
    let pointer = Pointer(size_of::<[Gate; 256]>() as u16 - 1, GATES.0.get() as u64);
    // SAFETY: the gates are filled in and stay. The segments of `sysret` are those of `gdt`: 0x20 + 8 and + 16.
    unsafe {
        asm!("lidt [{}]", in(reg) &raw const pointer, options(nostack, preserves_flags, readonly));
        cpu::write_msr(cpu::msr::STAR, 0x20 << 48 | u64::from(KERNEL_CODE) << 32);
        cpu::write_msr(cpu::msr::LSTAR, syscall_entry as *const () as u64);
        // Trap, interrupts, direction, nested task, alignment check.
        cpu::write_msr(cpu::msr::FMASK, 0x4_4700);
    }
}

#[inline]
fn access_of(error: u64) -> Access {
    if error & WRITE != 0 {
        Access::Write
    } else if error & FETCH != 0 {
        Access::Execute
    } else {
        Access::Read
    }
}

/// False when there is nothing to be done but to return.
#[unsafe(no_mangle)]
extern "C" fn page_fault_from_user(frame: &mut TrapFrame, addr: u64) -> bool {
    interrupts::enable();
    task::count_fault();
    let access = access_of(frame.orig_rax);
    match mm::fault(addr, access) {
        Ok(()) => false,
        Err(error) => {
            task::on_page_fault(frame, addr, access, error);
            true
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn trap_from_user(frame: &mut TrapFrame, vector: u8) {
    interrupts::enable();
    task::on_trap(frame, vector, frame.orig_rax);
}

/// Returns with interrupts off.
#[unsafe(no_mangle)]
extern "C" fn syscall_from_user(frame: &mut TrapFrame) {
    interrupts::enable();
    task::on_syscall(frame);
    interrupts::disable();
    before_return_to_user(frame);
}

/// With interrupts off, and so they stay.
#[unsafe(no_mangle)]
extern "C" fn before_return_to_user(frame: &mut TrapFrame) {
    loop {
        task::before_user(frame);
        // Whatever a signal's frame or a debugger of the program's put there: what is loaded must not fault.
        frame.cs = USER_CODE.into();
        frame.ss = USER_DATA.into();
        frame.rflags = frame.rflags & USER_FLAGS | IF | 2;
        if frame.rip >> 47 == 0 {
            // Interrupts have been off since `before_user` looked.
            percpu::this().work.store(false, Ordering::Relaxed);
            return;
        }
        interrupts::enable();
        task::on_trap(frame, 13, 0);
        interrupts::disable();
    }
}

#[unsafe(no_mangle)]
extern "C" fn trap_from_kernel(frame: &mut TrapFrame, vector: u8, addr: u64) {
    if vector == 14 && user::is_copy(frame.rip) {
        if frame.rflags & IF != 0 {
            interrupts::enable();
        }
        let result = mm::fault(addr, access_of(frame.orig_rax));
        interrupts::disable();
        if result.is_err() {
            frame.rip = user::copy_failed();
        }
        return;
    }
    super::backtrace::panic_in_trap(frame, vector, addr);
}

fn interrupt(vector: u8, user: bool) {
    match vector {
        vector::TIMER => {
            apic::end_of_interrupt();
            task::on_timer(user);
        }
        vector::RESCHEDULE => {
            apic::end_of_interrupt();
            task::on_reschedule();
        }
        vector::SHOOT_DOWN => {
            apic::end_of_interrupt();
            mm::answer_shoot_downs();
        }
        vector::SERIAL => {
            crate::console::on_input();
            apic::end_of_interrupt();
        }
        _ => {}
    }
}

#[unsafe(no_mangle)]
extern "C" fn interrupt_from_user(_frame: &mut TrapFrame, vector: u8) {
    interrupt(vector, true);
}

#[unsafe(no_mangle)]
extern "C" fn interrupt_from_kernel(_frame: &mut TrapFrame, vector: u8) {
    interrupt(vector, false);
    percpu::this().work.store(true, Ordering::Relaxed);
}

/// Set when a processor panics: the others are to stop.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Stops all other processors, whatever they do; for a panic. False when one has done so before.
pub fn stop_others() -> bool {
    if STOPPED.swap(true, Ordering::SeqCst) {
        return false;
    }
    if percpu::count() > 1 {
        apic::interrupt_others_unmasked();
    }
    true
}

/// Stops this processor.
pub fn stop() -> ! {
    loop {
        // SAFETY: nothing runs here any more.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) };
    }
}

#[unsafe(no_mangle)]
extern "C" fn paranoid_trap(frame: &mut TrapFrame, vector: u8) {
    if vector == 2 && !STOPPED.load(Ordering::SeqCst) {
        return;
    }
    if vector == 2 {
        stop();
    }
    super::backtrace::panic_in_trap(frame, vector, cpu::fault_address());
}
