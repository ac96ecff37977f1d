//! The heap, and changes in one step beside faults, forks and listings.

use super::races::Stage;
use super::{Bench, Space};
use crate::addr::PAGE_SIZE as P;
use crate::error::{Error, FaultError};
use crate::space::{Backing, Locking, MapRequest, SpaceConfig};
use crate::testing::TestHost;
use crate::vma::{Access, MapFlags, Prot};
use alloc::vec::Vec;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const HEAP: u64 = 0x200_0000;

fn heap_of(b: &Bench, config: SpaceConfig, pages: u64) -> Space {
    let space = b.space(config);
    space.set_heap(&b.cpu, HEAP).unwrap();
    assert_eq!(space.brk(&b.cpu, HEAP + pages * P), HEAP + pages * P);
    space
}

/// A page stays free above the heap, more below a stack, and nothing is lost on the way there and back.
#[test]
fn the_break_keeps_its_distance() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let b = Bench::new(200);
        let space = heap_of(&b, SpaceConfig::with_locking(locking), 1);
        let top = |pages: u64| space.brk(&b.cpu, HEAP + pages * P);
        let above = |at: u64, flags| {
            let request = MapRequest { addr: HEAP + at * P, ..MapRequest::anonymous(P, RW) };
            space.map(&b.cpu, request.with(MapFlags::FIXED | flags)).unwrap()
        };
        let plain = above(20, MapFlags::empty());
        assert_eq!(top(19), HEAP + 19 * P);
        assert_eq!(top(20), HEAP + 19 * P);
        // Part of a page more needs no page.
        assert_eq!(space.brk(&b.cpu, HEAP + 18 * P + 1), HEAP + 18 * P + 1);
        assert_eq!(top(2), HEAP + 2 * P);
        space.unmap(&b.cpu, plain, P).unwrap();
        above(600, MapFlags::GROWSDOWN);
        assert_eq!(top(344), HEAP + 2 * P, "no room for the guard");
        assert_eq!(top(343), HEAP + 343 * P);
        assert_eq!(b.store(&space, HEAP + 342 * P, 7), Ok(()));
        assert_eq!(top(342), HEAP + 342 * P);
        assert_eq!(b.load(&space, HEAP + 342 * P), Err(FaultError::NotMapped));
        assert_eq!(top(343), HEAP + 343 * P);
        assert_eq!(b.load(&space, HEAP + 342 * P), Ok(0));
        assert_eq!(space.mapped_bytes(), 344 * P);
        assert_eq!(space.mappings(&b.cpu).unwrap().len(), 2);
        assert_eq!(top(0), HEAP);
        assert_eq!(space.mapped_bytes(), P);
        drop(space);
        b.assert_nothing_left();
    }
}

/// The break moves while others fault on the heap, map beside it, and list: nobody keeps a page beyond the break.
#[test]
fn the_break_moves_beside_faults_and_listings() {
    let b = Bench::on(TestHost::with_tickets(1, 600), 8);
    let space = heap_of(&b, SpaceConfig::default(), 1);
    let (space, stage) = (&space, &Stage::new());
    std::thread::scope(|threads| {
        for seed in 0..2 {
            let mut me = stage.worker(&b, seed);
            threads.spawn(move || {
                while me.goes_on() {
                    let addr = HEAP + me.random.below(24) * P;
                    if let Err(error) = me.store(space, addr, addr) {
                        assert_eq!(error, FaultError::NotMapped);
                    }
                }
            });
        }
        let me = stage.worker(&b, 2);
        threads.spawn(move || {
            while me.goes_on() {
                let list = space.mappings(&me.cpu).unwrap();
                let heap: Vec<_> = list.iter().filter(|m| m.backing == Backing::Heap).collect();
                assert!(heap.len() == 1 && heap[0].range.start == HEAP, "{heap:?}");
                for pair in list.windows(2) {
                    assert!(pair[0].range.end + P <= pair[1].range.start, "{list:?}");
                }
            }
        });
        let mut me = stage.worker(&b, 3);
        threads.spawn(move || {
            // Where the heap would grow to, but never within a page of it.
            let request = |at| MapRequest { addr: at, ..MapRequest::anonymous(P, Prot::READ) };
            while me.goes_on() {
                let at = HEAP + (30 + me.random.below(3)) * P;
                match space.map(&me.cpu, request(at).with(MapFlags::FIXED_NOREPLACE)) {
                    Ok(at) => space.unmap(&me.cpu, at, P).unwrap(),
                    Err(error) => assert_eq!(error, Error::Exists),
                }
            }
        });
        let mut me = stage.worker(&b, 4);
        while me.goes_on() {
            let end = HEAP + (1 + me.random.below(27)) * P;
            assert_eq!(space.brk(&me.cpu, end), end);
            let beyond = HEAP + 27 * P;
            assert!(space.translate(&me.cpu, beyond, Access::Read).is_none());
        }
        assert_eq!(space.brk(&me.cpu, HEAP + P), HEAP + P);
        for page in 1..28 {
            assert_eq!(me.load(space, HEAP + page * P), Err(FaultError::NotMapped));
        }
    });
    assert_eq!(space.mapped_bytes(), P);
}

/// Fork keeps the counter of a record odd for as long as it copies it: steps of other calls leave it alone.
#[test]
fn steps_leave_a_record_alone_that_is_being_forked() {
    let b = Bench::on(TestHost::with_tickets(1, 600), 8);
    let space = heap_of(&b, SpaceConfig::default(), 1);
    let base = 0x1000_0000;
    space.map(&b.cpu, MapRequest::anonymous(16 * P, RW).fixed(base)).unwrap();
    let (space, stage) = (&space, &Stage::new());
    std::thread::scope(|threads| {
        for seed in 0..2 {
            let mut me = stage.worker(&b, seed);
            threads.spawn(move || {
                let own = base + 8 * P * seed;
                while me.goes_on() {
                    match me.random.below(4) {
                        0 => {
                            let end = HEAP + (1 + me.random.below(8)) * P;
                            space.brk(&me.cpu, end);
                        }
                        1 => {
                            let at = space.map(&me.cpu, MapRequest::anonymous(P, Prot::READ)).unwrap();
                            space.unmap(&me.cpu, at, P).unwrap();
                        }
                        _ => {
                            let at = own + me.random.below(8) * P;
                            let prot = if me.random.one_in(2) { RW } else { Prot::READ };
                            space.protect(&me.cpu, at, P, prot).unwrap();
                        }
                    }
                }
            });
        }
        let me = stage.worker(&b, 2);
        while me.goes_on() {
            let child = space.fork(&me.cpu).unwrap();
            assert!(child.mapped_bytes() >= 17 * P);
        }
    });
    // All records are at rest.
    space.protect(&b.cpu, base, 16 * P, RW).unwrap();
    for page in 0..16 {
        assert_eq!(b.store(space, base + page * P, 1), Ok(()));
    }
}
