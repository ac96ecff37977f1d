//! Numbers that a program cannot guess easily, for `/dev/urandom`: the processor's own where it has them. They are not for keys.

use crate::arch;

/// Fills `buffer`.
pub fn fill(buffer: &mut [u8]) {
    for part in buffer.chunks_mut(8) {
        let value = arch::random().to_ne_bytes();
        part.copy_from_slice(&value[..part.len()]);
    }
}
