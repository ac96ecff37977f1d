//! Copies between the kernel and the memory of the program that runs here.
//!
//! The copies themselves are a few routines in assembly, one after the other. A page fault in them goes to Terrane like a program's own;
//! if it cannot be resolved, the trap goes on at `user_copy_failed`, which returns from the routine with 1. For that
//! the routines push nothing. They may block (a page may come from swap), so no spin lock is held around them.

use crate::arch::{cpu, cpu::Feature};
use crate::errno::Errno;
use alloc::vec::Vec;
use core::arch::{asm, global_asm};
use core::mem::MaybeUninit;
use terrane::page_table::{Format, X86_64};

global_asm!(
    r#"
    .pushsection .text.user_copies, "ax", @progbits
    .global user_copies
    .global user_copies_end
    .global user_copy_failed
user_copies:
    .balign 16
    .global user_copy           # to rdi, from rsi, rdx bytes: 0, or 1
user_copy:
    sub rdx, 16
    jb 2f
    .balign 16
1:  movups xmm0, [rsi]
    movups [rdi], xmm0
    add rsi, 16
    add rdi, 16
    sub rdx, 16
    jae 1b
2:  add rdx, 16
    test dl, 8
    jz 3f
    mov rax, [rsi]
    mov [rdi], rax
    add rsi, 8
    add rdi, 8
3:  and edx, 7
    jz 5f
4:  mov al, [rsi]
    mov [rdi], al
    inc rsi
    inc rdi
    dec edx
    jnz 4b
5:  xor eax, eax
    ret

    .balign 16
    .global user_clear          # rdi, rsi bytes: 0, or 1
user_clear:
    xorps xmm0, xmm0
    xor eax, eax
    sub rsi, 16
    jb 7f
6:  movups [rdi], xmm0
    add rdi, 16
    sub rsi, 16
    jae 6b
7:  add rsi, 16
    jz 9f
8:  mov [rdi], al
    inc rdi
    dec rsi
    jnz 8b
9:  ret

    .balign 16
    .global user_copy_string    # to rdi, from rsi, up to a NUL, rdx bytes at most; to [rcx] how many before it, or -1 without one
user_copy_string:
    xor r8d, r8d
10: cmp r8, rdx
    je 11f
    mov al, [rsi + r8]
    mov [rdi + r8], al
    test al, al
    jz 12f
    inc r8
    jmp 10b
11: mov r8, -1
12: mov [rcx], r8
    xor eax, eax
    ret

    .balign 16
    .global user_load           # the word at rsi, to [rdi]
user_load:
    mov eax, [rsi]
    mov [rdi], eax
    xor eax, eax
    ret

    .balign 16
    .global user_exchange       # the word at rsi: if it is [rdi], to edx; what was there to [rdi]
user_exchange:
    mov eax, [rdi]
    lock cmpxchg [rsi], edx
    mov [rdi], eax
    mov eax, 0
    ret

user_copies_end:
user_copy_failed:
    mov eax, 1
    ret
    .popsection
"#
);

unsafe extern "C" {
    static user_copies: u8;
    static user_copies_end: u8;
    fn user_copy_failed();
    fn user_copy(to: *mut u8, from: *const u8, len: usize) -> u32;
    fn user_clear(at: *mut u8, len: usize) -> u32;
    fn user_copy_string(to: *mut u8, from: *const u8, len: usize, found: *mut usize) -> u32;
    fn user_load(to: *mut u32, from: *const u32) -> u32;
    fn user_exchange(current: *mut u32, at: *mut u32, new: u32) -> u32;
}

/// True when an instruction is part of a copy: then a page fault there is the program's memory's.
pub fn is_copy(rip: u64) -> bool {
    (&raw const user_copies as u64..&raw const user_copies_end as u64).contains(&rip)
}

/// Where a copy goes on that cannot be done.
pub fn copy_failed() -> u64 {
    user_copy_failed as *const () as u64
}

/// Types of which any bytes are a value, and that have no padding.
///
/// # Safety
/// As the first sentence says.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($int:ty)*) => { $(
        // SAFETY: an integer.
        unsafe impl Plain for $int {}
    )* }
}

plain!(u8 u16 u32 u64 i8 i16 i32 i64 usize isize);

// SAFETY: one after the other, without gaps.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Checks that `len` bytes at `at` are a program's.
#[inline]
fn check(at: u64, len: u64) -> Result<(), Errno> {
    if at < X86_64::USER_END && len <= X86_64::USER_END - at { Ok(()) } else { Err(Errno::EFAULT) }
}

/// Runs `copy` with programs' memory within reach.
#[inline]
fn reach(copy: impl FnOnce() -> u32) -> Result<(), Errno> {
    let guarded = cpu::has(Feature::Smap);
    if guarded {
        // SAFETY: the processor has the instruction. Should the copy block, `switch` keeps the flag with the thread.
        unsafe { asm!("stac", options(nostack)) };
    }
    let failed = copy() != 0;
    if guarded {
        // SAFETY: as above.
        unsafe { asm!("clac", options(nostack)) };
    }
    if failed { Err(Errno::EFAULT) } else { Ok(()) }
}

/// Reads `to.len()` bytes at `at`.
///
/// # Errors
/// `EFAULT` when not all can be read; some may have been.
#[inline]
pub fn read(to: &mut [u8], at: u64) -> Result<(), Errno> {
    check(at, to.len() as u64)?;
    // SAFETY: `to` is the caller's; the other side is a program's, and a fault there ends the copy.
    reach(|| unsafe { user_copy(to.as_mut_ptr(), at as *const u8, to.len()) })
}

/// Writes `from` to `at`.
///
/// # Errors
/// `EFAULT` when not all can be written; some may have been.
#[inline]
pub fn write(at: u64, from: &[u8]) -> Result<(), Errno> {
    check(at, from.len() as u64)?;
    // SAFETY: as in `read`.
    reach(|| unsafe { user_copy(at as *mut u8, from.as_ptr(), from.len()) })
}

/// Reads a value.
///
/// # Errors
/// `EFAULT`.
#[inline]
pub fn read_value<T: Plain>(at: u64) -> Result<T, Errno> {
    check(at, size_of::<T>() as u64)?;
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: as in `read`; and any bytes are a `T`.
    unsafe {
        reach(|| user_copy(value.as_mut_ptr().cast(), at as *const u8, size_of::<T>()))?;
        Ok(value.assume_init())
    }
}

/// Writes a value.
///
/// # Errors
/// `EFAULT`.
#[inline]
pub fn write_value<T: Plain>(at: u64, value: T) -> Result<(), Errno> {
    check(at, size_of::<T>() as u64)?;
    // SAFETY: as in `read`; a `T` has no bytes that are not initialised.
    reach(|| unsafe { user_copy(at as *mut u8, (&raw const value).cast(), size_of::<T>()) })
}

/// Reads bytes up to a NUL, which is not among those returned.
///
/// # Errors
/// `EFAULT`; `ENAMETOOLONG` when there is no NUL within `limit` bytes; `ENOMEM`.
pub fn read_string(at: u64, limit: usize) -> Result<Vec<u8>, Errno> {
    const STEP: usize = 256;
    let mut bytes = Vec::<u8>::new();
    while bytes.len() < limit {
        let step = STEP.min(limit - bytes.len());
        bytes.try_reserve(step)?;
        let from = at.checked_add(bytes.len() as u64).ok_or(Errno::EFAULT)?;
        // The string may end right before the end of the program's addresses.
        check(from, 1)?;
        let step = step.min((X86_64::USER_END - from) as usize);
        let mut found = 0;
        // SAFETY: as in `read`, to reserved room; as many bytes as are counted have been written.
        unsafe {
            let to = bytes.as_mut_ptr().add(bytes.len());
            reach(|| user_copy_string(to, from as *const u8, step, &mut found))?;
            if found != usize::MAX {
                bytes.set_len(bytes.len() + found);
                return Ok(bytes);
            }
            bytes.set_len(bytes.len() + step);
        }
    }
    Err(Errno::ENAMETOOLONG)
}

/// Writes `len` zeros.
///
/// # Errors
/// `EFAULT`.
pub fn clear(at: u64, len: u64) -> Result<(), Errno> {
    check(at, len)?;
    // SAFETY: as in `read`.
    reach(|| unsafe { user_clear(at as *mut u8, len as usize) })
}

/// An atomic load of a word.
///
/// # Errors
/// `EFAULT`; `EINVAL` when it is not aligned.
pub fn load_u32(at: u64) -> Result<u32, Errno> {
    check_word(at)?;
    let mut value = 0;
    // SAFETY: as in `read`.
    reach(|| unsafe { user_load(&mut value, at as *const u32) })?;
    Ok(value)
}

/// An atomic compare-and-swap of a word: `Ok(Ok(_))` when it was `current` and is `new` now; each with what was there.
///
/// # Errors
/// `EFAULT`; `EINVAL` when it is not aligned.
pub fn compare_exchange_u32(at: u64, current: u32, new: u32) -> Result<Result<u32, u32>, Errno> {
    check_word(at)?;
    let mut value = current;
    // SAFETY: as in `read`.
    reach(|| unsafe { user_exchange(&mut value, at as *mut u32, new) })?;
    Ok(if value == current { Ok(value) } else { Err(value) })
}

fn check_word(at: u64) -> Result<(), Errno> {
    if !at.is_multiple_of(4) {
        return Err(Errno::EINVAL);
    }
    check(at, 4)
}
