//! `std::collections::BTreeMap`, bare and under a reader-writer lock: what one would write without Terrane.

use super::areas::Areas;
use std::collections::BTreeMap;
use std::sync::PoisonError;

/// Start to end and flags: the least that a mapping is.
pub type Map = BTreeMap<u64, (u64, u64)>;

/// A map of `areas`.
pub fn map(areas: Areas) -> Map {
    areas.iter().map(|(start, end)| (start, (end, 0))).collect()
}

/// The area that holds `address`: its start and end.
#[inline]
pub fn find(map: &Map, address: u64) -> Option<(u64, u64)> {
    let (&start, &(end, _)) = map.range(..=address).next_back()?;
    (address < end).then_some((start, end))
}

/// Takes the area at `start` out and puts it in again.
#[inline]
pub fn erase_insert(map: &mut Map, start: u64) {
    if let Some(area) = map.remove(&start) {
        map.insert(start, area);
    }
}

/// The lowest free range of `length` bytes within `limits`, found as before there were gap sizes: by looking at one
/// area after the other.
pub fn search(map: &Map, length: u64, limits: std::ops::Range<u64>) -> Option<u64> {
    let mut free = limits.start;
    for (&start, &(end, _)) in map {
        if start - free >= length {
            return Some(free);
        }
        free = end;
    }
    (limits.end - free >= length).then_some(free)
}

/// A map under a reader-writer lock.
pub trait Locked: Sync {
    /// [`find`] under the lock taken for reading.
    fn find(&self, address: u64) -> Option<(u64, u64)>;
    /// [`erase_insert`] under the lock taken for writing.
    fn erase_insert(&self, start: u64);
}

/// Under the lock of the standard library.
pub struct Std(std::sync::RwLock<Map>);

/// Under the lock of `parking_lot`.
pub struct ParkingLot(parking_lot::RwLock<Map>);

/// A record as large as Terrane's, in a place of its own, as it must be if others point to it.
#[repr(align(64))]
struct Record {
    start: u64,
    end: u64,
    _rest: [u64; 14],
}

/// A map of records, not of bare ends, under the lock of the standard library.
pub struct Records(std::sync::RwLock<BTreeMap<u64, Box<Record>>>);

impl Records {
    /// A map of `areas`.
    pub fn new(areas: Areas) -> Self {
        let record = |(start, end)| (start, Box::new(Record { start, end, _rest: [0; 14] }));
        Self(std::sync::RwLock::new(areas.iter().map(record).collect()))
    }

    /// The start of the area that holds `address`, by its record.
    #[inline]
    pub fn find(&self, address: u64) -> Option<u64> {
        let map = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let (_, record) = map.range(..=address).next_back()?;
        (record.start <= address && address < record.end).then_some(record.start)
    }
}

impl Std {
    /// A map of `areas`.
    pub fn new(areas: Areas) -> Self {
        Self(std::sync::RwLock::new(map(areas)))
    }
}

impl ParkingLot {
    /// A map of `areas`.
    pub fn new(areas: Areas) -> Self {
        Self(parking_lot::RwLock::new(map(areas)))
    }
}

impl Locked for Std {
    #[inline]
    fn find(&self, address: u64) -> Option<(u64, u64)> {
        find(&self.0.read().unwrap_or_else(PoisonError::into_inner), address)
    }

    #[inline]
    fn erase_insert(&self, start: u64) {
        erase_insert(&mut self.0.write().unwrap_or_else(PoisonError::into_inner), start);
    }
}

impl Locked for ParkingLot {
    #[inline]
    fn find(&self, address: u64) -> Option<(u64, u64)> {
        find(&self.0.read(), address)
    }

    #[inline]
    fn erase_insert(&self, start: u64) {
        erase_insert(&mut self.0.write(), start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baseline::areas::{LENGTH, SIZES};

    #[test]
    fn finds_what_is_there_and_only_the_tail_is_free() {
        let areas = SIZES[0];
        let mut map = map(areas);
        let (start, end) = (areas.start(7), areas.start(7) + LENGTH);
        assert_eq!(find(&map, start), Some((start, end)));
        assert_eq!(find(&map, end - 1), Some((start, end)));
        assert_eq!(find(&map, end), None);
        erase_insert(&mut map, start);
        assert_eq!(map.len() as u64, areas.count);
        assert_eq!(search(&map, 4 << 12, areas.limits()), Some(areas.start(63) + LENGTH));
        assert_eq!(search(&map, 3 << 12, areas.limits()), Some(end - 7 * (32 << 10)));
        assert_eq!(Records::new(areas).find(end - 1), Some(start));
        assert_eq!(Records::new(areas).find(end), None);
        for locked in [&Std::new(areas) as &dyn Locked, &ParkingLot::new(areas)] {
            locked.erase_insert(start);
            assert_eq!(locked.find(start + 1), Some((start, end)));
        }
    }
}
