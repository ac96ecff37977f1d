//! Backtraces, and the end in a panic.

use super::frame::TrapFrame;
use super::{interrupts, percpu, trap};
use crate::console::report_in_panic;
use core::arch::asm;
use core::fmt;

/// Frames at most.
const DEPTH: usize = 64;

unsafe extern "C" {
    static kernel_start: u8;
    static text_end: u8;
}

fn is_code(addr: u64) -> bool {
    (&raw const kernel_start as u64..&raw const text_end as u64).contains(&addr)
}

/// Reports what went wrong and how it came there, and ends the machine.
pub fn panic(text: fmt::Arguments<'_>) -> ! {
    let stack: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) stack, options(nomem, nostack)) };
    end(text, None, stack)
}

/// The same, for a trap that the kernel did not expect.
pub fn panic_in_trap(frame: &TrapFrame, vector: u8, addr: u64) -> ! {
    end(
        format_args!(
            "trap {vector} in the kernel: error {:#x}, address {addr:#x}, at {:#x}, stack {:#x}",
            frame.orig_rax, frame.rip, frame.rsp
        ),
        Some(frame.rip),
        frame.rsp,
    )
}

fn end(text: fmt::Arguments<'_>, at: Option<u64>, stack: u64) -> ! {
    interrupts::disable();
    if !trap::stop_others() {
        // A panic in a panic, or on two processors at once: the first one reports.
        loop {
            // SAFETY: the end of this processor.
            unsafe { asm!("cli", "hlt", options(nomem, nostack)) };
        }
    }
    report_in_panic(format_args!("@panic cpu {}: {text}", percpu::this().index));
    if let Some(at) = at {
        report_in_panic(format_args!("@frame {at:#x}"));
    }
    frames(stack);
    super::exit(1)
}

/// Reports the return addresses on the stack from `from` up: every word that leads behind a call. Some of them may be left over
/// from calls that have returned; none that matters is missing, whoever compiled the code and however.
fn frames(from: u64) {
    let mut found = 0;
    let mut at = from & !7;
    while found < DEPTH && at >> 47 != 0 && at & 0xfff_ffff != 0 && at < from + (64 << 10) {
        // SAFETY: kernel stacks lie in memory that is mapped for a long way up: the direct map, or the kernel's data. The end of
        // either is not within a stack, but behind it a fault would only end the machine a bit earlier.
        let word = unsafe { (at as *const u64).read_volatile() };
        at += 8;
        if is_code(word) && follows_call(word) {
            report_in_panic(format_args!("@frame {word:#x}"));
            found += 1;
        }
    }
}

/// True when the instruction before `addr` looks like a call.
fn follows_call(addr: u64) -> bool {
    if !is_code(addr - 7) {
        return false;
    }
    // SAFETY: inside the kernel's code.
    let before = unsafe { core::slice::from_raw_parts((addr - 7) as *const u8, 7) };
    // call rel32; call r/m64 with and without displacement.
    before[2] == 0xe8
        || (before[5] == 0xff && before[6] & 0x38 == 0x10)
        || (before[4] == 0xff && before[5] & 0xf8 == 0x50)
        || (before[1] == 0xff && before[2] & 0x38 == 0x10)
        || (before[4] == 0x41 && before[5] == 0xff && before[6] & 0xf8 == 0xd0)
}
