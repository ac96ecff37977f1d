//! The serial lines: bytes out, bytes in.

use super::port;

/// A UART of the 16550 kind, by its first port.
#[derive(Clone, Copy)]
pub struct Serial(u16);

/// Standard output and input of programs.
pub const COM1: Serial = Serial(0x3f8);
/// The kernel's report.
pub const COM2: Serial = Serial(0x2f8);
/// Standard error of programs.
pub const COM3: Serial = Serial(0x3e8);

impl Serial {
    /// Sets it up: 115200 bits a second, 8 bits, FIFOs on, no interrupts.
    pub fn set_up(self) {
        for (register, value) in [(1, 0), (3, 0x80), (0, 1), (1, 0), (3, 3), (2, 0x07), (4, 0x0b)] {
            // SAFETY: registers of this UART, which only this module drives.
            unsafe { port::write_u8(self.0 + register, value) };
        }
    }

    /// Asks for an interrupt when a byte has come.
    pub fn interrupt_on_input(self) {
        // SAFETY: as above.
        unsafe { port::write_u8(self.0 + 1, 1) };
    }

    /// Sends bytes. The FIFO takes 16 at a time.
    pub fn send_all(self, bytes: &[u8]) {
        for part in bytes.chunks(16) {
            // SAFETY: as above. With the transmitter empty there is room for 16 bytes.
            unsafe {
                while port::read_u8(self.0 + 5) & 0x20 == 0 {
                    core::hint::spin_loop();
                }
                for &byte in part {
                    port::write_u8(self.0, byte);
                }
            }
        }
    }

    /// A byte that has come, if one has.
    pub fn receive(self) -> Option<u8> {
        // SAFETY: as above; who calls takes the byte.
        unsafe { (port::read_u8(self.0 + 5) & 1 != 0).then(|| port::read_u8(self.0)) }
    }
}
