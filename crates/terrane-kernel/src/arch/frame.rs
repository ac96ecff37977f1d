//! The registers of what was interrupted.

/// All registers of the program (or of the kernel) as a trap, an interrupt or a system call found them; on the thread's kernel
/// stack. What returns from the trap loads them from here.
///
/// The kernel is compiled code that uses the SSE registers and nothing wider, so an entry saves these 16, and what is wider
/// stays where it is until another thread runs ([`FpuState`](super::FpuState)).
#[derive(Clone, Debug, Default)]
#[repr(C, align(16))]
pub struct TrapFrame {
    /// The SSE registers.
    pub xmm: [[u64; 2]; 16],
    pad: u64,
    /// General registers, in the order in which entries push them.
    pub r15: u64,
    /// See `r15`.
    pub r14: u64,
    /// See `r15`.
    pub r13: u64,
    /// See `r15`.
    pub r12: u64,
    /// See `r15`.
    pub r11: u64,
    /// See `r15`.
    pub r10: u64,
    /// See `r15`.
    pub r9: u64,
    /// See `r15`.
    pub r8: u64,
    /// See `r15`.
    pub rbp: u64,
    /// See `r15`.
    pub rdi: u64,
    /// See `r15`.
    pub rsi: u64,
    /// See `r15`.
    pub rdx: u64,
    /// See `r15`.
    pub rcx: u64,
    /// See `r15`.
    pub rbx: u64,
    /// See `r15`.
    pub rax: u64,
    /// The number of the system call, or the error code of the trap.
    pub orig_rax: u64,
    /// Where it goes on.
    pub rip: u64,
    /// Its code segment.
    pub cs: u64,
    /// Its flags.
    pub rflags: u64,
    /// Its stack pointer.
    pub rsp: u64,
    /// Its stack segment.
    pub ss: u64,
}

const _: () = assert!(size_of::<TrapFrame>() == 27 * 16);

impl TrapFrame {
    /// The registers of a program that is to begin at `rip` with its stack at `rsp`.
    pub fn user(rip: u64, rsp: u64) -> Self {
        Self {
            rip,
            rsp,
            cs: super::gdt::USER_CODE.into(),
            ss: super::gdt::USER_DATA.into(),
            rflags: 0x202,
            ..Self::default()
        }
    }
}
