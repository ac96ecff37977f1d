//! Backtraces, and the end in a panic.
//!
//! The way from a function to its caller is in the unwinding tables (`.eh_frame`), which the compiler writes for the kernel's code as for
//! the prebuilt libraries'. So no register is given away for frame pointers, and none is missing in what is not ours to compile.

use super::frame::TrapFrame;
use super::{interrupts, percpu, stack, trap};
use crate::console::report_in_panic;
use core::arch::naked_asm;
use core::cell::UnsafeCell;
use core::fmt;
use core::mem::MaybeUninit;
use gimli::{
    BaseAddresses, CfaRule, EhFrame, EndianSlice, LittleEndian, Register, RegisterRule, UnwindContext,
    UnwindContextStorage, UnwindSection, UnwindTableRow,
};

/// Frames at most.
const DEPTH: usize = 64;
/// Bytes of stack at most.
const STACK: u64 = 1 << 20;

unsafe extern "C" {
    static kernel_start: u8;
    static text_end: u8;
    static eh_frame_start: u8;
    static eh_frame_end: u8;
}

/// The registers at one point of the program, as DWARF numbers them; the last is where it goes on.
#[derive(Clone, Copy)]
#[repr(C)]
struct Registers([u64; 17]);

const RBX: usize = 3;
const RBP: usize = 6;
const RSP: usize = 7;
const R12: usize = 12;
const RIP: usize = 16;

/// Room for one row of rules, and one that is remembered.
struct Store;

impl UnwindContextStorage<usize> for Store {
    type Rules = [(Register, RegisterRule<usize>); 32];
    type Stack = [UnwindTableRow<usize, Self>; 4];
}

struct Context(UnsafeCell<MaybeUninit<UnwindContext<usize, Store>>>);

// SAFETY: used by the one processor that panics first, once.
unsafe impl Sync for Context {}

/// Not on the stack, of which there may not be much left.
static CONTEXT: Context = Context(UnsafeCell::new(MaybeUninit::uninit()));

/// The registers of the caller that it expects to find again, its stack pointer, and where it goes on.
#[unsafe(naked)]
extern "C" fn here(_registers: &mut Registers) {
    naked_asm!(
        "mov [rdi + 3 * 8], rbx",
        "mov [rdi + 6 * 8], rbp",
        "lea rax, [rsp + 8]",
        "mov [rdi + 7 * 8], rax",
        "mov [rdi + 12 * 8], r12",
        "mov [rdi + 13 * 8], r13",
        "mov [rdi + 14 * 8], r14",
        "mov [rdi + 15 * 8], r15",
        "mov rax, [rsp]",
        "mov [rdi + 16 * 8], rax",
        "ret",
    );
}

/// Reports what went wrong and how it came there, and ends the machine.
pub fn panic(text: fmt::Arguments<'_>) -> ! {
    let mut registers = Registers([0; 17]);
    here(&mut registers);
    end(text, registers, false)
}

/// The same, for a trap that the kernel did not expect.
pub fn panic_in_trap(frame: &TrapFrame, vector: u8, addr: u64) -> ! {
    let mut registers = Registers([0; 17]);
    registers.0[RBX] = frame.rbx;
    registers.0[RBP] = frame.rbp;
    registers.0[RSP] = frame.rsp;
    registers.0[R12..RIP].copy_from_slice(&[frame.r12, frame.r13, frame.r14, frame.r15]);
    registers.0[RIP] = frame.rip;
    if vector == 8 && stack::is_guard(addr) {
        end(
            format_args!("a kernel stack has overflowed, at {:#x}, stack {:#x}", frame.rip, frame.rsp),
            registers,
            true,
        );
    }
    end(
        format_args!(
            "trap {vector} in the kernel: error {:#x}, address {addr:#x}, at {:#x}, stack {:#x}",
            frame.orig_rax, frame.rip, frame.rsp
        ),
        registers,
        true,
    )
}

fn end(text: fmt::Arguments<'_>, registers: Registers, in_trap: bool) -> ! {
    interrupts::disable();
    if !trap::stop_others() {
        // A panic in a panic, or on two processors at once: the first one reports, and ends the machine.
        trap::stop();
    }
    report_in_panic(format_args!("@panic cpu {}: {text}", percpu::this().index));
    frames(registers, in_trap);
    super::exit(1)
}

/// Reports the frames from `registers` up. `exact`: the first is where it goes on, not where a call returns to.
fn frames(mut registers: Registers, mut exact: bool) {
    // SAFETY: the section lies between the two symbols.
    let section = unsafe {
        let (start, end) = (&raw const eh_frame_start, &raw const eh_frame_end);
        core::slice::from_raw_parts(start, end as usize - start as usize)
    };
    let mut tables = EhFrame::from(EndianSlice::new(section, LittleEndian));
    tables.set_address_size(8);
    let bases = BaseAddresses::default().set_eh_frame(&raw const eh_frame_start as u64);
    // SAFETY: only this processor comes here, once.
    let context = unsafe { (*CONTEXT.0.get()).write(UnwindContext::new_in()) };
    let bottom = registers.0[RSP];
    for _ in 0..DEPTH {
        let at = registers.0[RIP];
        if !is_code(at) {
            return;
        }
        report_in_panic(format_args!("@frame {at:#x}"));
        let place = if exact { at } else { at - 1 };
        exact = false;
        let row = tables.unwind_info_for_address(&bases, context, place, EhFrame::cie_from_offset);
        let Some(caller) = row.ok().and_then(|row| caller(&registers, row, bottom)) else { return };
        registers = caller;
    }
}

/// The registers of the caller, by the rules of one row of the tables.
fn caller(registers: &Registers, row: &UnwindTableRow<usize, Store>, bottom: u64) -> Option<Registers> {
    let &CfaRule::RegisterAndOffset { register, offset } = row.cfa() else { return None };
    let frame = registers.0.get(usize::from(register.0))?.checked_add_signed(offset)?;
    if !(bottom..bottom + STACK).contains(&frame) {
        return None;
    }
    let mut caller = *registers;
    caller.0[RSP] = frame;
    caller.0[RIP] = 0;
    for &(register, ref rule) in row.registers() {
        let (Some(value), &RegisterRule::Offset(offset)) = (caller.0.get_mut(usize::from(register.0)), rule)
        else {
            continue;
        };
        let at = frame.checked_add_signed(offset)?;
        if !at.is_multiple_of(8) || !(bottom - STACK..bottom + STACK).contains(&at) {
            return None;
        }
        // SAFETY: near the stack pointer of the kernel's code. Should it be no stack, this panic ends without its last frames.
        *value = unsafe { (at as *const u64).read_volatile() };
    }
    Some(caller)
}

fn is_code(addr: u64) -> bool {
    (&raw const kernel_start as u64..&raw const text_end as u64).contains(&addr)
}
