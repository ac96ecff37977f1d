//! Advice about pages: forgetting, freeing, ageing, guards, holes in objects.

use super::super::races::{Stage, own_words};
use super::*;
use crate::fault::may_vanish;
use crate::frame::FrameFlags;
use crate::page_table::{Pte, PteFlags};
use crate::vma::Access;
use std::thread;

/// What the entry of `addr` says, and what its frame is marked with.
fn entry(b: &Bench, space: &Space, addr: u64) -> (PteFlags, FrameFlags, bool) {
    let pin = b.cpu.pin();
    let slot = space.mm().page_table.lookup(&space.mm().ram(&pin), addr).unwrap();
    let (Pte::Page { frame, flags } | Pte::NoAccess { frame, flags }) =
        slot.decode::<crate::testing::TestFormat>()
    else {
        panic!("no page at {addr:#x}");
    };
    let meta = b.machine.frames().meta(frame);
    (flags, meta.flags(), may_vanish(meta, flags))
}

/// The account of resident pages is right.
fn counted(b: &Bench, space: &Space) {
    assert_eq!(space.mm().rss().resident(), space.resident_pages(&b.cpu));
}

#[test]
fn freed_pages_may_vanish_until_they_are_stored_to() {
    both(|b, config| {
        let space = b.space(config);
        let at = memory(b, &space, 0, 4);
        (0..4).for_each(|n| b.store(&space, page(n), n + 1).unwrap());
        assert!(!entry(b, &space, at).2);
        let before = b.machine.host().shoot_downs();
        space.advise(&b.cpu, at, 4 * PAGE_SIZE, Advice::Free).unwrap();
        assert!(
            b.machine.host().shoot_downs() > before,
            "a processor that remembers the mark would not set it again"
        );
        for n in 0..4 {
            let (flags, frame, vanishes) = entry(b, &space, page(n));
            assert!(!flags.intersects(PteFlags::DIRTY | PteFlags::ACCESSED) && vanishes);
            assert!(frame.contains(FrameFlags::LAZYFREE | FrameFlags::AGED));
        }
        // Without pressure it stays, whatever is done; a load keeps it no more than it was, a store does.
        assert_eq!(b.load(&space, page(0)), Ok(1));
        assert!(entry(b, &space, page(0)).2);
        b.store(&space, page(1), 7).unwrap();
        assert!(!entry(b, &space, page(1)).2);
        // Hidden pages too.
        space.protect(&b.cpu, at, 4 * PAGE_SIZE, Prot::empty()).unwrap();
        assert!(!entry(b, &space, page(1)).2 && entry(b, &space, page(2)).2);
        space.advise(&b.cpu, at, 4 * PAGE_SIZE, Advice::Free).unwrap();
        assert!(entry(b, &space, page(1)).2);
        space.protect(&b.cpu, at, 4 * PAGE_SIZE, RW).unwrap();
        assert_eq!((0..4).map(|n| b.load(&space, page(n)).unwrap()).collect::<Vec<_>>(), [1, 7, 3, 4]);
        // Shared pages are nobody's to free.
        b.store(&space, page(3), 9).unwrap();
        let child = space.fork(&b.cpu).unwrap();
        space.advise(&b.cpu, at, 4 * PAGE_SIZE, Advice::Free).unwrap();
        assert!((0..4).all(|n| !entry(b, &space, page(n)).2));
        child.destroy(&b.cpu);
        assert!(!entry(b, &space, page(3)).2);
        assert_eq!(b.load(&space, page(3)), Ok(9));
    });
}

#[test]
fn cold_pages_lose_a_mark_and_nothing_else() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 3);
        b.store(&space, page(0), 5).unwrap();
        b.load(&space, page(1)).unwrap();
        let object = Object::file(&b.machine, TestFile::new(&[3; 4096])).unwrap();
        map_object(b, &space, &object, 3, 1, true);
        b.store(&space, page(3), 6).unwrap();
        space.advise(&b.cpu, page(0), 4 * PAGE_SIZE, Advice::Cold).unwrap();
        for n in [0, 3] {
            let (flags, frame, vanishes) = entry(b, &space, page(n));
            assert!(!flags.contains(PteFlags::ACCESSED) && flags.contains(PteFlags::WRITE | PteFlags::DIRTY));
            assert!(frame.contains(FrameFlags::AGED) && !vanishes);
        }
        // The page of zeros is everybody's.
        assert!(entry(b, &space, page(1)).0.contains(PteFlags::ACCESSED));
        // A copy-on-write cannot trust the missing mark: processors may hold a translation all the same.
        let child = space.fork(&b.cpu).unwrap();
        b.load(&space, page(0)).unwrap();
        space.advise(&b.cpu, page(0), PAGE_SIZE, Advice::Cold).unwrap();
        let before = b.machine.host().shoot_downs();
        b.store(&space, page(0), 8).unwrap();
        assert_eq!(b.machine.host().shoot_downs(), before + 1);
        assert_eq!(b.load(&child, page(0)), Ok(5));
    });
}

#[test]
fn guards_raise_signals_and_stay() {
    both(|b, config| {
        let space = b.space(config);
        let at = memory(b, &space, 0, 4);
        let object = Object::file(&b.machine, TestFile::new(&[6; 4 * 4096])).unwrap();
        let file = map_object(b, &space, &object, 10, 4, true);
        for at in [at, file] {
            let guard = at + PAGE_SIZE;
            let all = |advice| space.advise(&b.cpu, at, 4 * PAGE_SIZE, advice);
            (0..4).for_each(|n| b.store(&space, at + n * PAGE_SIZE, 1).unwrap());
            let resident = space.resident_pages(&b.cpu);
            space.advise(&b.cpu, guard, PAGE_SIZE, Advice::GuardInstall).unwrap();
            assert_eq!(space.resident_pages(&b.cpu), resident - 1);
            let guarded = |space: &Space| {
                assert_eq!(b.load(space, guard), Err(FaultError::Guard));
                assert_eq!(b.store(space, guard, 1), Err(FaultError::Guard));
                assert!(b.load(space, guard + PAGE_SIZE).is_ok() && b.load(space, guard - PAGE_SIZE).is_ok());
            };
            guarded(&space);
            for advice in [Advice::DontNeed, Advice::DontNeedLocked, Advice::Cold, Advice::GuardInstall] {
                if advice != Advice::GuardInstall {
                    all(advice).unwrap();
                    guarded(&space);
                }
            }
            for advice in [Advice::PopulateRead, Advice::PopulateWrite] {
                assert_eq!(all(advice), Err(Error::BadAddress));
            }
            for prot in [Prot::READ, Prot::empty(), RW] {
                space.protect(&b.cpu, guard, PAGE_SIZE, prot).unwrap();
                if prot.is_empty() {
                    assert_eq!(b.load(&space, guard), Err(FaultError::NotAllowed), "the mapping comes first");
                }
            }
            guarded(&space);
            let child = space.fork(&b.cpu).unwrap();
            guarded(&child);
            child.destroy(&b.cpu);
            if at == file {
                object.set_len(&b.cpu, 0);
                assert_eq!(b.load(&space, guard), Err(FaultError::Guard));
                assert_eq!(b.load(&space, at), Err(FaultError::BeyondEnd));
                object.set_len(&b.cpu, 4 * PAGE_SIZE);
                all(Advice::Remove).unwrap();
            } else {
                all(Advice::Free).unwrap();
            }
            guarded(&space);
            all(Advice::GuardRemove).unwrap();
            b.store(&space, guard, 3).unwrap();
            all(Advice::GuardInstall).unwrap();
            space.advise(&b.cpu, guard, PAGE_SIZE, Advice::GuardRemove).unwrap();
            assert_eq!(b.load(&space, at), Err(FaultError::Guard));
            assert_eq!(b.load(&space, guard), Ok(if at == file { 3 } else { 0 }));
            counted(b, &space);
            space.unmap(&b.cpu, at, 4 * PAGE_SIZE).unwrap();
        }
        counted(b, &space);
        assert_eq!(space.page_tables(), 1, "guards go with their mappings, and tables with them");
    });
}

#[test]
fn wiping_children_have_no_guards_and_guards_need_an_anon_vma() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 2);
        space.advise(&b.cpu, page(0), PAGE_SIZE, Advice::GuardInstall).unwrap();
        space.advise(&b.cpu, page(0), 2 * PAGE_SIZE, Advice::WipeOnFork).unwrap();
        let child = space.fork(&b.cpu).unwrap();
        assert_eq!(b.load(&child, page(0)), Ok(0));
        // Its anon_vma keeps a mapping apart from a neighbour that has one of its own.
        memory(b, &space, 10, 2);
        space.advise(&b.cpu, page(10), PAGE_SIZE, Advice::DontFork).unwrap();
        space.advise(&b.cpu, page(10), PAGE_SIZE, Advice::GuardInstall).unwrap();
        b.store(&space, page(11), 1).unwrap();
        space.advise(&b.cpu, page(10), PAGE_SIZE, Advice::DoFork).unwrap();
        assert_eq!(listing(b, &space), [(0, 2), (10, 11), (11, 12)]);
    });
}

#[test]
fn guards_in_huge_pages() {
    both(|b, config| {
        let config = SpaceConfig { huge_pages: crate::mm::HugePages::Always, ..config };
        let space = b.space(config);
        let at = memory(b, &space, 0, 1024);
        b.store(&space, at, 1).unwrap();
        b.store(&space, page(600), 2).unwrap();
        assert_eq!(space.resident_pages(&b.cpu), 1024);
        space.advise(&b.cpu, page(5), 600 * PAGE_SIZE, Advice::GuardInstall).unwrap();
        assert_eq!(space.resident_pages(&b.cpu), 1024 - 600);
        assert_eq!((b.load(&space, at), b.load(&space, page(600))), (Ok(1), Err(FaultError::Guard)));
        assert_eq!(space.advise(&b.cpu, at, 2 << 20, Advice::Collapse), Err(Error::Invalid));
        space.advise(&b.cpu, at, 4 << 20, Advice::DontNeed).unwrap();
        assert_eq!(b.load(&space, page(604)), Err(FaultError::Guard));
        space.advise(&b.cpu, at, 4 << 20, Advice::GuardRemove).unwrap();
        space.advise(&b.cpu, at, 4 << 20, Advice::PopulateWrite).unwrap();
        space.advise(&b.cpu, at, 2 << 20, Advice::Collapse).unwrap();
        // Marks of all pages of a huge one.
        space.advise(&b.cpu, at, 4 << 20, Advice::Free).unwrap();
        b.store(&space, page(3), 1).unwrap();
        space.advise(&b.cpu, page(2), PAGE_SIZE, Advice::Cold).unwrap();
        let vanishing = (0..512).filter(|&n| entry(b, &space, page(n)).2).count();
        assert_eq!(vanishing, 0, "a store to a huge page keeps all of it");
        space.advise(&b.cpu, at, 2 << 20, Advice::Free).unwrap();
        assert_eq!((0..512).filter(|&n| entry(b, &space, page(n)).2).count(), 512);
    });
}

#[test]
fn holes_in_objects_are_zeros_for_everybody_but_private_copies() {
    both(|b, config| {
        let file = TestFile::new(&[9; 4 * 4096 - 100]);
        let objects = [
            Object::shared_memory(&b.machine, 4 * PAGE_SIZE).unwrap(),
            Object::file(&b.machine, file.clone()).unwrap(),
        ];
        for object in &objects {
            let space = b.space(config);
            let other = b.space(config);
            let shared = map_object(b, &space, object, 0, 4, true);
            let private = map_object(b, &space, object, 10, 4, false);
            let elsewhere = map_object(b, &other, object, 0, 4, true);
            (0..4).for_each(|n| b.store(&other, elsewhere + n * PAGE_SIZE, 9).unwrap());
            b.store(&space, private, 3).unwrap();
            b.load(&space, private + PAGE_SIZE).unwrap();
            space.advise(&b.cpu, shared, 2 * PAGE_SIZE, Advice::Remove).unwrap();
            for (space, at) in [(&space, shared), (&other, elsewhere)] {
                let found: Vec<_> = (0..4).map(|n| b.load(space, at + n * PAGE_SIZE).unwrap()).collect();
                assert_eq!(found, [0, 0, 9, 9]);
            }
            assert_eq!((b.load(&space, private), b.load(&space, private + PAGE_SIZE)), (Ok(3), Ok(0)));
            b.store(&space, shared, 4).unwrap();
            assert_eq!(b.load(&other, elsewhere), Ok(4));
            object.write_back(&b.cpu).unwrap();
            space.advise(&b.cpu, shared, 4 * PAGE_SIZE, Advice::Remove).unwrap();
            assert_eq!(object.resident(), 0);
            counted(b, &space);
            counted(b, &other);
        }
        assert!(file.holds(&[0; 4 * 4096 - 100]));
        file.refuse_writes(true);
        let space = b.space(config);
        let at = map_object(b, &space, &objects[1], 0, 4, true);
        assert_eq!(space.advise(&b.cpu, at, PAGE_SIZE, Advice::Remove), Err(Error::Io));
    });
}

/// Threads that guard, unguard, free and forget pages of an area, while others store to their own words beside them.
#[test]
fn guards_come_and_go_among_faults() {
    both_racing(|b, space, stage| {
        let at = memory(b, space, 0, 64);
        // Pages whose number is odd are stored to, the others are guarded now and then.
        let odd: Vec<_> = (0..64).filter(|n| n % 2 == 1).map(page).collect();
        thread::scope(|scope| {
            for number in 0..2 {
                let (me, odd) = (stage.worker(b, number + 1), &odd);
                scope.spawn(move || own_words(me, space, odd, number));
            }
            for number in 0..2 {
                let mut me = stage.worker(b, 77 + number);
                scope.spawn(move || {
                    while me.goes_on() {
                        let n = 2 * (me.random.below(8) + 8 * number);
                        space.advise(&me.cpu, page(n), PAGE_SIZE, Advice::GuardInstall).unwrap();
                        assert_eq!(me.load(space, page(n)), Err(FaultError::Guard));
                        space.advise(&me.cpu, page(n), PAGE_SIZE, Advice::DontNeed).unwrap();
                        assert_eq!(me.store(space, page(n), 1), Err(FaultError::Guard));
                        space.advise(&me.cpu, page(n), PAGE_SIZE, Advice::GuardRemove).unwrap();
                        let _ = space.fault(&me.cpu, page(n), Access::Write);
                        space.advise(&me.cpu, at, 64 * PAGE_SIZE, Advice::Cold).unwrap();
                        let own = page(32 + 2 * number);
                        me.store(space, own, 5).unwrap();
                        space.advise(&me.cpu, own, PAGE_SIZE, Advice::Free).unwrap();
                        assert_eq!(me.load(space, own), Ok(5));
                    }
                });
            }
        });
    });
}

fn both_racing(test: impl Fn(&Bench, &Space, &Stage)) {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::on(TestHost::with_tickets(1, 1500), 12);
        let space = bench.space(SpaceConfig::with_locking(locking));
        test(&bench, &space, &Stage::new());
        space.destroy(&bench.cpu);
        bench.assert_nothing_left();
    }
}
