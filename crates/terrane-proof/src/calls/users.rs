//! Faults that wait for a handler: nobody waits for ever, and what the handler put in place is what is read.

use super::{BASE, Me, Space, World, load, map, page, store};
use crate::host::Model;
use crate::schedules::{Effort, USUAL, check, check_caught};
use terrane::PAGE_SIZE;
use terrane::addr::AddrRange;
use terrane::space::{FaultKind, Resolve, UserEvent, UserFault, UserFaultModes, UserFaults, UserFeatures};
use terrane::vma::Advice;

const FEW: Effort = Effort { schedules: 150, ..USUAL };

const PLAIN: Resolve = Resolve::empty();

fn bytes(value: u64) -> Vec<u8> {
    value.to_ne_bytes().repeat(PAGE_SIZE as usize / 8)
}

fn handler(cpu: &Me, space: &Space, modes: UserFaultModes, pages: u64) -> UserFaults<Model> {
    map(cpu, space, 0, pages);
    let faults = space.user_faults(cpu, UserFeatures::empty()).unwrap();
    faults.register(cpu, BASE, pages * PAGE_SIZE, modes).unwrap();
    faults
}

/// The next event; waits.
fn next(cpu: &Me, faults: &UserFaults<Model>) -> UserFault {
    let mut events = [UserEvent::Unmap(AddrRange::new(0, 0))];
    while faults.read_events(cpu, &mut events).unwrap() == 0 {}
    match events[0] {
        UserEvent::Fault(fault) => fault,
        other => panic!("{other:?}"),
    }
}

/// A fault against a copy that does not wait for its event.
fn against_copy() {
    let (world, cpu) = World::new();
    let faults = handler(&cpu, &world.space, UserFaultModes::MISSING, 2);
    let fault = world.spawn(|cpu, space| load(cpu, space, 0));
    faults.copy(&cpu, BASE, &bytes(5), PLAIN).unwrap();
    assert_eq!(fault.join().unwrap(), Ok(5));
    assert_eq!(faults.waiting(), 0);
    drop(faults);
    world.end(cpu);
}

#[test]
fn a_fault_and_its_answer() {
    check(USUAL, against_copy);
}

#[test]
fn a_fault_must_look_before_it_waits() {
    check_caught("user_fault_waits_blindly", USUAL, against_copy);
}

/// Two faults of one page, one of them a store, and a handler that waits for both events.
fn two_faults() {
    let (world, cpu) = World::new();
    let faults = handler(&cpu, &world.space, UserFaultModes::MISSING, 2);
    let one = world.spawn(|cpu, space| load(cpu, space, 1).unwrap());
    let two = world.spawn(|cpu, space| Model::store(cpu, space, page(1) + 8, 9).unwrap());
    let first = next(&cpu, &faults);
    assert_eq!((first.addr, first.kind), (page(1), FaultKind::Missing));
    let second = next(&cpu, &faults);
    assert_ne!((first.cpu, first.write), (second.cpu, second.write));
    faults.copy(&cpu, page(1), &bytes(6), PLAIN).unwrap();
    assert_eq!(one.join().unwrap(), 6);
    two.join().unwrap();
    assert_eq!(Model::load(&cpu, &world.space, page(1) + 8), Ok(9));
    assert_eq!(faults.waiting(), 0);
    drop(faults);
    world.end(cpu);
}

#[test]
fn each_fault_is_told_and_woken() {
    check(FEW, two_faults);
}

#[test]
fn readers_must_be_told() {
    check_caught("user_event_nobody_told", FEW, two_faults);
}

/// A fault against the end of the registration.
fn against_unregister() {
    let (world, cpu) = World::new();
    let faults = handler(&cpu, &world.space, UserFaultModes::MISSING, 2);
    let fault = world.spawn(|cpu, space| store(cpu, space, 0, 3).unwrap());
    faults.unregister(&cpu, BASE, PAGE_SIZE).unwrap();
    fault.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(3));
    drop(faults);
    assert_eq!(load(&cpu, &world.space, 1), Ok(0));
    world.end(cpu);
}

#[test]
fn a_fault_and_the_end_of_the_registration() {
    check(USUAL, against_unregister);
}

#[test]
fn the_registration_ends_before_the_waiting() {
    check_caught("user_unregister_wakes_first", USUAL, against_unregister);
}

/// A fault against the end of the handler.
fn against_drop() {
    let (world, cpu) = World::new();
    let faults = handler(&cpu, &world.space, UserFaultModes::MISSING, 2);
    let fault = world.spawn(|cpu, space| store(cpu, space, 0, 3).unwrap());
    drop(faults);
    fault.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(3));
    world.end(cpu);
}

#[test]
fn a_fault_and_the_end_of_the_handler() {
    check(FEW, against_drop);
}

/// A store against write-protection: once the call has returned the page stands still, until it is allowed again.
fn against_protection() {
    let (world, cpu) = World::new();
    let faults = handler(&cpu, &world.space, UserFaultModes::WP, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let stores = world.spawn(|cpu, space| store(cpu, space, 0, 2).unwrap());
    faults.write_protect(&cpu, BASE, PAGE_SIZE, true, PLAIN).unwrap();
    let still = load(&cpu, &world.space, 0).unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(still), "stored to a page that stands still");
    faults.write_protect(&cpu, BASE, PAGE_SIZE, false, PLAIN).unwrap();
    stores.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(2));
    drop(faults);
    world.end(cpu);
}

#[test]
fn a_store_and_write_protection() {
    check(USUAL, against_protection);
}

#[test]
fn write_protection_waits_for_stores() {
    check_caught("stores_not_awaited", USUAL, against_protection);
    check_caught("user_protect_not_awaited", USUAL, against_protection);
}

/// A store against a move of its page to where another thread reads.
fn against_move() {
    let (world, cpu) = World::new();
    let faults = handler(&cpu, &world.space, UserFaultModes::MISSING, 2);
    map(&cpu, &world.space, 4, 6);
    store(&cpu, &world.space, 4, 1).unwrap();
    let stores = world.spawn(|cpu, space| store(cpu, space, 4, 2).unwrap());
    faults.move_pages(&cpu, page(0), page(4), PAGE_SIZE, PLAIN).unwrap();
    let still = load(&cpu, &world.space, 0).unwrap();
    stores.join().unwrap();
    let seen = (load(&cpu, &world.space, 0).unwrap(), load(&cpu, &world.space, 4).unwrap());
    assert!(seen == (2, 0) && still == 2 || seen == (1, 2) && still == 1, "{still} {seen:?}");
    drop(faults);
    world.end(cpu);
}

#[test]
fn a_store_and_a_move() {
    check(USUAL, against_move);
}

#[test]
fn moves_wait_for_stores() {
    check_caught("stores_not_awaited", USUAL, against_move);
}

/// A copy against `MADV_DONTNEED` and a fork: the page is there or not, and nothing is left behind.
fn copies_beside_calls() {
    let (world, cpu) = World::new();
    let faults = handler(&cpu, &world.space, UserFaultModes::MISSING, 2);
    let copies = faults.clone();
    let copy = world.spawn(move |cpu, _| {
        copies.copy(cpu, BASE, &[bytes(7), bytes(8)].concat(), PLAIN).unwrap();
        drop(copies);
    });
    world.space.advise(&cpu, BASE, 2 * PAGE_SIZE, Advice::DontNeed).unwrap();
    let child = world.space.fork(&cpu).unwrap();
    copy.join().unwrap();
    for (n, value) in [(0, 7), (1, 8)] {
        let seen = load(&cpu, &child, n).unwrap();
        assert!(seen == 0 || seen == value, "{seen}");
    }
    child.destroy(&cpu);
    faults.unregister(&cpu, BASE, 2 * PAGE_SIZE).unwrap();
    drop(faults);
    let seen = load(&cpu, &world.space, 1).unwrap();
    assert!(seen == 0 || seen == 8, "{seen}");
    world.end(cpu);
}

#[test]
fn a_copy_and_calls() {
    check(FEW, copies_beside_calls);
}

/// A handler that fetched a page and puts it in place beside its being given back: once that has returned, the old bytes do not come.
fn copies_are_not_late() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 2);
    let faults = world.space.user_faults(&cpu, UserFeatures::EVENT_REMOVE).unwrap();
    faults.register(&cpu, BASE, 2 * PAGE_SIZE, UserFaultModes::MISSING).unwrap();
    let copies = faults.clone();
    let handler = world.spawn(move |cpu, _| {
        // What was fetched before anything was given back; refused from when that is announced until it is known.
        let copied = copies.copy(cpu, BASE, &bytes(7), PLAIN).is_ok();
        let mut events = [UserEvent::Unmap(AddrRange::new(0, 0))];
        while copies.read_events(cpu, &mut events).unwrap() == 0 {}
        assert_eq!(events[0], UserEvent::Remove(AddrRange::new(BASE, BASE + PAGE_SIZE)));
        drop(copies);
        copied
    });
    world.space.advise(&cpu, BASE, PAGE_SIZE, Advice::DontNeed).unwrap();
    assert!(!super::is_present(&cpu, &world.space, 0), "old bytes have come late");
    handler.join().unwrap();
    assert!(!super::is_present(&cpu, &world.space, 0), "old bytes have come late");
    drop(faults);
    world.end(cpu);
}

#[test]
fn a_copy_and_what_it_must_know_of() {
    check(FEW, copies_are_not_late);
}
