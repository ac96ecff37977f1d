//! Threads that store to memory while others move it about, fork it, look for its pages, and map and unmap next door.

use super::super::model::Random;
use super::super::races::{Stage, Worker};
use super::super::rmap::check_private;
use super::super::{Bench, Space};
use super::{FIXED, P, RW};
use crate::error::FaultError;
use crate::mm::BLOCK_SIZE;
use crate::rmap::walk::for_each_mapping;
use crate::space::{HugePages, Locking, MapRequest, SpaceConfig};
use crate::testing::TestHost;
use crate::vma::{Access, Prot};

/// Where the memory is, in turn: in one table, across two, and at the same place of another table, but for the last.
const PLACES: [u64; 4] = [1 << 30, (3 << 30) - 5 * P, (5 << 30) + 7 * BLOCK_SIZE, (6 << 30) + 3 * P];

/// Stores to a word of each page wherever the memory is, and finds what it stored, wherever it is then.
fn stores(mut me: Worker<'_>, space: &Space, pages: u64, number: u64) {
    let mut expected = [0u64; 16];
    let mut value = number << 48;
    while me.goes_on() {
        let page = me.random.below(pages.min(16));
        let store = me.random.one_in(2);
        value += 1;
        let mut at = me.random.below(4) as usize;
        loop {
            let addr = PLACES[at % 4] + page * (pages / pages.min(16)) * P + number * 8;
            at += 1;
            let result = if store {
                me.store(space, addr, value).map(|()| expected[page as usize] = value)
            } else {
                me.load(space, addr).map(|found| assert_eq!(found, expected[page as usize], "{addr:#x}"))
            };
            match result {
                Ok(()) => break,
                Err(error) => assert!(matches!(error, FaultError::NotMapped | FaultError::NotAllowed)),
            }
        }
    }
}

fn moves(mut me: Worker<'_>, space: &Space, len: u64) {
    let mut at = 0;
    while me.goes_on() {
        let to = (at + 1 + me.random.below(3) as usize) % 4;
        if me.random.one_in(3) {
            // Something is in the way.
            let request =
                MapRequest::anonymous(P, Prot::empty()).fixed(PLACES[to] + me.random.below(len / P) * P);
            space.map(&me.cpu, request).unwrap();
        }
        let moved = space.remap(&me.cpu, PLACES[at], len, len, FIXED, PLACES[to]);
        assert_eq!(moved, Ok(PLACES[to]));
        at = to;
    }
}

fn next_door(mut me: Worker<'_>, space: &Space, len: u64) {
    while me.goes_on() {
        let place = PLACES[me.random.below(4) as usize];
        let (pages, above) = (1 + me.random.below(4), me.random.one_in(2));
        let addr = if above { place + len } else { place - pages * P };
        space.map(&me.cpu, MapRequest::anonymous(pages * P, RW).fixed(addr)).unwrap();
        if me.random.one_in(2) {
            me.store(space, addr, 1).unwrap();
        }
        space.unmap(&me.cpu, addr, pages * P).unwrap();
    }
}

/// Every page is found, exactly once, at every moment.
fn looks(mut me: Worker<'_>, space: &Space, pages: u64) {
    while me.goes_on() {
        let addr = PLACES[me.random.below(4) as usize] + me.random.below(pages) * P;
        let Some(found) = space.translate(&me.cpu, addr, Access::Read) else { continue };
        if found.frame == me.cpu.machine().zero_frame() {
            continue;
        }
        let mut times = 0;
        assert!(for_each_mapping(&me.cpu, found.frame, |_, _, _, _| times += 1));
        assert_eq!(times, 1, "{:?} at {addr:#x}", found.frame);
    }
}

/// A child's memory stands still.
fn forks(mut me: Worker<'_>, space: &Space, pages: u64) {
    while me.goes_on() {
        let child = space.fork(&me.cpu).unwrap();
        let place = PLACES.into_iter().find(|&place| me.load(&child, place).is_ok()).unwrap();
        let words = |me: &mut Worker<'_>| {
            (0..pages.min(16) * 3).fold(0u64, |sum, n| {
                let addr = place + n / 3 * (pages / pages.min(16)) * P + n % 3 * 8;
                sum.rotate_left(7) ^ me.load(&child, addr).unwrap()
            })
        };
        let before = words(&mut me);
        let to = PLACES.into_iter().find(|&other| other != place).unwrap();
        (0..me.random.below(20)).for_each(|_| std::thread::yield_now());
        assert_eq!(words(&mut me), before);
        assert_eq!(child.remap(&me.cpu, place, pages * P, pages * P, FIXED, to), Ok(to));
        drop(child);
    }
}

fn run(config: SpaceConfig, frames: usize, pages: u64, forking: bool) {
    let bench = Bench::on(TestHost::with_tickets(1, frames), 12);
    let space = bench.space(config);
    space.map(&bench.cpu, MapRequest::anonymous(pages * P, RW).fixed(PLACES[0])).unwrap();
    let mut random = Random::new(7);
    for page in 0..pages {
        if forking || random.one_in(2) {
            bench.store(&space, PLACES[0] + page * P + 64, page).unwrap();
        }
    }
    let stage = Stage::new();
    std::thread::scope(|scope| {
        let (space, stage, bench) = (&space, &stage, &bench);
        for number in 0..3 {
            let me = stage.worker(bench, number);
            scope.spawn(move || stores(me, space, pages, number));
        }
        let me = stage.worker(bench, 10);
        scope.spawn(move || moves(me, space, pages * P));
        let me = stage.worker(bench, 11);
        scope.spawn(move || next_door(me, space, pages * P));
        let me = stage.worker(bench, 12);
        match forking {
            true => scope.spawn(move || forks(me, space, pages)),
            false => scope.spawn(move || looks(me, space, pages)),
        };
    });
    check_private(&bench.cpu, &[&space]);
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn stores_and_walks_beside_moves() {
    for locking in [Locking::Speculative, Locking::Classic] {
        run(SpaceConfig::with_locking(locking), 1500, 16, false);
    }
}

#[test]
fn forks_beside_moves() {
    for locking in [Locking::Speculative, Locking::Classic] {
        run(SpaceConfig::with_locking(locking), 2500, 16, true);
    }
}

#[test]
fn huge_pages_beside_moves() {
    for forking in [false, true] {
        run(SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() }, 9000, 1024, forking);
    }
}
