//! The stage-1 page tables of AArch64 for user space: 4 KiB granule, 48-bit addresses (`TTBR0`).
//!
//! | bit | name | here |
//! |---|---|---|
//! | 0 | valid | |
//! | 1 | | set: a table, or a page at the last level; clear: a block |
//! | 2..=4 | AttrIndx | 0: the host makes attribute 0 of `MAIR` normal write-back memory |
//! | 6 | AP\[1\] | always set: user pages |
//! | 7 | AP\[2\] | stores are not allowed (but see DBM) |
//! | 8..=9 | SH | 3: inner shareable |
//! | 10 | AF | accessed |
//! | 11 | nG | always set: translations belong to one address space |
//! | 12..=47 | | the frame; Terrane uses 32 bits of it |
//! | 51 | DBM | stores are allowed: the processor may clear AP\[2\] |
//! | 53 | PXN | always set: the kernel does not execute user pages |
//! | 54 | UXN | instruction fetches are not allowed |
//! | 55 | software | dirty |
//! | 58 | software | protected by a handler of user faults |
//!
//! AArch64 has no dirty bit of its own. A page that may be written and is clean has DBM and AP\[2\] set; the first
//! store clears AP\[2\], by the processor where it can (`FEAT_HAFDBS`, turned on in `TCR`), else by a permission
//! fault whose handler finds an entry with `WRITE` and adds `DIRTY`. Bit 55 keeps `DIRTY` when `WRITE` is taken away.
//!
//! Source: Arm Architecture Reference Manual for A-profile, chapter D8, "The AArch64 Virtual Memory System
//! Architecture".

use super::format::{Format, PteFlags};
use crate::addr::Frame;

const VALID: u64 = 1;
const TABLE_OR_PAGE: u64 = 1 << 1;
const AP_USER: u64 = 1 << 6;
const AP_READ_ONLY: u64 = 1 << 7;
const SH_INNER: u64 = 3 << 8;
const AF: u64 = 1 << 10;
const NG: u64 = 1 << 11;
const DBM: u64 = 1 << 51;
const PXN: u64 = 1 << 53;
const UXN: u64 = 1 << 54;
const DIRTY: u64 = 1 << 55;
const USER_WP: u64 = 1 << 58;
/// Every bit that a flag stands for.
const FLAG_BITS: u64 = AP_READ_ONLY | AF | DBM | UXN | DIRTY | USER_WP;
/// What all entries that map memory have in common.
const MEMORY: u64 = VALID | AP_USER | SH_INNER | NG | PXN;

/// Stage-1 paging of AArch64 with 4 KiB pages and 48-bit addresses.
#[derive(Clone, Copy, Debug)]
pub struct Aarch64;

#[inline]
const fn bits(flags: PteFlags) -> u64 {
    let mut raw = 0;
    if flags.contains(PteFlags::WRITE) {
        raw |= DBM;
    }
    if !flags.contains(PteFlags::WRITE.union(PteFlags::DIRTY)) {
        raw |= AP_READ_ONLY;
    }
    if flags.contains(PteFlags::ACCESSED) {
        raw |= AF;
    }
    if flags.contains(PteFlags::DIRTY) {
        raw |= DIRTY;
    }
    if flags.contains(PteFlags::USER_WP) {
        raw |= USER_WP;
    }
    if !flags.contains(PteFlags::EXEC) {
        raw |= UXN;
    }
    raw
}

impl Format for Aarch64 {
    const NAME: &'static str = "aarch64";
    const LEVELS: u32 = 4;
    const USER_END: u64 = 1 << 48;

    #[inline]
    fn page(frame: Frame, flags: PteFlags) -> u64 {
        frame.address() | MEMORY | TABLE_OR_PAGE | bits(flags)
    }

    #[inline]
    fn block(frame: Frame, flags: PteFlags) -> u64 {
        frame.address() | MEMORY | bits(flags)
    }

    #[inline]
    fn table(frame: Frame) -> u64 {
        frame.address() | VALID | TABLE_OR_PAGE
    }

    #[inline]
    fn is_block(raw: u64) -> bool {
        raw & TABLE_OR_PAGE == 0
    }

    #[inline]
    fn frame(raw: u64) -> Frame {
        Frame::containing(raw)
    }

    #[inline]
    fn flags(raw: u64) -> PteFlags {
        let mut flags = PteFlags::READ;
        flags.set(PteFlags::WRITE, raw & DBM != 0);
        flags.set(PteFlags::EXEC, raw & UXN == 0);
        flags.set(PteFlags::ACCESSED, raw & AF != 0);
        flags.set(PteFlags::DIRTY, raw & DIRTY != 0 || raw & (DBM | AP_READ_ONLY) == DBM);
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
        // Valid page, user, read-only, inner shareable, nG, PXN, UXN.
        assert_eq!(Aarch64::page(frame, PteFlags::READ), 0x60_0000_1234_5bc3);
        assert_eq!(Aarch64::page(frame, PteFlags::READ | PteFlags::EXEC), 0x20_0000_1234_5bc3);
        // Writable and clean: DBM with AP[2] still set.
        assert_eq!(Aarch64::page(frame, PteFlags::READ | PteFlags::WRITE), 0x68_0000_1234_5bc3);
        // Everything: AP[2] clear, AF, DBM, the software bit.
        assert_eq!(Aarch64::page(frame, PteFlags::all()), 0x4a8_0000_1234_5f43);
        assert_eq!(Aarch64::block(Frame(0x200), PteFlags::READ), 0x60_0000_0020_0bc1);
        assert_eq!(Aarch64::table(frame), 0x1234_5003);
        assert!(!Aarch64::is_block(Aarch64::table(frame)));
        assert!(Aarch64::is_block(Aarch64::block(Frame(0x200), PteFlags::READ)));
    }

    #[test]
    fn a_store_by_the_processor_makes_the_page_dirty() {
        let clean = Aarch64::page(Frame(7), PteFlags::READ | PteFlags::WRITE);
        assert!(!Aarch64::flags(clean).contains(PteFlags::DIRTY));
        let stored = clean & !AP_READ_ONLY;
        assert!(Aarch64::flags(stored).contains(PteFlags::DIRTY));
        // Write protection keeps the knowledge, and makes the processor refuse stores again.
        let protected = Aarch64::with_flags(stored, Aarch64::flags(stored) - PteFlags::WRITE);
        assert_eq!(Aarch64::flags(protected), PteFlags::READ | PteFlags::DIRTY);
        assert!(protected & AP_READ_ONLY != 0 && protected & DBM == 0);
    }
}
