//! A guest of a few instructions that writes bytes to ports: to see whether an accelerator runs code at all, and, in tests, in
//! place of a kernel.

/// The machine's port that ends the emulator: a byte `b` makes its exit status `2 b + 1`.
pub const END_PORT: u16 = 0xf4;
/// What is written there to be told from any other end.
pub const END: u8 = 0x10;
/// The emulator's exit status for it.
pub const END_STATUS: i32 = 2 * END as i32 + 1;

const BASE: u32 = 0x10_0000;

/// A kernel that writes these bytes to these ports, one after the other, and then stands still.
///
/// It is an ELF file of 64 bits with the note by which QEMU finds the entry of 32 bits (Xen's number 18, PVH).
pub fn guest(writes: &[(u16, &[u8])]) -> Vec<u8> {
    const HEADERS: usize = 64 + 2 * 56;
    const NOTE: usize = 20;
    let entry = BASE + (HEADERS + NOTE) as u32;
    let mut code = Vec::new();
    for (port, bytes) in writes {
        // mov dx, port
        code.extend([0x66, 0xba]);
        code.extend(port.to_le_bytes());
        for byte in *bytes {
            // mov al, byte; out dx, al
            code.extend([0xb0, *byte, 0xee]);
        }
    }
    // cli; hlt; jmp to the hlt
    code.extend([0xfa, 0xf4, 0xeb, 0xfd]);
    let length = (HEADERS + NOTE + code.len()) as u64;
    let mut file = Vec::with_capacity(length as usize);
    file.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    file.extend(2u16.to_le_bytes()); // a program
    file.extend(62u16.to_le_bytes()); // for x86-64
    file.extend(1u32.to_le_bytes());
    file.extend(u64::from(entry).to_le_bytes());
    file.extend(64u64.to_le_bytes()); // where the segments are described
    file.extend(0u64.to_le_bytes());
    file.extend(0u32.to_le_bytes());
    for number in [64u16, 56, 2, 64, 0, 0] {
        file.extend(number.to_le_bytes());
    }
    for (kind, flags, offset, size) in [(1u32, 7u32, 0u64, length), (4, 4, HEADERS as u64, NOTE as u64)] {
        file.extend(kind.to_le_bytes());
        file.extend(flags.to_le_bytes());
        let address = u64::from(BASE) + offset;
        for number in [offset, address, address, size, size, if kind == 1 { 4096 } else { 4 }] {
            file.extend(number.to_le_bytes());
        }
    }
    for number in [4u32, 4, 18] {
        file.extend(number.to_le_bytes());
    }
    file.extend(b"Xen\0");
    file.extend(entry.to_le_bytes());
    file.extend(code);
    file
}
