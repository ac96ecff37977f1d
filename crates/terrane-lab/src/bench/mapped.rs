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

// SAFETY: records never change. They lie in a vector that stays as it is and is dropped after the index.
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
    _records: Vec<Record>,
    /// Nodes that a thread has set aside for its changes.
    reserves: Vec<OwnReserve>,
    cpus: Vec<rig::Seat>,
}

/// In cache lines of its own. The lock is only ever taken by the thread it belongs to.
#[repr(align(128))]
struct OwnReserve(Mutex<Reserve<Record>>);

impl OwnReserve {
    fn lock(&self) -> MutexGuard<'_, Reserve<Record>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a thread needs.
pub struct Thread<'a> {
    cpu: MutexGuard<'a, Cpu>,
    reserve: MutexGuard<'a, Reserve<Record>>,
}

impl Mapped {
    /// An index of `areas`, for so many threads.
    pub fn new(areas: Areas, threads: usize) -> Result<Self, Failure> {
        let no_memory = rig::broken("make an index");
        let machine = rig::machine(1 << 20, threads)?;
        let cpus = rig::processors(&machine, threads)?;
        let records: Vec<Record> = areas.iter().map(|(start, _)| Record { start, _rest: [0; 15] }).collect();
        let limits = areas.limits();
        let index =
            Index::try_new_in(AddrRange::new(limits.start, limits.end), true, machine.machine().leaves())
                .map_err(|e| no_memory(&e))?;
        let mut reserve = Reserve::new();
        for record in &records {
            index.reserve(&mut reserve, 1).map_err(|e| no_memory(&e))?;
            let cpu = rig::lock(&cpus[0]);
            let range = AddrRange::new(record.start, record.start + LENGTH);
            index.insert(&mut reserve, &cpu.core().pin(), range, NonNull::from(record));
            cpu.core().participant().collect();
        }
        let reserves = (0..threads).map(|_| OwnReserve(Mutex::new(Reserve::new()))).collect();
        Ok(Self { index, _records: records, reserves, cpus })
    }

    /// What thread `index` needs.
    pub fn thread(&self, index: usize) -> Thread<'_> {
        Thread { cpu: rig::lock(&self.cpus[index]), reserve: self.reserves[index].lock() }
    }

    /// The record of the area that holds `address`, which is not touched: as an address, 0 for none.
    #[inline]
    pub fn find(&self, thread: &Thread<'_>, address: u64) -> u64 {
        let pin = thread.cpu.core().pin();
        self.index.find(&pin, address).map_or(0, |record| core::ptr::from_ref(record).addr() as u64)
    }

    /// The start of the area that holds `address`, by its record, which says itself that it does: what a fault looks at.
    #[inline]
    pub fn find_record(&self, thread: &Thread<'_>, address: u64) -> Option<u64> {
        let pin = thread.cpu.core().pin();
        let record = self.index.find(&pin, address)?;
        (record.start() <= address && address < record.end()).then_some(record.start)
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
        self.index.search(&thread.cpu.core().pin(), &request)
    }

    /// Takes the area at `start` out and puts it in again: two changes, each with what a call does around it.
    #[inline]
    pub fn erase_insert(&self, thread: &mut Thread<'_>, start: u64) -> Result<(), Failure> {
        let Thread { cpu, reserve } = thread;
        let cpu = cpu.core();
        let no_memory = |_| Failure::Broken("cannot change an index: out of memory".to_owned());
        self.index.reserve(reserve, 0).map_err(no_memory)?;
        let record = self.index.edit(reserve, &cpu.pin(), start, 0, |record, edit| {
            edit.remove();
            NonNull::from(record)
        });
        cpu.participant().collect();
        self.index.reserve(reserve, 1).map_err(no_memory)?;
        if let Some(record) = record {
            self.index.insert(reserve, &cpu.pin(), AddrRange::new(start, start + LENGTH), record);
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
        let mut thread = map.thread(0);
        let start = areas.start(700);
        for _ in 0..100 {
            map.erase_insert(&mut thread, start).unwrap();
        }
        assert_eq!(map.index.len() as u64, areas.count);
        assert_eq!(map.find_record(&thread, start + LENGTH - 1), Some(start));
        assert_eq!(map.find_record(&thread, start + LENGTH), None);
        assert_ne!(map.find(&thread, start + LENGTH - 1), 0);
        assert_eq!(map.find(&thread, start + LENGTH), 0);
        assert_eq!(map.search(&thread, 4 << 12), Some(areas.start(1023) + LENGTH));
        assert_eq!(map.search(&thread, 3 << 12), Some(areas.start(0) + LENGTH));
    }
}
