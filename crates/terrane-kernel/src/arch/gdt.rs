//! Segments.

/// The selector of programs' code.
pub const USER_CODE: u16 = 0x33;
/// The selector of programs' data and stack.
pub const USER_DATA: u16 = 0x2b;
