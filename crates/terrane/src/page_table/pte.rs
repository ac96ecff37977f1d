//! What an entry says: [`Pte`], and the words that stand for it.
//!
//! A word with bit 0 set belongs to the processor and is laid out by the [`Format`]. A word with bit 0 clear is
//! invisible to the processor and laid out here, the same for all formats:
//!
//! | bits 1..=3 | entry | bits 4..=63 |
//! |---|---|---|
//! | 0 | empty | 0 |
//! | 1 | busy: one CPU owns the entry | 0 |
//! | 2 | tombstone: this part of a table is closed for good | 0 |
//! | 3 | swapped out | payload, inverted |
//! | 4 | migration under way | payload, inverted |
//! | 5 | guard: every access raises a signal | 0 |
//! | 6 | a page, or in level 2 a block, that is mapped but allows no access | 4..=11 flags, 12..=43 frame, inverted |
//! | 7 | nothing is there, but a mark of a handler of user faults | 1: write-protected, 2: poisoned |
//!
//! The highest bit of the payload of a page that is swapped out or under migration says that the page is protected by a handler of user faults
//! ([`PAYLOAD_USER_WP`]).
//!
//! Payloads and frame numbers are kept inverted because some processors (the L1 Terminal Fault of Intel) load
//! speculatively from the address in an entry even when bit 0 is clear. Inverted, small numbers become addresses
//! high above any memory.

use super::format::{Format, PteFlags};
use crate::addr::Frame;

/// An entry as it stands in memory.
pub type Raw = u64;

/// Bit 0: the entry is valid, and the processor's.
pub(super) const VALID: Raw = 1;
/// Nothing is there.
pub const EMPTY: Raw = 0;
/// One CPU owns the entry and will give it a new value within nanoseconds.
pub const BUSY: Raw = 1 << TAG_SHIFT;
/// Nothing is there, and nothing will be in this table any more (see [`free`](super::free)).
pub const TOMBSTONE: Raw = 2 << TAG_SHIFT;

const TAG_SHIFT: u32 = 1;
const TAG_MASK: Raw = 7 << TAG_SHIFT;
const SWAP: Raw = 3 << TAG_SHIFT;
const MIGRATION: Raw = 4 << TAG_SHIFT;
/// A guard; see [`Pte::Guard`].
pub const GUARD: Raw = 5 << TAG_SHIFT;
const NO_ACCESS: Raw = 6 << TAG_SHIFT;
const USER: Raw = 7 << TAG_SHIFT;
const USER_WP: Raw = USER | 1 << PAYLOAD_SHIFT;
const POISON: Raw = USER | 2 << PAYLOAD_SHIFT;

const PAYLOAD_SHIFT: u32 = 4;
/// Bits of a swap or migration payload; more are cut off.
pub const PAYLOAD_BITS: u32 = 64 - PAYLOAD_SHIFT;
/// In the payload of [`Pte::Swap`] and [`Pte::Migration`]: the page had [`PteFlags::USER_WP`], and is to have it again. What
/// the payload says besides must not need this bit.
pub const PAYLOAD_USER_WP: u64 = 1 << (PAYLOAD_BITS - 1);

/// The slot of the swap device that the payload of [`Pte::Swap`] names.
#[inline]
pub const fn swap_slot(payload: u64) -> u64 {
    payload & !PAYLOAD_USER_WP
}

const NO_ACCESS_FLAGS_SHIFT: u32 = 4;
const NO_ACCESS_FRAME_SHIFT: u32 = 12;

/// What a page-table entry says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pte {
    /// Nothing is there.
    Empty,
    /// One CPU owns the entry for a moment: try again from scratch.
    Busy,
    /// Nothing is there, and the table is about to be freed: try again from scratch.
    Tombstone,
    /// A page that the processor can use. `flags` contains `READ`.
    Page {
        /// The frame that holds it.
        frame: Frame,
        /// What it allows and records.
        flags: PteFlags,
    },
    /// 2 MiB of memory mapped by one entry of level 2. Without `READ` in `flags` nobody may touch it (`PROT_NONE`), and
    /// the processor does not see it.
    Block {
        /// The first of 512 frames.
        frame: Frame,
        /// What it allows and records.
        flags: PteFlags,
    },
    /// A page that is mapped and that nobody may touch (`PROT_NONE`).
    NoAccess {
        /// The frame that holds it.
        frame: Frame,
        /// What it records, and what it may allow again later.
        flags: PteFlags,
    },
    /// The page is elsewhere; [`PAYLOAD_BITS`] bits say where.
    Swap(u64),
    /// The page is being moved; [`PAYLOAD_BITS`] bits say by whom.
    Migration(u64),
    /// A guard: every access raises a signal, nothing is mapped.
    Guard,
    /// Nothing is there, and a store to what will be there is for a handler of user faults. In a mapping that is not
    /// registered for that, the same as [`Empty`](Self::Empty); only that it has to be taken by its own value.
    UserWp,
    /// The page is lost: every access raises a bus error.
    Poison,
}

impl Pte {
    /// The meaning of an entry of a leaf table.
    #[inline]
    pub fn decode<F: Format>(raw: Raw) -> Self {
        if raw & VALID != 0 {
            return Pte::Page { frame: F::frame(raw), flags: F::flags(raw) };
        }
        match raw & TAG_MASK {
            EMPTY => Pte::Empty,
            BUSY => Pte::Busy,
            TOMBSTONE => Pte::Tombstone,
            SWAP => Pte::Swap(!raw >> PAYLOAD_SHIFT),
            MIGRATION => Pte::Migration(!raw >> PAYLOAD_SHIFT),
            NO_ACCESS => Pte::NoAccess {
                frame: Frame((!raw >> NO_ACCESS_FRAME_SHIFT) as u32),
                flags: PteFlags::from_bits_truncate((raw >> NO_ACCESS_FLAGS_SHIFT) as u8),
            },
            USER if raw == USER_WP => Pte::UserWp,
            USER if raw == POISON => Pte::Poison,
            // Other words are never written; read as the entry that refuses everything.
            _ => Pte::Guard,
        }
    }

    /// True when nothing is there, whatever is to be remembered about what will be.
    #[inline]
    pub fn is_vacant(self) -> bool {
        matches!(self, Pte::Empty | Pte::UserWp)
    }

    /// The meaning of an entry of level 2 that is not a table.
    #[inline]
    pub fn decode_block<F: Format>(raw: Raw) -> Self {
        match Self::decode::<F>(raw) {
            Pte::Page { frame, flags } => Pte::Block { frame, flags },
            Pte::NoAccess { frame, flags } => Pte::Block { frame, flags: flags - PteFlags::READ },
            other => other,
        }
    }

    /// The first frame and the flags of the block that `raw`, an entry of level 2, maps; `None` for anything else.
    #[inline]
    pub fn block<F: Format>(raw: Raw) -> Option<(Frame, PteFlags)> {
        if is_table::<F>(raw) {
            return None;
        }
        match Self::decode_block::<F>(raw) {
            Pte::Block { frame, flags } => Some((frame, flags)),
            _ => None,
        }
    }

    /// The word that says this.
    #[inline]
    pub fn encode<F: Format>(self) -> Raw {
        match self {
            Pte::Empty => EMPTY,
            Pte::Busy => BUSY,
            Pte::Tombstone => TOMBSTONE,
            Pte::Page { frame, flags } => F::page(frame, flags),
            Pte::Block { frame, flags } if flags.contains(PteFlags::READ) => F::block(frame, flags),
            Pte::Block { frame, flags } | Pte::NoAccess { frame, flags } => {
                !u64::from(frame.0) << NO_ACCESS_FRAME_SHIFT
                    | u64::from(flags.bits()) << NO_ACCESS_FLAGS_SHIFT
                    | NO_ACCESS
            }
            Pte::Swap(payload) => !payload << PAYLOAD_SHIFT | SWAP,
            Pte::Migration(payload) => !payload << PAYLOAD_SHIFT | MIGRATION,
            Pte::Guard => GUARD,
            Pte::UserWp => USER_WP,
            Pte::Poison => POISON,
        }
    }

    /// The frame of a page, accessible or not, or the first frame of a block.
    #[inline]
    pub fn frame(self) -> Option<Frame> {
        match self {
            Pte::Page { frame, .. } | Pte::Block { frame, .. } | Pte::NoAccess { frame, .. } => Some(frame),
            _ => None,
        }
    }
}

/// True when `raw`, an entry of an upper level, points to a table.
#[inline]
pub(super) fn is_table<F: Format>(raw: Raw) -> bool {
    raw & VALID != 0 && !F::is_block(raw)
}

/// True when a handler of user faults has protected what is there, or what will be.
pub(super) fn is_user_protected<F: Format>(raw: Raw) -> bool {
    match Pte::decode::<F>(raw) {
        Pte::Page { flags, .. } | Pte::NoAccess { flags, .. } => flags.contains(PteFlags::USER_WP),
        Pte::Swap(payload) => payload & PAYLOAD_USER_WP != 0,
        Pte::UserWp => true,
        _ => false,
    }
}

/// `raw` without the flags in `mask`, if it is a page; else `raw`.
#[inline]
pub(super) fn without<F: Format>(raw: Raw, mask: PteFlags) -> Raw {
    if raw & VALID != 0 {
        let flags = F::flags(raw);
        if flags.intersects(mask) { F::with_flags(raw, flags - mask) } else { raw }
    } else if raw & TAG_MASK == NO_ACCESS {
        raw & !(Raw::from(mask.bits()) << NO_ACCESS_FLAGS_SHIFT)
    } else {
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Aarch64, X86_64};
    use super::*;
    use proptest::prelude::*;

    fn flags() -> impl Strategy<Value = PteFlags> {
        (0..=PteFlags::all().bits()).prop_map(|bits| PteFlags::from_bits_truncate(bits) | PteFlags::READ)
    }

    fn leaf() -> impl Strategy<Value = Pte> {
        let frame = any::<u32>().prop_map(Frame);
        let payload = any::<u64>().prop_map(|p| p >> (64 - PAYLOAD_BITS));
        prop_oneof![
            Just(Pte::Empty),
            Just(Pte::Busy),
            Just(Pte::Tombstone),
            Just(Pte::Guard),
            Just(Pte::UserWp),
            Just(Pte::Poison),
            (frame.clone(), flags()).prop_map(|(frame, flags)| Pte::Page { frame, flags }),
            (frame, 0..=PteFlags::all().bits())
                .prop_map(|(frame, bits)| Pte::NoAccess { frame, flags: PteFlags::from_bits_truncate(bits) }),
            payload.clone().prop_map(Pte::Swap),
            payload.prop_map(Pte::Migration),
        ]
    }

    fn round_trip<F: Format>(pte: Pte, new: PteFlags) {
        let raw = pte.encode::<F>();
        assert_eq!(Pte::decode::<F>(raw), pte);
        assert_eq!(raw & VALID != 0, matches!(pte, Pte::Page { .. }));
        assert_eq!(raw == EMPTY, pte == Pte::Empty);
        if let Pte::Page { frame, flags } = pte {
            assert!(!F::is_block(raw) || F::NAME == "aarch64", "PS is clear in a leaf");
            assert_eq!(Pte::decode::<F>(F::with_flags(raw, new)), Pte::Page { frame, flags: new });
            assert_eq!(F::with_flags(raw, flags), raw);
            let first = Frame(frame.0 & !511);
            let block = Pte::Block { frame: first, flags };
            assert!(F::is_block(block.encode::<F>()) && !is_table::<F>(block.encode::<F>()));
            assert_eq!(Pte::decode_block::<F>(block.encode::<F>()), block);
            let hidden = Pte::Block { frame: first, flags: flags - PteFlags::READ };
            assert_eq!(Pte::decode_block::<F>(hidden.encode::<F>()), hidden);
            assert!(hidden.encode::<F>() & VALID == 0);
            assert!(is_table::<F>(F::table(frame)));
            assert_eq!(F::frame(F::table(frame)), frame);
        }
    }

    proptest! {
        #[test]
        fn encoding_is_exact(pte in leaf(), new in flags()) {
            round_trip::<X86_64>(pte, new);
            round_trip::<Aarch64>(pte, new);
        }
    }

    #[test]
    fn invalid_entries_point_above_memory() {
        // What an L1 Terminal Fault would load from: bits 12..=51 of an entry whose bit 0 is clear.
        let address = |pte: Pte| pte.encode::<X86_64>() & 0x000f_ffff_ffff_f000;
        assert!(address(Pte::NoAccess { frame: Frame(0x1234), flags: PteFlags::all() }) > 1 << 51);
        assert!(address(Pte::Swap(0x1234_5678)) > 1 << 51);
        assert!(address(Pte::Migration(1)) > 1 << 51);
    }

    #[test]
    fn unknown_words_refuse_access() {
        assert_eq!(Pte::decode::<X86_64>(TAG_MASK), Pte::Guard);
    }
}
