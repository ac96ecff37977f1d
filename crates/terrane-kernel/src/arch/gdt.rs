//! Segments, and the stacks that traps begin on.

use super::percpu::PerCpu;
use core::arch::asm;
use core::cell::UnsafeCell;
use terrane::OutOfMemory;

/// The selector of the kernel's code.
pub const KERNEL_CODE: u16 = 0x08;
/// The selector of programs' data and stack.
pub const USER_DATA: u16 = 0x2b;
/// The selector of programs' code.
pub const USER_CODE: u16 = 0x33;
const TASK: u16 = 0x38;

/// Stacks that traps begin on whatever the stack pointer was, by their number in the gates.
#[derive(Clone, Copy)]
#[repr(u8)]
pub enum TrapStack {
    /// The interrupted one, or in user mode the thread's kernel stack.
    Interrupted = 0,
    /// Interrupts: which leave it at once.
    Interrupt = 1,
    /// Interrupts that cannot be masked.
    NonMaskable = 2,
    /// A double fault: the kernel's stack is broken.
    Double = 3,
    /// The machine is broken.
    Machine = 4,
}

const STACKS: usize = 4;
const STACK: usize = 8 << 10;

#[repr(C, packed(4))]
struct TaskState {
    _reserved: u32,
    stacks: [u64; 3],
    _reserved_too: u64,
    trap_stacks: [u64; 7],
    _reserved_three: [u16; 5],
    ports: u16,
}

/// The tables of one processor.
pub struct Tables {
    segments: UnsafeCell<[u64; 9]>,
    task: UnsafeCell<TaskState>,
}

#[repr(C, packed)]
struct Pointer {
    limit: u16,
    base: u64,
}

impl Tables {
    /// New ones.
    ///
    /// # Errors
    /// When there is no memory for the stacks.
    pub fn try_new() -> Result<Self, OutOfMemory> {
        let mut stacks = [0; STACKS];
        for top in &mut stacks {
            *top = super::stack::allocate(STACK)? as u64 + STACK as u64;
        }
        Ok(Self {
            segments: UnsafeCell::new([
                0,
                0x00af_9b00_0000_ffff, // 0x08: the kernel's code
                0x00cf_9300_0000_ffff, // 0x10: its data
                0,
                0,                     // 0x20: 32-bit code of programs, if there were any
                0x00cf_f300_0000_ffff, // 0x28: data of programs
                0x00af_fb00_0000_ffff, // 0x30: code of programs
                0,                     // 0x38: the task state
                0,
            ]),
            task: UnsafeCell::new(TaskState {
                _reserved: 0,
                stacks: [0; 3],
                _reserved_too: 0,
                trap_stacks: [stacks[0], stacks[1], stacks[2], stacks[3], 0, 0, 0],
                _reserved_three: [0; 5],
                ports: size_of::<TaskState>() as u16,
            }),
        })
    }

    /// Loads them into this processor, whose `cpu` is.
    pub fn load(cpu: &'static PerCpu) {
        let tables = &cpu.tables;
        let base = tables.task.get() as u64;
        let low = (size_of::<TaskState>() as u64 - 1)
            | (base & 0xff_ffff) << 16
            | 0x89 << 40
            | (base >> 24 & 0xff) << 56;
        // SAFETY: before the tables are loaded nobody else looks at them. They stay for ever; the selectors
        // are those that the kernel runs with, reloaded.
        unsafe {
            let segments = tables.segments.get();
            (*segments)[7] = low;
            (*segments)[8] = base >> 32;
            let pointer = Pointer { limit: size_of::<[u64; 9]>() as u16 - 1, base: segments as u64 };
            asm!(
                "lgdt [{pointer}]",
                "push {code}",
                "lea {scratch}, [rip + 2f]",
                "push {scratch}",
                "retfq",
                "2:",
                "mov ss, {data:x}",
                "xor {scratch:e}, {scratch:e}",
                "mov ds, {scratch:x}",
                "mov es, {scratch:x}",
                "ltr {task:x}",
                pointer = in(reg) &raw const pointer,
                code = const KERNEL_CODE,
                data = in(reg) 0x10u64,
                task = in(reg) u64::from(TASK),
                scratch = out(reg) _,
            );
        }
    }

    /// Sets the stack for entries from user mode.
    #[inline]
    pub fn set_kernel_stack(&self, top: u64) {
        // SAFETY: the processor whose it is reads it, when it enters from user mode: not now.
        unsafe { (*self.task.get()).stacks[0] = top };
    }
}
