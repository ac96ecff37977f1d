//! Threads, processes, the scheduler. To come.

pub mod wait;

use crate::arch::TrapFrame;

/// Runs the program that the command line names, and everything it starts.
pub fn start() -> ! {
    crate::report!("@exit 0");
    crate::arch::exit(0)
}
/// A page fault in user mode that cannot be resolved.
pub fn on_page_fault(_frame: &mut TrapFrame, _addr: u64, _access: terrane::vma::Access, _error: terrane::FaultError) {}
/// Another exception in user mode.
pub fn on_trap(_frame: &mut TrapFrame, _vector: u8, _error: u64) {}
/// A system call.
pub fn on_syscall(_frame: &mut TrapFrame) {}
/// The timer: with interrupts off.
pub fn on_timer() {}
/// Another processor has called `ipi::reschedule` for this one: with interrupts off.
pub fn on_reschedule() {}
/// Input has come: with interrupts off.
pub fn on_input() {}
/// The last thing before a return to user mode: signals, preemption.
pub fn before_user(_frame: &mut TrapFrame) {}
/// The loop of a processor that has nothing to do: never returns.
pub fn idle() -> ! {
    loop {
        crate::arch::relax()
    }
}
/// Lets other threads run.
pub fn yield_now() {}
