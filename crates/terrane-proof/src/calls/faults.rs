//! One fault against one change on the same entry.

use super::{BASE, World, is_present, load, map, mapped, page, store, unmap};
use crate::schedules::{Effort, USUAL, check, check_caught};
use terrane::vma::{Advice, Prot};
use terrane::{FaultError, PAGE_SIZE};

const FEW: Effort = Effort { schedules: 150, ..USUAL };

/// Stores beside an unmap: what was stored is not found in the mapping that comes after, and nothing stays mapped where
/// nothing is.
fn against_unmap() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 3);
    let faults = world.spawn(|cpu, space| {
        let first = store(cpu, space, 1, 7);
        let second = load(cpu, space, 1);
        match (first, second) {
            (Ok(()), Ok(value)) => assert!(value == 7 || value == 0, "{value}"),
            (Err(FaultError::NotMapped), _) | (_, Err(FaultError::NotMapped)) => {}
            other => panic!("{other:?}"),
        }
    });
    unmap(&cpu, &world.space, 1, 2);
    assert!(!is_present(&cpu, &world.space, 1), "a page was left behind");
    faults.join().unwrap();
    assert!(!is_present(&cpu, &world.space, 1), "a page has come late");
    assert_eq!(load(&cpu, &world.space, 1), Err(FaultError::NotMapped));
    assert_eq!(load(&cpu, &world.space, 0), Ok(0));
    world.end(cpu);
}

#[test]
fn a_fault_and_unmap() {
    check(USUAL, against_unmap);
}

#[test]
fn unmap_needs_the_validation() {
    check_caught("validate_never", USUAL, against_unmap);
}

/// Stores beside a protect: once that has returned, the page stands still.
fn against_protect() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 3);
    let faults = world.spawn(|cpu, space| {
        let mut stored = 0;
        for value in 1..=2 {
            match store(cpu, space, 1, value) {
                Ok(()) => stored = value,
                Err(error) => {
                    assert_eq!(error, FaultError::NotAllowed);
                    break;
                }
            }
        }
        stored
    });
    world.space.protect(&cpu, page(1), PAGE_SIZE, Prot::READ).unwrap();
    let still = load(&cpu, &world.space, 1).unwrap();
    let stored = faults.join().unwrap();
    assert_eq!(
        (load(&cpu, &world.space, 1), stored),
        (Ok(still), still),
        "stored to a page that stands still"
    );
    let rw = super::RW;
    assert_eq!(mapped(&cpu, &world.space), [(0, 1, rw), (1, 2, Prot::READ), (2, 3, rw)]);
    world.space.protect(&cpu, page(1), PAGE_SIZE, rw).unwrap();
    assert_eq!(mapped(&cpu, &world.space).len(), 1);
    store(&cpu, &world.space, 1, 9).unwrap();
    assert_eq!(load(&cpu, &world.space, 1), Ok(9));
    world.end(cpu);
}

#[test]
fn a_fault_and_protect() {
    check(USUAL, against_protect);
}

#[test]
fn protect_needs_the_validation_and_waits_for_stores() {
    check_caught("validate_never", USUAL, against_protect);
    check_caught("stores_not_awaited", USUAL, against_protect);
}

/// Stores beside `MADV_DONTNEED`: a page holds what was stored behind it, or zeros.
fn against_dontneed() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 2);
    store(&cpu, &world.space, 0, 5).unwrap();
    let faults = world.spawn(|cpu, space| {
        let before = load(cpu, space, 0).unwrap();
        assert!(before == 5 || before == 0);
        store(cpu, space, 0, 7).unwrap();
        store(cpu, space, 1, 8).unwrap();
        let after = load(cpu, space, 1).unwrap();
        assert!(after == 8 || after == 0);
    });
    world.space.advise(&cpu, BASE, 2 * PAGE_SIZE, Advice::DontNeed).unwrap();
    let seen = load(&cpu, &world.space, 0).unwrap();
    assert!(seen == 0 || seen == 7, "{seen}: older than the advice");
    faults.join().unwrap();
    let seen = (load(&cpu, &world.space, 0).unwrap(), load(&cpu, &world.space, 1).unwrap());
    assert!(matches!(seen.0, 0 | 7) && matches!(seen.1, 0 | 8), "{seen:?}");
    world.end(cpu);
}

#[test]
fn a_fault_and_dontneed() {
    check(USUAL, against_dontneed);
}

/// A processor that goes on using its translation while the page is unmapped and its frame is wanted elsewhere: it
/// never sees what the frame's next owner stores.
fn frames_anew() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 1);
    map(&cpu, &world.space, 8, 12);
    store(&cpu, &world.space, 0, 7).unwrap();
    let reader = world.spawn(|cpu, space| {
        for _ in 0..3 {
            match load(cpu, space, 0) {
                Ok(value) => assert_eq!(value, 7, "read from a page of somebody else"),
                Err(error) => assert_eq!(error, FaultError::NotMapped),
            }
        }
    });
    unmap(&cpu, &world.space, 0, 1);
    for n in 8..12 {
        store(&cpu, &world.space, n, 100 + n).unwrap();
    }
    reader.join().unwrap();
    for n in 8..12 {
        assert_eq!(load(&cpu, &world.space, n), Ok(100 + n));
    }
    world.end(cpu);
}

#[test]
fn a_frame_waits_for_its_shoot_down() {
    check(USUAL, frames_anew);
}

#[test]
fn a_frame_must_wait_for_its_shoot_down() {
    check_caught("limbo_ignores_ticket", USUAL, frames_anew);
    check_caught("no_shoot_down", USUAL, frames_anew);
}

/// Three stores to one fresh page: it is made once, and no store is lost.
fn first_touches() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 1);
    let touch = |word: u64| {
        move |cpu: &super::Me, space: &super::Space| {
            let addr = page(0) + 8 * word;
            assert_eq!(crate::host::Model::load(cpu, space, addr), Ok(0));
            crate::host::Model::store(cpu, space, addr, word).unwrap();
        }
    };
    let others = [world.spawn(touch(1)), world.spawn(touch(2))];
    store(&cpu, &world.space, 0, 3).unwrap();
    for other in others {
        other.join().unwrap();
    }
    for (word, value) in [(0, 3), (1, 1), (2, 2)] {
        assert_eq!(crate::host::Model::load(&cpu, &world.space, page(0) + 8 * word), Ok(value));
    }
    world.end(cpu);
}

#[test]
fn one_page_for_all_who_touch_it() {
    check(USUAL, first_touches);
}

#[test]
fn one_page_needs_the_look_at_the_entry() {
    check_caught("take_without_looking", USUAL, first_touches);
}

/// A fault beside changes that never end reaches its end: it gives up speculating and is served in turn.
fn against_endless_change() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 3);
    let ended = std::sync::Arc::new(terrane::sync::atomic::AtomicBool::new(false));
    let flag = std::sync::Arc::clone(&ended);
    let fault = world.spawn(move |cpu, space| {
        store(cpu, space, 1, 7).unwrap();
        flag.store(true, terrane::sync::atomic::Ordering::SeqCst);
    });
    // Bounded only by the steps of the model.
    while !ended.load(terrane::sync::atomic::Ordering::SeqCst) {
        world.space.protect(&cpu, page(1), PAGE_SIZE, Prot::all()).unwrap();
        world.space.protect(&cpu, page(1), PAGE_SIZE, super::RW).unwrap();
        // A program does something else now and then, too.
        terrane::sync::atomic::spin_loop();
    }
    fault.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 1), Ok(7));
    world.end(cpu);
}

#[test]
fn a_fault_ends() {
    check(FEW, against_endless_change);
}
