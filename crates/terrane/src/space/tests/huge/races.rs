//! Threads in the same huge pages: first touches, collapse, division, forks and unmaps at once; what each thread stores it
//! finds again. As in the races of small pages, each test takes `TERRANE_RACES_MS` milliseconds a way of locking.

use super::super::races::{Stage, Worker, fork_all_the_time, own_pages, own_words};
use super::*;
use alloc::vec;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const FRAMES: usize = 12_000;

fn both(test: impl Fn(&Bench, SpaceConfig, &Stage)) {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::on(TestHost::with_tickets(1, FRAMES), 12);
        test(&bench, SpaceConfig { locking, ..always() }, &Stage::new());
        bench.assert_nothing_left();
    }
}

/// Stores to an own word of each page of `pages`, which others empty, divide and gather: it finds what it stored, or zero from
/// some moment on.
fn stores_to_what_is_emptied(mut me: Worker<'_>, space: &Space, pages: core::ops::Range<u64>, word: u64) {
    let mut stored = vec![0; (pages.end - pages.start) as usize];
    let mut value = word << 48;
    while me.goes_on() {
        // Near each other, so that the threads meet in one block.
        let n = me.random.below(stored.len() as u64) as usize;
        let at = page(pages.start + n as u64) + word * 8;
        if me.random.one_in(2) {
            value += 1;
            match me.store(space, at, value) {
                Ok(()) => stored[n] = value,
                Err(error) => assert!(matches!(error, FaultError::NotAllowed | FaultError::NotMapped)),
            }
        }
        match me.load(space, at) {
            Ok(found) => {
                assert!(found == stored[n] || found == 0, "{found:#x} at {at:#x}, not {:#x}", stored[n]);
                // What has gone does not come back.
                stored[n] = found;
            }
            Err(error) => assert!(matches!(error, FaultError::NotAllowed | FaultError::NotMapped)),
        }
    }
}

fn collapses(space: &Space, me: &Worker<'_>, addr: u64) {
    match space.advise(&me.cpu, addr, BLOCK_SIZE, Advice::Collapse) {
        Ok(()) | Err(Error::Again | Error::Invalid | Error::NoMemory) => {}
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn nothing_is_lost_while_pages_are_gathered_and_divided() {
    both(|bench, config, stage| {
        let space = mapped(bench, config, 2);
        let common: Vec<u64> = [0, 1, 200, 511, 512, 900].map(page).into();
        std::thread::scope(|scope| {
            let (space, common) = (&space, &common[..]);
            for n in 0..2 {
                let me = stage.worker(bench, n);
                scope.spawn(move || own_words(me, space, common, n));
            }
            // Their block is whole now and then only; the first one is nearly always.
            let me = stage.worker(bench, 20);
            scope.spawn(move || own_pages(me, space, page(514), 8));
            let me = stage.worker(bench, 100);
            scope.spawn(move || fork_all_the_time(me, space, &common[..3]));
            let mut me = stage.worker(bench, 101);
            scope.spawn(move || {
                while me.goes_on() {
                    match me.random.below(6) {
                        0 => drop(space.collapse_step(&me.cpu, 2)),
                        1 => {
                            space.protect(&me.cpu, page(190), 20 * PAGE_SIZE, Prot::READ).unwrap();
                            space.protect(&me.cpu, page(190), 20 * PAGE_SIZE, RW).unwrap();
                        }
                        2 => space.advise(&me.cpu, page(300), 100 * PAGE_SIZE, Advice::DontNeed).unwrap(),
                        3 => collapses(space, &me, page(512)),
                        _ => collapses(space, &me, page(0)),
                    }
                }
            });
        });
        check_private(&bench.cpu, &[&space]);
        assert!(count(bench, Counter::ThpCollapseAlloc) > 0 && count(bench, Counter::ThpSplitPmd) > 0);
    });
}

#[test]
fn first_touches_of_blocks_that_come_and_go() {
    both(|bench, config, stage| {
        let space = mapped(bench, config, 2);
        std::thread::scope(|scope| {
            let space = &space;
            for word in 0..3 {
                let me = stage.worker(bench, word);
                scope.spawn(move || stores_to_what_is_emptied(me, space, 480..560, word));
            }
            for seed in [10, 11] {
                let mut me = stage.worker(bench, seed);
                scope.spawn(move || {
                    while me.goes_on() {
                        let block = page(me.random.below(2) * 512);
                        let part = page(480 + me.random.below(60));
                        let len = (1 + me.random.below(30)) * PAGE_SIZE;
                        let cpu = &me.cpu;
                        match me.random.below(12) {
                            0 => space.advise(cpu, block, BLOCK_SIZE, Advice::DontNeed).unwrap_or(()),
                            1 => space.advise(cpu, part, len, Advice::DontNeed).unwrap_or(()),
                            2 => space.unmap(cpu, block, BLOCK_SIZE).unwrap(),
                            3 => space.unmap(cpu, part, len).unwrap(),
                            4 => drop(space.protect(cpu, block, BLOCK_SIZE, Prot::empty())),
                            5 => drop(space.protect(cpu, part, len, Prot::READ)),
                            6 => drop(space.advise(cpu, part, len, Advice::PopulateWrite)),
                            7 => collapses(space, &me, block),
                            8 => drop(space.fork(cpu).unwrap()),
                            _ => {
                                // As before, and as a rule one VMA.
                                let request = MapRequest::anonymous(2 * BLOCK_SIZE, RW).fixed(BASE);
                                space.map(cpu, request).unwrap();
                            }
                        }
                    }
                });
            }
        });
        check_private(&bench.cpu, &[&space]);
        assert!(count(bench, Counter::ThpFaultAlloc) > 0 && count(bench, Counter::ThpSplitPmd) > 0);
    });
}

#[test]
fn no_block_comes_into_what_was_unmapped() {
    both(|bench, config, stage| {
        let space = bench.space(config);
        let mut me = stage.worker(bench, 1);
        let mut other = stage.worker(bench, 2);
        while me.goes_on() {
            let request = MapRequest::anonymous(BLOCK_SIZE, RW).fixed(BASE);
            space.map(&me.cpu, request).unwrap();
            let (begun, pause) = (Barrier::new(2), me.random.below(400));
            // All of it, or so much that the rest is not enough for a block.
            let gone = if me.random.one_in(2) { BLOCK_SIZE } else { PAGE_SIZE };
            std::thread::scope(|scope| {
                let (space, other, begun) = (&space, &mut other, &begun);
                scope.spawn(move || {
                    begun.wait();
                    let stored = other.store(space, page(9), 1);
                    assert!(matches!(stored, Ok(()) | Err(FaultError::NotMapped)));
                });
                begun.wait();
                // Zeroing takes so long; then comes what is to be met.
                let now = Instant::now();
                while now.elapsed() < Duration::from_micros(pause) {
                    core::hint::spin_loop();
                }
                space.unmap(&me.cpu, BASE, gone).unwrap();
            });
            assert_eq!(bench.load(&space, BASE), Err(FaultError::NotMapped));
            space.unmap(&me.cpu, BASE, BLOCK_SIZE).unwrap();
            assert_eq!(space.resident_pages(&me.cpu), 0);
        }
    });
}

#[test]
fn two_spaces_give_up_the_same_block() {
    both(|bench, config, stage| {
        let mut me = stage.worker(bench, 1);
        while me.goes_on() {
            let space = mapped(bench, config, 1);
            let at = page(me.random.below(512));
            me.store(&space, at, 1).unwrap();
            let child = space.fork(&me.cpu).unwrap();
            let [other, mut third] = [2, 3].map(|seed| stage.worker(bench, seed));
            std::thread::scope(|scope| {
                let child = &child;
                scope.spawn(move || {
                    // Divides the child's block, perhaps while it is being unmapped.
                    let stored = third.store(child, at, 2);
                    assert!(matches!(stored, Ok(()) | Err(FaultError::NotMapped)));
                });
                scope.spawn(move || child.unmap(&{ other }.cpu, BASE, BLOCK_SIZE).unwrap());
                space.unmap(&me.cpu, BASE, BLOCK_SIZE).unwrap();
            });
            assert_eq!((space.resident_pages(&me.cpu), child.resident_pages(&me.cpu)), (0, 0));
        }
    });
}
