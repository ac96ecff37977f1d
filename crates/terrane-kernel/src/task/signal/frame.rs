//! What a handler finds on its stack, and `sigreturn` takes back: `struct rt_sigframe` of Linux on x86-64.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 8 | where the handler returns to: the restorer |
//! | 8 | 304 | `ucontext`: flags, link, alternate stack, registers (`sigcontext`), mask |
//! | 312 | 128 | `siginfo` |
//! | above, at a multiple of 64 | the XSAVE area and 4 | vector registers; bytes 464 on describe them |
//!
//! The frame begins at an address that is 8 below a multiple of 16, as if the handler had been called.

use super::{AlternateStack, Info, Set};
use crate::arch::{FpuState, TrapFrame};
use crate::errno::Errno;
use crate::task::thread::CurrentThread;
use crate::user;
use terrane::page_table::{Format, X86_64};

/// Bytes below the stack pointer that belong to the interrupted function.
const RED_ZONE: u64 = 128;
const CONTEXT: usize = 8;
const REGISTERS: usize = CONTEXT + 40;
const MASK: usize = REGISTERS + 256;
const INFO: usize = MASK + 8;
/// Bytes up to the vector registers.
const FRAME: usize = INFO + 128;
/// The XMM registers in the area.
const XMM: usize = 160;
const XMM_END: usize = XMM + 256;
/// What the kernel says about the area (`struct _fpx_sw_bytes`).
const SOFTWARE: usize = 464;
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2: u32 = 0x4650_5845;
/// The most that an area has: x87, SSE, AVX and AVX-512 are 2696 bytes.
const AREA_MAX: usize = 3072;
/// The part of the area that there is without XSAVE.
const LEGACY: usize = 512;

/// `uc_flags`: there is an XSAVE area, and the stack segment is real.
const UC_FLAGS: u64 = 1 | 2 | 4;

/// Flags that a handler's return may set: the arithmetic ones, direction, trap, alignment check, resume.
const USER_FLAGS: u64 = 0x5_0dd5;

/// The least stack for a signal that programs should have (`AT_MINSIGSTKSZ`).
pub fn minimum_stack(thread: &CurrentThread) -> u64 {
    // SAFETY: it is the current thread.
    let area = unsafe { thread.with_fpu(|fpu| fpu.bytes().len()) };
    (FRAME + area + 4 + 64 + 16 + 128) as u64
}

struct Words<'a>(&'a mut [u8]);

impl Words<'_> {
    fn put(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
    fn put32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// `siginfo_t`.
pub fn siginfo(info: &Info) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut words = Words(&mut bytes);
    words.put32(0, info.signal);
    words.put32(4, info.errno as u32);
    words.put32(8, info.code as u32);
    let is_child = info.signal == super::SIGCHLD && info.code > 0;
    if is_child {
        // pid and uid are 32 bits each, and so is the status; the times are 64.
        words.put(16, info.words[0]);
        words.put32(24, info.words[1] as u32);
        words.put(32, info.words[2]);
        words.put(40, info.words[3]);
    } else {
        for (nth, &word) in info.words.iter().enumerate() {
            words.put(16 + 8 * nth, word);
        }
    }
    bytes
}

/// What a program gave as `siginfo_t` (`rt_sigqueueinfo`).
pub fn parse_siginfo(signal: u32, bytes: &[u8; 128]) -> Info {
    let words = [16, 24, 32, 40].map(|at| word(bytes, at));
    Info { signal, errno: word32(bytes, 4) as i32, code: word32(bytes, 8) as i32, words }
}

/// What decides where a handler runs, and how it gets back.
pub struct Call {
    pub handler: u64,
    pub restorer: u64,
    /// It wants the alternate stack.
    pub on_alternate: bool,
    /// The mask that comes back with `sigreturn`.
    pub mask: Set,
    /// The trap that caused it and its error code, and the address.
    pub trap: (u64, u64, u64),
}

/// True when `sp` lies on the alternate stack.
pub fn is_on(stack: &AlternateStack, sp: u64) -> bool {
    stack.flags & super::SS_AUTODISARM == 0
        && stack.size != 0
        && sp > stack.base
        && sp - stack.base <= stack.size
}

/// Puts a frame on the stack and lets the thread begin in the handler.
///
/// # Errors
/// [`Errno::EFAULT`] when the stack is not there: the registers are as before.
pub fn push(thread: &CurrentThread, frame: &mut TrapFrame, call: &Call, info: &Info) -> Result<(), Errno> {
    let stack = thread.private().alternate_stack;
    let already = is_on(&stack, frame.rsp);
    let enters = call.on_alternate && stack.size != 0 && !already;
    let top = if enters { stack.base + stack.size } else { frame.rsp.wrapping_sub(RED_ZONE) };
    let mut bytes = [0; FRAME];
    let mut words = Words(&mut bytes);
    // A copy: writing to the program may block, and then the thread's own area is used for what it is for.
    let mut buffer = [0; AREA_MAX];
    // SAFETY: it is the current thread.
    let size = unsafe {
        thread.with_fpu(|fpu| {
            fpu.save();
            let size = fpu.bytes().len().min(AREA_MAX);
            buffer[..size].copy_from_slice(&fpu.bytes()[..size]);
            size
        })
    };
    let area = &mut buffer[..size];
    for (place, xmm) in area[XMM..XMM_END].chunks_exact_mut(8).zip(frame.xmm.as_flattened()) {
        place.copy_from_slice(&xmm.to_ne_bytes());
    }
    let mut software = Words(area);
    software.put32(SOFTWARE, MAGIC1);
    software.put32(SOFTWARE + 4, size as u32 + 4);
    software.put(SOFTWARE + 8, FpuState::components());
    software.put32(SOFTWARE + 16, size as u32);
    let area_at = top.wrapping_sub(size as u64 + 4) & !63;
    let at = (area_at.wrapping_sub(FRAME as u64) & !15).wrapping_sub(8);
    user::write(area_at, area)?;
    user::write_value(area_at + size as u64, MAGIC2)?;
    // On the alternate stack it must have room.
    if (enters || already && call.on_alternate) && at < stack.base {
        return Err(Errno::EFAULT);
    }
    words.put(0, call.restorer);
    words.put(CONTEXT, UC_FLAGS);
    words.put(CONTEXT + 16, stack.base);
    let stack_flags = if stack.size == 0 { super::SS_DISABLE } else { stack.flags | u32::from(already) };
    words.put32(CONTEXT + 24, stack_flags);
    words.put(CONTEXT + 32, stack.size);
    let registers = [
        frame.r8,
        frame.r9,
        frame.r10,
        frame.r11,
        frame.r12,
        frame.r13,
        frame.r14,
        frame.r15,
        frame.rdi,
        frame.rsi,
        frame.rbp,
        frame.rbx,
        frame.rdx,
        frame.rax,
        frame.rcx,
        frame.rsp,
        frame.rip,
        frame.rflags,
        // cs, gs, fs, ss: 16 bits each.
        frame.cs & 0xffff | (frame.ss & 0xffff) << 48,
        call.trap.1,
        call.trap.0,
        call.mask.0,
        call.trap.2,
        area_at,
    ];
    for (nth, register) in registers.into_iter().enumerate() {
        words.put(REGISTERS + 8 * nth, register);
    }
    words.put(MASK, call.mask.0);
    words.0[INFO..].copy_from_slice(&siginfo(info));
    user::write(at, words.0)?;
    frame.rdi = info.signal.into();
    frame.rsi = at + INFO as u64;
    frame.rdx = at + CONTEXT as u64;
    frame.rax = 0;
    frame.rip = call.handler;
    frame.rsp = at;
    // Direction, resume and trap flags are the handler's own.
    frame.rflags &= !(1 << 10 | 1 << 16 | 1 << 8);
    if enters && stack.flags & super::SS_AUTODISARM != 0 {
        thread.change(|own| own.alternate_stack = AlternateStack::default());
    }
    Ok(())
}

/// `rt_sigreturn`: takes back what [`push`] put down.
///
/// # Errors
/// [`Errno::EFAULT`] when it is not there or makes no sense: the thread gets `SIGSEGV`.
pub fn pop(thread: &CurrentThread, frame: &mut TrapFrame) -> Result<(), Errno> {
    // The handler's `ret` has taken the first word.
    let at = frame.rsp.wrapping_sub(8);
    let mut bytes = [0; FRAME];
    user::read(&mut bytes, at)?;
    let register = |nth: usize| word(&bytes, REGISTERS + 8 * nth);
    let (rip, rsp) = (register(16), register(15));
    // An address that is not a program's would fault in the kernel, on the way out.
    if rip >= <X86_64 as Format>::USER_END {
        return Err(Errno::EFAULT);
    }
    let area_at = register(23);
    if area_at != 0 {
        take_area(thread, frame, area_at)?;
    }
    let to: [&mut u64; 15] = [
        &mut frame.r8,
        &mut frame.r9,
        &mut frame.r10,
        &mut frame.r11,
        &mut frame.r12,
        &mut frame.r13,
        &mut frame.r14,
        &mut frame.r15,
        &mut frame.rdi,
        &mut frame.rsi,
        &mut frame.rbp,
        &mut frame.rbx,
        &mut frame.rdx,
        &mut frame.rax,
        &mut frame.rcx,
    ];
    for (nth, to) in to.into_iter().enumerate() {
        *to = word(&bytes, REGISTERS + 8 * nth);
    }
    frame.rsp = rsp;
    frame.rip = rip;
    frame.rflags = frame.rflags & !USER_FLAGS | register(17) & USER_FLAGS;
    thread.set_mask(Set(word(&bytes, MASK)));
    let stack = AlternateStack {
        base: word(&bytes, CONTEXT + 16),
        flags: word32(&bytes, CONTEXT + 24),
        size: word(&bytes, CONTEXT + 32),
    };
    // As Linux: what cannot be is ignored.
    let _ = super::set_alternate_stack(thread, stack, frame.rsp);
    Ok(())
}

fn take_area(thread: &CurrentThread, frame: &mut TrapFrame, at: u64) -> Result<(), Errno> {
    let mut buffer = [0; AREA_MAX];
    // SAFETY: it is the current thread.
    let size = unsafe { thread.with_fpu(|fpu| fpu.bytes().len()) }.min(AREA_MAX);
    user::read(&mut buffer[..LEGACY], at)?;
    let whole = word32(&buffer, SOFTWARE) == MAGIC1 && word32(&buffer, SOFTWARE + 16) as usize == size;
    if whole && size > LEGACY {
        user::read(&mut buffer[LEGACY..size], at + LEGACY as u64)?;
    } else if size > LEGACY {
        // Only the old part is there: the rest as a program begins with, and XSTATE_BV says so.
        buffer[LEGACY] = 3;
    }
    for (xmm, bytes) in frame.xmm.as_flattened_mut().iter_mut().zip(buffer[XMM..XMM_END].chunks_exact(8)) {
        *xmm = word(bytes, 0);
    }
    // SAFETY: it is the current thread. Nothing blocks in between.
    unsafe {
        thread.with_fpu(|fpu| {
            fpu.bytes_mut()[..size].copy_from_slice(&buffer[..size]);
            fpu.sanitize();
            fpu.restore();
        });
    }
    Ok(())
}
