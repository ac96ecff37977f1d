//! Locking in memory.

use super::super::races::Stage;
use super::*;
use crate::mm::HugePages;
use crate::space::{LockAllFlags, LockFlags};
use crate::vma::VmFlags;
use std::thread;

const MLOCK_ONFAULT: u32 = LockFlags::ONFAULT.bits();
const MCL_CURRENT: u32 = LockAllFlags::CURRENT.bits();
const MCL_FUTURE: u32 = LockAllFlags::FUTURE.bits();
const MCL_ONFAULT: u32 = LockAllFlags::ONFAULT.bits();

fn locked_pages(space: &Space) -> u64 {
    // The account, and what the mappings say.
    space.locked_bytes() / PAGE_SIZE
}

fn check(b: &Bench, space: &Space, pages: u64) {
    let mappings = space.mappings(&b.cpu).unwrap();
    let locked = mappings.iter().filter(|m| m.flags.contains(VmFlags::LOCKED));
    assert_eq!(locked.map(|m| m.range.pages()).sum::<u64>(), pages);
    assert_eq!(locked_pages(space), pages);
}

#[test]
fn locking_fills_in_divides_and_counts() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 8);
        // Unaligned: every page that is touched.
        space.mlock(&b.cpu, page(2) + 5, PAGE_SIZE).unwrap();
        check(b, &space, 2);
        assert_eq!(
            (listing(b, &space), space.resident_pages(&b.cpu)),
            (Vec::from([(0, 2), (2, 4), (4, 8)]), 2)
        );
        // Locked already: nothing new. On fault: nothing filled in, an attribute of its own.
        space.mlock(&b.cpu, page(2), 2 * PAGE_SIZE).unwrap();
        space.mlock2(&b.cpu, page(4), PAGE_SIZE, MLOCK_ONFAULT).unwrap();
        check(b, &space, 3);
        assert_eq!(space.resident_pages(&b.cpu), 2);
        assert_eq!(listing(b, &space), [(0, 2), (2, 4), (4, 5), (5, 8)]);
        space.mlock(&b.cpu, page(4), PAGE_SIZE).unwrap();
        assert_eq!((listing(b, &space).len(), space.resident_pages(&b.cpu)), (3, 3));
        assert_eq!(space.advise(&b.cpu, page(3), PAGE_SIZE, Advice::DontNeed), Err(Error::Invalid));
        for advice in [Advice::Free, Advice::Cold, Advice::PageOut, Advice::GuardInstall, Advice::Remove] {
            assert_eq!(space.advise(&b.cpu, page(3), PAGE_SIZE, advice), Err(Error::Invalid));
        }
        space.advise(&b.cpu, page(3), PAGE_SIZE, Advice::DontNeedLocked).unwrap();
        assert_eq!(space.resident_pages(&b.cpu), 2);
        // Unmapping, replacing, forking.
        space.unmap(&b.cpu, page(3), PAGE_SIZE).unwrap();
        check(b, &space, 2);
        let child = space.fork(&b.cpu).unwrap();
        check(b, &child, 0);
        memory(b, &space, 2, 1);
        check(b, &space, 1);
        space.munlock(&b.cpu, page(4), PAGE_SIZE).unwrap();
        check(b, &space, 0);
        assert_eq!(listing(b, &space), [(0, 3), (4, 8)]);
    });
}

#[test]
fn what_lies_before_a_hole_is_locked() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 2);
        memory(b, &space, 3, 1);
        let len = 4 * PAGE_SIZE;
        assert_eq!(space.mlock(&b.cpu, page(0), len), Err(Error::NoMemory));
        check(b, &space, 2);
        assert_eq!(space.resident_pages(&b.cpu), 0, "nothing is filled in then");
        assert_eq!(space.munlock(&b.cpu, page(0), len), Err(Error::NoMemory));
        check(b, &space, 0);
        assert_eq!(space.mlock(&b.cpu, page(2), PAGE_SIZE), Err(Error::NoMemory));
        assert_eq!(space.mlock(&b.cpu, page(2), 0), Ok(()));
        assert_eq!(space.mlock(&b.cpu, page(0), u64::MAX), Ok(()), "wraps to nothing");
        assert_eq!(space.mlock(&b.cpu, page(0) + 100, 0u64.wrapping_sub(100)), Ok(()));
        assert_eq!(space.mlock(&b.cpu, page(0), 0u64.wrapping_sub(2 * PAGE_SIZE)), Err(Error::Invalid));
        assert_eq!(space.munlock(&b.cpu, page(0), 0u64.wrapping_sub(2 * PAGE_SIZE)), Err(Error::Invalid));
        for flags in [2, 3, u32::MAX] {
            assert_eq!(space.mlock2(&b.cpu, page(0), PAGE_SIZE, flags), Err(Error::Invalid));
        }
        // Locked, though it cannot be filled in: for nobody, beyond the end, a guard.
        space.protect(&b.cpu, page(0), PAGE_SIZE, Prot::empty()).unwrap();
        space.advise(&b.cpu, page(1), PAGE_SIZE, Advice::GuardInstall).unwrap();
        let object = Object::shared_memory(&b.machine, PAGE_SIZE).unwrap();
        map_object(b, &space, &object, 10, 3, true);
        for (at, pages) in [(page(0), 1), (page(1), 1), (page(10), 3)] {
            assert_eq!(space.mlock(&b.cpu, at, pages * PAGE_SIZE), Err(Error::NoMemory));
            check(b, &space, pages);
            space.munlock(&b.cpu, at, pages * PAGE_SIZE).unwrap();
        }
        check(b, &space, 0);
    });
}

#[test]
fn limits_are_errors_of_several_kinds() {
    both(|b, config| {
        let space = b.space(SpaceConfig { memlock_limit: Some(4 * PAGE_SIZE), ..config });
        memory(b, &space, 0, 16);
        let mlock = |from, count| space.mlock(&b.cpu, page(from), count * PAGE_SIZE);
        assert_eq!(mlock(0, 5), Err(Error::NoMemory));
        assert_eq!(mlock(0, 4), Ok(()));
        assert_eq!(mlock(0, 4), Ok(()), "not counted twice");
        assert_eq!(mlock(4, 1), Err(Error::NoMemory));
        assert_eq!(mlock(0, 5), Err(Error::NoMemory));
        space.munlock(&b.cpu, page(0), 4 * PAGE_SIZE).unwrap();
        assert_eq!(space.mlock(&b.cpu, page(0), 0u64.wrapping_sub(8192)), Err(Error::NoMemory));
        assert_eq!(space.mlockall(&b.cpu, MCL_CURRENT), Err(Error::NoMemory));
        assert_eq!(space.mlockall(&b.cpu, MCL_FUTURE), Ok(()));
        let map = |count| space.map(&b.cpu, MapRequest::anonymous(count * PAGE_SIZE, RW));
        assert_eq!(map(5), Err(Error::Again));
        let at = map(4).unwrap();
        check(b, &space, 4);
        assert_eq!(map(1), Err(Error::Again));
        space.set_heap(&b.cpu, 0x10_0000).unwrap();
        assert_eq!(space.brk(&b.cpu, 0x10_1000), 0x10_0000);
        space.unmap(&b.cpu, at, 4 * PAGE_SIZE).unwrap();
        assert_eq!(space.brk(&b.cpu, 0x10_1000), 0x10_1000);
        check(b, &space, 1);
        assert_eq!(space.brk(&b.cpu, 0x10_0000), 0x10_0000);
        space.munlockall(&b.cpu);
        check(b, &space, 0);
        map(5).unwrap();
        let none = b.space(SpaceConfig { memlock_limit: Some(0), ..config });
        memory(b, &none, 0, 1);
        for len in [0, PAGE_SIZE] {
            assert_eq!(none.mlock(&b.cpu, page(0), len), Err(Error::NotPermitted));
        }
        assert_eq!(none.mlock2(&b.cpu, page(0), 1, 2), Err(Error::Invalid));
        assert_eq!(none.mlockall(&b.cpu, 0), Err(Error::Invalid));
        assert_eq!(none.mlockall(&b.cpu, MCL_CURRENT), Err(Error::NotPermitted));
        assert_eq!(none.munlock(&b.cpu, page(0), PAGE_SIZE), Ok(()));
    });
}

#[test]
fn all_that_is_and_all_that_will_be() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 3);
        let object = Object::shared_memory(&b.machine, 2 * PAGE_SIZE).unwrap();
        map_object(b, &space, &object, 10, 3, true);
        for flags in [0, MCL_ONFAULT, 8, 9] {
            assert_eq!(space.mlockall(&b.cpu, flags), Err(Error::Invalid));
        }
        space.mlockall(&b.cpu, MCL_CURRENT).unwrap();
        check(b, &space, 6);
        assert_eq!(space.resident_pages(&b.cpu), 5);
        memory(b, &space, 20, 2);
        check(b, &space, 6);
        space.mlockall(&b.cpu, MCL_FUTURE).unwrap();
        check(b, &space, 6);
        memory(b, &space, 30, 2);
        check(b, &space, 8);
        assert_eq!(space.resident_pages(&b.cpu), 7);
        space.mlockall(&b.cpu, MCL_FUTURE | MCL_CURRENT | MCL_ONFAULT).unwrap();
        memory(b, &space, 40, 2);
        check(b, &space, 12);
        assert_eq!(space.resident_pages(&b.cpu), 7);
        let child = space.fork(&b.cpu).unwrap();
        memory(b, &child, 50, 2);
        check(b, &child, 0);
        space.mlockall(&b.cpu, MCL_CURRENT).unwrap();
        assert_eq!(space.resident_pages(&b.cpu), 11);
        memory(b, &space, 50, 2);
        check(b, &space, 12);
        space.munlockall(&b.cpu);
        check(b, &space, 0);
    });
}

#[test]
fn parts_of_huge_pages_are_locked() {
    both(|b, config| {
        let space = b.space(SpaceConfig { huge_pages: HugePages::Always, ..config });
        memory(b, &space, 0, 1024);
        b.store(&space, page(0), 1).unwrap();
        space.mlock(&b.cpu, page(3), 600 * PAGE_SIZE).unwrap();
        check(b, &space, 600);
        space.unmap(&b.cpu, page(0), 100 * PAGE_SIZE).unwrap();
        check(b, &space, 503);
    });
}

/// Threads lock, unlock, map and unmap in areas of their own and in a common one: at the end the account is right, and while a
/// limit holds nobody passes it.
#[test]
fn the_account_is_right_after_calls_side_by_side() {
    for (locking, limit) in [
        (Locking::Speculative, None),
        (Locking::Speculative, Some(40 * PAGE_SIZE)),
        (Locking::Classic, Some(40 * PAGE_SIZE)),
    ] {
        let bench = Bench::on(TestHost::with_tickets(1, 1500), 12);
        let config = SpaceConfig { memlock_limit: limit, ..SpaceConfig::with_locking(locking) };
        let space = bench.space(config);
        let stage = Stage::new();
        memory(&bench, &space, 0, 100);
        thread::scope(|scope| {
            for number in 0..3 {
                let mut me = stage.worker(&bench, number + 5);
                let space = &space;
                scope.spawn(move || {
                    while me.goes_on() {
                        let area = if me.random.one_in(4) { 0 } else { 30 * number };
                        let at = page(area + me.random.below(30));
                        let len = (1 + me.random.below(10)) * PAGE_SIZE;
                        let result = match me.random.below(6) {
                            0 | 1 => space.mlock(&me.cpu, at, len),
                            2 => space.mlock2(&me.cpu, at, len, MLOCK_ONFAULT),
                            3 => space.munlock(&me.cpu, at, len),
                            4 => space.map(&me.cpu, MapRequest::anonymous(len, RW).fixed(at)).map(drop),
                            _ => space.unmap(&me.cpu, at, len),
                        };
                        assert!(matches!(result, Ok(()) | Err(Error::NoMemory | Error::Again)), "{result:?}");
                        if let Some(limit) = limit {
                            let _one_at_a_time = space.mm().limits.lock();
                            assert!(space.locked_bytes() <= limit);
                        }
                    }
                });
            }
        });
        let locked = space.mappings(&bench.cpu).unwrap();
        let locked = locked.iter().filter(|m| m.flags.contains(VmFlags::LOCKED));
        assert_eq!(locked.map(|m| m.range.len()).sum::<u64>(), space.locked_bytes());
        space.munlockall(&bench.cpu);
        assert_eq!(space.locked_bytes(), 0);
        space.destroy(&bench.cpu);
        bench.assert_nothing_left();
    }
}
