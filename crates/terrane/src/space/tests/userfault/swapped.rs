//! Handlers and pages that are swapped out.

use super::*;
use crate::reclaim::page_out;
use crate::testing::TestSwap;
use alloc::boxed::Box;

fn bench() -> (Bench, TestSwap) {
    let bench = Bench::new(512);
    let swap = TestSwap::new(256);
    bench.machine.swap_on(Box::new(swap.clone())).unwrap();
    (bench, swap)
}

fn out(bench: &Bench, space: &Space, at: u64, pages: u64) -> usize {
    page_out(space.mm(), &bench.cpu, AddrRange::new(at, at + pages * P))
}

#[test]
fn what_is_protected_stays_so_in_swap() {
    let (bench, _) = bench();
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &handler(&bench, space);
    for at in [map(&bench, space, 4, RW), map_shared(&bench, space, 4)] {
        faults.register(cpu, at, 4 * P, WP).unwrap();
        (0..4).for_each(|page| bench.store(space, at + page * P, 5 + page).unwrap());
        faults.write_protect(cpu, at, 2 * P, true, PLAIN).unwrap();
        assert_eq!(out(&bench, space, at, 4), 4);
        // Stored to right from swap, or loaded before.
        for page in 0..2 {
            if page == 1 {
                assert_eq!(bench.load(space, at + page * P), Ok(6));
            }
            beside(
                &bench,
                |cpu| store(cpu, space, at + page * P, 1),
                || {
                    let event = next(faults, cpu);
                    assert_eq!((event.addr, event.kind), (at + page * P, FaultKind::WriteProtected));
                    faults.write_protect(cpu, event.addr, P, false, PLAIN).unwrap();
                },
            )
            .unwrap();
        }
        bench.store(space, at + 2 * P, 1).unwrap();
        assert_eq!([1, 2, 3].map(|page| bench.load(space, at + page * P)), [Ok(1), Ok(1), Ok(8)]);
    }
}

#[test]
fn pages_in_swap_move_too() {
    let (bench, swap) = bench();
    let space = bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = handler(&bench, &space);
    let (to, from) = (map(&bench, &space, 16, RW), map(&bench, &space, 16, RW));
    let (to, from) = (to.max(from), to.min(from));
    faults.register(cpu, to, 16 * P, MISSING).unwrap();
    (0..16).for_each(|page| bench.store(&space, from + page * P, 100 + page).unwrap());
    assert_eq!(out(&bench, &space, from, 8), 8);
    let used = bench.machine.swap().usage().1;
    assert_eq!(faults.move_pages(cpu, to, from, 12 * P, PLAIN), Ok(()));
    assert_eq!(bench.machine.swap().usage().1, used, "no page has been read");
    for page in 0..12 {
        assert_eq!(bench.load(&space, to + page * P), Ok(100 + page));
        assert_eq!(bench.load(&space, from + page * P), Ok(0));
    }
    // It has a new place in the reverse mapping: swapped out and in again.
    assert_eq!(out(&bench, &space, to, 12), 12);
    (0..12).for_each(|page| assert_eq!(bench.load(&space, to + page * P), Ok(100 + page)));
    // Shared with a child it stays.
    assert_eq!(out(&bench, &space, from + 12 * P, 4), 4);
    let child = space.fork(cpu).unwrap();
    assert_eq!(faults.move_pages(cpu, to + 12 * P, from + 12 * P, P, PLAIN), failed(Error::Busy));
    child.destroy(cpu);
    assert_eq!(faults.move_pages(cpu, to + 12 * P, from + 12 * P, P, PLAIN), Ok(()));
    // A page that the device has not taken is in memory, and moves as well; one that cannot be read moves unread.
    swap.fail_writes(1);
    bench.store(&space, from + P, 1).unwrap();
    out(&bench, &space, from + P, 1);
    space.advise(cpu, to + 13 * P, P, Advice::DontNeed).unwrap();
    assert_eq!(faults.move_pages(cpu, to + 13 * P, from + P, P, PLAIN), Ok(()));
    assert_eq!(bench.load(&space, to + 13 * P), Ok(1));
    swap.fail_writes(0);
    assert_eq!(out(&bench, &space, to + 13 * P, 1), 1);
    swap.fail_reads(1);
    let back = map(&bench, &space, 1, RW);
    faults.register(cpu, back, P, MISSING).unwrap();
    assert_eq!(faults.move_pages(cpu, back, to + 13 * P, P, PLAIN), Ok(()));
    assert_eq!(bench.load(&space, back), Err(FaultError::Io));
    swap.fail_reads(0);
    assert_eq!(bench.load(&space, back), Ok(1));
    drop(faults);
    space.destroy(cpu);
    assert_eq!(bench.machine.swap().usage().1, 0);
    bench.assert_nothing_left();
}
