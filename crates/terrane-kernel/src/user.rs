//! Copies between the kernel and the memory of the program that runs here.

use crate::errno::Errno;

/// Types any bytes of which are a value, and that have no padding.
///
/// # Safety
/// As the first sentence says.
pub unsafe trait Plain: Copy {}
macro_rules! plain { ($($t:ty)*) => { $(
    // SAFETY: an integer.
    unsafe impl Plain for $t {}
    // SAFETY: integers.
    unsafe impl<const N: usize> Plain for [$t; N] {}
)* } }
plain!(u8 u16 u32 u64 i8 i16 i32 i64 usize isize);

/// Reads `to.len()` bytes at `at`.
/// # Errors
/// `EFAULT` when not all can be read; some may have been.
pub fn read(_to: &mut [u8], _at: u64) -> Result<(), Errno> {
    todo!()
}
/// Writes `from` to `at`.
/// # Errors
/// `EFAULT` when not all can be written; some may have been.
pub fn write(_at: u64, _from: &[u8]) -> Result<(), Errno> {
    todo!()
}
/// Reads a value.
/// # Errors
/// `EFAULT`.
pub fn read_value<T: Plain>(_at: u64) -> Result<T, Errno> {
    todo!()
}
/// Writes a value.
/// # Errors
/// `EFAULT`.
pub fn write_value<T: Plain>(_at: u64, _value: T) -> Result<(), Errno> {
    todo!()
}
/// Reads bytes up to a NUL, which is not among those returned.
/// # Errors
/// `EFAULT`; `ENAMETOOLONG` when there is no NUL within `limit` bytes; `ENOMEM`.
pub fn read_string(_at: u64, _limit: usize) -> Result<alloc::vec::Vec<u8>, Errno> {
    todo!()
}
/// Writes `len` zeros.
/// # Errors
/// `EFAULT`.
pub fn clear(_at: u64, _len: u64) -> Result<(), Errno> {
    todo!()
}
/// An atomic load of an aligned word.
/// # Errors
/// `EFAULT`; `EINVAL` when it is not aligned.
pub fn load_u32(_at: u64) -> Result<u32, Errno> {
    todo!()
}
/// An atomic compare-and-swap of an aligned word: `Ok(Ok(_))` when it was `current` and is `new` now; each with what was there.
/// # Errors
/// `EFAULT`; `EINVAL` when it is not aligned.
pub fn compare_exchange_u32(_at: u64, _current: u32, _new: u32) -> Result<Result<u32, u32>, Errno> {
    todo!()
}
