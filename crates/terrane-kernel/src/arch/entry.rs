//! The first and the last instructions of traps, interrupts and system calls.
//!
//! # What an entry saves
//!
//! All general registers, and the 16 SSE registers: compiled code, the prebuilt libraries' above all, uses those anywhere and
//! nothing wider. Nothing else changes in the kernel until another thread is switched to, and then `xsave` takes care of it. A
//! whole `xsave` at each entry costs microseconds under emulation.
//!
//! # Stacks
//!
//! From user mode, the kernel runs on the thread's kernel stack, with the registers at its top
//! ([`TrapFrame`](super::TrapFrame)). How an entry gets there differs:
//!
//! * A *system call* loads it from the processor's data.
//! * *Exceptions* come on it by the task state. In the kernel only the copies from and to programs' memory cause
//!   any (`user`), and those are assembly that keeps nothing below its stack pointer; any other is the end.
//! * *Interrupts* come anywhere, also where compiled code keeps values in the 128 bytes below the stack pointer (the red
//!   zone; the kernel's own code could do without, the prebuilt libraries do not). So their gates name a stack of their
//!   own, where the processor puts its five words; from there the entry copies them to the thread's kernel stack, or 128
//!   bytes below the interrupted one's pointer, and goes on there. Interrupts are off until then, so that stack is
//!   free again, and traps nest.
//! * What *cannot be masked* (NMI, double fault, machine check) stays on its own stack, and looks at the base of GS itself to see
//!   whether it is the kernel's: it may have come between a system call and its `swapgs`.
//!
//! # GS
//!
//! In the kernel the base of GS is the processor's data, in user mode the program's. Entries from user mode, and returns to it, exchange the
//! two, with interrupts off. Programs cannot set the base themselves (`CR4.FSGSBASE` is off), and the kernel sets no
//! base in the upper half for them, so its sign tells whose it is.

use core::arch::global_asm;

/// Vectors of interrupts.
pub mod vector {
    /// The first of the legacy interrupt controllers', which are silenced.
    pub const LEGACY: u8 = 0x20;
    /// Input on COM1.
    pub const SERIAL: u8 = 0x30;
    /// The timer.
    pub const TIMER: u8 = 0x40;
    /// Another processor wants this one to look at its run queue.
    pub const RESCHEDULE: u8 = 0x41;
    /// Another processor has changed a page table.
    pub const SHOOT_DOWN: u8 = 0x42;
    /// Nothing.
    pub const SPURIOUS: u8 = 0xff;
}

global_asm!(
    r#"
    .pushsection .text.entry, "ax", @progbits

    # What follows rax, which is pushed already.
    .macro push_rest
    push rbx
    push rcx
    push rdx
    push rsi
    push rdi
    push rbp
    push r8
    push r9
    push r10
    push r11
    push r12
    push r13
    push r14
    push r15
    sub rsp, 264
    movaps [rsp], xmm0
    movaps [rsp + 16], xmm1
    movaps [rsp + 32], xmm2
    movaps [rsp + 48], xmm3
    movaps [rsp + 64], xmm4
    movaps [rsp + 80], xmm5
    movaps [rsp + 96], xmm6
    movaps [rsp + 112], xmm7
    movaps [rsp + 128], xmm8
    movaps [rsp + 144], xmm9
    movaps [rsp + 160], xmm10
    movaps [rsp + 176], xmm11
    movaps [rsp + 192], xmm12
    movaps [rsp + 208], xmm13
    movaps [rsp + 224], xmm14
    movaps [rsp + 240], xmm15
    cld
    .endm

    .macro pop_all
    movaps xmm0, [rsp]
    movaps xmm1, [rsp + 16]
    movaps xmm2, [rsp + 32]
    movaps xmm3, [rsp + 48]
    movaps xmm4, [rsp + 64]
    movaps xmm5, [rsp + 80]
    movaps xmm6, [rsp + 96]
    movaps xmm7, [rsp + 112]
    movaps xmm8, [rsp + 128]
    movaps xmm9, [rsp + 144]
    movaps xmm10, [rsp + 160]
    movaps xmm11, [rsp + 176]
    movaps xmm12, [rsp + 192]
    movaps xmm13, [rsp + 208]
    movaps xmm14, [rsp + 224]
    movaps xmm15, [rsp + 240]
    add rsp, 264
    pop r15
    pop r14
    pop r13
    pop r12
    pop r11
    pop r10
    pop r9
    pop r8
    pop rbp
    pop rdi
    pop rsi
    pop rdx
    pop rcx
    pop rbx
    pop rax
    .endm

    # From an interrupt's stack, which holds rdx, rcx, rax, error, rip, cs, rflags, rsp, ss, to the one in rcx.
    .macro leave_stack
    mov rdx, rsp
    mov rsp, rcx
    push [rdx + 64]
    push [rdx + 56]
    push [rdx + 48]
    push [rdx + 40]
    push [rdx + 32]
    push [rdx + 24]
    push [rdx + 16]
    mov rcx, [rdx + 8]
    mov rdx, [rdx]
    push_rest
    .endm

    # ---- page faults: from user mode straight to `page_fault_from_user` ----
    .balign 16
page_fault_entry:
    push rax
    test byte ptr [rsp + 24], 3
    jz 1f
    swapgs
    push_rest
    mov rdi, rsp
    mov rsi, cr2
    call page_fault_from_user
    cli
    test al, al
    jnz return_to_user
    # Resolved: the frame is as the processor left it, and there is something to do only if somebody has said so.
    cmp byte ptr gs:[24], 0
    jne return_to_user
    jmp return_to_user_now
1:  mov eax, 14
    jmp trap_from_kernel_entry

    # ---- other exceptions: vector in eax, rax and the error code pushed ----
    .balign 16
trap_entry:
    test byte ptr [rsp + 24], 3
    jz trap_from_kernel_entry
    swapgs
    push_rest
    mov rdi, rsp
    mov esi, eax
    call trap_from_user
    jmp return_to_user

trap_from_kernel_entry:
    push_rest
    mov rdi, rsp
    mov esi, eax
    mov rdx, cr2
    call trap_from_kernel
    jmp return_to_kernel

    # ---- interrupts: the same, on a stack to be left ----
    .balign 16
interrupt_entry:
    push rcx
    push rdx
    test byte ptr [rsp + 40], 3
    jz 2f
    swapgs
    mov rcx, gs:[8]
    leave_stack
    mov rdi, rsp
    mov esi, eax
    call interrupt_from_user
    jmp return_to_user
2:  mov rcx, [rsp + 56]
    sub rcx, 128
    and rcx, -16
    leave_stack
    mov rdi, rsp
    mov esi, eax
    call interrupt_from_kernel
    jmp return_to_kernel

    # ---- what cannot be masked ----
    .balign 16
paranoid_entry:
    push_rest
    mov edi, eax
    mov ecx, 0xc0000101
    rdmsr
    mov ebx, edx
    test ebx, ebx
    js 1f
    swapgs
1:  mov esi, edi
    mov rdi, rsp
    call paranoid_trap
    test ebx, ebx
    js return_to_kernel
    swapgs
    jmp return_to_kernel

    # ---- system calls ----
    .balign 16
    .global syscall_entry
syscall_entry:
    swapgs
    mov gs:[16], rsp
    mov rsp, gs:[8]
    push {user_data}
    push gs:[16]
    push r11
    push {user_code}
    push rcx
    push rax
    push rax
    push_rest
    mov rdi, rsp
    call syscall_from_user
    # Interrupts are off. The short way back, if the registers are as `sysret` leaves them.
    mov rcx, [rsp + 264 + 12 * 8]
    cmp rcx, [rsp + 264 + 16 * 8]
    jne return_to_user_now
    mov r11, [rsp + 264 + 4 * 8]
    cmp r11, [rsp + 264 + 18 * 8]
    jne return_to_user_now
    pop_all
    mov rsp, [rsp + 32]
    swapgs
    sysretq

    # ---- the ways back ----
    .balign 16
    .global return_to_user
return_to_user:
    cli
    mov rdi, rsp
    call before_return_to_user
return_to_user_now:
    pop_all
    add rsp, 8
    swapgs
    iretq

return_to_kernel:
    pop_all
    add rsp, 8
    iretq

    # rdi: a frame. rsi: where it belongs, at the top of the kernel stack. Copied from its end, since the two may overlap. 
    .global enter_user_at
enter_user_at:
    cli
    mov rdx, rsi
    cmp rdi, rsi
    je 1f
    mov ecx, 54
    lea rdi, [rdi + 53 * 8]
    lea rsi, [rsi + 53 * 8]
    xchg rdi, rsi
    mov rsp, rdx
    sub rsp, 8
    std
    rep movsq
    cld
1:  mov rsp, rdx
    jmp return_to_user

    .popsection
"#,
    user_data = const super::gdt::USER_DATA,
    user_code = const super::gdt::USER_CODE,
);

// The gates, 16 bytes each: they push an error code where the processor does not, and rax, and put the number of the vector into eax.
global_asm!(
    r#"
    .pushsection .text.entry, "ax", @progbits
    .balign 16
    .global exception_gates
exception_gates:
    .set number, 0
    .rept 32
    .balign 16
    .if number == 14
    jmp page_fault_entry
    .else
    .if (number != 8) && (number != 10) && (number != 11) && (number != 12) && (number != 13) && (number != 17) && (number != 21)
    pushq $0
    .endif
    pushq %rax
    movl $number, %eax
    .if (number == 2) || (number == 8) || (number == 18)
    jmp paranoid_entry
    .else
    jmp trap_entry
    .endif
    .endif
    .set number, number + 1
    .endr

    .balign 16
    .global interrupt_gates
interrupt_gates:
    .rept 224
    .balign 16
    pushq $0
    pushq %rax
    movl $number, %eax
    jmp interrupt_entry
    .set number, number + 1
    .endr
    .popsection
"#,
    options(att_syntax)
);
