//! Two spaces that share a page after a fork, of which one gives it up while a processor is in the middle of reading it there: that
//! reader does not see what the other space, now the only owner, makes of the page, nor what the frame's next owner does.

use super::{BASE, Forked, Me, SMALL, Space, World, end_fork, fork, load, map, page, store, unmap};
use crate::schedules::{Effort, USUAL, check, check_caught};
use shuttle::thread::JoinHandle;
use std::sync::atomic::{AtomicBool, Ordering};
use terrane::PAGE_SIZE;
use terrane::sync::atomic::spin_loop;
use terrane::vma::Advice;

/// Three threads take longer.
const FEW: Effort = Effort { schedules: 150, ..USUAL };

/// A page that holds 5, and a fork that shares it.
fn shared_page() -> (World, Me, Forked) {
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 5).unwrap();
    let child = fork(&cpu, &world.space);
    (world, cpu, child)
}

/// One who reads page 0, and finds one of these values.
fn reads(world: &World, values: &'static [u64]) -> JoinHandle<()> {
    world.spawn(move |cpu, space| {
        for _ in 0..6 {
            let seen = load(cpu, space, 0).unwrap();
            assert!(values.contains(&seen), "{seen} was read from a page of somebody else");
        }
    })
}

/// The parent does `give_up`, then the child stores.
fn against_reuse(values: &'static [u64], give_up: fn(&Me, &Space)) {
    let (world, cpu, child) = shared_page();
    let reader = reads(&world, values);
    give_up(&cpu, &world.space);
    store(&cpu, &child, 0, 9).unwrap();
    reader.join().unwrap();
    assert_eq!(load(&cpu, &child, 0), Ok(9));
    end_fork(&cpu, child);
    world.end(cpu);
}

fn forget(cpu: &Me, space: &Space) {
    space.advise(cpu, BASE, PAGE_SIZE, Advice::DontNeed).unwrap();
}

fn reuse_after_forget() {
    against_reuse(&[5, 0], forget);
}

fn reuse_after_unmap() {
    against_reuse(&[5, 0], |cpu, space| {
        // What is in its place at once: a reader always finds something.
        let request = terrane::space::MapRequest::anonymous(PAGE_SIZE, super::RW).fixed(page(0));
        assert_eq!(space.map(cpu, request), Ok(page(0)));
    });
}

fn reuse_after_copy() {
    against_reuse(&[5, 6], |cpu, space| store(cpu, space, 0, 6).unwrap());
}

/// The parent does `give_up`, then the child's end frees the page, and its frame is used anew.
fn against_free(values: &'static [u64], give_up: fn(&Me, &Space)) {
    static GIVEN_UP: AtomicBool = AtomicBool::new(false);
    GIVEN_UP.store(false, Ordering::SeqCst);
    let (world, cpu, child) = shared_page();
    map(&cpu, &world.space, 8, 12);
    let reader = reads(&world, values);
    let other = world.spawn(move |cpu, space| {
        while !GIVEN_UP.load(Ordering::SeqCst) {
            spin_loop();
        }
        end_fork(cpu, child);
        for n in 8..12 {
            store(cpu, space, n, 100 + n).unwrap();
        }
    });
    give_up(&cpu, &world.space);
    GIVEN_UP.store(true, Ordering::SeqCst);
    reader.join().unwrap();
    other.join().unwrap();
    unmap(&cpu, &world.space, 8, 12);
    world.end(cpu);
}

fn free_after_forget() {
    against_free(&[5, 0], forget);
}

fn free_after_copy() {
    against_free(&[5, 6], |cpu, space| store(cpu, space, 0, 6).unwrap());
}

#[test]
fn a_page_that_is_forgotten_is_read_no_more() {
    check(USUAL, reuse_after_forget);
    check(USUAL, reuse_after_unmap);
    check(FEW, free_after_forget);
}

#[test]
fn a_page_that_is_copied_is_read_no_more() {
    check(USUAL, reuse_after_copy);
    check(FEW, free_after_copy);
}

#[test]
fn a_page_is_an_owners_until_its_shoot_down_has_passed() {
    check_caught("copied_page_dropped_at_once", USUAL, reuse_after_copy);
    check_caught("parting_at_once", USUAL, reuse_after_forget);
    check_caught("parting_not_awaited", USUAL, reuse_after_forget);
}
