//! Reverse mapping: what the walks find is compared with what the page tables hold.

use super::model::{Random, from_env};
use super::{Bench, Space, access, load, store};
use crate::addr::{AddrRange, Frame, PAGE_SIZE};
use crate::error::FaultError;
use crate::frame::FrameFlags;
use crate::machine::Cpu;
use crate::object::Object;
use crate::page_table::{Level, Pte, PteFlags, Slot};
use crate::rmap::walk::{for_each_mapping, for_each_mapping_of_object};
use crate::space::{Locking, MapRequest, SpaceConfig};
use crate::stats::Counter;
use crate::sync::Shared;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::testing::{TestFile, TestFormat, TestHost};
use crate::vma::{Access, Advice, Prot};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::ControlFlow;

const RW: Prot = Prot::READ.union(Prot::WRITE);

/// An entry: the space's inside, and the address.
type Entries = BTreeSet<(usize, u64)>;

fn inside(space: &Space) -> usize {
    core::ptr::from_ref(space.mm()).addr()
}

/// Every page that is mapped in the spaces, with its entries.
fn all_entries(cpu: &Cpu<TestHost>, spaces: &[&Space]) -> BTreeMap<Frame, Entries> {
    let mut found: BTreeMap<Frame, Entries> = BTreeMap::new();
    for space in spaces {
        space.mm().for_each_part(cpu, space.config().range, |ram, part| {
            let _ = space.mm().page_table.for_each_run(ram, part, |run| {
                Slot::for_each_used(run.slots, |index, slot| {
                    let addr = run.address_of(index);
                    let mut note = |frame, addr| {
                        found.entry(frame).or_default().insert((inside(space), addr));
                    };
                    if run.level == Level::BLOCK {
                        let (first, _) = Pte::block::<TestFormat>(slot.load()).expect("at rest");
                        (0..512).for_each(|n| note(Frame(first.0 + n), addr + u64::from(n) * PAGE_SIZE));
                    } else if let Some(frame) = Pte::decode::<TestFormat>(slot.load()).frame() {
                        note(frame, addr);
                    }
                    ControlFlow::Continue(())
                })
            });
        });
    }
    found
}

/// The walk finds for each private page exactly the entries that map it, each once, and its count is theirs.
pub(super) fn check_private(cpu: &Cpu<TestHost>, spaces: &[&Space]) -> usize {
    let mut shared = 0;
    // References of pages that were copied are given back late.
    cpu.quiesce();
    for (frame, entries) in all_entries(cpu, spaces) {
        let meta = cpu.machine().frames().meta(frame);
        let mut found = Entries::new();
        let walked = for_each_mapping(cpu, frame, |mm, _, addr, _| {
            assert!(found.insert((core::ptr::from_ref(mm).addr(), addr)), "found twice");
        });
        if meta.flags().contains(FrameFlags::ANON) {
            assert!(walked);
            assert_eq!(found, entries);
            assert_eq!(meta.references() as usize, entries.len());
            shared += usize::from(entries.len() > 1);
        } else {
            assert!(!walked && found.is_empty());
        }
    }
    shared
}

/// The walk of an object finds exactly the entries of its mappings, private copies included.
pub(super) fn check_object(cpu: &Cpu<TestHost>, object: &Shared<Object<TestHost>>, spaces: &[&Space]) {
    let mut expected: BTreeMap<u64, Entries> = BTreeMap::new();
    for entries in all_entries(cpu, spaces).values() {
        for &(space, addr) in entries {
            let mm = spaces.iter().find(|other| inside(other) == space).unwrap().mm();
            let pin = cpu.pin();
            let vma = mm.index.find(&pin, addr).expect("a page without a mapping");
            if vma.object().is_some_and(|shown| Shared::ptr_eq(shown, object)) {
                expected.entry(vma.snapshot().index_of(addr)).or_default().insert((space, addr));
            }
        }
    }
    let mut all = BTreeMap::new();
    for index in 0..80 {
        let mut found = Entries::new();
        for_each_mapping_of_object(cpu, object, index..index + 1, |mm, _, _, addr, _| {
            assert!(found.insert((core::ptr::from_ref(mm).addr(), addr)), "found twice");
        });
        if !found.is_empty() {
            all.insert(index, found);
        }
    }
    assert_eq!(all, expected);
}

#[test]
fn random_forks_splits_and_unmaps() {
    for seed in 0..from_env("TERRANE_RMAP_RUNS").unwrap_or(12) {
        let bench = Bench::on(TestHost::with_tickets(1, 1500), 3);
        let object = Object::file(&bench.machine, TestFile::new(&[3; 20 * 4096])).unwrap();
        let mut random = Random::new(seed);
        let config = SpaceConfig { fault_around: PAGE_SIZE << (seed % 5), ..SpaceConfig::default() };
        let base = (4 << 20) - 20 * PAGE_SIZE;
        let mut spaces = Vec::from([bench.space(config)]);
        for step in 0..300 {
            let n = random.below(spaces.len() as u64) as usize;
            let addr = base + random.below(40) * PAGE_SIZE;
            let len = (1 + random.below(8)) * PAGE_SIZE;
            let (cpu, space) = (&bench.cpu, &spaces[n]);
            match random.below(16) {
                0 | 1 => {
                    space.map(cpu, MapRequest::anonymous(len, RW).fixed(addr)).unwrap();
                }
                2 | 3 => {
                    let request = MapRequest::object(&object, addr - base, len, RW, random.one_in(3));
                    space.map(cpu, request.fixed(addr)).unwrap();
                }
                4 => space.unmap(cpu, addr, len).unwrap(),
                5 => drop(space.protect(cpu, addr, len, Prot::empty())),
                6 => drop(space.protect(cpu, addr, len, [RW, Prot::READ][random.below(2) as usize])),
                7 => drop(space.advise(cpu, addr, len, Advice::DontNeed)),
                8 if spaces.len() < 7 => {
                    let child = space.fork(cpu).unwrap();
                    spaces.push(child);
                }
                9 if spaces.len() > 1 => drop(spaces.remove(n)),
                _ => drop(bench.store(space, addr, step)),
            }
            let all: Vec<&Space> = spaces.iter().collect();
            check_private(&bench.cpu, &all);
            check_object(&bench.cpu, &object, &all);
        }
        drop(spaces);
        drop(object);
        bench.assert_nothing_left();
    }
}

#[test]
fn forty_generations_in_which_each_parent_exits() {
    let bench = Bench::new(800);
    let mut space = bench.space(SpaceConfig::default());
    let addr = space.map_anonymous(&bench.cpu, 64 * PAGE_SIZE).unwrap();
    for page in 0..64 {
        bench.store(&space, addr + page * PAGE_SIZE, page).unwrap();
    }
    for generation in 0..40 {
        let child = space.fork(&bench.cpu).unwrap();
        // Each generation keeps some pages, copies one, and looks for all.
        assert!(check_private(&bench.cpu, &[&space, &child]) > 0);
        bench.store(&child, addr + generation * PAGE_SIZE, 1000 + generation).unwrap();
        bench.store(&space, addr + 63 * PAGE_SIZE, 7).unwrap();
        check_private(&bench.cpu, &[&space, &child]);
        space = child;
        check_private(&bench.cpu, &[&space]);
    }
    for page in 0..63 {
        let expected = if page < 40 { 1000 + page } else { page };
        assert_eq!(bench.load(&space, addr + page * PAGE_SIZE), Ok(expected));
    }
    // Beyond the greatest depth nodes lie beside one another; there, too, all sharers are found.
    let spaces: Vec<Space> = (0..5).map(|_| space.fork(&bench.cpu).unwrap()).collect();
    let grandchildren: Vec<Space> = spaces.iter().map(|child| child.fork(&bench.cpu).unwrap()).collect();
    bench.store(&spaces[0], addr, 1).unwrap();
    bench.store(&grandchildren[4], addr, 2).unwrap();
    let all: Vec<&Space> = spaces.iter().chain(&grandchildren).chain([&space]).collect();
    assert!(check_private(&bench.cpu, &all) >= 63);
    drop((space, spaces, grandchildren));
    bench.assert_nothing_left();
}

#[test]
fn two_hundred_children() {
    let bench = Bench::new(4000);
    let space = bench.space(SpaceConfig::default());
    let addr = space.map_anonymous(&bench.cpu, 4 * PAGE_SIZE).unwrap();
    bench.store(&space, addr, 1).unwrap();
    bench.store(&space, addr + PAGE_SIZE, 1).unwrap();
    let mut children: Vec<Space> = (0..200).map(|_| space.fork(&bench.cpu).unwrap()).collect();
    for child in children.iter().step_by(3) {
        bench.store(child, addr, 2).unwrap();
    }
    let check = |children: &[Space]| {
        let all: Vec<&Space> = children.iter().chain([&space]).collect();
        check_private(&bench.cpu, &all);
    };
    check(&children);
    children.drain(50..150);
    check(&children);
    drop((children, space));
    bench.assert_nothing_left();
}

#[test]
fn neighbours_share_an_anon_vma_and_their_pages_are_found() {
    let bench = Bench::new(600);
    let space = bench.space(SpaceConfig::default());
    let addr = space.map_anonymous(&bench.cpu, 9 * PAGE_SIZE).unwrap();
    let part = |n: u64| addr + n * 3 * PAGE_SIZE;
    space.protect(&bench.cpu, part(1), 3 * PAGE_SIZE, Prot::all()).unwrap();
    for n in 0..3 {
        bench.store(&space, part(n), n).unwrap();
    }
    {
        let pin = bench.cpu.pin();
        let anon = |n| core::ptr::from_ref(space.mm().index.find(&pin, part(n)).unwrap().anon_vma().unwrap());
        assert!(anon(0) == anon(1) && anon(1) == anon(2), "alike but for the protection");
    }
    space.protect(&bench.cpu, part(1), 3 * PAGE_SIZE, RW).unwrap();
    assert_eq!(space.map_count(), 1);
    let child = space.fork(&bench.cpu).unwrap();
    space.unmap(&bench.cpu, part(1), PAGE_SIZE).unwrap();
    child.unmap(&bench.cpu, part(0), 2 * PAGE_SIZE).unwrap();
    child.protect(&bench.cpu, part(2), PAGE_SIZE, Prot::empty()).unwrap();
    assert_eq!(check_private(&bench.cpu, &[&space, &child]), 1);
    drop(space);
    assert_eq!(check_private(&bench.cpu, &[&child]), 0);
    drop(child);
    bench.assert_nothing_left();
}

#[test]
fn private_memory_changes_its_layout_without_a_lock() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::new(600);
        let space = bench.space(SpaceConfig::with_locking(locking));
        let cpu = &bench.cpu;
        let none_taken = || assert_eq!(bench.machine.stats().sum(Counter::RmapLock), 0);
        space.set_heap(cpu, 0x20_0000).unwrap();
        for n in 1..20 {
            assert_eq!(space.brk(cpu, 0x20_0000 + n * 0x3000), 0x20_0000 + n * 0x3000);
            bench.store(&space, 0x20_0000, n).unwrap();
            space.brk(cpu, 0x20_0000 + n * 0x2000);
        }
        none_taken();
        let addr = space.map_anonymous(cpu, 30 * PAGE_SIZE).unwrap();
        space.advise(cpu, addr, 30 * PAGE_SIZE, Advice::PopulateWrite).unwrap();
        for page in [3, 9, 15] {
            space.protect(cpu, addr + page * PAGE_SIZE, PAGE_SIZE, Prot::READ).unwrap();
            space.protect(cpu, addr + page * PAGE_SIZE, PAGE_SIZE, RW).unwrap();
        }
        none_taken();
        space.unmap(cpu, addr + 10 * PAGE_SIZE, PAGE_SIZE).unwrap();
        space.unmap(cpu, addr, 2 * PAGE_SIZE).unwrap();
        space.unmap(cpu, addr + 28 * PAGE_SIZE, 2 * PAGE_SIZE).unwrap();
        space.map(cpu, MapRequest::anonymous(PAGE_SIZE, RW).fixed(addr + 10 * PAGE_SIZE)).unwrap();
        none_taken();
        assert!(bench.machine.stats().sum(Counter::VmaSplit) > 6);
        drop(space);
        bench.assert_nothing_left();
    }
}

#[test]
fn cutting_a_file_short_reaches_every_mapping() {
    let bench = Bench::on(TestHost::with_tickets(1, 900), 3);
    let file = TestFile::new(&[0x11; 30 * 4096]);
    let object = Object::file(&bench.machine, file.clone()).unwrap();
    let spaces: Vec<Space> = (0..4).map(|_| bench.space(SpaceConfig::default())).collect();
    let mut places = Vec::new();
    for (n, space) in spaces.iter().enumerate() {
        for shared in [true, false] {
            // Different first pages and different addresses.
            let request = MapRequest::object(&object, n as u64 * PAGE_SIZE, 20 * PAGE_SIZE, RW, shared);
            let addr = space.map(&bench.cpu, request).unwrap();
            places.push((space, addr, n as u64, shared));
            space.advise(&bench.cpu, addr, 20 * PAGE_SIZE, Advice::PopulateRead).unwrap();
            bench.store(space, addr + 12 * PAGE_SIZE, 5).unwrap();
            bench.store(space, addr + 2 * PAGE_SIZE, 6).unwrap();
            space.protect(&bench.cpu, addr + 14 * PAGE_SIZE, PAGE_SIZE, Prot::empty()).unwrap();
        }
    }
    let child = spaces[1].fork(&bench.cpu).unwrap();
    let all: Vec<&Space> = spaces.iter().chain([&child]).collect();
    check_object(&bench.cpu, &object, &all);
    let len = 10 * PAGE_SIZE + 8;
    object.set_len(&bench.cpu, len);
    file.set_len(len as usize);
    check_object(&bench.cpu, &object, &all);
    assert_eq!(object.resident(), 11);
    for &(space, addr, first, _) in &places {
        for page in 0..20 {
            let at = addr + page * PAGE_SIZE;
            match first + page {
                10 => assert_eq!(bench.load(space, at + 8), Ok(0), "zeros behind the end"),
                0..10 => assert!(bench.load(space, at).is_ok()),
                _ if page == 14 => assert_eq!(bench.load(space, at), Err(FaultError::NotAllowed)),
                _ => assert_eq!(bench.load(space, at), Err(FaultError::BeyondEnd)),
            }
        }
    }
    file.set_len(16 * 4096);
    object.set_len(&bench.cpu, 16 * PAGE_SIZE);
    for &(space, addr, first, shared) in &places {
        assert_eq!(bench.load(space, addr + 12 * PAGE_SIZE), Ok(0), "{shared} {first}");
    }
    drop((child, places, object));
    drop(spaces);
    bench.assert_nothing_left();
}

/// The entries of the page at `addr`: whether it may be stored to without a fault, and whether it is dirty.
fn marks(bench: &Bench, space: &Space, addr: u64) -> PteFlags {
    let pin = bench.cpu.pin();
    let slot = space.mm().page_table.lookup(&space.mm().ram(&pin), addr).unwrap();
    match Pte::decode::<TestFormat>(slot.load()) {
        Pte::Page { flags, .. } => flags & (PteFlags::WRITE | PteFlags::DIRTY),
        other => panic!("{other:?}"),
    }
}

#[test]
fn writing_back_makes_all_mappings_clean() {
    let bench = Bench::new(600);
    let file = TestFile::new(&[0; 8 * 4096]);
    let object = Object::file(&bench.machine, file.clone()).unwrap();
    let spaces: Vec<Space> = (0..3).map(|_| bench.space(SpaceConfig::default())).collect();
    let map = |space: &Space, shared| {
        space.map(&bench.cpu, MapRequest::object(&object, 0, 8 * PAGE_SIZE, RW, shared)).unwrap()
    };
    let places: Vec<u64> = spaces.iter().map(|space| map(space, true)).collect();
    let private = map(&spaces[0], false);
    bench.store(&spaces[0], private, 99).unwrap();
    for (n, (space, addr)) in spaces.iter().zip(&places).enumerate() {
        bench.store(space, addr + 8 * n as u64, 1 + n as u64).unwrap();
    }
    object.write_back(&bench.cpu).unwrap();
    for (space, addr) in spaces.iter().zip(&places) {
        assert_eq!(marks(&bench, space, *addr), PteFlags::empty());
    }
    assert_eq!(marks(&bench, &spaces[0], private), PteFlags::WRITE | PteFlags::DIRTY, "a private copy stays");
    assert_eq!(file.contents()[..24], [1u64, 2, 3].map(u64::to_le_bytes).concat());
    let written = bench.machine.stats().sum(Counter::PgPgOut);
    object.write_back(&bench.cpu).unwrap();
    assert_eq!(bench.machine.stats().sum(Counter::PgPgOut), written, "nothing is dirty");
    file.refuse_writes(true);
    bench.store(&spaces[1], places[1] + PAGE_SIZE, 4).unwrap();
    assert!(object.write_back(&bench.cpu).is_err());
    file.refuse_writes(false);
    object.write_back(&bench.cpu).unwrap();
    assert_eq!(file.contents()[4096], 4);
    drop((spaces, object));
    bench.assert_nothing_left();
}

#[test]
fn writing_back_loses_no_store() {
    const STORED: u64 = 6;
    let bench = Bench::on(TestHost::with_tickets(1, 600), 4);
    let file = TestFile::new(&[0; STORED as usize * 4096]);
    let object = Object::file(&bench.machine, file.clone()).unwrap();
    let space = bench.space(SpaceConfig::default());
    let request = MapRequest::object(&object, 0, STORED * PAGE_SIZE, RW, true);
    let addr = space.map(&bench.cpu, request).unwrap();
    let (round, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let cpu = Cpu::try_new(&bench.machine).unwrap();
            let mut random = Random::new(1);
            loop {
                let now = round.load(Ordering::SeqCst);
                if now == u64::MAX || failed.load(Ordering::SeqCst) {
                    break;
                }
                if now == done.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                    continue;
                }
                for page in 0..STORED {
                    let slow = random.one_in(2);
                    access(&cpu, &space, addr + page * PAGE_SIZE, Access::Write, |word| {
                        if slow {
                            // As if the processor were interrupted between its translation and its store.
                            (0..20).for_each(|_| std::thread::yield_now());
                        }
                        word.store(now, Ordering::SeqCst);
                    })
                    .unwrap();
                }
                done.store(now, Ordering::SeqCst);
            }
        });
        for now in 1..=from_env("TERRANE_RMAP_ROUNDS").unwrap_or(1500) {
            round.store(now, Ordering::SeqCst);
            while done.load(Ordering::SeqCst) < now {
                object.write_back(&bench.cpu).unwrap();
            }
            object.write_back(&bench.cpu).unwrap();
            let contents = file.contents();
            let lost = (0..STORED as usize).find(|page| contents[page * 4096..][..8] != now.to_le_bytes());
            if lost.is_some() {
                failed.store(true, Ordering::SeqCst);
            }
            assert_eq!(lost, None, "a store of round {now} did not reach the file");
        }
        round.store(u64::MAX, Ordering::SeqCst);
    });
    drop((space, object));
    bench.assert_nothing_left();
}

#[test]
fn a_page_cut_short_while_it_is_read_ends_in_zeros() {
    let bench = Bench::on(TestHost::with_tickets(1, 400), 4);
    let file = TestFile::new(&[0x77; 4096]);
    let object = Object::file(&bench.machine, file.clone()).unwrap();
    let space = bench.space(SpaceConfig::default());
    let addr = space.map(&bench.cpu, MapRequest::object(&object, 0, PAGE_SIZE, Prot::READ, true)).unwrap();
    let cutter = {
        let (object, machine) = (object.clone(), bench.machine.clone());
        move || {
            let cpu = Cpu::try_new(&machine).unwrap();
            object.set_len(&cpu, 100);
        }
    };
    // The bytes have been read, the page is not in use yet, and the file is cut short at this very moment: the cut waits for the page.
    let once = parking_lot::Mutex::new(Some(cutter));
    let cutting = alloc::sync::Arc::new(parking_lot::Mutex::new(None));
    let (begun, shortened) = (cutting.clone(), object.clone());
    file.after_read(move |_| {
        if let Some(cut) = once.lock().take() {
            *begun.lock() = Some(std::thread::spawn(cut));
            while shortened.len() != 100 {
                std::thread::yield_now();
            }
        }
    });
    assert_eq!(bench.load(&space, addr), Ok(0x7777_7777_7777_7777));
    cutting.lock().take().unwrap().join().unwrap();
    assert_eq!(bench.load(&space, addr + 104), Ok(0));
    file.set_len(100);
    drop((space, object));
    file.after_read(|_| {});
    bench.assert_nothing_left();
}

#[test]
fn loads_and_stores_of_two_threads_agree_with_walks() {
    let bench = Bench::on(TestHost::with_tickets(1, 900), 4);
    let space = bench.space(SpaceConfig::default());
    let addr = space.map_anonymous(&bench.cpu, 16 * PAGE_SIZE).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let cpu = Cpu::try_new(&bench.machine).unwrap();
            let mut random = Random::new(5);
            while !stop.load(Ordering::Relaxed) {
                let at = addr + random.below(16) * PAGE_SIZE;
                if random.one_in(4) {
                    space.advise(&cpu, at, 2 * PAGE_SIZE, Advice::DontNeed).ok();
                } else {
                    store(&cpu, &space, at, at).unwrap();
                    let seen = load(&cpu, &space, at).unwrap();
                    assert_eq!(seen, at);
                }
            }
        });
        let mut children = Vec::new();
        for n in 0..from_env("TERRANE_RMAP_ROUNDS").unwrap_or(150) {
            // Any frame at all: free, a table, a private page that goes away this moment.
            let range = bench.machine.frames().range();
            for offset in 0..range.count as u32 {
                let frame = Frame(range.first.0 + offset);
                for_each_mapping(&bench.cpu, frame, |_, _, at, _| {
                    assert!(AddrRange::new(addr, addr + 16 * PAGE_SIZE).contains(at));
                });
                if offset % 64 == 0 && n % 8 == 0 {
                    children.push(space.fork(&bench.cpu).unwrap());
                    if children.len() > 3 {
                        drop(children.remove(0));
                    }
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    drop(space);
    bench.assert_nothing_left();
}
