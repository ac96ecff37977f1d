//! Terrane's index by itself, holding areas.

use super::rig;
use crate::baseline::areas::{Areas, LENGTH};
use crate::failure::Failure;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use terrane::addr::AddrRange;
use terrane::index::{Direction, Entry, GapRequest, Index, Reserve};
use terrane_hosted::Cpu;

/// A record as large, and aligned, as a VMA.
#[repr(align(64))]
struct Record {
    start: u64,
    _rest: [u64; 15],
}

const _: () = assert!(size_of::<Record>() == 128);

// SAFETY: records never change. They lie in a vector that stays as it is and is dropped after the index, and the
// index's one reserve is beside it.
unsafe impl Entry for Record {
    #[inline]
    fn start(&self) -> u64 {
        self.start
    }

    #[inline]
    fn end(&self) -> u64 {
        self.start + LENGTH
    }
}

/// An index of areas, and processors to use it with.
pub struct Mapped {
    // Dropped in this order: the index before its records, and the machine, which has index nodes to free, last.
    index: Index<Record>,
    /// Boxed, for it is written by every change, and what is beside it read by every lookup.
    reserve: Box<Mutex<Reserve<Record>>>,
    _records: Vec<Record>,
    cpus: Vec<rig::Seat>,
}

/// What a thread needs.
pub type Thread<'a> = MutexGuard<'a, Cpu>;

impl Mapped {
    /// An index of `areas`, for so many threads.
    pub fn new(areas: Areas, threads: usize) -> Result<Self, Failure> {
        let no_memory = rig::broken("make an index");
        let machine = rig::machine(1 << 20, threads)?;
        let cpus = rig::processors(&machine, threads)?;
        let records: Vec<Record> = areas.iter().map(|(start, _)| Record { start, _rest: [0; 15] }).collect();
        let limits = areas.limits();
        let index =
            Index::try_new(AddrRange::new(limits.start, limits.end), true).map_err(|e| no_memory(&e))?;
        let mut reserve = Reserve::new();
        for record in &records {
            index.reserve(&mut reserve, 1).map_err(|e| no_memory(&e))?;
            let cpu = rig::lock(&cpus[0]);
            index.insert(&mut reserve, &cpu.core().pin(), NonNull::from(record));
            cpu.core().participant().collect();
        }
        Ok(Self { index, reserve: Box::new(Mutex::new(reserve)), _records: records, cpus })
    }

    /// What thread `index` needs.
    pub fn thread(&self, index: usize) -> Thread<'_> {
        rig::lock(&self.cpus[index])
    }

    /// The start of the area that holds `address`.
    #[inline]
    pub fn find(&self, thread: &Thread<'_>, address: u64) -> Option<u64> {
        let pin = thread.core().pin();
        self.index.find(&pin, address).map(|record| record.start)
    }

    /// The lowest free range of `length` bytes.
    pub fn search(&self, thread: &Thread<'_>, length: u64) -> Option<u64> {
        let limits = self.index.limits();
        let request = GapRequest {
            length,
            low: limits.start,
            high: limits.end,
            direction: Direction::BottomUp,
            align_mask: 0,
            align_offset: 0,
        };
        self.index.search(&thread.core().pin(), &request)
    }

    /// The right to change it.
    pub fn locked(&self) -> Writer<'_> {
        Writer { index: &self.index, reserve: self.reserve.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

/// The right to change an index.
pub struct Writer<'a> {
    index: &'a Index<Record>,
    reserve: MutexGuard<'a, Reserve<Record>>,
}

impl Writer<'_> {
    /// Takes the area at `start` out and puts it in again: two changes, each with what a call does around it.
    #[inline]
    pub fn erase_insert(&mut self, thread: &Thread<'_>, start: u64) -> Result<(), Failure> {
        let cpu = thread.core();
        let no_memory = |_| Failure::Broken("cannot change an index: out of memory".to_owned());
        self.index.reserve(&mut self.reserve, 0).map_err(no_memory)?;
        let record = self.index.remove(&mut self.reserve, &cpu.pin(), start);
        cpu.participant().collect();
        self.index.reserve(&mut self.reserve, 1).map_err(no_memory)?;
        if let Some(record) = record {
            self.index.insert(&mut self.reserve, &cpu.pin(), record);
        }
        cpu.participant().collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baseline::areas::SIZES;

    #[test]
    fn does_the_same_as_the_plain_map() {
        let areas = SIZES[1];
        let map = Mapped::new(areas, 1).unwrap();
        let thread = map.thread(0);
        let start = areas.start(700);
        for _ in 0..100 {
            map.locked().erase_insert(&thread, start).unwrap();
        }
        assert_eq!(map.index.len() as u64, areas.count);
        assert_eq!(map.find(&thread, start + LENGTH - 1), Some(start));
        assert_eq!(map.find(&thread, start + LENGTH), None);
        assert_eq!(map.search(&thread, 4 << 12), Some(areas.start(1023) + LENGTH));
        assert_eq!(map.search(&thread, 3 << 12), Some(areas.start(0) + LENGTH));
    }
}
