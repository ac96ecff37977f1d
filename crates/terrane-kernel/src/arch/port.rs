//! Input and output ports.

use core::arch::asm;

/// Reads a byte.
///
/// # Safety
/// Reading the port does nothing that somebody relies on not happening.
#[inline]
pub unsafe fn read_u8(port: u16) -> u8 {
    let value: u8;
    // SAFETY: by the caller.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Writes a byte.
///
/// # Safety
/// The device does nothing that somebody relies on not happening.
#[inline]
pub unsafe fn write_u8(port: u16, value: u8) {
    // SAFETY: by the caller.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags)) };
}

/// Writes four bytes.
///
/// # Safety
/// The device does nothing that somebody relies on not happening.
#[inline]
pub unsafe fn write_u32(port: u16, value: u32) {
    // SAFETY: by the caller.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nomem, nostack, preserves_flags)) };
}
