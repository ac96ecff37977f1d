//! A swap device that goes out of use, beside those who swap out, and beside those who need what is on it. When it has gone it
//! is asked for nothing any more: each model makes the device fail then, and everything is there all the same.

use super::files::{self, memory};
use super::{FEW, is_resident, load, one_page, page, reclaim, second_word, store};
use crate::host::{Disk, Model};
use crate::schedules::{USUAL, check, check_caught};

/// Takes the device out of use, and breaks it.
fn swap_off(world: &super::World, cpu: &super::Me, disk: &Disk) {
    assert_eq!(world.machine.swap_off(cpu, 0), Ok(()));
    disk.fail(true);
}

/// A private page is swapped out meanwhile: nothing is left there.
fn against_reclaim() {
    let (world, cpu, disk) = one_page();
    let other = world.spawn(|cpu, space| reclaim(cpu, space, 0));
    swap_off(&world, &cpu, &disk);
    other.join().unwrap();
    assert_eq!(world.machine.swap().usage().1, 0, "a page is on a device that is out of use");
    assert_eq!(load(&cpu, &world.space, 0), Ok(1), "a store was lost");
    world.end(cpu);
}

/// So is a page of shared memory, which looks at the device but once.
fn against_reclaim_of_memory() {
    let (world, cpu, object, disk) = memory();
    store(&cpu, &world.space, 0, 1).unwrap();
    let other = world.spawn(|cpu, space| reclaim(cpu, space, 0));
    swap_off(&world, &cpu, &disk);
    other.join().unwrap();
    assert_eq!(world.machine.swap().usage().1, 0, "a page is on a device that is out of use");
    assert_eq!(load(&cpu, &world.space, 0), Ok(1), "a store was lost");
    files::end(world, cpu, object);
}

#[test]
fn reclaim_and_a_device_that_goes() {
    check(USUAL, against_reclaim);
    check(FEW, against_reclaim_of_memory);
}

/// Two need a private page that is on the device: they bring it back, or the device's end does, or all of them. No store is lost, and who reads
/// is waited for.
fn against_faults() {
    let (world, cpu, disk) = one_page();
    reclaim(&cpu, &world.space, 0);
    assert!(!is_resident(&cpu, &world.space, 0));
    let first = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
    });
    let second = world.spawn(|cpu, space| {
        Model::store(cpu, space, page(0) + 8, 3).unwrap();
        assert_eq!(second_word(cpu, space), 3, "a store was lost");
    });
    swap_off(&world, &cpu, &disk);
    assert!(matches!(load(&cpu, &world.space, 0), Ok(1 | 2)));
    first.join().unwrap();
    second.join().unwrap();
    assert_eq!(
        (load(&cpu, &world.space, 0), second_word(&cpu, &world.space)),
        (Ok(2), 3),
        "a store was lost"
    );
    world.end(cpu);
}

/// The same with a page of shared memory.
fn against_faults_on_memory() {
    let (world, cpu, object, disk) = memory();
    store(&cpu, &world.space, 0, 1).unwrap();
    reclaim(&cpu, &world.space, 0);
    let user = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
    });
    swap_off(&world, &cpu, &disk);
    assert!(matches!(load(&cpu, &world.space, 0), Ok(1 | 2)));
    user.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(2), "a store was lost");
    files::end(world, cpu, object);
}

#[test]
fn faults_and_a_device_that_goes() {
    check(USUAL, against_faults);
    check(FEW, against_faults_on_memory);
}

#[test]
fn who_reads_is_waited_for_and_what_it_brought_stays() {
    for name in ["swap_off_leaves_readers", "swap_reads_over"] {
        check_caught(name, USUAL, against_faults);
    }
}
