//! Changes in one step (`space::at_once`), which hold no range: the heap's, beside a fault and beside a call that holds the addresses; of a record that a
//! fork is copying; and beside a listing that knows their range.

use super::{
    BASE, Me, RW, SMALL, Space, World, end_fork, fork, is_present, load, map, mapped, page, store, unmap,
};
use crate::schedules::{Effort, USUAL, check, check_caught};
use terrane::space::MapRequest;
use terrane::vma::{MapFlags, Prot};
use terrane::{Error, FaultError, PAGE_SIZE};

/// Lists take longer.
const FEW: Effort = Effort { schedules: 100, ..USUAL };

/// A heap of `pages` pages, untouched.
fn heap(pages: u64) -> (World, Me) {
    let (world, cpu) = World::of(SMALL);
    world.space.set_heap(&cpu, BASE).unwrap();
    assert_eq!(world.space.brk(&cpu, page(pages)), page(pages));
    (world, cpu)
}

/// The break goes down beside the first touch of what it leaves, and up again.
fn break_beside_fault() {
    let (world, cpu) = heap(2);
    let user = world.spawn(|cpu, space| match store(cpu, space, 1, 7) {
        Ok(()) | Err(FaultError::NotMapped) => {}
        Err(error) => panic!("{error:?}"),
    });
    assert_eq!(world.space.brk(&cpu, page(1)), page(1));
    assert!(!is_present(&cpu, &world.space, 1), "a page was left behind");
    user.join().unwrap();
    assert!(!is_present(&cpu, &world.space, 1), "a page has come late");
    assert_eq!(load(&cpu, &world.space, 1), Err(FaultError::NotMapped));
    assert_eq!(world.space.brk(&cpu, page(3)), page(3));
    assert_eq!(load(&cpu, &world.space, 1), Ok(0), "a page of before");
    assert_eq!(mapped(&cpu, &world.space), [(0, 3, RW)]);
    world.end(cpu);
}

/// The break goes up beside a call that maps where it would go: one of the two is refused.
fn break_beside_map() {
    let (world, cpu) = heap(2);
    let other = world.spawn(|cpu, space| {
        // Shared memory holds its range.
        let request = MapRequest::shared_anonymous(PAGE_SIZE, RW).fixed(page(3));
        match space.map(cpu, request.with(MapFlags::FIXED_NOREPLACE)) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error, Error::Exists);
                false
            }
        }
    });
    let grown = world.space.brk(&cpu, page(4)) == page(4);
    assert_ne!(other.join().unwrap(), grown, "both, or none");
    assert_eq!(mapped(&cpu, &world.space)[0], (0, if grown { 4 } else { 2 }, RW));
    assert_eq!(world.space.brk(&cpu, page(1)), page(1));
    world.end(cpu);
}

#[test]
fn the_break_and_others() {
    check(USUAL, break_beside_fault);
    check(USUAL, break_beside_map);
}

#[test]
fn the_breaks_step_looks_for_tables_and_holders() {
    check_caught("break_ignores_tables", USUAL, break_beside_fault);
    check_caught("range_always_quiet", USUAL, break_beside_map);
}

/// A fork beside steps about what it copies, and a first touch of it.
fn steps_beside_fork(act: fn(&Me, &Space)) {
    let (world, cpu) = heap(2);
    // What the fork has to do before.
    map(&cpu, &world.space, 8, 9);
    store(&cpu, &world.space, 8, 1).unwrap();
    let steps = world.spawn(move |cpu, space| {
        act(cpu, space);
        store(cpu, space, 0, 5).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(5), "a store was lost");
    });
    let child = fork(&cpu, &world.space);
    let seen = load(&cpu, &child, 0).unwrap();
    steps.join().unwrap();
    assert_eq!(load(&cpu, &child, 0), Ok(seen), "the child has changed");
    assert_eq!(load(&cpu, &world.space, 0), Ok(5), "a store was lost");
    store(&cpu, &world.space, 0, 6).unwrap();
    assert_eq!(load(&cpu, &child, 0), Ok(seen), "the child has changed");
    unmap(&cpu, &world.space, 8, 9);
    end_fork(&cpu, child);
    world.end(cpu);
}

fn protect_beside_fork() {
    steps_beside_fork(|cpu, space| {
        for prot in [Prot::READ, RW] {
            space.protect(cpu, BASE, 2 * PAGE_SIZE, prot).unwrap();
        }
    });
}

fn break_beside_fork() {
    steps_beside_fork(|cpu, space| {
        for end in [page(3), page(1)] {
            assert_eq!(space.brk(cpu, end), end);
        }
    });
}

#[test]
fn steps_and_a_fork() {
    check(USUAL, protect_beside_fork);
    check(USUAL, break_beside_fork);
}

/// One page below all others, and one above.
const LOW: u64 = 0;
const HIGH: u64 = 100;

/// A list beside steps at two places, again and again: of those at the low place there is always one more, or as many.
fn steps_beside_listing() {
    let (world, cpu) = World::of(SMALL);
    // So many that the places are in two leaves.
    for n in 0..20 {
        map(&cpu, &world.space, 4 + 2 * n, 5 + 2 * n);
    }
    let steps = world.spawn(|cpu, space| {
        for _ in 0..2 {
            map(cpu, space, LOW, LOW + 1);
            map(cpu, space, HIGH, HIGH + 1);
            unmap(cpu, space, HIGH, HIGH + 1);
            unmap(cpu, space, LOW, LOW + 1);
        }
    });
    for _ in 0..2 {
        let list = mapped(&cpu, &world.space);
        let has = |n| list.iter().any(|&(from, to, _)| (from..to).contains(&n));
        assert!(has(LOW) || !has(HIGH), "a layout that never was");
        assert_eq!(list.len(), 20 + usize::from(has(LOW)) + usize::from(has(HIGH)));
    }
    steps.join().unwrap();
    assert_eq!(mapped(&cpu, &world.space).len(), 20);
    world.end(cpu);
}

#[test]
fn steps_and_a_listing() {
    check(FEW, steps_beside_listing);
}

#[test]
fn steps_tell_a_listing() {
    check_caught("step_untold", FEW, steps_beside_listing);
}
