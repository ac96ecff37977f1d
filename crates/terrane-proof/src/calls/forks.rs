//! Copy-on-write: against fork, against unmap, among sharers.

use super::{World, load, map, store, unmap};
use crate::schedules::{USUAL, check, check_caught};
use std::mem::ManuallyDrop;
use terrane::FaultError;

/// A store beside a fork: the child has it or not, for good.
fn against_fork() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 2);
    store(&cpu, &world.space, 0, 1).unwrap();
    let faults = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2));
        store(cpu, space, 0, 3).unwrap();
        store(cpu, space, 1, 4).unwrap();
    });
    let child = ManuallyDrop::new(world.space.fork(&cpu).unwrap());
    let seen = (load(&cpu, &child, 0).unwrap(), load(&cpu, &child, 1).unwrap());
    assert!(matches!(seen.0, 1..=3) && matches!(seen.1, 0 | 4), "{seen:?}");
    assert!(seen.1 == 0 || seen.0 == 3, "the later store without the earlier one: {seen:?}");
    faults.join().unwrap();
    assert_eq!(
        (load(&cpu, &child, 0).unwrap(), load(&cpu, &child, 1).unwrap()),
        seen,
        "the child has changed"
    );
    assert_eq!(
        (load(&cpu, &world.space, 0), load(&cpu, &world.space, 1)),
        (Ok(3), Ok(4)),
        "a store was lost"
    );
    store(&cpu, &child, 0, 9).unwrap();
    assert_eq!((load(&cpu, &world.space, 0), load(&cpu, &child, 0)), (Ok(3), Ok(9)));
    ManuallyDrop::into_inner(child).destroy(&cpu);
    world.end(cpu);
}

#[test]
fn a_fault_and_fork() {
    check(USUAL, against_fork);
}

#[test]
fn fork_waits_for_stores_and_holds_copies_back() {
    check_caught("stores_not_awaited", USUAL, against_fork);
    check_caught("fork_not_awaited", USUAL, against_fork);
    check_caught("forking_copies", USUAL, two_stores_against_fork);
}

/// Two threads store to a page beside a fork: what one copies has the other's store, or the other stores to the copy.
fn two_stores_against_fork() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let others = world.spawn(|cpu, space| {
        let word = super::page(0) + 8;
        for value in 1..=2 {
            crate::host::Model::store(cpu, space, word, value).unwrap();
        }
        assert_eq!(crate::host::Model::load(cpu, space, word), Ok(2), "a store was lost");
    });
    let copies = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        store(cpu, space, 0, 3).unwrap();
    });
    let child = world.space.fork(&cpu).unwrap();
    others.join().unwrap();
    copies.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(3), "a store was lost");
    assert_eq!(crate::host::Model::load(&cpu, &world.space, super::page(0) + 8), Ok(2), "a store was lost");
    child.destroy(&cpu);
    world.end(cpu);
}

#[test]
fn two_stores_and_fork() {
    check(USUAL, two_stores_against_fork);
}

/// Copy-on-write in the child beside an unmap in the parent.
fn against_unmap() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 5).unwrap();
    let child = ManuallyDrop::new(world.space.fork(&cpu).unwrap());
    let parent = world.spawn(|cpu, space| {
        match store(cpu, space, 0, 6) {
            Ok(()) | Err(FaultError::NotMapped) => {}
            other => panic!("{other:?}"),
        }
        unmap(cpu, space, 0, 1);
        map(cpu, space, 0, 1);
        assert_eq!(load(cpu, space, 0), Ok(0));
    });
    assert_eq!(load(&cpu, &child, 0), Ok(5));
    store(&cpu, &child, 0, 7).unwrap();
    assert_eq!(load(&cpu, &child, 0), Ok(7));
    parent.join().unwrap();
    assert_eq!(load(&cpu, &child, 0), Ok(7));
    ManuallyDrop::into_inner(child).destroy(&cpu);
    world.end(cpu);
}

#[test]
fn copy_on_write_and_unmap() {
    check(USUAL, against_unmap);
}

/// Two threads of one space store to a shared page: it is copied, and both stores are in it.
fn two_copiers() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 5).unwrap();
    let child = ManuallyDrop::new(world.space.fork(&cpu).unwrap());
    let other = world.spawn(|cpu, space| {
        crate::host::Model::store(cpu, space, super::page(0) + 8, 1).unwrap();
    });
    store(&cpu, &world.space, 0, 6).unwrap();
    other.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(6));
    assert_eq!(crate::host::Model::load(&cpu, &world.space, super::page(0) + 8), Ok(1));
    assert_eq!(load(&cpu, &child, 0), Ok(5));
    assert_eq!(crate::host::Model::load(&cpu, &child, super::page(0) + 8), Ok(0));
    ManuallyDrop::into_inner(child).destroy(&cpu);
    world.end(cpu);
}

#[test]
fn sharers_copy_once() {
    check(USUAL, two_copiers);
}

#[test]
fn sharing_needs_the_shoot_down_and_the_entry() {
    check_caught("no_shoot_down", USUAL, two_copiers);
    check_caught("take_without_looking", USUAL, two_copiers);
}
