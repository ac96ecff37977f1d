//! How a space behaves.

use crate::addr::{AddrRange, PAGE_SIZE, TABLE_ENTRIES};
use crate::error::Error;
use crate::mm::{HugePages, Locking};
use crate::page_table::Format;

/// Where mappings go that ask for no address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// Where Linux puts them: at the highest free addresses.
    #[default]
    Linux,
    /// Small ones into a stretch of addresses that belongs to the CPU, so that CPUs map and unmap side by side; large ones
    /// as Linux does.
    PerCpu,
}

/// How a space behaves. `SpaceConfig::default()` is a space as Linux would set it up, with speculative faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SpaceConfig {
    /// How faults exclude layout changes.
    pub locking: Locking,
    /// Bytes mapped around a load from a file, a power of two from a page (none) to 2 MiB. Default 64 KiB.
    pub fault_around: u64,
    /// Addresses that may be mapped, page-aligned. An end of 0 stands for the format's. Default from 64 KiB up.
    pub range: AddrRange,
    /// Where free addresses are looked for from above, page-aligned; above it only when there is no room below.
    /// 0 (the default) stands for the end of the range.
    pub map_top: u64,
    /// Where mappings go that ask for no address. Default as in Linux.
    pub placement: Placement,
    /// When first touches of private memory make huge pages. Default where the program advised
    /// [`HugePage`](crate::vma::Advice::HugePage): a program that did not ask does not pay 2 MiB, and the time to zero them, for
    /// one byte.
    pub huge_pages: HugePages,
    /// Pages of a huge page that may be missing when the collapser ([`collapse_step`](crate::space::AddressSpace::collapse_step))
    /// makes one, up to 511. Default 511, as in Linux: one page that is there is enough.
    pub collapse_max_none: u32,
    /// Looks for free addresses from below, as Linux does for programs with a limited stack. Default false.
    pub bottom_up: bool,
    /// Aligns shared mappings so that address and offset agree in these bits, for caches indexed by virtual addresses.
    /// A mask of bits above the page; default 0.
    pub colour_mask: u64,
    /// VMAs at most; default none. Linux has 65530.
    pub map_limit: Option<usize>,
    /// Bytes mapped at most (`RLIMIT_AS`); default none.
    pub address_limit: Option<u64>,
    /// Bytes to which a stack may grow (`RLIMIT_STACK`); default none.
    pub stack_limit: Option<u64>,
    /// Bytes of private memory that may be stored to at most (`RLIMIT_DATA`); default none.
    pub data_limit: Option<u64>,
    /// Bytes locked in memory at most (`RLIMIT_MEMLOCK`); at 0, nothing may be locked. Default none.
    pub memlock_limit: Option<u64>,
    /// Keeps gap sizes in the index. Default true; false only to measure what they cost.
    pub gaps: bool,
    /// Looks at one VMA after the other for free addresses, as Linux did before 3.8. Default false; a baseline.
    pub linear_search: bool,
    /// Takes the reverse-mapping lock when only the end of a VMA moves, as Linux did before 2.6.32. Default false; a
    /// baseline.
    pub rmap_lock_on_end_move: bool,
}

impl Default for SpaceConfig {
    fn default() -> Self {
        Self {
            locking: Locking::Speculative,
            fault_around: 64 << 10,
            range: AddrRange { start: 64 << 10, end: 0 },
            map_top: 0,
            placement: Placement::Linux,
            huge_pages: HugePages::Madvise,
            collapse_max_none: 511,
            bottom_up: false,
            colour_mask: 0,
            map_limit: None,
            address_limit: None,
            stack_limit: None,
            data_limit: None,
            memlock_limit: None,
            gaps: true,
            linear_search: false,
            rmap_lock_on_end_move: false,
        }
    }
}

impl SpaceConfig {
    /// The default with this locking.
    pub fn with_locking(locking: Locking) -> Self {
        Self { locking, ..Self::default() }
    }

    /// Fills in what is 0 and checks the rest.
    pub(super) fn checked<F: Format>(mut self) -> Result<Self, Error> {
        if self.range.end == 0 {
            self.range.end = F::USER_END;
        }
        if self.map_top == 0 {
            self.map_top = self.range.end;
        }
        let aligned = [self.range.start, self.range.end, self.map_top, self.colour_mask]
            .iter()
            .all(|value| value % PAGE_SIZE == 0);
        let window = self.fault_around.is_power_of_two()
            && (PAGE_SIZE..=PAGE_SIZE * TABLE_ENTRIES as u64).contains(&self.fault_around);
        let colour = self.colour_mask == 0 || (self.colour_mask + PAGE_SIZE).is_power_of_two();
        let ranges = self.range.start < self.range.end
            && self.range.end <= F::USER_END
            && self.range.start < self.map_top
            && self.map_top <= self.range.end;
        let none = self.collapse_max_none < TABLE_ENTRIES as u32;
        if aligned && window && colour && ranges && none { Ok(self) } else { Err(Error::Invalid) }
    }
}
