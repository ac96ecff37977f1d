//! Pages that change their address, beside those who use them and those who look for them.

use super::{BASE, FRAMES, Me, Space, World, frame_of, load, map, page, reclaim, store};
use crate::schedules::{Effort, USUAL, check, check_caught};
use std::mem::ManuallyDrop;
use terrane::rmap::walk::for_each_mapping;
use terrane::space::{Resolve, UserFaultModes, UserFeatures};
use terrane::vma::RemapFlags;
use terrane::{FaultError, Frame, PAGE_SIZE};

const FEW: Effort = Effort { schedules: 150, ..USUAL };

/// Moves page `from` to `to`.
fn remap(cpu: &Me, space: &Space, from: u64, to: u64) {
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    let moved = space.remap(cpu, page(from), PAGE_SIZE, PAGE_SIZE, flags, page(to));
    assert_eq!(moved, Ok(page(to)));
}

/// At how many addresses a walk finds `frame`.
fn places(cpu: &Me, frame: Frame) -> usize {
    let mut count = 0;
    for_each_mapping(cpu, frame, |_, _, _, _| count += 1);
    count
}

/// A walk beside a move: it finds the page, at the one address or the other.
fn walk_beside_move() {
    let (world, cpu) = World::of(FRAMES);
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let frame = frame_of(&cpu, &world.space, 0).unwrap();
    let moves = world.spawn(|cpu, space| {
        remap(cpu, space, 0, 5);
        assert_eq!(load(cpu, space, 5), Ok(1));
    });
    assert_eq!(places(&cpu, frame), 1, "a walk misses a page that moves");
    assert_eq!(places(&cpu, frame), 1, "a walk misses a page that moves");
    moves.join().unwrap();
    assert_eq!(places(&cpu, frame), 1, "a walk misses a page that has moved");
    world.end(cpu);
}

/// The same with a page that a fork shares: it keeps its number.
fn walk_beside_move_of_shared() {
    let (world, cpu) = World::of(FRAMES);
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let frame = frame_of(&cpu, &world.space, 0).unwrap();
    let child = ManuallyDrop::new(world.space.fork(&cpu).unwrap());
    let moves = world.spawn(|cpu, space| remap(cpu, space, 0, 5));
    assert_eq!(places(&cpu, frame), 2, "a walk misses a page that moves");
    moves.join().unwrap();
    assert_eq!(places(&cpu, frame), 2, "a walk misses a page that has moved");
    let grandchild = world.space.fork(&cpu).unwrap();
    assert_eq!(places(&cpu, frame), 3, "a walk misses a page in a fork");
    assert_eq!((load(&cpu, &child, 0), load(&cpu, &grandchild, 5)), (Ok(1), Ok(1)));
    grandchild.destroy(&cpu);
    ManuallyDrop::into_inner(child).destroy(&cpu);
    world.end(cpu);
}

#[test]
fn walks_and_moves() {
    check(USUAL, walk_beside_move);
    check(FEW, walk_beside_move_of_shared);
}

#[test]
fn a_walk_reads_the_number_under_the_lock_and_asks_the_relocations() {
    check_caught("rmap_number_before_lock", USUAL, walk_beside_move);
    check_caught("carry_without_tree", USUAL, walk_beside_move);
    for name in ["relocation_unmarked", "relocation_not_inherited"] {
        check_caught(name, FEW, walk_beside_move_of_shared);
    }
}

/// A store beside a move: it is in the page at its new address, or did not happen.
fn store_beside_move() {
    let (world, cpu) = World::of(FRAMES);
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let user = world.spawn(|cpu, space| match store(cpu, space, 0, 2) {
        Ok(()) => 2,
        Err(FaultError::NotMapped) => 1,
        Err(error) => panic!("{error:?}"),
    });
    remap(&cpu, &world.space, 0, 5);
    let seen = load(&cpu, &world.space, 5).unwrap();
    assert_eq!(seen, user.join().unwrap(), "a store came late, or was lost");
    world.end(cpu);
}

#[test]
fn stores_and_moves() {
    check(USUAL, store_beside_move);
}

#[test]
fn a_move_waits_for_stores() {
    check_caught("carry_not_awaited", USUAL, store_beside_move);
    check_caught("no_shoot_down", USUAL, store_beside_move);
}

/// A page moves beside its way to swap: it is there afterwards, at its new address, and goes again.
fn reclaim_beside_move() {
    let (world, cpu, _disk) = World::swapping();
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let frame = frame_of(&cpu, &world.space, 0).unwrap();
    let moves = world.spawn(|cpu, space| {
        remap(cpu, space, 0, 5);
        store(cpu, space, 5, 2).unwrap();
    });
    terrane::proof::reclaim(&cpu, frame);
    terrane::proof::reclaim(&cpu, frame);
    moves.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 5), Ok(2), "a store was lost");
    reclaim(&cpu, &world.space, 5);
    assert_eq!(load(&cpu, &world.space, 5), Ok(2), "a store was lost");
    world.end(cpu);
}

#[test]
fn reclaim_and_moves() {
    check(USUAL, reclaim_beside_move);
}

/// A page that a handler moves gets another owner: a walk that stands before the old one's lock finds it all the same.
fn walk_beside_user_move() {
    let (world, cpu) = World::of(FRAMES);
    map(&cpu, &world.space, 0, 1);
    let faults = world.space.user_faults(&cpu, UserFeatures::empty()).unwrap();
    faults.register(&cpu, BASE, PAGE_SIZE, UserFaultModes::MISSING).unwrap();
    map(&cpu, &world.space, 5, 6);
    store(&cpu, &world.space, 5, 1).unwrap();
    let frame = frame_of(&cpu, &world.space, 5).unwrap();
    let mover = faults.clone();
    let moves = world.spawn(move |cpu, space| {
        mover.move_pages(cpu, page(0), page(5), PAGE_SIZE, Resolve::empty()).unwrap();
        drop(mover);
        remap(cpu, space, 0, 7);
        assert_eq!(load(cpu, space, 7), Ok(1));
    });
    assert_eq!(places(&cpu, frame), 1, "a walk misses a page that moves");
    moves.join().unwrap();
    assert_eq!(places(&cpu, frame), 1, "a walk misses a page that has moved");
    drop(faults);
    world.end(cpu);
}

#[test]
fn walks_and_pages_that_a_handler_moves() {
    check(USUAL, walk_beside_user_move);
}

#[test]
fn a_walk_looks_again_whose_page_it_is() {
    check_caught("rmap_owner_before_lock", USUAL, walk_beside_user_move);
}
