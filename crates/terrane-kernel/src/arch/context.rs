//! Switching between threads of the kernel.

use super::frame::TrapFrame;
use super::stack::KernelStack;
use super::{cpu, percpu};
use core::arch::global_asm;
use core::sync::atomic::Ordering;

/// Where a thread of the kernel goes on: its stack pointer. All else is on its stack.
#[derive(Debug)]
#[repr(transparent)]
pub struct Context(u64);

global_asm!(
    r#"
    .pushsection .text.switch, "ax", @progbits
    .global switch_contexts
switch_contexts:                # rdi: where to store the stack pointer, rsi: the new one
    push rbp
    push rbx
    push r12
    push r13
    push r14
    push r15
    pushfq                      # for the flag of `stac`
    mov [rdi], rsp
    mov rsp, rsi
    popfq
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbx
    pop rbp
    ret
.global begin_context
begin_context:
    mov rdi, r12
    xor ebp, ebp
    push 0                      # where a backtrace ends
    jmp rbx
    .popsection
"#
);

unsafe extern "C" {
    fn switch_contexts(from: *mut Context, to: u64);
    fn begin_context();
    fn enter_user_at(frame: *const TrapFrame, place: *mut TrapFrame) -> !;
}

impl Context {
    /// One that begins in `entry(argument)` on `stack`, with interrupts off. `entry` finds the stack used from
    /// [`user_frame`](KernelStack::user_frame) down.
    pub fn new(stack: &KernelStack, entry: extern "C" fn(usize) -> !, argument: usize) -> Self {
        let words = [
            0x2, // flags: interrupts off
            0,
            0,
            0,
            argument as u64,       // r12
            entry as usize as u64, // rbx
            0,
            begin_context as *const () as u64,
        ];
        // With the return address taken, the stack pointer is at the frame: aligned to 16.
        let at = stack.user_frame() as u64 - size_of_val(&words) as u64;
        // SAFETY: the stack is new: nobody else uses it.
        unsafe { (at as *mut [u64; 8]).write(words) };
        Self(at)
    }

    /// For what runs now, to be switched away from.
    pub const fn empty() -> Self {
        Self(0)
    }
}

/// Goes on in `to`, on this processor, and stores in `from` where the caller goes on when it is switched to. Switches
/// stacks and nothing else.
///
/// # Safety
/// Interrupts are off. `to` was made by [`Context::new`] or stored here and not used since, and its stack is there. Both
/// pointers are good until the stack pointer is stored and loaded.
#[inline]
pub unsafe fn switch(from: *mut Context, to: *const Context) {
    // SAFETY: by the caller.
    unsafe { switch_contexts(from, (*to).0) };
}

/// Leaves the kernel for a program, with the registers in `frame`; the thread's kernel stack is empty after that.
///
/// # Safety
/// Runs on the kernel stack that [`set_thread`] named.
pub unsafe fn enter_user(frame: &TrapFrame) -> ! {
    let place = (percpu::this().kernel_stack.get() - size_of::<TrapFrame>() as u64) as *mut TrapFrame;
    // SAFETY: by the caller the place is this stack's, and nothing above the caller is used any more.
    unsafe { enter_user_at(frame, place) }
}

/// Makes the registers that belong to a thread, besides those in its frame, those of the one that runs from now on: the stack for its
/// entries into the kernel, and the bases of its FS and GS (which must be a program's addresses).
#[inline]
pub fn set_thread(kernel_stack_top: u64, fs_base: u64, gs_base: u64) {
    let this = percpu::this();
    this.kernel_stack.set(kernel_stack_top);
    this.work.store(true, Ordering::Relaxed);
    this.tables.set_kernel_stack(kernel_stack_top);
    set_fs_base(fs_base);
    set_gs_base(gs_base);
}

/// Sets the base of the program's FS.
#[inline]
pub fn set_fs_base(base: u64) {
    // SAFETY: the kernel does not use FS. A base in the upper half would fault when set: cut.
    unsafe { cpu::write_msr(cpu::msr::FS_BASE, base & 0x7fff_ffff_ffff) };
}

/// Sets the base of the program's GS.
#[inline]
pub fn set_gs_base(base: u64) {
    // SAFETY: in the kernel this is what `swapgs` gives the program. Its sign must tell it from the kernel's: cut.
    unsafe { cpu::write_msr(cpu::msr::KERNEL_GS_BASE, base & 0x7fff_ffff_ffff) };
}
