//! Changes of the layout: beside lookups, beside each other, and the search for free addresses.

use super::{BASE, RW, World, load, map, mapped, page, store, unmap};
use crate::schedules::{Effort, USUAL, check, check_caught};
use terrane::PAGE_SIZE;
use terrane::error::Error;
use terrane::space::{MapRequest, SpaceConfig};
use terrane::vma::Prot;

const FEW: Effort = Effort { schedules: 100, ..USUAL };

/// Every other page is mapped, so that a leaf of the index is full; then neighbours come and go, leaves are divided and
/// joined, and a mapping in their midst is always found.
fn lookup() {
    let (world, cpu) = World::new();
    for n in 0..16 {
        map(&cpu, &world.space, 2 * n, 2 * n + 1);
    }
    store(&cpu, &world.space, 16, 7).unwrap();
    let reader = world.spawn(|cpu, space| {
        for _ in 0..4 {
            assert_eq!(load(cpu, space, 16), Ok(7));
            // A fault that has to look for the VMA.
            space.fault(cpu, page(16), terrane::vma::Access::Write).unwrap();
        }
    });
    // Divides the leaf, divides the VMA's neighbours, joins the VMA with them, and takes it apart again.
    for n in 16..20 {
        map(&cpu, &world.space, 2 * n, 2 * n + 1);
    }
    map(&cpu, &world.space, 15, 16);
    map(&cpu, &world.space, 17, 18);
    unmap(&cpu, &world.space, 15, 16);
    unmap(&cpu, &world.space, 17, 30);
    unmap(&cpu, &world.space, 0, 16);
    reader.join().unwrap();
    let left = mapped(&cpu, &world.space);
    assert_eq!(left, [(16, 17, RW), (30, 31, RW), (32, 33, RW), (34, 35, RW), (36, 37, RW), (38, 39, RW)]);
    world.end(cpu);
}

#[test]
fn lookups_and_changes_of_the_index() {
    check(FEW, lookup);
}

/// Stores into a VMA that is divided and joined all the time.
fn split_and_merge() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 4);
    let faults = world.spawn(|cpu, space| {
        for n in 0..4 {
            store(cpu, space, n, 10 + n).unwrap();
        }
    });
    world.space.protect(&cpu, page(1), 2 * PAGE_SIZE, Prot::all()).unwrap();
    world.space.protect(&cpu, page(1), PAGE_SIZE, RW).unwrap();
    world.space.protect(&cpu, page(2), PAGE_SIZE, RW).unwrap();
    assert_eq!(mapped(&cpu, &world.space), [(0, 4, RW)]);
    faults.join().unwrap();
    for n in 0..4 {
        assert_eq!(load(&cpu, &world.space, n), Ok(10 + n));
    }
    world.end(cpu);
}

#[test]
fn faults_and_changes_of_their_vma() {
    check(USUAL, split_and_merge);
}

/// Two threads map and unmap wherever there is room: they never get the same addresses, and at the end all room is
/// found again.
fn gaps() {
    const PAGES: u64 = 8;
    let mut config = SpaceConfig::default();
    config.range = terrane::AddrRange::new(BASE, page(PAGES));
    config.fault_around = PAGE_SIZE;
    let (world, cpu) = World::with(super::FRAMES, config);
    fn coming_and_going(cpu: &super::Me, space: &super::Space, value: u64) {
        for pages in [1, 2, 1] {
            let addr = space.map(cpu, MapRequest::anonymous(pages * PAGE_SIZE, RW)).unwrap();
            let n = (addr - BASE) / PAGE_SIZE;
            store(cpu, space, n, value).unwrap();
            assert_eq!(load(cpu, space, n), Ok(value), "the addresses have two owners");
            unmap(cpu, space, n, n + pages);
        }
    }
    let other = world.spawn(|cpu, space| coming_and_going(cpu, space, 1));
    coming_and_going(&cpu, &world.space, 2);
    other.join().unwrap();
    assert_eq!(mapped(&cpu, &world.space), []);
    let all = world.space.map(&cpu, MapRequest::anonymous(PAGES * PAGE_SIZE, RW));
    assert_eq!(all, Ok(BASE), "room was forgotten");
    world.end(cpu);
}

#[test]
fn room_is_given_once_and_found_again() {
    check(USUAL, gaps);
}

/// Two threads map, use and unmap pages of one table, which comes and goes with them: a page that was stored to is found
/// again, even if the other thread takes the table for empty in between.
fn one_table() {
    let (world, cpu) = World::new();
    fn coming_and_going(cpu: &super::Me, space: &super::Space, n: u64) {
        for value in 1..=2 {
            map(cpu, space, n, n + 1);
            store(cpu, space, n, value).unwrap();
            assert_eq!(load(cpu, space, n), Ok(value), "the page was lost with its table");
            unmap(cpu, space, n, n + 1);
        }
    }
    let other = world.spawn(|cpu, space| coming_and_going(cpu, space, 9));
    coming_and_going(&cpu, &world.space, 3);
    other.join().unwrap();
    assert_eq!(mapped(&cpu, &world.space), []);
    // Two that close one table at the same time may both leave it to the other; the next one frees it.
    map(&cpu, &world.space, 5, 6);
    store(&cpu, &world.space, 5, 1).unwrap();
    unmap(&cpu, &world.space, 5, 6);
    assert_eq!(world.space.page_tables(), 1);
    world.end(cpu);
}

#[test]
fn tables_come_and_go() {
    check(USUAL, one_table);
}

#[test]
fn closing_tables_needs_the_look_at_the_head() {
    check_caught("take_never_looks", USUAL, one_table);
}

/// Two calls on ranges that overlap: one comes before the other as a whole.
fn overlapping() {
    let (world, cpu) = World::new();
    map(&cpu, &world.space, 0, 6);
    store(&cpu, &world.space, 2, 7).unwrap();
    let other = world.spawn(|cpu, space| {
        // 1..4 become readable only; where page 3 is gone, as in Linux, what lies before it.
        space.protect(cpu, page(1), 3 * PAGE_SIZE, Prot::READ)
    });
    unmap(&cpu, &world.space, 3, 5);
    let protected = other.join().unwrap();
    let list = mapped(&cpu, &world.space);
    assert!(matches!(protected, Ok(()) | Err(Error::NoMemory)));
    assert_eq!(list, [(0, 1, RW), (1, 3, Prot::READ), (5, 6, RW)]);
    assert_eq!(load(&cpu, &world.space, 2), Ok(7));
    world.end(cpu);
}

/// Two calls on ranges that touch, and whose VMAs are joined over the border.
fn touching() {
    let (world, cpu) = World::new();
    let other = world.spawn(|cpu, space| {
        map(cpu, space, 2, 4);
        store(cpu, space, 2, 1).unwrap();
        unmap(cpu, space, 3, 4);
    });
    map(&cpu, &world.space, 0, 2);
    store(&cpu, &world.space, 1, 2).unwrap();
    unmap(&cpu, &world.space, 0, 1);
    other.join().unwrap();
    let list = mapped(&cpu, &world.space);
    let pages: u64 = list.iter().map(|(from, to, _)| to - from).sum();
    assert_eq!((list[0].0, list[list.len() - 1].1, pages), (1, 3, 2), "{list:?}");
    assert_eq!((load(&cpu, &world.space, 1), load(&cpu, &world.space, 2)), (Ok(2), Ok(1)));
    world.end(cpu);
}

#[test]
fn changes_of_ranges_that_overlap_or_touch() {
    check(USUAL, overlapping);
    check(USUAL, touching);
}
