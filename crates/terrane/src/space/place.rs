//! Finding free addresses (requirement C2).
//!
//! One search of the index serves all: this module only says what to ask it, in the order of Linux: a fixed address, a
//! hint, then from above below `map_top`, and when that has no room, from below above it.

use super::SpaceConfig;
use super::change::Change;
use super::map::MapRequest;
use crate::addr::{AddrRange, PAGE_SIZE, page_ceil};
use crate::error::Error;
use crate::host::Host;
use crate::index::{Direction, GapRequest};
use crate::stats::Counter;
use crate::sync::Pin;
use crate::vma::MapFlags;

/// Where `MAP_32BIT` looks, as in Linux.
const LOW: AddrRange = AddrRange { start: 0x4000_0000, end: 0x8000_0000 };

impl<H: Host> Change<'_, H> {
    /// The address for `request`, whose length is `len` (whole pages, not 0). What is mapped at a fixed address is
    /// still there.
    pub(super) fn place(
        &mut self,
        pin: &Pin<'_>,
        config: &SpaceConfig,
        request: &MapRequest<H>,
        len: u64,
    ) -> Result<u64, Error> {
        let limits = config.range;
        if len > limits.len() {
            return Err(Error::NoMemory);
        }
        if request.flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE) {
            return self.fixed(pin, config, request, len);
        }
        let low_2gib = request.flags.contains(MapFlags::LOW_2GIB);
        if request.addr != 0
            && request.align <= PAGE_SIZE
            && let Some(addr) =
                self.hint(pin, limits, request.addr, len).filter(|addr| !low_2gib || addr + len <= LOW.end)
        {
            return Ok(addr);
        }
        let (align_mask, align_offset) = if request.align > PAGE_SIZE {
            (request.align - PAGE_SIZE, 0)
        } else if request.object.is_some() && request.flags.contains(MapFlags::SHARED) {
            (config.colour_mask, request.offset & config.colour_mask)
        } else {
            (0, 0)
        };
        let ask = |range: AddrRange, direction| GapRequest {
            length: len,
            low: range.start.max(limits.start),
            high: range.end.min(limits.end),
            direction,
            align_mask,
            align_offset,
        };
        if low_2gib {
            return self.search(pin, config, ask(LOW, Direction::BottomUp)).ok_or(Error::NoMemory);
        }
        let below = AddrRange::new(limits.start, config.map_top);
        if config.bottom_up {
            return self.search(pin, config, ask(limits, Direction::BottomUp)).ok_or(Error::NoMemory);
        }
        if let Some(addr) = self.search(pin, config, ask(below, Direction::TopDown)) {
            return Ok(addr);
        }
        let above = AddrRange::new(config.map_top, limits.end);
        if above.is_empty() {
            return Err(Error::NoMemory);
        }
        self.search(pin, config, ask(above, Direction::BottomUp)).ok_or(Error::NoMemory)
    }

    fn fixed(
        &self,
        pin: &Pin<'_>,
        config: &SpaceConfig,
        request: &MapRequest<H>,
        len: u64,
    ) -> Result<u64, Error> {
        let addr = request.addr;
        if !addr.is_multiple_of(PAGE_SIZE) {
            return Err(Error::Invalid);
        }
        let range = AddrRange::of_len(addr, len).filter(|range| range.end <= config.range.end);
        let range = range.ok_or(Error::NoMemory)?;
        if addr < config.range.start {
            // As below `mmap_min_addr`.
            return Err(Error::NotPermitted);
        }
        if request.flags.contains(MapFlags::FIXED_NOREPLACE)
            && self.mm.index.first_ending_after(pin, addr).is_some_and(|vma| vma.start() < range.end)
        {
            return Err(Error::Exists);
        }
        Ok(addr)
    }

    /// The hint, rounded up to a page, if the range there is free and keeps the guard gap of a stack above.
    fn hint(&self, pin: &Pin<'_>, limits: AddrRange, addr: u64, len: u64) -> Option<u64> {
        let addr = page_ceil(addr)?.max(limits.start);
        let range = AddrRange::of_len(addr, len).filter(|range| range.end <= limits.end)?;
        let free = self.mm.index.first_ending_after(pin, addr).is_none_or(|vma| {
            range.end <= vma.start().saturating_sub(crate::index::Entry::guard_below(vma))
                && vma.start() >= addr
        });
        free.then_some(addr)
    }

    fn search(&mut self, pin: &Pin<'_>, config: &SpaceConfig, ask: GapRequest) -> Option<u64> {
        if config.linear_search {
            let found = self.mm.index.search_linear(pin, &ask, self.layout.search_from);
            self.layout.search_from = found.unwrap_or(0);
            return found;
        }
        let mut leaves = 0;
        let found = self.mm.index.search_counting(pin, &ask, &mut leaves);
        self.mm.machine.stats().add(pin, Counter::GapLeaves, leaves as u64);
        found
    }
}
