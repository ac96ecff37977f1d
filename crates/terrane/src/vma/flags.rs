//! Protections, mapping flags and advice, with Linux's values where Linux has them.

use crate::page_table::PteFlags;

bitflags::bitflags! {
    /// What a program may do with a page (`PROT_…`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Prot: u32 {
        /// Loads.
        const READ = 1;
        /// Stores.
        const WRITE = 2;
        /// Instruction fetches.
        const EXEC = 4;
    }
}

bitflags::bitflags! {
    /// How to map (`MAP_…`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct MapFlags: u32 {
        /// Stores reach the object and everyone who maps it.
        const SHARED = 0x01;
        /// Stores stay with this mapping: pages are copied when written.
        const PRIVATE = 0x02;
        /// Private memory whose pages may vanish when memory is short, a fork's child finds none, and a core dump neither.
        const DROPPABLE = 0x08;
        /// At exactly this address, in place of what is mapped there.
        const FIXED = 0x10;
        /// In the lowest 2 GiB.
        const LOW_2GIB = 0x40;
        /// A stack: the hole below it keeps its guard gap.
        const GROWSDOWN = 0x100;
        /// Locked in memory, and filled in at once.
        const LOCKED = 0x2000;
        /// No reservation of swap space; accepted, and nothing is reserved either way.
        const NORESERVE = 0x4000;
        /// Fill the mapping in at once.
        const POPULATE = 0x8000;
        /// With `POPULATE`: nothing is filled in.
        const NONBLOCK = 0x1_0000;
        /// A thread's stack: no huge pages.
        const STACK = 0x2_0000;
        /// As in Linux, kept as an attribute of the mapping, and without effect otherwise (`MAP_SYNC`).
        const SYNC = 0x8_0000;
        /// At exactly this address, or not at all.
        const FIXED_NOREPLACE = 0x10_0000;
        /// Not Linux's: the object was opened without permission to store, so that a shared mapping is never writable.
        const READ_ONLY = 0x8000_0000;
    }
}

bitflags::bitflags! {
    /// How to move (`MREMAP_…`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct RemapFlags: u32 {
        /// To another address, if there is no room.
        const MAYMOVE = 1;
        /// To exactly this address, in place of what is mapped there. With `MAYMOVE` only.
        const FIXED = 2;
        /// The old range stays mapped, empty. With `MAYMOVE`, and the same length, only.
        const DONTUNMAP = 4;
    }
}

bitflags::bitflags! {
    /// The attributes of a VMA (`VM_…`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct VmFlags: u64 {
        /// Loads are allowed.
        const READ = 0x1;
        /// Stores are allowed.
        const WRITE = 0x2;
        /// Instruction fetches are allowed.
        const EXEC = 0x4;
        /// Stores reach the object.
        const SHARED = 0x8;
        /// `protect` may allow loads.
        const MAYREAD = 0x10;
        /// `protect` may allow stores.
        const MAYWRITE = 0x20;
        /// `protect` may allow fetches.
        const MAYEXEC = 0x40;
        /// A stack that grows downwards.
        const GROWSDOWN = 0x100;
        /// Missing pages are for a handler of user faults ([`userfault`](crate::fault::user)).
        const UFFD_MISSING = 0x200;
        /// Maps frames of a device, which are not the machine's memory.
        const PFNMAP = 0x400;
        /// There may be guards ([`Advice::GuardInstall`]) in the page table.
        const MAYBE_GUARD = 0x800;
        /// Stores to pages that a handler of user faults has write-protected are for it.
        const UFFD_WP = 0x1000;
        /// Pages stay in memory.
        const LOCKED = 0x2000;
        /// Maps registers of a device.
        const IO = 0x4000;
        /// Expected to be read in order.
        const SEQ_READ = 0x8000;
        /// Expected to be read in no order: no fault-around, no read-ahead.
        const RAND_READ = 0x1_0000;
        /// Not copied by `fork`.
        const DONTCOPY = 0x2_0000;
        /// `remap` may not let it grow.
        const DONTEXPAND = 0x4_0000;
        /// Pages are locked when they are first touched, not before.
        const LOCKONFAULT = 0x8_0000;
        /// Counted against the memory that programs may ask for.
        const ACCOUNT = 0x10_0000;
        /// Mapped with `NORESERVE`.
        const NORESERVE = 0x20_0000;
        /// Mapped with `SYNC`.
        const SYNC = 0x80_0000;
        /// Empty in the child after `fork`.
        const WIPEONFORK = 0x200_0000;
        /// Left out of core dumps.
        const DONTDUMP = 0x400_0000;
        /// Huge pages are welcome.
        const HUGEPAGE = 0x2000_0000;
        /// No huge pages.
        const NOHUGEPAGE = 0x4000_0000;
        /// Pages may be dropped when memory is short, and read as zeros then.
        const DROPPABLE = 1 << 40;
        /// Pages of shared memory that are in memory and not mapped are for a handler of user faults.
        const UFFD_MINOR = 1 << 41;
        /// May not be unmapped, moved, or changed any more.
        const SEALED = 1 << 42;
        /// The number of the handler's context; 0 without one.
        const UFFD_CONTEXT = 0xffff << 48;
    }
}

impl VmFlags {
    /// The three protection bits.
    pub const PROT: VmFlags = VmFlags::READ.union(VmFlags::WRITE).union(VmFlags::EXEC);

    /// Mappings that are not of ordinary pages (`VM_SPECIAL`): many calls leave them alone.
    pub const SPECIAL: VmFlags = VmFlags::IO.union(VmFlags::DONTEXPAND).union(VmFlags::PFNMAP);

    /// What stays with whatever it is merged with (`VM_STICKY`): it keeps no two mappings apart, and the merged one has it.
    pub const STICKY: VmFlags = VmFlags::MAYBE_GUARD;

    /// The two bits of a locked mapping.
    pub const LOCKED_MASK: VmFlags = VmFlags::LOCKED.union(VmFlags::LOCKONFAULT);

    /// True when mappings with the two may be one.
    #[inline]
    pub fn merges_with(self, other: VmFlags) -> bool {
        (self ^ other).difference(VmFlags::STICKY).is_empty()
    }

    /// The protection as the calls name it.
    #[inline]
    pub fn prot(self) -> Prot {
        Prot::from_bits_truncate((self.bits() & 7) as u32)
    }

    /// These flags with the protection `prot` instead of their own.
    #[inline]
    pub fn with_prot(self, prot: Prot) -> Self {
        self.difference(Self::PROT).union(VmFlags::from_bits_retain(u64::from(prot.bits())))
    }

    /// Everything about user faults: the modes and the context.
    pub const UFFD: VmFlags = VmFlags::UFFD_MODES.union(VmFlags::UFFD_CONTEXT);

    /// The modes in which a mapping may be registered for user faults.
    pub const UFFD_MODES: VmFlags = VmFlags::UFFD_MISSING.union(VmFlags::UFFD_WP).union(VmFlags::UFFD_MINOR);

    /// The number of the context that user faults go to; 0 for none.
    #[inline]
    pub fn user_context(self) -> u16 {
        (self.bits() >> 48) as u16
    }

    /// These flags, registered with context `number` in `modes` and no others; with 0 and none, not registered.
    #[inline]
    pub fn with_user_context(self, number: u16, modes: VmFlags) -> Self {
        let context = VmFlags::from_bits_retain(u64::from(number) << 48);
        self.difference(Self::UFFD).union(modes.intersection(Self::UFFD_MODES)).union(context)
    }

    /// True when stores go to copies of the pages.
    #[inline]
    pub fn is_private(self) -> bool {
        !self.contains(VmFlags::SHARED)
    }

    /// True when the VMA allows `access`. A mapping that may be written or executed may also be read, as on the
    /// processors at hand.
    #[inline]
    pub fn allows(self, access: Access) -> bool {
        match access {
            Access::Read => self.intersects(Self::PROT),
            Access::Write => self.contains(VmFlags::WRITE),
            Access::Execute => self.contains(VmFlags::EXEC),
        }
    }

    /// The page-table flags of a page of this VMA that must not be written (yet).
    #[inline]
    pub fn read_only_pte(self) -> PteFlags {
        if self.contains(VmFlags::EXEC) { PteFlags::READ.union(PteFlags::EXEC) } else { PteFlags::READ }
    }
}

/// What a processor tries to do with an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Access {
    /// Load.
    Read,
    /// Store.
    Write,
    /// Fetch an instruction.
    Execute,
}

/// Advice on a range (`MADV_…`): what is here is done; what is not here is refused by
/// [`from_linux`](Self::from_linux).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// No special treatment.
    Normal,
    /// Expect accesses in no order.
    Random,
    /// Expect accesses in order.
    Sequential,
    /// Read the file pages of the range into the page cache.
    WillNeed,
    /// Forget the pages: private ones read as zeros or as the file again. Not of locked mappings.
    DontNeed,
    /// The same, of locked mappings too.
    DontNeedLocked,
    /// The pages of private memory may be forgotten when memory is short, unless they are stored to before.
    Free,
    /// Punch a hole into the object: its bytes become zeros, for all who map or read it.
    Remove,
    /// Leave the range out of `fork`.
    DontFork,
    /// Undo [`DontFork`](Self::DontFork).
    DoFork,
    /// Empty in the child after `fork`; private anonymous mappings only.
    WipeOnFork,
    /// Undo [`WipeOnFork`](Self::WipeOnFork).
    KeepOnFork,
    /// Leave the range out of core dumps.
    DontDump,
    /// Undo [`DontDump`](Self::DontDump).
    DoDump,
    /// Use huge pages where [`HugePages`](crate::mm::HugePages) leaves it to the program.
    HugePage,
    /// Use no huge pages; those that are there stay.
    NoHugePage,
    /// Make huge pages of the pages that are there, now.
    Collapse,
    /// Not used for now: the first to go when memory is short.
    Cold,
    /// Not used for now: write them out.
    PageOut,
    /// Raise a signal at any access, and give the pages up.
    GuardInstall,
    /// Undo [`GuardInstall`](Self::GuardInstall).
    GuardRemove,
    /// Map every page for reading.
    PopulateRead,
    /// Map every page for writing.
    PopulateWrite,
}

impl Advice {
    /// The advice with Linux's number `raw`, or `None` for one that is not available: `EINVAL`. Not available are the
    /// numbers that Linux does not know, and those that it knows only with `CONFIG_KSM` (`MADV_MERGEABLE`, 12, and
    /// `MADV_UNMERGEABLE`, 13) or `CONFIG_MEMORY_FAILURE` (`MADV_HWPOISON`, 100, and `MADV_SOFT_OFFLINE`, 101).
    pub const fn from_linux(raw: i32) -> Option<Advice> {
        Some(match raw {
            0 => Advice::Normal,
            1 => Advice::Random,
            2 => Advice::Sequential,
            3 => Advice::WillNeed,
            4 => Advice::DontNeed,
            8 => Advice::Free,
            9 => Advice::Remove,
            10 => Advice::DontFork,
            11 => Advice::DoFork,
            14 => Advice::HugePage,
            15 => Advice::NoHugePage,
            16 => Advice::DontDump,
            17 => Advice::DoDump,
            18 => Advice::WipeOnFork,
            19 => Advice::KeepOnFork,
            20 => Advice::Cold,
            21 => Advice::PageOut,
            22 => Advice::PopulateRead,
            23 => Advice::PopulateWrite,
            24 => Advice::DontNeedLocked,
            25 => Advice::Collapse,
            102 => Advice::GuardInstall,
            103 => Advice::GuardRemove,
            _ => return None,
        })
    }
}
