//! Page-table formats: how a processor lays out an entry (requirement B7).
//!
//! A format only translates between bits and meaning; the protocols above it are the same for all. Bit 0 of an
//! entry must be the processor's "valid" bit: entries with bit 0 clear are Terrane's own (see
//! [`entry`](super::entry)).

use crate::addr::Frame;

bitflags::bitflags! {
    /// What a page-table entry allows and records.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
    pub struct PteFlags: u8 {
        /// Loads are allowed. An entry without it is kept in Terrane's own form, invisible to the processor.
        const READ = 1;
        /// Stores are allowed.
        const WRITE = 1 << 1;
        /// Instruction fetches are allowed.
        const EXEC = 1 << 2;
        /// The page has been accessed since this bit was last cleared.
        const ACCESSED = 1 << 3;
        /// The page has been written since this bit was last cleared.
        const DIRTY = 1 << 4;
        /// Protected by a handler of user faults: a store is the handler's to allow. Without `WRITE` always; says nothing in
        /// a mapping that is not registered for it. The processor does not look at it.
        const USER_WP = 1 << 5;
    }
}

/// The page-table format of a processor. All entries are of user pages.
pub trait Format: Send + Sync + 'static {
    /// A name for people, such as `x86-64`.
    const NAME: &'static str;
    /// Levels of tables, each of 512 entries; 4 for 48-bit addresses.
    const LEVELS: u32;
    /// First address behind those a program may use, in bytes.
    const USER_END: u64;

    /// The entry that maps one page. `flags` contains `READ`.
    fn page(frame: Frame, flags: PteFlags) -> u64;

    /// The entry one level up that maps 2 MiB from `frame`, which is a multiple of 512. `flags` contains `READ`.
    fn block(frame: Frame, flags: PteFlags) -> u64;

    /// The entry of an upper level that points to a table.
    fn table(frame: Frame) -> u64;

    /// True when `raw`, a valid entry of an upper level, maps memory rather than pointing to a table.
    fn is_block(raw: u64) -> bool;

    /// The frame in a valid entry.
    fn frame(raw: u64) -> Frame;

    /// The flags of a valid entry that maps memory; contains `READ`.
    fn flags(raw: u64) -> PteFlags;

    /// `raw`, valid and mapping memory, with its flags replaced by `flags` (which contains `READ`).
    fn with_flags(raw: u64, flags: PteFlags) -> u64;
}
