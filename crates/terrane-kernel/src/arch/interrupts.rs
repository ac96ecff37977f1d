//! Whether this processor takes interrupts.

use core::arch::asm;

const IF: u64 = 1 << 9;

/// Lets interrupts in.
#[inline]
pub fn enable() {
    // SAFETY: the tables are set up before anything is that interrupts.
    unsafe { asm!("sti", options(nostack)) };
}

/// Keeps interrupts out.
#[inline]
pub fn disable() {
    // SAFETY: changes nothing else.
    unsafe { asm!("cli", options(nostack)) };
}

/// True when interrupts are let in.
#[inline]
pub fn are_enabled() -> bool {
    let flags: u64;
    // SAFETY: pushes and pops a word.
    unsafe { asm!("pushfq", "pop {}", out(reg) flags) };
    flags & IF != 0
}

/// Runs `act` without interrupts.
#[inline]
pub fn without<R>(act: impl FnOnce() -> R) -> R {
    let enabled = are_enabled();
    if enabled {
        disable();
    }
    let result = act();
    if enabled {
        enable();
    }
    result
}

/// Lets interrupts in and stops the processor until one has come. Called with interrupts kept out, after a last look at what it
/// might be waiting for: an interrupt that comes after that look ends the wait. Returns with interrupts kept out.
#[inline]
pub fn wait_for_one() {
    // SAFETY: `sti` lets interrupts in after the instruction that follows it, so none is lost between the two.
    unsafe { asm!("sti", "hlt", "cli", options(nostack)) };
}
