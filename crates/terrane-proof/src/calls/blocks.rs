//! Huge pages: faults beside a collapse of their 2 MiB, and beside the division of a block.

use super::{BASE, RW, World, load, map, mapped, page, store, unmap};
use crate::schedules::{Effort, check, check_caught};
use terrane::vma::{Advice, Prot};
use terrane::{FaultError, PAGE_SIZE};

/// A collapse is some ten thousand steps.
const FEW: Effort = Effort { schedules: 25, steps: 2_000_000 };
const BLOCK: u64 = 512;
/// Two blocks of frames, and as many single ones.
const FRAMES: usize = 4 * 512;

fn collapse(cpu: &super::Me, space: &super::Space) {
    space.advise(cpu, BASE, BLOCK * PAGE_SIZE, Advice::Collapse).unwrap();
}

/// Stores and loads beside a collapse: none is lost, whichever page it reaches.
fn against_collapse() {
    let (world, cpu) = World::of(FRAMES);
    map(&cpu, &world.space, 0, BLOCK);
    for n in [0, 5, 511] {
        store(&cpu, &world.space, n, 100 + n).unwrap();
    }
    let faults = world.spawn(|cpu, space| {
        for (n, value) in [(5, 1), (7, 2), (511, 3), (5, 4)] {
            store(cpu, space, n, value).unwrap();
            assert_eq!(load(cpu, space, n), Ok(value), "a store was lost");
        }
        assert_eq!(load(cpu, space, 0), Ok(100));
    });
    collapse(&cpu, &world.space);
    faults.join().unwrap();
    for (n, value) in [(0, 100), (5, 4), (7, 2), (511, 3), (6, 0)] {
        assert_eq!(load(&cpu, &world.space, n), Ok(value));
    }
    assert_eq!(world.space.page_tables(), 2, "no block");
    world.end(cpu);
}

/// Stores beside calls that divide the block: each page keeps what it holds, and what is protected stands still.
fn against_division() {
    let (world, cpu) = World::of(FRAMES);
    map(&cpu, &world.space, 0, BLOCK);
    store(&cpu, &world.space, 3, 5).unwrap();
    collapse(&cpu, &world.space);
    let faults = world.spawn(|cpu, space| {
        store(cpu, space, 5, 1).unwrap();
        match store(cpu, space, 9, 2) {
            Ok(()) | Err(FaultError::NotMapped) => {}
            other => panic!("{other:?}"),
        }
        match store(cpu, space, 3, 3) {
            Ok(()) => 3,
            Err(error) => {
                assert_eq!(error, FaultError::NotAllowed);
                5
            }
        }
    });
    world.space.protect(&cpu, page(3), PAGE_SIZE, Prot::READ).unwrap();
    let still = load(&cpu, &world.space, 3).unwrap();
    unmap(&cpu, &world.space, 9, 10);
    assert_eq!(load(&cpu, &world.space, 9), Err(FaultError::NotMapped));
    assert_eq!(faults.join().unwrap(), still);
    assert_eq!(load(&cpu, &world.space, 3), Ok(still), "stored to a page that stands still");
    assert_eq!((load(&cpu, &world.space, 5), load(&cpu, &world.space, 511)), (Ok(1), Ok(0)));
    let list = [(0, 3, RW), (3, 4, Prot::READ), (4, 9, RW), (10, BLOCK, RW)];
    assert_eq!(mapped(&cpu, &world.space), list);
    world.end(cpu);
}

#[test]
fn faults_and_collapse() {
    check(FEW, against_collapse);
}

#[test]
fn faults_and_the_division_of_a_block() {
    check(FEW, against_division);
}

#[test]
fn blocks_need_the_shoot_down() {
    check_caught("no_shoot_down", FEW, against_collapse);
    check_caught("no_shoot_down", FEW, against_division);
}
