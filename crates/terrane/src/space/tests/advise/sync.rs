//! Writing shared mappings of files back.

use super::super::races::Stage;
use super::*;
use crate::space::SyncFlags;
use std::thread;

const MS_ASYNC: u32 = SyncFlags::ASYNC.bits();
const MS_INVALIDATE: u32 = SyncFlags::INVALIDATE.bits();
const MS_SYNC: u32 = SyncFlags::SYNC.bits();

#[test]
fn arguments_are_checked_in_the_order_of_linux() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 2);
        memory(b, &space, 3, 1);
        let sync = |addr, len, flags| space.msync(&b.cpu, addr, len, flags);
        for flags in [8, MS_ASYNC | MS_SYNC, u32::MAX] {
            assert_eq!(sync(page(0), PAGE_SIZE, flags), Err(Error::Invalid));
        }
        assert_eq!(sync(page(0) + 1, 0, MS_SYNC), Err(Error::Invalid));
        for flags in [0, MS_ASYNC, MS_SYNC, MS_INVALIDATE, MS_SYNC | MS_INVALIDATE] {
            assert_eq!(sync(page(0), PAGE_SIZE, flags), Ok(()));
            assert_eq!(sync(page(50), 0, flags), Ok(()));
            assert_eq!(sync(page(0), u64::MAX, flags), Ok(()), "wraps to nothing");
            assert_eq!(sync(page(0), 0u64.wrapping_sub(PAGE_SIZE), flags), Err(Error::NoMemory));
            assert_eq!(sync(page(0), 4 * PAGE_SIZE, flags), Err(Error::NoMemory));
            assert_eq!(sync(page(2), PAGE_SIZE, flags), Err(Error::NoMemory));
        }
        // A locked mapping behind a hole: who asks for nothing but checks does not come so far.
        space.mlock(&b.cpu, page(3), PAGE_SIZE).unwrap();
        assert_eq!(sync(page(0), 4 * PAGE_SIZE, MS_ASYNC), Err(Error::NoMemory));
        assert_eq!(sync(page(0), 4 * PAGE_SIZE, MS_ASYNC | MS_INVALIDATE), Err(Error::Busy));
        assert_eq!(sync(page(0), 4 * PAGE_SIZE, MS_SYNC | MS_INVALIDATE), Err(Error::Busy));
        assert_eq!(sync(page(0), 2 * PAGE_SIZE, MS_SYNC | MS_INVALIDATE), Ok(()));
    });
}

#[test]
fn what_is_shared_is_written_behind_holes_too() {
    both(|b, config| {
        let file = TestFile::new(&[0; 4 * 4096]);
        let object = Object::file(&b.machine, file.clone()).unwrap();
        let space = b.space(config);
        map_object(b, &space, &object, 0, 4, true);
        map_object(b, &space, &object, 10, 4, false);
        (0..4).for_each(|n| b.store(&space, page(n), n + 1).unwrap());
        b.store(&space, page(10), 99).unwrap();
        let word = |n: usize| file.contents()[n * 4096];
        for flags in [0, MS_ASYNC, MS_INVALIDATE] {
            space.msync(&b.cpu, page(0), 4 * PAGE_SIZE, flags).unwrap();
            assert!(file.holds(&[0; 4 * 4096]));
        }
        space.unmap(&b.cpu, page(1), PAGE_SIZE).unwrap();
        space.msync(&b.cpu, page(2), PAGE_SIZE, MS_SYNC).unwrap();
        assert_eq!([0, 1, 2, 3].map(word), [0, 0, 3, 0]);
        let all = space.msync(&b.cpu, page(0), 12 * PAGE_SIZE, MS_SYNC);
        assert_eq!((all, [0, 1, 2, 3].map(word)), (Err(Error::NoMemory), [1, 0, 3, 4]));
        object.write_back(&b.cpu).unwrap();
        assert_eq!(word(1), 2);
    });
}

#[test]
fn an_error_is_reported_once_and_the_page_stays_dirty() {
    both(|b, config| {
        let file = TestFile::new(&[0; 2 * 4096]);
        let object = Object::file(&b.machine, file.clone()).unwrap();
        let space = b.space(config);
        map_object(b, &space, &object, 0, 2, true);
        b.store(&space, page(0), 5).unwrap();
        file.refuse_writes(true);
        let sync = |n| space.msync(&b.cpu, page(n), PAGE_SIZE, MS_SYNC);
        assert_eq!(sync(0), Err(Error::Io));
        assert_eq!(sync(1), Ok(()), "nothing is dirty there, and the error has been reported");
        assert_eq!(sync(0), Err(Error::Io), "tried again");
        // A write-back that nobody waits for.
        assert_eq!(object.write_back(&b.cpu), Err(Error::Io));
        assert_eq!((sync(1), sync(1)), (Err(Error::Io), Ok(())));
        file.refuse_writes(false);
        assert_eq!(sync(0), Ok(()));
        assert_eq!(file.contents()[0], 5);
    });
}

/// Threads that store and sync, others punch holes: what a thread has
/// stored and synced is in the file.
#[test]
fn syncing_among_stores_and_holes() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::on(TestHost::with_tickets(1, 1500), 12);
        let space = bench.space(SpaceConfig::with_locking(locking));
        let stage = Stage::new();
        let file = TestFile::new(&[0; 16 * 4096]);
        let object = Object::file(&bench.machine, file.clone()).unwrap();
        map_object(&bench, &space, &object, 0, 16, true);
        thread::scope(|scope| {
            for number in 0..2 {
                let (mut me, space, file) = (stage.worker(&bench, number + 3), &space, &file);
                scope.spawn(move || {
                    let mut value = 0;
                    while me.goes_on() {
                        // Pages 0 to 7 are left alone by the others.
                        let n = me.random.below(8);
                        value += 1;
                        me.store(space, page(n) + 8 * number, value).unwrap();
                        // Frames that others have freed may wait for their shoot-downs.
                        while let Err(error) = space.msync(&me.cpu, page(n), PAGE_SIZE, MS_SYNC) {
                            assert_eq!(error, Error::NoMemory);
                        }
                        let at = (n * PAGE_SIZE + 8 * number) as usize;
                        let found = u64::from_le_bytes(file.contents()[at..][..8].try_into().unwrap());
                        assert_eq!(found, value);
                    }
                });
            }
            for number in 0..2 {
                let (mut me, space) = (stage.worker(&bench, number + 30), &space);
                scope.spawn(move || {
                    while me.goes_on() {
                        let n = 8 + 4 * number + me.random.below(4);
                        me.store(space, page(n), 1).unwrap();
                        assert_eq!(me.load(space, page(n)), Ok(1));
                        space.advise(&me.cpu, page(n), PAGE_SIZE, Advice::Remove).unwrap();
                        assert_eq!(me.load(space, page(n)), Ok(0));
                    }
                });
            }
        });
        space.destroy(&bench.cpu);
        drop(object);
        bench.assert_nothing_left();
    }
}
