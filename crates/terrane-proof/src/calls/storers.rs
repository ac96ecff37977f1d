//! Two who store to one page beside a change that takes their permission away, or moves the page, and awaits stores: what the one is in the
//! middle of storing must not be missing from what the other's fault makes of the page.

use super::files::{self, memory};
use super::{BASE, Me, RW, SMALL, Space, World, end_fork, fork, load, map, one_page, page, reclaim, store};
use crate::host::Model;
use crate::schedules::{Effort, USUAL, check, check_caught};
use shuttle::thread::JoinHandle;
use std::sync::atomic::{AtomicBool, Ordering};
use terrane::space::{Resolve, UserFaultModes, UserFeatures};
use terrane::vma::{Advice, Prot, RemapFlags};
use terrane::{FaultError, PAGE_SIZE};

/// Three threads take longer.
const FEW: Effort = Effort { schedules: 100, ..USUAL };
/// For calls of ten thousand steps.
const FEWEST: Effort = Effort { schedules: 15, steps: 2_000_000 };

const LAST: u64 = 3;

/// Two who store 2 and more to a word each of page `n`, and look.
fn storers(world: &World, n: u64) -> [JoinHandle<()>; 2] {
    [0, 8].map(|word| {
        world.spawn(move |cpu, space| {
            let addr = page(n) + word;
            for value in 2..=LAST {
                Model::store(cpu, space, addr, value).unwrap();
            }
            assert_eq!(Model::load(cpu, space, addr), Ok(LAST), "a store was lost");
        })
    })
}

/// Both words of page `n`.
fn words(cpu: &Me, space: &Space, n: u64) -> [u64; 2] {
    [0, 8].map(|word| Model::load(cpu, space, page(n) + word).unwrap())
}

/// What both have stored is there.
fn join(cpu: &Me, world: &World, n: u64, storers: [JoinHandle<()>; 2]) {
    storers.into_iter().for_each(|one| one.join().unwrap());
    assert_eq!(words(cpu, &world.space, n), [LAST; 2], "a store was lost");
}

/// Page `n` does not change any more.
fn assert_still(cpu: &Me, space: &Space, n: u64) -> [u64; 2] {
    let seen = words(cpu, space, n);
    assert_eq!(words(cpu, space, n), seen, "a page that stands still changes");
    seen
}

/// Two forks, one after the other.
fn beside_two_forks() {
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let both = storers(&world, 0);
    let children = [0, 1].map(|_| {
        let child = fork(&cpu, &world.space);
        (assert_still(&cpu, &child, 0), child)
    });
    join(&cpu, &world, 0, both);
    for (seen, child) in children {
        assert_eq!(words(&cpu, &child, 0), seen, "the child's page has changed");
        end_fork(&cpu, child);
    }
    world.end(cpu);
}

/// The end of the other sharer: the one's fault finds the page shared, the other's finds that it has it alone.
fn beside_the_sharers_end() {
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let child = fork(&cpu, &world.space);
    let both = storers(&world, 0);
    assert_eq!(load(&cpu, &child, 0), Ok(1));
    end_fork(&cpu, child);
    join(&cpu, &world, 0, both);
    world.end(cpu);
}

#[test]
fn two_who_store_and_forks() {
    check(FEW, beside_two_forks);
    check(FEW, beside_the_sharers_end);
}

#[test]
fn forks_wait_for_both() {
    check_caught("fork_not_awaited", FEW, beside_two_forks);
    check_caught("take_without_looking", FEW, beside_the_sharers_end);
}

/// Two who store as long as they may. What they are to store once `done` is raised they may not.
fn until_refused(world: &World, done: &'static AtomicBool) -> [JoinHandle<()>; 2] {
    [0, 8].map(|word| {
        world.spawn(move |cpu, space| {
            loop {
                let late = done.load(Ordering::SeqCst);
                match Model::store(cpu, space, page(0) + word, 2) {
                    Ok(()) => assert!(!late, "stored through a translation from before the protection"),
                    Err(FaultError::NotAllowed) => return,
                    Err(error) => panic!("{error:?}"),
                }
                terrane::sync::atomic::spin_loop();
            }
        })
    })
}

/// A protection of a page that a fork has shared: the one copies it, the other stores to the copy.
fn beside_protect() {
    static DONE: AtomicBool = AtomicBool::new(false);
    DONE.store(false, Ordering::SeqCst);
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 2);
    store(&cpu, &world.space, 0, 1).unwrap();
    let child = fork(&cpu, &world.space);
    let both = until_refused(&world, &DONE);
    world.space.protect(&cpu, BASE, PAGE_SIZE, Prot::READ).unwrap();
    DONE.store(true, Ordering::SeqCst);
    let seen = assert_still(&cpu, &world.space, 0);
    both.into_iter().for_each(|one| one.join().unwrap());
    assert_eq!(words(&cpu, &world.space, 0), seen, "stored to a page that stands still");
    assert_eq!(words(&cpu, &child, 0), [1, 0], "the child's page has changed");
    end_fork(&cpu, child);
    world.end(cpu);
}

#[test]
fn two_who_store_and_protect() {
    check(FEW, beside_protect);
}

#[test]
fn protect_waits_for_both() {
    check_caught("stores_not_awaited", FEW, beside_protect);
}

/// `MADV_DONTNEED`: what is stored once it has returned is there.
fn beside_dontneed() {
    static DONE: AtomicBool = AtomicBool::new(false);
    DONE.store(false, Ordering::SeqCst);
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let both = [0, 8].map(|word| {
        world.spawn(move |cpu, space| {
            for value in 2..=LAST {
                let late = DONE.load(Ordering::SeqCst);
                Model::store(cpu, space, page(0) + word, value).unwrap();
                let seen = Model::load(cpu, space, page(0) + word).unwrap();
                assert!(seen == value || seen == 0 && !late, "{seen}: a store was lost");
            }
        })
    });
    world.space.advise(&cpu, BASE, PAGE_SIZE, Advice::DontNeed).unwrap();
    DONE.store(true, Ordering::SeqCst);
    assert_ne!(words(&cpu, &world.space, 0)[0], 1, "older than the advice");
    both.into_iter().for_each(|one| one.join().unwrap());
    assert!(words(&cpu, &world.space, 0).iter().all(|seen| [0, 2, LAST].contains(seen)));
    world.end(cpu);
}

#[test]
fn two_who_store_and_dontneed() {
    check(FEW, beside_dontneed);
}

#[test]
fn dontneed_shoots_down() {
    check_caught("no_shoot_down", FEW, beside_dontneed);
}

/// Two who store until the page is gone; what each has stored last.
fn until_unmapped(world: &World, n: u64) -> [JoinHandle<u64>; 2] {
    [0, 8].map(|word| {
        world.spawn(move |cpu, space| {
            let mut stored = 0;
            for value in 2..=LAST {
                match Model::store(cpu, space, page(n) + word, value) {
                    Ok(()) => stored = value,
                    Err(FaultError::NotMapped) => break,
                    Err(error) => panic!("{error:?}"),
                }
            }
            stored
        })
    })
}

/// `mremap` of a page that a fork has shared.
fn beside_mremap() {
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 0).unwrap();
    let child = fork(&cpu, &world.space);
    let both = until_unmapped(&world, 0);
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    assert_eq!(world.space.remap(&cpu, BASE, PAGE_SIZE, PAGE_SIZE, flags, page(5)), Ok(page(5)));
    let seen = assert_still(&cpu, &world.space, 5);
    assert_eq!(both.map(|one| one.join().unwrap()), seen, "a store came late, or was lost");
    assert_eq!(words(&cpu, &child, 0), [0; 2], "the child's page has changed");
    end_fork(&cpu, child);
    world.end(cpu);
}

#[test]
fn two_who_store_and_mremap() {
    check(FEW, beside_mremap);
}

#[test]
fn mremap_waits_for_both() {
    check_caught("carry_not_awaited", FEW, beside_mremap);
}

const BLOCK: u64 = 512;

/// A collapse of the 2 MiB around the page.
fn beside_collapse() {
    let (world, cpu) = World::of(4 * 512);
    map(&cpu, &world.space, 0, BLOCK);
    store(&cpu, &world.space, 5, 1).unwrap();
    let both = storers(&world, 5);
    world.space.advise(&cpu, BASE, BLOCK * PAGE_SIZE, Advice::Collapse).unwrap();
    join(&cpu, &world, 5, both);
    assert_eq!(world.space.page_tables(), 2, "no block");
    world.end(cpu);
}

/// The division of a block that a fork has shared: the one copies a page of it by dividing it, the other stores, and a call protects another page.
fn beside_division() {
    let (world, cpu) = World::of(6 * 512);
    map(&cpu, &world.space, 0, BLOCK);
    store(&cpu, &world.space, 5, 1).unwrap();
    world.space.advise(&cpu, BASE, BLOCK * PAGE_SIZE, Advice::Collapse).unwrap();
    let child = fork(&cpu, &world.space);
    let both = storers(&world, 5);
    world.space.protect(&cpu, page(6), PAGE_SIZE, Prot::READ).unwrap();
    join(&cpu, &world, 5, both);
    assert_eq!(words(&cpu, &child, 5), [1, 0], "the child's page has changed");
    assert_eq!(super::mapped(&cpu, &world.space), [(0, 6, RW), (6, 7, Prot::READ), (7, BLOCK, RW)]);
    end_fork(&cpu, child);
    world.end(cpu);
}

#[test]
fn two_who_store_and_blocks() {
    check(FEWEST, beside_collapse);
    check(FEWEST, beside_division);
}

#[test]
fn blocks_are_shot_down() {
    check_caught("no_shoot_down", FEWEST, beside_collapse);
    check_caught("no_shoot_down", FEWEST, beside_division);
}

/// Write-protection by a handler of user faults, taken back once the page has been seen to stand still.
fn beside_user_protection() {
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 1);
    let faults = world.space.user_faults(&cpu, UserFeatures::empty()).unwrap();
    faults.register(&cpu, BASE, PAGE_SIZE, UserFaultModes::WP).unwrap();
    store(&cpu, &world.space, 0, 1).unwrap();
    let both = storers(&world, 0);
    faults.write_protect(&cpu, BASE, PAGE_SIZE, true, Resolve::empty()).unwrap();
    assert_still(&cpu, &world.space, 0);
    faults.write_protect(&cpu, BASE, PAGE_SIZE, false, Resolve::empty()).unwrap();
    join(&cpu, &world, 0, both);
    drop(faults);
    world.end(cpu);
}

/// A handler's move of the page: what each has stored is where it went, or in the page that came after it.
fn beside_user_move() {
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 2);
    let faults = world.space.user_faults(&cpu, UserFeatures::empty()).unwrap();
    faults.register(&cpu, BASE, 2 * PAGE_SIZE, UserFaultModes::MISSING).unwrap();
    map(&cpu, &world.space, 4, 6);
    store(&cpu, &world.space, 4, 0).unwrap();
    let both = [0, 8].map(|word| {
        world.spawn(move |cpu, space| {
            for value in 2..=LAST {
                Model::store(cpu, space, page(4) + word, value).unwrap();
            }
        })
    });
    faults.move_pages(&cpu, page(0), page(4), PAGE_SIZE, Resolve::empty()).unwrap();
    let moved = assert_still(&cpu, &world.space, 0);
    both.into_iter().for_each(|one| one.join().unwrap());
    assert_eq!(words(&cpu, &world.space, 0), moved, "a store came late");
    for (moved, left) in moved.into_iter().zip(words(&cpu, &world.space, 4)) {
        assert!(left == LAST || left == 0 && moved == LAST, "{moved}, {left}: a store was lost");
    }
    drop(faults);
    world.end(cpu);
}

#[test]
fn two_who_store_and_handlers() {
    check(FEW, beside_user_protection);
    check(FEW, beside_user_move);
}

#[test]
fn handlers_wait_for_both() {
    check_caught("user_protect_not_awaited", FEW, beside_user_protection);
    check_caught("stores_not_awaited", FEW, beside_user_move);
}

/// A page of a file, which each maps elsewhere: all is written in the end.
fn beside_write_back() {
    let (world, cpu, object, disk) = files::file();
    files::show(&cpu, &world.space, &object, 4);
    store(&cpu, &world.space, 0, 1).unwrap();
    let both = [0, 4].map(|n| {
        world.spawn(move |cpu, space| {
            let addr = page(n) + 2 * n;
            for value in 2..=LAST {
                Model::store(cpu, space, addr, value).unwrap();
            }
            assert_eq!(Model::load(cpu, space, addr), Ok(LAST), "a store was lost");
        })
    });
    object.write_back(&cpu).unwrap();
    join(&cpu, &world, 0, both);
    object.write_back(&cpu).unwrap();
    reclaim(&cpu, &world.space, 0);
    assert_eq!(words(&cpu, &world.space, 4), [LAST; 2], "a store has not reached the file");
    assert_eq!(disk.word(0), LAST, "a store has not reached the file");
    files::end(world, cpu, object);
}

/// Reclaim of shared memory that each maps elsewhere.
fn beside_reclaim_of_memory() {
    let (world, cpu, object, _disk) = memory();
    store(&cpu, &world.space, 0, 1).unwrap();
    let both = storers(&world, 0);
    world.space.advise(&cpu, BASE, PAGE_SIZE, Advice::PageOut).unwrap();
    join(&cpu, &world, 0, both);
    reclaim(&cpu, &world.space, 0);
    assert_eq!(words(&cpu, &world.space, 0), [LAST; 2], "a store was lost");
    files::end(world, cpu, object);
}

#[test]
fn two_who_store_and_objects() {
    check(FEW, beside_write_back);
    check(FEW, beside_reclaim_of_memory);
}

#[test]
fn objects_wait_for_both() {
    check_caught("write_back_not_awaited", FEW, beside_write_back);
    check_caught("reclaim_file_not_awaited", FEW, beside_reclaim_of_memory);
}

/// A page that goes to swap and is shared by a fork meanwhile; its device goes out of use.
fn beside_swap_and_fork() {
    let (world, cpu, _disk) = one_page();
    let both = storers(&world, 0);
    world.space.advise(&cpu, BASE, PAGE_SIZE, Advice::PageOut).unwrap();
    let child = fork(&cpu, &world.space);
    let seen = assert_still(&cpu, &child, 0);
    assert_eq!(world.machine.swap_off(&cpu, 0), Ok(()));
    join(&cpu, &world, 0, both);
    assert_eq!(words(&cpu, &child, 0), seen, "the child's page has changed");
    end_fork(&cpu, child);
    world.end(cpu);
}

#[test]
fn two_who_store_and_swap() {
    check(FEW, beside_swap_and_fork);
}

#[test]
fn what_goes_to_swap_waits_for_both() {
    check_caught("reclaim_anon_not_awaited", FEW, beside_swap_and_fork);
}
