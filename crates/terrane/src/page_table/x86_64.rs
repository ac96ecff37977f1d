//! The 4-level page tables of x86-64 (48-bit addresses).
//!
//! | bit | name | here |
//! |---|---|---|
//! | 0 | P, present | the entry is valid |
//! | 1 | R/W | stores are allowed |
//! | 2 | U/S | always set: user pages |
//! | 5 | A, accessed | set by the processor, in tables too |
//! | 6 | D, dirty | set by the processor |
//! | 7 | PS, page size | in an upper entry: a block, not a table |
//! | 10 | software | protected by a handler of user faults |
//! | 12..=51 | | the frame; Terrane uses 32 bits of it |
//! | 63 | XD, execute disable | instruction fetches are not allowed |
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3A, section 5.5 "4-level paging".

use super::format::{Format, PteFlags};
use crate::addr::Frame;

const P: u64 = 1;
const RW: u64 = 1 << 1;
const US: u64 = 1 << 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const USER_WP: u64 = 1 << 10;
const XD: u64 = 1 << 63;
/// Every bit that a flag stands for.
const FLAG_BITS: u64 = P | RW | US | A | D | USER_WP | XD;

/// 4-level paging of x86-64. The host turns on `EFER.NXE`, without which bit 63 is reserved.
#[derive(Clone, Copy, Debug)]
pub struct X86_64;

#[inline]
const fn bits(flags: PteFlags) -> u64 {
    let mut raw = P | US;
    if flags.contains(PteFlags::WRITE) {
        raw |= RW;
    }
    if flags.contains(PteFlags::ACCESSED) {
        raw |= A;
    }
    if flags.contains(PteFlags::DIRTY) {
        raw |= D;
    }
    if flags.contains(PteFlags::USER_WP) {
        raw |= USER_WP;
    }
    if !flags.contains(PteFlags::EXEC) {
        raw |= XD;
    }
    raw
}

impl Format for X86_64 {
    const NAME: &'static str = "x86-64";
    const LEVELS: u32 = 4;
    /// One page below the end of the lower half: a `SYSCALL` that ends at the last canonical address would
    /// return to a non-canonical one, which some processors handle badly.
    const USER_END: u64 = 0x7fff_ffff_f000;

    #[inline]
    fn page(frame: Frame, flags: PteFlags) -> u64 {
        frame.address() | bits(flags)
    }

    #[inline]
    fn block(frame: Frame, flags: PteFlags) -> u64 {
        frame.address() | bits(flags) | PS
    }

    /// A is set from the start: otherwise the processor would set it behind the back of a compare-and-swap that
    /// expects the entry as it was written.
    #[inline]
    fn table(frame: Frame) -> u64 {
        frame.address() | P | RW | US | A
    }

    #[inline]
    fn is_block(raw: u64) -> bool {
        raw & PS != 0
    }

    #[inline]
    fn frame(raw: u64) -> Frame {
        Frame::containing(raw)
    }

    #[inline]
    fn flags(raw: u64) -> PteFlags {
        let mut flags = PteFlags::READ;
        flags.set(PteFlags::WRITE, raw & RW != 0);
        flags.set(PteFlags::EXEC, raw & XD == 0);
        flags.set(PteFlags::ACCESSED, raw & A != 0);
        flags.set(PteFlags::DIRTY, raw & D != 0);
        flags.set(PteFlags::USER_WP, raw & USER_WP != 0);
        flags
    }

    #[inline]
    fn with_flags(raw: u64, flags: PteFlags) -> u64 {
        raw & !FLAG_BITS | bits(flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_where_the_manual_says() {
        let frame = Frame(0x1_2345);
        assert_eq!(X86_64::page(frame, PteFlags::READ), 0x8000_0000_1234_5005);
        assert_eq!(X86_64::page(frame, PteFlags::READ | PteFlags::WRITE), 0x8000_0000_1234_5007);
        assert_eq!(X86_64::page(frame, PteFlags::READ | PteFlags::EXEC), 0x1234_5005);
        assert_eq!(X86_64::page(frame, PteFlags::all()), 0x1234_5467);
        assert_eq!(X86_64::block(Frame(0x200), PteFlags::all()), 0x20_04e7);
        assert_eq!(X86_64::table(frame), 0x1234_5027);
        assert!(!X86_64::is_block(X86_64::table(frame)));
        assert!(X86_64::is_block(X86_64::block(Frame(0x200), PteFlags::READ)));
    }

    #[test]
    fn other_bits_survive_a_change_of_flags() {
        // PWT, PCD, G and the bits left to software, but for the one in use.
        let extra = 1 << 3 | 1 << 4 | 1 << 8 | 5 << 9 | 0x7ff << 52;
        let raw = X86_64::page(Frame(u32::MAX), PteFlags::all()) | extra;
        let now = X86_64::with_flags(raw, PteFlags::READ);
        assert_eq!(now, X86_64::page(Frame(u32::MAX), PteFlags::READ) | extra);
        assert_eq!(X86_64::frame(now), Frame(u32::MAX));
    }
}
