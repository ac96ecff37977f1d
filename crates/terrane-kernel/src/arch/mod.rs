//! The processor: start, traps, interrupts, timers, switching.

mod boot;
mod exit;
mod frame;
mod gdt;
pub mod interrupts;
mod memory;
mod port;
pub mod serial;

pub use exit::exit;
pub use frame::TrapFrame;

/// One round of waiting for another processor.
#[inline]
pub fn relax() {
    core::hint::spin_loop();
}

/// A kernel stack, with a guard word at its end.
pub struct KernelStack(());
impl KernelStack {
    /// # Errors
    /// When there is no memory.
    pub fn try_new() -> Result<Self, terrane::OutOfMemory> {
        todo!()
    }
    /// The address behind its last byte: where it begins to be used.
    pub fn top(&self) -> u64 {
        todo!()
    }
    /// Where a program's registers are kept while the kernel runs for it: at the top.
    pub fn user_frame(&self) -> *mut TrapFrame {
        todo!()
    }
}
/// Where a thread of the kernel goes on.
pub struct Context(());
impl Context {
    /// A context that begins in `entry(argument)` on `stack`.
    pub fn new(_stack: &KernelStack, _entry: extern "C" fn(usize) -> !, _argument: usize) -> Self {
        todo!()
    }
    /// A context to be switched away from: of what runs now.
    pub const fn empty() -> Self {
        Context(())
    }
}
/// # Safety
/// Later.
pub unsafe fn switch(_from: *mut Context, _to: *const Context) {
    todo!()
}
/// # Safety
/// Later.
pub unsafe fn enter_user(_frame: &TrapFrame) -> ! {
    todo!()
}
/// The registers that belong to a thread, besides those in its frame: on a switch.
pub fn set_thread(_kernel_stack_top: u64, _fs_base: u64, _gs_base: u64) {
    todo!()
}
/// What the program's FS base is now (it is only changed by `set_thread` and `set_fs_base`).
pub fn set_fs_base(_base: u64) {
    todo!()
}
/// The program's GS base.
pub fn set_gs_base(_base: u64) {
    todo!()
}
/// x87 and vector registers.
pub struct FpuState(());
impl FpuState {
    /// The state that a program begins with.
    /// # Errors
    /// When there is no memory.
    pub fn try_new() -> Result<Self, terrane::OutOfMemory> {
        todo!()
    }
    /// Saves this processor's registers. The 16 SSE registers in it are the kernel's; those of the program are in its frame.
    pub fn save(&mut self) {
        todo!()
    }
    /// Loads them.
    pub fn restore(&self) {
        todo!()
    }
    /// The area as `xsave` writes it (standard format): for signal frames. Put the frame's `xmm` at bytes 160..416 first.
    pub fn bytes(&self) -> &[u8] {
        todo!()
    }
    /// The same, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        todo!()
    }
    /// Makes what a program put there loadable: clears reserved bits, so that `restore` does not fault.
    pub fn sanitize(&mut self) {
        todo!()
    }
    /// A copy, for a fork.
    /// # Errors
    /// When there is no memory.
    pub fn try_clone(&self) -> Result<Self, terrane::OutOfMemory> {
        todo!()
    }
}
/// The number of this processor.
pub fn cpu_index() -> usize {
    0
}
/// How many processors there are.
pub fn cpu_count() -> usize {
    1
}
/// Nanoseconds since the start of the kernel.
pub fn now() -> u64 {
    todo!()
}
/// Nanoseconds since 1970.
pub fn realtime() -> u64 {
    todo!()
}
/// The word of this processor that holds the scheduler's pointer to the thread that runs here (0: none).
pub fn current_thread() -> usize {
    todo!()
}
/// Sets it.
pub fn set_current_thread(_thread: usize) {
    todo!()
}
/// A random number.
pub fn random() -> u64 {
    todo!()
}
pub mod ipi {
    //! Interrupts from one processor to another.
    /// Makes `cpu` look at its run queue: `task::on_reschedule` is called there, with interrupts off.
    pub fn reschedule(_cpu: usize) {
        todo!()
    }
}
pub mod timer {
    //! The timer of each processor.
    /// `task::on_timer` is called on this processor at `at` (ns, as `now` counts) or soon after, with interrupts off. One at a time: the
    /// last call counts. `u64::MAX`: never.
    pub fn arm(_at: u64) {
        todo!()
    }
}
