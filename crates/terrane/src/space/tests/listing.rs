//! Listings beside calls: each is the state of one moment, and none keeps a call waiting.
//!
//! Tests with threads take `TERRANE_RACES_MS` milliseconds each (default 350).

use super::model::from_env;
use super::{Bench, Space};
use crate::addr::{AddrRange, PAGE_SIZE};
use crate::machine::Cpu;
use crate::object::Object;
use crate::space::{MapRequest, Mapping, SpaceConfig};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::testing::TestHost;
use crate::vma::Prot;
use alloc::vec;
use alloc::vec::Vec;
use std::thread;
use std::time::{Duration, Instant};

const RW: Prot = Prot::READ.union(Prot::WRITE);
const R: Prot = Prot::READ;

/// Pages in a region.
const PAGES: u64 = 12;

/// Where zones meet: what reaches over it is locked as a wide range.
const SEAM: u64 = 4 << 30;

/// A thread's region of a space, which goes through a cycle of states, each step by one call.
#[derive(Clone, Copy)]
struct Region(u64);

/// The protection of the VMAs of a region, by their first page and the one behind.
type State = &'static [(u64, u64, Prot)];

const STATES: [State; 8] = [
    &[(0, 12, RW)],
    &[(0, 4, RW), (4, 8, R), (8, 12, RW)],
    &[(0, 12, R)],
    &[(0, 4, R), (8, 12, R)],
    &[(2, 4, R), (8, 12, R)],
    &[(2, 3, R), (3, 9, RW), (9, 12, R)],
    &[(2, 12, RW)],
    &[(3, 12, RW)],
];

impl Region {
    fn range(self) -> AddrRange {
        AddrRange::new(self.0, self.0 + PAGES * PAGE_SIZE)
    }

    fn map(self, cpu: &Cpu<TestHost>, space: &Space, first: u64, end: u64, prot: Prot) {
        let request = MapRequest::anonymous((end - first) * PAGE_SIZE, prot);
        space.map(cpu, request.fixed(self.0 + first * PAGE_SIZE)).unwrap();
    }

    /// Goes from the state before to `STATES[step % 8]`.
    fn step(self, cpu: &Cpu<TestHost>, space: &Space, step: u64) {
        let page = |number: u64| self.0 + number * PAGE_SIZE;
        match step % 8 {
            0 => self.map(cpu, space, 0, 12, RW),
            1 => space.protect(cpu, page(4), 4 * PAGE_SIZE, R).unwrap(),
            2 => self.map(cpu, space, 0, 12, R),
            3 => space.unmap(cpu, page(4), 4 * PAGE_SIZE).unwrap(),
            4 => space.unmap(cpu, page(0), 2 * PAGE_SIZE).unwrap(),
            5 => self.map(cpu, space, 3, 9, RW),
            6 => space.protect(cpu, page(2), 10 * PAGE_SIZE, RW).unwrap(),
            _ => space.unmap(cpu, page(0), 3 * PAGE_SIZE).unwrap(),
        }
    }

    /// The part of a listing that is in the region, as a state.
    fn seen(self, mappings: &[Mapping]) -> Vec<(u64, u64, Prot)> {
        let inside = mappings.iter().filter(|mapping| mapping.range.overlaps(self.range()));
        let part = |mapping: &Mapping| {
            let part = mapping.range.intersection(self.range());
            ((part.start - self.0) / PAGE_SIZE, (part.end - self.0) / PAGE_SIZE, mapping.prot)
        };
        inside.map(part).collect()
    }
}

/// The same with neighbours that are alike put together.
fn united(state: &[(u64, u64, Prot)]) -> Vec<(u64, u64, Prot)> {
    let mut list: Vec<(u64, u64, Prot)> = vec![];
    for &(first, end, prot) in state {
        match list.last_mut() {
            Some(last) if last.1 == first && last.2 == prot => last.1 = end,
            _ => list.push((first, end, prot)),
        }
    }
    list
}

/// Maps `count` VMAs that do not merge, a page each, from `at` on.
fn fill(cpu: &Cpu<TestHost>, space: &Space, at: u64, count: u64) {
    for number in 0..count {
        let prot = if number % 2 == 0 { R } else { RW };
        let request = MapRequest::anonymous(PAGE_SIZE, prot);
        space.map(cpu, request.fixed(at + number * PAGE_SIZE)).unwrap();
    }
}

fn time() -> Instant {
    Instant::now() + Duration::from_millis(from_env("TERRANE_RACES_MS").unwrap_or(350))
}

/// Set when a thread ends, however it does.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Two threads take turns. So at every moment the one is as far as the other, or one step further: whoever reads one region
/// at another moment than the other, or amidst a step, is found out.
fn turns(regions: [Region; 2], between: u64) {
    let bench = Bench::new(200);
    let space = &bench.space(SpaceConfig::default());
    fill(&bench.cpu, space, between, 300);
    regions.iter().for_each(|region| region.step(&bench.cpu, space, 0));
    // How many steps have been made, by both.
    let (steps, over, end) = (&AtomicU64::new(2), &AtomicBool::new(false), time());
    thread::scope(|scope| {
        for (index, region) in regions.into_iter().enumerate() {
            let cpu = Cpu::try_new(&bench.machine).unwrap();
            scope.spawn(move || {
                let _ends = Ends(over);
                while !over.load(Ordering::SeqCst) {
                    let made = steps.load(Ordering::SeqCst);
                    if made % 2 == index as u64 {
                        region.step(&cpu, space, made / 2);
                        steps.store(made + 1, Ordering::SeqCst);
                    } else {
                        thread::yield_now();
                    }
                }
            });
        }
        let _ends = Ends(over);
        let mut listings = 0;
        while listings < 30 || Instant::now() < end && !over.load(Ordering::SeqCst) {
            let before = steps.load(Ordering::SeqCst);
            let mappings = space.mappings(&bench.cpu).unwrap();
            let after = steps.load(Ordering::SeqCst);
            let seen = regions.map(|region| region.seen(&mappings));
            // After `made` steps the first region has made the odd one more.
            let state = |steps: u64| STATES[(steps % 8) as usize];
            let matches = |made: &u64| {
                let made = *made;
                seen[0] == state(made.div_ceil(2) - 1) && seen[1] == state(made / 2 - 1)
            };
            assert!((before..=after + 1).any(|made| matches(&made)), "{seen:?}, {before} to {after} steps");
            assert!(mappings.is_sorted_by(|a, b| a.range.end <= b.range.start));
            listings += 1;
        }
        assert!(steps.load(Ordering::SeqCst) > 2);
    });
}

#[test]
fn a_listing_is_the_state_of_one_moment() {
    turns([Region(0x100_0000), Region(0x900_0000)], 0x500_0000);
    turns([Region(0x900_0000), Region(0x100_0000)], 0x500_0000);
}

#[test]
fn so_it_is_where_ranges_are_wide() {
    turns([Region(SEAM - 6 * PAGE_SIZE), Region(2 * SEAM - 4 * PAGE_SIZE)], 0x500_0000);
    turns([Region(0x100_0000), Region(2 * SEAM - 6 * PAGE_SIZE)], SEAM - 100 * PAGE_SIZE);
}

/// Threads whose regions touch, so that their VMAs merge and part all the time: each region is in one of its states.
#[test]
fn so_it_is_among_neighbours() {
    let bench = Bench::new(200);
    let space = &bench.space(SpaceConfig::default());
    let regions = [0, 1, 2].map(|index| Region(SEAM - (index * PAGES + 3) * PAGE_SIZE));
    fill(&bench.cpu, space, 0x500_0000, 40);
    regions.iter().for_each(|region| region.step(&bench.cpu, space, 0));
    let (over, end) = (&AtomicBool::new(false), time());
    thread::scope(|scope| {
        for region in regions {
            let cpu = Cpu::try_new(&bench.machine).unwrap();
            scope.spawn(move || {
                let _ends = Ends(over);
                let mut step = 1;
                while !over.load(Ordering::SeqCst) {
                    region.step(&cpu, space, step);
                    step += 1;
                }
            });
        }
        let _ends = Ends(over);
        let mut listings = 0;
        while listings < 30 || Instant::now() < end && !over.load(Ordering::SeqCst) {
            let mappings = space.mappings(&bench.cpu).unwrap();
            for region in regions {
                let seen = united(&region.seen(&mappings));
                assert!(
                    STATES.iter().any(|state| *state == seen),
                    "{seen:?} at {:x}: {mappings:x?}",
                    region.0
                );
            }
            assert_eq!(mappings.iter().filter(|mapping| mapping.range.end < 0x600_0000).count(), 40);
            listings += 1;
        }
    });
}

/// One page between two VMAs that nobody touches makes the three one, and parts them: all the time, in many places, most of
/// them in different leaves of the index. The two are always there.
#[test]
fn what_merges_and_parts_is_not_missed() {
    const PLACES: u64 = 60;
    let bench = Bench::new(200);
    let space = &bench.space(SpaceConfig::default());
    let place = |number: u64| Region(0x100_0000 + number * 16 * PAGE_SIZE);
    (0..PLACES).for_each(|number| place(number).map(&bench.cpu, space, 0, 9, RW));
    let (over, end) = (&AtomicBool::new(false), time());
    thread::scope(|scope| {
        for thread in 0..2 {
            let cpu = Cpu::try_new(&bench.machine).unwrap();
            scope.spawn(move || {
                let _ends = Ends(over);
                for step in 0.. {
                    // Upwards, as a listing goes; every place is of one thread.
                    let page = place((2 * step + thread) % PLACES).0 + 4 * PAGE_SIZE;
                    let prot = if (step / (PLACES / 2)).is_multiple_of(2) { R } else { RW };
                    space.protect(&cpu, page, PAGE_SIZE, prot).unwrap();
                    if over.load(Ordering::SeqCst) {
                        break;
                    }
                }
            });
        }
        let _ends = Ends(over);
        let mut listings = 0;
        while listings < 30 || Instant::now() < end && !over.load(Ordering::SeqCst) {
            let mappings = space.mappings(&bench.cpu).unwrap();
            for number in 0..PLACES {
                let seen = place(number).seen(&mappings);
                let whole = [(0, 9, RW)];
                let parted = [(0, 4, RW), (4, 5, R), (5, 9, RW)];
                assert!(seen == whole || seen == parted, "{seen:?} in place {number}");
            }
            listings += 1;
        }
    });
}

/// More is written beside the listing than it has room for.
#[test]
fn so_it_is_when_calls_change_more_than_expected() {
    let bench = Bench::new(200);
    let space = &bench.space(SpaceConfig::default());
    let (over, end) = (&AtomicBool::new(false), time());
    let all = AddrRange::new(0x100_0000, 0x100_0000 + 900 * PAGE_SIZE);
    thread::scope(|scope| {
        let cpu = Cpu::try_new(&bench.machine).unwrap();
        scope.spawn(move || {
            let _ends = Ends(over);
            while !over.load(Ordering::SeqCst) {
                fill(&cpu, space, all.start, all.pages());
                space.protect(&cpu, all.start, all.len(), Prot::EXEC).unwrap();
                space.unmap(&cpu, all.start, all.len()).unwrap();
            }
        });
        let _ends = Ends(over);
        let mut listings = 0;
        while listings < 30 || Instant::now() < end && !over.load(Ordering::SeqCst) {
            let mappings = space.mappings(&bench.cpu).unwrap();
            listings += 1;
            if let [only] = &mappings[..]
                && only.prot == Prot::EXEC
            {
                assert_eq!(only.range, all);
                continue;
            }
            for (number, mapping) in mappings.iter().enumerate() {
                let start = all.start + number as u64 * PAGE_SIZE;
                assert_eq!(mapping.range, AddrRange::new(start, start + PAGE_SIZE));
                assert_eq!(mapping.prot, if number % 2 == 0 { R } else { RW });
            }
        }
    });
}

/// A machine whose shoot-downs wait for an access, and a page of an object in a space.
fn with_access(act: impl FnOnce(&Bench, &Space, AddrRange)) {
    let bench = Bench::on(TestHost::with_tickets(1, 200), 8);
    let space = &bench.space(SpaceConfig::default());
    let object = Object::shared_memory(&bench.machine, 4 * PAGE_SIZE).unwrap();
    let request = MapRequest::<TestHost>::object(&object, 0, 4 * PAGE_SIZE, RW, true);
    let addr = space.map(&bench.cpu, request).unwrap();
    bench.store(space, addr, 1).unwrap();
    act(&bench, space, AddrRange::new(addr, addr + 4 * PAGE_SIZE));
}

/// An unmap that waits for accesses under way has changed the layout long since.
#[test]
fn a_listing_does_not_wait_for_a_sweep() {
    with_access(|bench, space, range| {
        let access = bench.machine.host().access(bench.cpu.id());
        let (lister, other) = (Cpu::try_new(&bench.machine).unwrap(), Cpu::try_new(&bench.machine).unwrap());
        thread::scope(|scope| {
            let unmap = scope.spawn(move || space.unmap(&other, range.start, range.len()).unwrap());
            let list = scope.spawn(move || while !space.mappings(&lister).unwrap().is_empty() {});
            let begun = Instant::now();
            while !list.is_finished() && begun.elapsed() < Duration::from_secs(10) {
                thread::yield_now();
            }
            let beside = list.is_finished() && !unmap.is_finished();
            // Before the check, or a thread that waits would never end.
            drop(access);
            assert!(beside, "the listing waited for the sweep");
        });
    });
}

/// A mapping that replaces another is not through when it has taken the other away.
#[test]
fn a_listing_waits_for_who_has_begun_to_change() {
    with_access(|bench, space, range| {
        let access = bench.machine.host().access(bench.cpu.id());
        let (lister, other) = (Cpu::try_new(&bench.machine).unwrap(), Cpu::try_new(&bench.machine).unwrap());
        thread::scope(|scope| {
            let map = scope.spawn(move || {
                let request = MapRequest::anonymous(range.len(), RW).fixed(range.start);
                space.map(&other, request).unwrap();
            });
            // What is looked up tells when the old one is gone.
            while space.map_count() > 0 {
                thread::yield_now();
            }
            let list = scope.spawn(move || space.mappings(&lister).unwrap());
            thread::sleep(Duration::from_millis(50));
            assert!(!list.is_finished() && !map.is_finished());
            drop(access);
            assert_eq!(list.join().unwrap().iter().map(|m| m.range).collect::<Vec<_>>(), [range]);
        });
    });
}
