//! Pages of objects that go, are written, are cut off and come back, beside those who use them.

use super::{
    BASE, FEW, Me, RW, SMALL, Space, World, frame_of, is_resident, load, migrate, page, reclaim, store, unmap,
};
use crate::host::{Disk, Model};
use crate::schedules::{Effort, USUAL, check, check_caught};
use std::mem::ManuallyDrop;
use terrane::object::Object;
use terrane::space::MapRequest;
use terrane::sync::Shared;
use terrane::{FaultError, Frame, PAGE_SIZE};

/// For what few schedules show.
const MANY: Effort = Effort { schedules: 1200, ..USUAL };
const PAGES: u64 = 2;

/// An object that a failed model leaves alone.
pub(super) type Shown = ManuallyDrop<Shared<Object<Model>>>;

/// Maps all of the object from page `at` of the space on.
pub(super) fn show(cpu: &Me, space: &Space, object: &Shared<Object<Model>>, at: u64) {
    let request = MapRequest::object(object, 0, PAGES * PAGE_SIZE, RW, true).fixed(page(at));
    assert_eq!(space.map(cpu, request), Ok(page(at)));
}

/// A file of two pages, mapped from page 0 on.
pub(super) fn file() -> (World, Me, Shown, Disk) {
    let (world, cpu) = World::of(SMALL);
    let disk = Disk::new(PAGES as usize);
    let object = Object::file(&world.machine, disk.clone()).unwrap();
    show(&cpu, &world.space, &object, 0);
    (world, cpu, ManuallyDrop::new(object), disk)
}

/// Shared memory of two pages, mapped from page 0 on, and a device to swap to.
pub(super) fn memory() -> (World, Me, Shown, Disk) {
    let (world, cpu, disk) = World::swapping();
    let object = Object::shared_memory(&world.machine, PAGES * PAGE_SIZE).unwrap();
    show(&cpu, &world.space, &object, 0);
    (world, cpu, ManuallyDrop::new(object), disk)
}

/// What is in memory and what is in the file is the same once it is written: page `n` holds `value`.
fn settle(cpu: &Me, world: &World, object: &Shown, disk: &Disk, n: u64, value: u64) {
    object.write_back(cpu).unwrap();
    assert_eq!(disk.word(n as usize), value, "a store has not reached the file");
    show(cpu, &world.space, object, 8);
    assert_eq!(load(cpu, &world.space, 8 + n), Ok(value), "a store was lost");
}

/// A file whose page `n` holds 1 and is not in memory.
fn written(n: u64) -> (World, Me, Shown, Disk) {
    let (world, cpu, object, disk) = file();
    store(&cpu, &world.space, n, 1).unwrap();
    settle(&cpu, &world, &object, &disk, n, 1);
    unmap(&cpu, &world.space, 8, 8 + PAGES);
    reclaim(&cpu, &world.space, n);
    (world, cpu, object, disk)
}

pub(super) fn end(world: World, cpu: Me, object: Shown) {
    world.space.unmap(&cpu, BASE, 16 * PAGE_SIZE).unwrap();
    drop(ManuallyDrop::into_inner(object));
    world.end(cpu);
}

/// Stores beside reclaim: nothing is lost, in memory or in the file.
fn stores_beside_reclaim() {
    let (world, cpu, object, disk) = file();
    store(&cpu, &world.space, 0, 1).unwrap();
    let user = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
    });
    reclaim(&cpu, &world.space, 0);
    reclaim(&cpu, &world.space, 0);
    user.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(2), "a store was lost");
    settle(&cpu, &world, &object, &disk, 0, 2);
    end(world, cpu, object);
}

#[test]
fn stores_and_reclaim() {
    check(USUAL, stores_beside_reclaim);
}

#[test]
fn reclaim_waits_for_stores() {
    check_caught("reclaim_file_not_awaited", USUAL, stores_beside_reclaim);
    check_caught("no_shoot_down", USUAL, stores_beside_reclaim);
}

/// A page in memory that nothing maps goes while a fault maps it, alone or among those around.
fn maps_beside_reclaim(around: bool) {
    let (world, cpu, object, disk) = file();
    store(&cpu, &world.space, 1, 1).unwrap();
    let frame = frame_of(&cpu, &world.space, 1).unwrap();
    unmap(&cpu, &world.space, 0, PAGES);
    show(&cpu, &world.space, &object, 0);
    object.read_in(&cpu, 0, false).unwrap();
    let user = world.spawn(move |cpu, space| {
        if around {
            load(cpu, space, 0).unwrap();
        }
        store(cpu, space, 1, 2).unwrap();
    });
    terrane::proof::reclaim(&cpu, frame);
    user.join().unwrap();
    settle(&cpu, &world, &object, &disk, 1, 2);
    end(world, cpu, object);
}

fn map_beside_reclaim() {
    maps_beside_reclaim(false);
}

fn map_around_beside_reclaim() {
    maps_beside_reclaim(true);
}

#[test]
fn a_fault_and_reclaim() {
    check(USUAL, map_beside_reclaim);
    check(USUAL, map_around_beside_reclaim);
}

#[test]
fn a_fault_looks_whether_the_page_is_leaving() {
    check_caught("object_maps_leaving", USUAL, map_beside_reclaim);
    check_caught("object_maps_leaving_around", USUAL, map_around_beside_reclaim);
}

/// A store whose mapping is taken away, beside a write-back or reclaim.
fn stores_beside_unmap(act: fn(&Me, Frame, &Object<Model>)) {
    let (world, cpu, object, disk) = file();
    show(&cpu, &world.space, &object, 4);
    store(&cpu, &world.space, 0, 1).unwrap();
    let frame = frame_of(&cpu, &world.space, 0).unwrap();
    let user = world.spawn(|cpu, space| match store(cpu, space, 0, 2) {
        Ok(()) => 2,
        Err(FaultError::NotMapped) => 1,
        Err(error) => panic!("{error:?}"),
    });
    let unmaps = world.spawn(|cpu, space| unmap(cpu, space, 0, PAGES));
    act(&cpu, frame, &object);
    let value = user.join().unwrap();
    unmaps.join().unwrap();
    settle(&cpu, &world, &object, &disk, 0, value);
    end(world, cpu, object);
}

fn unmap_beside_write_back() {
    stores_beside_unmap(|cpu, _, object| object.write_back(cpu).unwrap());
}

fn unmap_beside_reclaim() {
    stores_beside_unmap(|cpu, frame, _| {
        terrane::proof::reclaim(cpu, frame);
        terrane::proof::reclaim(cpu, frame);
    });
}

#[test]
fn a_store_and_the_end_of_its_mapping_and_the_file() {
    check(USUAL, unmap_beside_write_back);
    check(USUAL, unmap_beside_reclaim);
}

#[test]
fn stores_through_a_mapping_that_ends_are_awaited() {
    check_caught("write_back_ignores_ending", USUAL, unmap_beside_write_back);
    check_caught("reclaim_ignores_ending", USUAL, unmap_beside_reclaim);
    check_caught("leave_forgets_kind", MANY, unmap_beside_reclaim);
    check_caught("ending_not_awaited", USUAL, unmap_beside_write_back);
    check_caught("ending_not_awaited", USUAL, unmap_beside_reclaim);
}

/// Stores beside write-back.
fn stores_beside_write_back() {
    let (world, cpu, object, disk) = file();
    store(&cpu, &world.space, 0, 1).unwrap();
    let user = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        store(cpu, space, 0, 3).unwrap();
    });
    object.write_back(&cpu).unwrap();
    user.join().unwrap();
    settle(&cpu, &world, &object, &disk, 0, 3);
    end(world, cpu, object);
}

#[test]
fn stores_and_write_back() {
    check(USUAL, stores_beside_write_back);
}

#[test]
fn write_back_waits_for_stores() {
    check_caught("write_back_not_awaited", USUAL, stores_beside_write_back);
    check_caught("no_shoot_down", USUAL, stores_beside_write_back);
}

/// A file that cannot be written for a while: the page stays, dirty.
fn failing_file() {
    let (world, cpu, object, disk) = file();
    store(&cpu, &world.space, 0, 1).unwrap();
    disk.fail(true);
    let user = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
    });
    reclaim(&cpu, &world.space, 0);
    user.join().unwrap();
    disk.fail(false);
    settle(&cpu, &world, &object, &disk, 0, 2);
    end(world, cpu, object);
}

#[test]
fn a_file_that_fails_loses_nothing() {
    check(FEW, failing_file);
}

#[test]
fn a_page_that_could_not_be_written_stays_dirty() {
    check_caught("leave_forgets_failure", FEW, failing_file);
}

/// A mapping is locked beside reclaim: once that has returned its pages are in memory.
fn mlock_beside_reclaim() {
    let (world, cpu, object, disk) = file();
    store(&cpu, &world.space, 0, 1).unwrap();
    let reclaims = world.spawn(|cpu, space| {
        reclaim(cpu, space, 0);
        reclaim(cpu, space, 0);
    });
    world.space.mlock(&cpu, BASE, PAGE_SIZE).unwrap();
    assert!(is_resident(&cpu, &world.space, 0), "a locked page is not there");
    reclaims.join().unwrap();
    assert!(is_resident(&cpu, &world.space, 0), "a locked page was taken");
    settle(&cpu, &world, &object, &disk, 0, 1);
    end(world, cpu, object);
}

#[test]
fn locked_pages_of_files_stay() {
    check(FEW, mlock_beside_reclaim);
}

#[test]
fn locked_pages_of_files_stay_because_they_are_looked_at() {
    check_caught("reclaim_file_takes_locked", FEW, mlock_beside_reclaim);
}

/// Memory without a file, beside its way to swap and back.
fn shared_memory() {
    let (world, cpu, object, _disk) = memory();
    store(&cpu, &world.space, 0, 1).unwrap();
    let user = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
    });
    reclaim(&cpu, &world.space, 0);
    assert!(matches!(load(&cpu, &world.space, 0), Ok(1 | 2)));
    user.join().unwrap();
    reclaim(&cpu, &world.space, 0);
    show(&cpu, &world.space, &object, 8);
    assert_eq!(
        (load(&cpu, &world.space, 0), load(&cpu, &world.space, 8)),
        (Ok(2), Ok(2)),
        "a store was lost"
    );
    end(world, cpu, object);
}

#[test]
fn shared_memory_and_swap() {
    check(USUAL, shared_memory);
}

#[test]
fn shared_memory_waits_for_stores() {
    check_caught("reclaim_file_not_awaited", USUAL, shared_memory);
}

/// A page of a file moves to another frame beside stores.
fn migration() {
    let (world, cpu, object, disk) = file();
    store(&cpu, &world.space, 0, 1).unwrap();
    let user = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
    });
    migrate(&cpu, &world.space, 0);
    user.join().unwrap();
    settle(&cpu, &world, &object, &disk, 0, 2);
    end(world, cpu, object);
}

#[test]
fn stores_and_a_page_of_a_file_that_moves() {
    check(USUAL, migration);
}

#[test]
fn moving_a_page_of_a_file_waits_for_stores() {
    check_caught("reclaim_file_not_awaited", USUAL, migration);
}

/// A page is read in while a hole is made where it lies: the hole is a hole.
fn punch_beside_reading() {
    let (world, cpu, object, disk) = written(0);
    assert!(!is_resident(&cpu, &world.space, 0));
    let user = world.spawn(|cpu, space| {
        let seen = load(cpu, space, 0).unwrap();
        assert!(matches!(seen, 0 | 1), "{seen}");
    });
    object.punch(&cpu, 0..1).unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(0), "what was there comes back");
    user.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(0), "what was there comes back");
    settle(&cpu, &world, &object, &disk, 0, 0);
    end(world, cpu, object);
}

#[test]
fn a_hole_and_a_page_that_is_read() {
    check(USUAL, punch_beside_reading);
}

#[test]
fn a_hole_waits_for_pages_that_are_read() {
    check_caught("punch_leaves_reading", USUAL, punch_beside_reading);
}

/// A page is read in while the object is cut short: it is not there when the object grows again.
fn cut_beside_reading() {
    let (world, cpu, object, _disk) = written(1);
    let user = world.spawn(|cpu, space| {
        let seen = load(cpu, space, 1);
        assert!(matches!(seen, Ok(1) | Err(FaultError::BeyondEnd)), "{seen:?}");
    });
    object.set_len(&cpu, PAGE_SIZE);
    assert_eq!(load(&cpu, &world.space, 1), Err(FaultError::BeyondEnd), "beyond the end");
    user.join().unwrap();
    assert!(!is_resident(&cpu, &world.space, 1), "a page beyond the end is mapped");
    let stays = {
        let pin = cpu.pin();
        object.slots(&pin, 1).and_then(|slots| slots.get(1))
    };
    assert_eq!(stays, None, "a page beyond the end stays");
    end(world, cpu, object);
}

/// A page is read in while the object is cut short and grows again: what was cut off does not come back.
fn cut_and_growth_beside_reading() {
    let (world, cpu, object, disk) = written(1);
    let user = world.spawn(|cpu, space| {
        let seen = load(cpu, space, 1);
        assert!(matches!(seen, Ok(0 | 1) | Err(FaultError::BeyondEnd)), "{seen:?}");
    });
    object.set_len(&cpu, PAGE_SIZE);
    // As the host does with its file.
    disk.clear(1);
    object.set_len(&cpu, PAGES * PAGE_SIZE);
    assert_eq!(load(&cpu, &world.space, 1), Ok(0), "what was cut off comes back");
    user.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 1), Ok(0), "what was cut off comes back");
    settle(&cpu, &world, &object, &disk, 1, 0);
    end(world, cpu, object);
}

#[test]
fn a_cut_and_a_page_that_is_read() {
    check(USUAL, cut_beside_reading);
    check(USUAL, cut_and_growth_beside_reading);
}

#[test]
fn who_reads_a_page_looks_whether_it_was_cut_off_and_is_waited_for() {
    for name in ["read_leaves_cut", "cut_leaves_reading"] {
        check_caught(name, USUAL, cut_and_growth_beside_reading);
    }
}

/// An object ends while reclaim finds one of its pages by the number of its frame.
fn end_beside_reclaim() {
    let (world, cpu, object, _disk) = file();
    load(&cpu, &world.space, 0).unwrap();
    let frame = frame_of(&cpu, &world.space, 0).unwrap();
    // Behind the epoch: the last owner of the object is the one here.
    unmap(&cpu, &world.space, 0, PAGES);
    cpu.quiesce();
    let reclaims = world.spawn(move |cpu, _| {
        terrane::proof::reclaim(cpu, frame);
        terrane::proof::reclaim(cpu, frame);
    });
    drop(ManuallyDrop::into_inner(object));
    reclaims.join().unwrap();
    world.end(cpu);
}

#[test]
fn the_end_of_an_object_and_reclaim() {
    check(USUAL, end_beside_reclaim);
}

#[test]
fn the_end_of_an_object_waits_for_who_holds_a_page() {
    check_caught("dismissed_while_held", USUAL, end_beside_reclaim);
}
