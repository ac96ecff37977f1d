//! The crate `memory_set`, through its own interface, with a backend that does nothing: what is measured is the
//! management of areas, not of pages.

use super::areas::{Areas, LENGTH};
use memory_addr::{AddrRange, VirtAddr};
use memory_set::{MappingBackend, MemoryArea, MemorySet};

/// A backend without pages.
#[derive(Clone)]
pub struct NoPages;

impl MappingBackend for NoPages {
    type Addr = VirtAddr;
    type Flags = u64;
    type PageTable = ();

    fn map(&self, _: VirtAddr, _: usize, _: u64, (): &mut ()) -> bool {
        true
    }

    fn unmap(&self, _: VirtAddr, _: usize, (): &mut ()) -> bool {
        true
    }

    fn protect(&self, _: VirtAddr, _: usize, _: u64, (): &mut ()) -> bool {
        true
    }
}

/// A set of areas.
pub type Set = MemorySet<NoPages>;

/// A set of `areas`.
pub fn set(areas: Areas) -> Set {
    let mut set = MemorySet::new();
    for (start, _) in areas.iter() {
        map(&mut set, start);
    }
    set
}

fn map(set: &mut Set, start: u64) {
    let area = MemoryArea::new(VirtAddr::from_usize(start as usize), LENGTH as usize, 0, NoPages);
    // Cannot fail: the range is free and the backend never refuses.
    let _ = set.map(area, &mut (), false);
}

/// The start of the area that holds `address`.
#[inline]
pub fn find(set: &Set, address: u64) -> Option<u64> {
    set.find(VirtAddr::from_usize(address as usize)).map(|area| area.start().as_usize() as u64)
}

/// Unmaps the area at `start` and maps it again.
#[inline]
pub fn unmap_map(set: &mut Set, start: u64) {
    let _ = set.unmap(VirtAddr::from_usize(start as usize), LENGTH as usize, &mut ());
    map(set, start);
}

/// Maps one more area at `start`, which is free, and unmaps it again.
#[inline]
pub fn map_unmap(set: &mut Set, start: u64) {
    map(set, start);
    let _ = set.unmap(VirtAddr::from_usize(start as usize), LENGTH as usize, &mut ());
}

/// The lowest free range of `length` bytes within `limits`.
pub fn search(set: &Set, length: u64, limits: std::ops::Range<u64>) -> Option<u64> {
    let low = VirtAddr::from_usize(limits.start as usize);
    let limit = AddrRange::new(low, VirtAddr::from_usize(limits.end as usize));
    set.find_free_area(low, length as usize, limit, 1 << 12).map(|start| start.as_usize() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baseline::areas::SIZES;

    #[test]
    fn does_the_same_as_the_plain_map() {
        let areas = SIZES[0];
        let mut set = set(areas);
        let start = areas.start(9);
        unmap_map(&mut set, start);
        map_unmap(&mut set, areas.start(areas.count));
        assert_eq!(set.len() as u64, areas.count);
        assert_eq!(find(&set, start + LENGTH - 1), Some(start));
        assert_eq!(find(&set, start + LENGTH), None);
        assert_eq!(search(&set, 4 << 12, areas.limits()), Some(areas.start(63) + LENGTH));
    }
}
