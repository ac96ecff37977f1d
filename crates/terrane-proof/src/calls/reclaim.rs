//! Private pages that reclaim takes away beside those who use them: to swap, to another frame, or for good.

use super::{
    BASE, FEW, SMALL, World, end_fork, fork, frame_of, is_resident, load, map, migrate, one_page, page,
    reclaim, second_word, store, unmap,
};
use crate::host::Model;
use crate::schedules::{Effort, USUAL, check, check_caught};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use terrane::sync::atomic::spin_loop;
use terrane::vma::{Advice, Prot};
use terrane::{FaultError, PAGE_SIZE};

/// For what few schedules show.
const MANY: Effort = Effort { schedules: 2400, ..USUAL };

/// Waits until another thread has raised `flag`.
fn wait_for(flag: &AtomicBool) {
    while !flag.load(Ordering::SeqCst) {
        spin_loop();
    }
}

/// Stores and loads beside a page's way out and back: at any moment the page is what was stored last.
fn against_stores() {
    let (world, cpu, _disk) = one_page();
    let user = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
        Model::store(cpu, space, page(0) + 8, 3).unwrap();
        assert_eq!((load(cpu, space, 0), second_word(cpu, space)), (Ok(2), 3), "a store was lost");
    });
    world.space.advise(&cpu, BASE, PAGE_SIZE, Advice::PageOut).unwrap();
    reclaim(&cpu, &world.space, 0);
    user.join().unwrap();
    reclaim(&cpu, &world.space, 0);
    assert_eq!(
        (load(&cpu, &world.space, 0), second_word(&cpu, &world.space)),
        (Ok(2), 3),
        "a store was lost"
    );
    world.end(cpu);
}

#[test]
fn stores_and_a_page_that_is_swapped_out() {
    check(USUAL, against_stores);
}

#[test]
fn swapping_out_waits_for_stores_and_frees_nothing_that_is_mapped() {
    for name in ["reclaim_anon_not_awaited", "no_shoot_down", "swap_frees_mapped"] {
        check_caught(name, USUAL, against_stores);
    }
}

/// Two who need a page that is in swap: both read it, and have one page.
fn two_readers() {
    let (world, cpu, _disk) = one_page();
    reclaim(&cpu, &world.space, 0);
    assert!(!is_resident(&cpu, &world.space, 0));
    let other = world.spawn(|cpu, space| Model::store(cpu, space, page(0) + 8, 5).unwrap());
    store(&cpu, &world.space, 0, 4).unwrap();
    other.join().unwrap();
    assert_eq!(
        (load(&cpu, &world.space, 0), second_word(&cpu, &world.space)),
        (Ok(4), 5),
        "a store was lost"
    );
    world.end(cpu);
}

#[test]
fn a_page_that_two_bring_back_is_one() {
    check(USUAL, two_readers);
}

#[test]
fn what_comes_back_late_is_not_taken() {
    check_caught("swap_reads_over", USUAL, two_readers);
}

/// Two reclaim the same page, beside who uses it.
fn two_reclaimers() {
    let (world, cpu, _disk) = one_page();
    let other = world.spawn(|cpu, space| {
        reclaim(cpu, space, 0);
        assert_eq!(load(cpu, space, 0), Ok(1));
        store(cpu, space, 0, 2).unwrap();
    });
    reclaim(&cpu, &world.space, 0);
    other.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(2), "a store was lost");
    world.end(cpu);
}

#[test]
fn a_page_leaves_once() {
    check(USUAL, two_reclaimers);
}

/// A page shared by a fork: its entries lead to one slot, and whoever stores to it has a copy of its own.
fn sharers() {
    let (world, cpu, _disk) = one_page();
    let child = Arc::new(fork(&cpu, &world.space));
    let theirs = Arc::clone(&child);
    let other = world.spawn(move |cpu, _| {
        assert_eq!(load(cpu, &theirs, 0), Ok(1));
        store(cpu, &theirs, 0, 7).unwrap();
        assert_eq!(load(cpu, &theirs, 0), Ok(7), "a store was lost");
        drop(theirs);
    });
    reclaim(&cpu, &world.space, 0);
    assert_eq!(load(&cpu, &world.space, 0), Ok(1), "a copy is not one's own");
    reclaim(&cpu, &world.space, 0);
    other.join().unwrap();
    assert_eq!((load(&cpu, &world.space, 0), load(&cpu, &child, 0)), (Ok(1), Ok(7)));
    end_fork(&cpu, Arc::into_inner(child).unwrap());
    world.end(cpu);
}

#[test]
fn sharers_of_a_page_in_swap() {
    check(USUAL, sharers);
}

#[test]
fn each_sharer_counts() {
    check_caught("swap_sharer_uncounted", USUAL, sharers);
    check_caught("swap_alone_too_soon", USUAL, sharers);
}

/// A fork beside a page's way out.
fn against_fork() {
    let (world, cpu, _disk) = one_page();
    let other = world.spawn(|cpu, space| {
        reclaim(cpu, space, 0);
        store(cpu, space, 0, 2).unwrap();
    });
    let child = fork(&cpu, &world.space);
    let seen = load(&cpu, &child, 0).unwrap();
    assert!(matches!(seen, 1 | 2), "{seen}");
    other.join().unwrap();
    assert_eq!((load(&cpu, &world.space, 0), load(&cpu, &child, 0)), (Ok(2), Ok(seen)));
    end_fork(&cpu, child);
    world.end(cpu);
}

#[test]
fn fork_and_a_page_that_is_swapped_out() {
    check(USUAL, against_fork);
}

/// A device that fails, and works again: nothing is lost, and who cannot have the page is told.
fn failing_device() {
    let (world, cpu, disk) = one_page();
    disk.fail(true);
    let user = world.spawn(|cpu, space| {
        for value in [2, 3] {
            match store(cpu, space, 0, value) {
                Ok(()) => assert_eq!(load(cpu, space, 0), Ok(value), "a store was lost"),
                Err(error) => panic!("nothing was swapped out: {error:?}"),
            }
        }
    });
    reclaim(&cpu, &world.space, 0);
    user.join().unwrap();
    disk.fail(false);
    reclaim(&cpu, &world.space, 0);
    disk.fail(true);
    let other = world.spawn(|cpu, space| load(cpu, space, 0));
    let gone = !is_resident(&cpu, &world.space, 0);
    disk.fail(false);
    let seen = other.join().unwrap();
    assert!(seen == Ok(3) || gone && seen == Err(FaultError::Io), "{seen:?}");
    assert_eq!(load(&cpu, &world.space, 0), Ok(3), "a store was lost");
    world.end(cpu);
}

#[test]
fn a_device_that_fails_loses_nothing() {
    check(FEW, failing_device);
}

#[test]
fn a_page_is_freed_when_it_is_written() {
    check_caught("swap_frees_unwritten", FEW, failing_device);
}

/// An unmap beside a page's way out: once it has returned nobody reaches the page.
fn against_unmap() {
    static GONE: AtomicBool = AtomicBool::new(false);
    let (world, cpu, _disk) = one_page();
    GONE.store(false, Ordering::SeqCst);
    let reclaims = world.spawn(|cpu, space| reclaim(cpu, space, 0));
    let user = world.spawn(|cpu, space| {
        let mut seen = load(cpu, space, 0);
        while !GONE.load(Ordering::SeqCst) {
            assert!(matches!(seen, Ok(1) | Err(FaultError::NotMapped)), "{seen:?}");
            spin_loop();
            seen = load(cpu, space, 0);
        }
        assert_eq!(load(cpu, space, 0), Err(FaultError::NotMapped), "a page is reached that is gone");
    });
    unmap(&cpu, &world.space, 0, 1);
    GONE.store(true, Ordering::SeqCst);
    user.join().unwrap();
    reclaims.join().unwrap();
    world.end(cpu);
}

#[test]
fn unmap_and_a_page_that_is_swapped_out() {
    check(FEW, against_unmap);
}

#[test]
fn unmap_shoots_down_what_is_on_its_way_out() {
    check_caught("swap_dropped_without_shoot_down", USUAL, against_unmap);
}

/// A protection beside a page's way out: once it has returned the page stands still, and no store comes through any more.
fn against_protect() {
    static DONE: AtomicBool = AtomicBool::new(false);
    DONE.store(false, Ordering::SeqCst);
    let (world, cpu, _disk) = one_page();
    let reclaims = world.spawn(|cpu, space| reclaim(cpu, space, 0));
    let user = world.spawn(|cpu, space| {
        let mut stored = false;
        loop {
            let done = DONE.load(Ordering::SeqCst);
            match store(cpu, space, 0, 2) {
                Ok(()) => assert!(!done, "stored through a translation from before the protection"),
                Err(FaultError::NotAllowed) => return stored,
                Err(error) => panic!("{error:?}"),
            }
            stored = true;
            spin_loop();
        }
    });
    world.space.protect(&cpu, BASE, PAGE_SIZE, Prot::READ).unwrap();
    DONE.store(true, Ordering::SeqCst);
    let seen = load(&cpu, &world.space, 0).unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(seen), "stored to a page that stands still");
    let stored = user.join().unwrap();
    reclaims.join().unwrap();
    assert_eq!(seen, if stored { 2 } else { 1 }, "a store came late");
    assert_eq!(load(&cpu, &world.space, 0), Ok(seen));
    world.end(cpu);
}

#[test]
fn protect_and_a_page_that_is_swapped_out() {
    check(FEW, against_protect);
}

#[test]
fn protect_shoots_down_what_is_on_its_way_out() {
    check_caught("swap_protected_without_shoot_down", MANY, against_protect);
}

/// A page is locked beside its way out: once that has returned it is in memory.
fn against_mlock() {
    let (world, cpu, _disk) = one_page();
    let reclaims = world.spawn(|cpu, space| {
        reclaim(cpu, space, 0);
        reclaim(cpu, space, 0);
    });
    world.space.mlock(&cpu, BASE, PAGE_SIZE).unwrap();
    assert!(is_resident(&cpu, &world.space, 0), "a locked page is not there");
    reclaims.join().unwrap();
    assert!(is_resident(&cpu, &world.space, 0), "a locked page was taken");
    assert_eq!(load(&cpu, &world.space, 0), Ok(1));
    world.end(cpu);
}

#[test]
fn locked_pages_stay() {
    check(FEW, against_mlock);
}

#[test]
fn locked_pages_stay_because_they_are_looked_at() {
    check_caught("reclaim_anon_takes_locked", FEW, against_mlock);
}

/// `MADV_FREE`: a page that was stored to afterwards stays, or comes back from swap.
fn against_free() {
    let (world, cpu, _disk) = one_page();
    world.space.advise(&cpu, BASE, PAGE_SIZE, Advice::Free).unwrap();
    let user = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
    });
    reclaim(&cpu, &world.space, 0);
    user.join().unwrap();
    reclaim(&cpu, &world.space, 0);
    assert_eq!(load(&cpu, &world.space, 0), Ok(2), "a store was lost");
    world.end(cpu);
}

#[test]
fn a_page_that_may_be_forgotten_and_a_store() {
    check(USUAL, against_free);
}

#[test]
fn a_page_is_not_forgotten_when_it_was_stored_to() {
    check_caught("vanish_though_stored", USUAL, against_free);
    check_caught("swap_keeps_lazyfree", USUAL, against_free);
}

/// A page that may be forgotten is shared meanwhile: it stays.
fn forgotten_beside_fork() {
    let (world, cpu, _disk) = one_page();
    world.space.advise(&cpu, BASE, PAGE_SIZE, Advice::Free).unwrap();
    let reclaims = world.spawn(|cpu, space| reclaim(cpu, space, 0));
    let child = fork(&cpu, &world.space);
    let seen = load(&cpu, &child, 0).unwrap();
    assert!(matches!(seen, 0 | 1));
    reclaims.join().unwrap();
    assert_eq!(
        (load(&cpu, &world.space, 0), load(&cpu, &child, 0)),
        (Ok(seen), Ok(seen)),
        "forgotten for one of two"
    );
    end_fork(&cpu, child);
    world.end(cpu);
}

#[test]
fn a_page_that_may_be_forgotten_and_a_fork() {
    check(FEW, forgotten_beside_fork);
}

#[test]
fn a_page_is_not_forgotten_when_it_is_shared() {
    check_caught("vanish_though_shared", USUAL, forgotten_beside_fork);
}

/// A page loses its marks while it is copied: who read it before reads the copy.
fn aged_and_copied(advised: bool) {
    static STORED: AtomicBool = AtomicBool::new(false);
    let (world, cpu, _disk) = one_page();
    STORED.store(false, Ordering::SeqCst);
    let child = fork(&cpu, &world.space);
    let reader = world.spawn(|cpu, space| {
        assert!(matches!(load(cpu, space, 0), Ok(1 | 2)));
        wait_for(&STORED);
        assert_eq!(load(cpu, space, 0), Ok(2), "an old page is read");
    });
    let ages = world.spawn(move |cpu, space| {
        if advised {
            space.advise(cpu, BASE, PAGE_SIZE, Advice::Cold).unwrap();
        } else if let Some(frame) = frame_of(cpu, space, 0) {
            terrane::proof::reclaim(cpu, frame);
        }
    });
    store(&cpu, &world.space, 0, 2).unwrap();
    STORED.store(true, Ordering::SeqCst);
    reader.join().unwrap();
    ages.join().unwrap();
    assert_eq!(load(&cpu, &child, 0), Ok(1));
    end_fork(&cpu, child);
    world.end(cpu);
}

fn advised_and_copied() {
    aged_and_copied(true);
}

fn looked_at_and_copied() {
    aged_and_copied(false);
}

#[test]
fn a_page_without_its_marks_may_be_in_use() {
    check(FEW, advised_and_copied);
    check(FEW, looked_at_and_copied);
}

#[test]
fn who_takes_marks_says_so() {
    for name in ["aged_untold", "aged_ignored"] {
        check_caught(name, USUAL, advised_and_copied);
        check_caught(name, USUAL, looked_at_and_copied);
    }
}

/// Two processors touch, copy and forget pages of one space: what each has counted adds up.
fn counts() {
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 4);
    let other = world.spawn(|cpu, space| {
        store(cpu, space, 0, 1).unwrap();
        store(cpu, space, 1, 1).unwrap();
        space.advise(cpu, BASE, PAGE_SIZE, Advice::DontNeed).unwrap();
    });
    store(&cpu, &world.space, 2, 1).unwrap();
    store(&cpu, &world.space, 3, 1).unwrap();
    other.join().unwrap();
    assert_eq!(world.space.mm().rss().anon, 3);
    world.end(cpu);
}

#[test]
fn resident_pages_are_counted() {
    check(FEW, counts);
}

#[test]
fn each_cpu_counts_for_itself() {
    check_caught("rss_in_one_place", USUAL, counts);
    check_caught("swap_out_uncounted", FEW, against_stores);
}

/// Stores beside a page's way to another frame, and a change of protection.
fn migration() {
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 2);
    store(&cpu, &world.space, 0, 1).unwrap();
    let user = world.spawn(|cpu, space| {
        store(cpu, space, 0, 2).unwrap();
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
        Model::store(cpu, space, page(0) + 8, 3).unwrap();
    });
    migrate(&cpu, &world.space, 0);
    migrate(&cpu, &world.space, 0);
    user.join().unwrap();
    assert_eq!(
        (load(&cpu, &world.space, 0), second_word(&cpu, &world.space)),
        (Ok(2), 3),
        "a store was lost"
    );
    assert!(migrate(&cpu, &world.space, 0), "a page that nobody uses does not move");
    assert_eq!(load(&cpu, &world.space, 0), Ok(2));
    world.end(cpu);
}

#[test]
fn stores_and_a_page_that_moves_to_another_frame() {
    check(USUAL, migration);
}

#[test]
fn moving_to_another_frame_waits_for_stores_and_for_who_maps_it() {
    for name in ["reclaim_anon_not_awaited", "no_shoot_down", "swap_moves_mapped"] {
        check_caught(name, USUAL, migration);
    }
}

/// A page on its way to another frame is mapped again as its mapping says by then.
fn migration_beside_protect() {
    let (world, cpu) = World::of(SMALL);
    map(&cpu, &world.space, 0, 1);
    store(&cpu, &world.space, 0, 1).unwrap();
    let moves = world.spawn(|cpu, space| migrate(cpu, space, 0));
    world.space.protect(&cpu, BASE, PAGE_SIZE, Prot::READ).unwrap();
    assert_eq!(store(&cpu, &world.space, 0, 2), Err(FaultError::NotAllowed));
    moves.join().unwrap();
    assert_eq!(store(&cpu, &world.space, 0, 2), Err(FaultError::NotAllowed), "stored to what is protected");
    unmap(&cpu, &world.space, 0, 1);
    assert_eq!(load(&cpu, &world.space, 0), Err(FaultError::NotMapped));
    world.end(cpu);
}

#[test]
fn a_page_that_moves_and_a_change() {
    check(FEW, migration_beside_protect);
}

#[test]
fn a_page_that_has_moved_is_mapped_as_allowed() {
    check_caught("map_again_unvalidated", USUAL, migration_beside_protect);
}

/// Two who store to a page on its way out: what the one has under way outlasts the copy that the other would make.
fn two_storers(leave: fn(&super::Me, &super::Space)) {
    let (world, cpu, _disk) = one_page();
    let one = world.spawn(|cpu, space| {
        for value in [4, 3, 2] {
            store(cpu, space, 0, value).unwrap();
        }
        assert_eq!(load(cpu, space, 0), Ok(2), "a store was lost");
    });
    let other = world.spawn(|cpu, space| {
        Model::store(cpu, space, page(0) + 8, 3).unwrap();
        assert_eq!(second_word(cpu, space), 3, "a store was lost");
    });
    leave(&cpu, &world.space);
    one.join().unwrap();
    other.join().unwrap();
    assert_eq!(
        (load(&cpu, &world.space, 0), second_word(&cpu, &world.space)),
        (Ok(2), 3),
        "a store was lost"
    );
    world.end(cpu);
}

fn two_storers_and_swap() {
    two_storers(|cpu, space| space.advise(cpu, BASE, PAGE_SIZE, Advice::PageOut).unwrap());
}

fn two_storers_and_migration() {
    two_storers(|cpu, space| {
        migrate(cpu, space, 0);
    });
}

/// One who stores, and a fork, beside a page on its way out: the child's page stands still.
fn storer_and_fork() {
    let (world, cpu, _disk) = one_page();
    let one = world.spawn(|cpu, space| store(cpu, space, 0, 2).unwrap());
    let other = world.spawn(|cpu, space| {
        // Maps the page again, if it is on its way.
        load(cpu, space, 0).unwrap();
        let child = fork(cpu, space);
        let seen = load(cpu, &child, 0);
        for _ in 0..3 {
            assert_eq!(load(cpu, &child, 0), seen, "the child's page changes");
        }
        end_fork(cpu, child);
    });
    migrate(&cpu, &world.space, 0);
    one.join().unwrap();
    other.join().unwrap();
    assert_eq!(load(&cpu, &world.space, 0), Ok(2), "a store was lost");
    world.end(cpu);
}

#[test]
fn two_who_store_to_a_page_on_its_way_out() {
    check(USUAL, two_storers_and_swap);
    check(USUAL, two_storers_and_migration);
    check(FEW, storer_and_fork);
}

#[test]
fn a_page_on_its_way_out_is_mapped_when_it_stands_still() {
    check_caught("swap_maps_unsettled", MANY, two_storers_and_swap);
}

#[test]
fn a_page_on_its_way_to_another_frame_is_mapped_when_it_stands_still() {
    check_caught("swap_maps_unsettled", MANY, two_storers_and_migration);
}
