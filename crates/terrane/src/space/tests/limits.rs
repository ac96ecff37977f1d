//! Limits, and the account of memory that was promised.

use super::model::Random;
use super::{Bench, Space};
use crate::addr::PAGE_SIZE as P;
use crate::commit::Overcommit;
use crate::error::{Error, FaultError};
use crate::machine::Cpu;
use crate::object::Object;
use crate::reclaim::page_out;
use crate::space::{Limit, MapRequest, SpaceConfig};
use crate::sync::Shared;
use crate::sync::atomic::spin_loop;
use crate::testing::{TestFile, TestHost, TestSwap};
use crate::vma::{Advice, MapFlags, Prot, RemapFlags, VmFlags};
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use std::sync::Barrier;
use std::thread;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const BASE: u64 = 0x1000_0000;
const FIXED: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);

/// What the counts must be, from the mappings that there are: pages, data, promised.
fn expected(bench: &Bench, spaces: &[Space]) -> Vec<(u64, u64)> {
    let mut promised = 0;
    let mut found = Vec::new();
    for space in spaces {
        let (mut all, mut data) = (0, 0);
        for mapping in space.mappings(&bench.cpu).unwrap() {
            let flags = mapping.flags;
            all += mapping.range.len();
            if flags.contains(VmFlags::WRITE) && !flags.intersects(VmFlags::SHARED | VmFlags::GROWSDOWN) {
                data += mapping.range.len();
                assert!(flags.intersects(VmFlags::ACCOUNT | VmFlags::NORESERVE));
            }
            if flags.contains(VmFlags::ACCOUNT) {
                promised += mapping.range.pages();
            }
        }
        found.push((all, data));
    }
    assert_eq!(bench.machine.commit().pages(), promised);
    found
}

#[test]
fn counts_are_those_of_the_mappings() {
    for seed in 0..8 {
        let bench = Bench::new(1500);
        let object = Object::file(&bench.machine, TestFile::new(&[1; 16 * 4096])).unwrap();
        let mut random = Random::new(seed);
        let mut spaces = Vec::from([bench.space(SpaceConfig::default())]);
        spaces[0].set_heap(&bench.cpu, 0x200_0000).unwrap();
        for _ in 0..250 {
            let n = random.below(spaces.len() as u64) as usize;
            let (addr, len) = (BASE + random.below(40) * P, (1 + random.below(8)) * P);
            let prot = [RW, Prot::READ, Prot::empty(), RW][random.below(4) as usize];
            let (cpu, space) = (&bench.cpu, &spaces[n]);
            match random.below(12) {
                0 => drop(space.map(cpu, MapRequest::anonymous(len, prot).fixed(addr)).unwrap()),
                1 => {
                    let request = MapRequest::object(&object, 0, len, prot, random.one_in(2)).fixed(addr);
                    space.map(cpu, request).unwrap();
                }
                2 => drop(space.map(cpu, MapRequest::anonymous(len, prot)).unwrap()),
                3 => {
                    let request = MapRequest::anonymous(len, prot).fixed(addr).with(MapFlags::NORESERVE);
                    space.map(cpu, request).unwrap();
                }
                4 => space.unmap(cpu, addr, len).unwrap(),
                5 | 6 => drop(space.protect(cpu, addr, len, prot)),
                7 => drop(space.remap(cpu, addr, len, len, FIXED, BASE + random.below(60) * P)),
                8 => drop(space.remap(cpu, addr, len, (1 + random.below(9)) * P, RemapFlags::MAYMOVE, 0)),
                9 => drop(space.brk(cpu, 0x200_0000 + random.below(9) * P)),
                10 if spaces.len() < 4 => {
                    let child = space.fork(cpu).unwrap();
                    spaces.push(child);
                }
                10 if spaces.len() > 1 => drop(spaces.swap_remove(n)),
                _ => drop(bench.store(space, addr, 1)),
            }
            for ((all, data), space) in expected(&bench, &spaces).into_iter().zip(&spaces) {
                assert_eq!((space.mapped_bytes(), space.data_bytes()), (all, data), "seed {seed}");
            }
        }
        spaces.clear();
        assert_eq!(bench.machine.commit().pages(), 0);
        drop(object);
        bench.assert_nothing_left();
    }
}

#[test]
fn data_is_limited() {
    let bench = Bench::new(600);
    let config = SpaceConfig { data_limit: Some(10 * P), ..SpaceConfig::default() };
    let (space, cpu) = (bench.space(config), &bench.cpu);
    let map = |pages: u64, prot| space.map(cpu, MapRequest::anonymous(pages * P, prot));
    let addr = map(8, RW).unwrap();
    assert_eq!(map(3, RW), Err(Error::NoMemory));
    // What cannot be stored to does not count, until it can.
    let other = map(20, Prot::READ).unwrap();
    assert_eq!(space.protect(cpu, other, 3 * P, RW), Err(Error::NoMemory));
    assert_eq!(space.protect(cpu, other, 2 * P, RW), Ok(()));
    assert_eq!(space.remap(cpu, addr, 8 * P, 9 * P, RemapFlags::MAYMOVE, 0), Err(Error::NoMemory));
    space.protect(cpu, other, 2 * P, Prot::READ).unwrap();
    let addr = space.remap(cpu, addr, 8 * P, 9 * P, RemapFlags::MAYMOVE, 0).unwrap();
    let keep = RemapFlags::MAYMOVE | RemapFlags::DONTUNMAP;
    assert_eq!(space.remap(cpu, addr, 9 * P, 9 * P, keep, 0), Err(Error::NoMemory));
    space.set_limit(Limit::Data, Some(18 * P));
    let child = space.fork(cpu).unwrap();
    assert_eq!(child.limit(Limit::Data), Some(18 * P));
    drop(child);
    let twice = space.remap(cpu, addr, 9 * P, 9 * P, keep, 0).unwrap();
    space.unmap(cpu, twice, 9 * P).unwrap();
    space.set_limit(Limit::Data, Some(10 * P));
    // In place of data there may be data.
    space.map(cpu, MapRequest::anonymous(9 * P, RW).fixed(addr)).unwrap();
    space.set_heap(cpu, 0x200_0000).unwrap();
    assert_eq!(space.brk(cpu, 0x200_0000 + P), 0x200_0000 + P);
    assert_eq!(space.brk(cpu, 0x200_0000 + 2 * P), 0x200_0000 + P);
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn what_was_promised_is_limited() {
    let bench = Bench::new(600);
    let (space, cpu) = (bench.space(SpaceConfig::default()), &bench.cpu);
    let map = |pages: u64, flags| space.map(cpu, MapRequest::anonymous(pages * P, RW).with(flags));
    let none = MapFlags::empty();
    // Only what is plainly too much is refused, and counted all the same.
    bench.machine.commit().set_mode(Overcommit::Guess);
    assert_eq!(map(601, none), Err(Error::NoMemory));
    let addr = map(500, none).unwrap();
    space.unmap(cpu, map(601, MapFlags::NORESERVE).unwrap(), 601 * P).unwrap();
    space.unmap(cpu, map(500, none).unwrap(), 500 * P).unwrap();
    bench.machine.commit().set_mode(Overcommit::Always);
    space.unmap(cpu, map(1 << 20, none).unwrap(), P << 20).unwrap();
    bench.machine.commit().set_mode(Overcommit::Never(700 * P));
    assert_eq!(map(201, none), Err(Error::NoMemory));
    assert_eq!(map(201, MapFlags::NORESERVE), Err(Error::NoMemory), "not honoured now");
    assert!(space.fork(cpu).is_err());
    assert_eq!(space.remap(cpu, addr, 500 * P, 701 * P, RemapFlags::MAYMOVE, 0), Err(Error::NoMemory));
    let read = space.map(cpu, MapRequest::anonymous(300 * P, Prot::READ)).unwrap();
    assert_eq!(space.protect(cpu, read, 201 * P, RW), Err(Error::NoMemory));
    assert_eq!(space.protect(cpu, read, 200 * P, RW), Ok(()));
    assert_eq!(bench.machine.commit().pages(), 700);
    // Memory without a page is given back when it may no longer be stored to; memory with pages is not.
    bench.store(&space, addr, 1).unwrap();
    space.protect(cpu, addr, 500 * P, Prot::READ).unwrap();
    assert_eq!(bench.machine.commit().pages(), 700);
    space.protect(cpu, read, 200 * P, Prot::READ).unwrap();
    assert_eq!(bench.machine.commit().pages(), 500);
    assert_eq!(space.protect(cpu, addr, 500 * P, RW), Ok(()));
    drop(space);
    assert_eq!(bench.machine.commit().pages(), 0);
    bench.assert_nothing_left();
}

#[test]
fn shared_memory_is_promised_once() {
    let bench = Bench::new(600);
    let (space, cpu) = (bench.space(SpaceConfig::default()), &bench.cpu);
    let commit = bench.machine.commit();
    let map = |pages: u64, flags| space.map(cpu, MapRequest::shared_anonymous(pages * P, RW).with(flags));
    let none = MapFlags::empty();
    // As a whole, whoever maps it and however often.
    let at = map(100, none).unwrap();
    assert_eq!(commit.pages(), 100);
    let again = space.remap(cpu, at, 0, 50 * P, RemapFlags::MAYMOVE, 0).unwrap();
    let child = space.fork(cpu).unwrap();
    bench.store(&child, again, 1).unwrap();
    space.unmap(cpu, at, 100 * P).unwrap();
    space.unmap(cpu, again, 50 * P).unwrap();
    assert_eq!(commit.pages(), 100);
    drop(child);
    cpu.quiesce();
    assert_eq!(commit.pages(), 0);
    // By page.
    let at = map(100, MapFlags::NORESERVE).unwrap();
    bench.store(&space, at, 1).unwrap();
    bench.load(&space, at + P).unwrap();
    assert_eq!(commit.pages(), 2);
    space.unmap(cpu, at, 100 * P).unwrap();
    cpu.quiesce();
    assert_eq!(commit.pages(), 0);
    commit.set_mode(Overcommit::Guess);
    assert_eq!(map(601, none), Err(Error::NoMemory));
    space.unmap(cpu, map(601, MapFlags::NORESERVE).unwrap(), 601 * P).unwrap();
    // With a limit for all.
    commit.set_mode(Overcommit::Never(10 * P));
    assert_eq!(map(11, MapFlags::NORESERVE), Err(Error::NoMemory), "not honoured now");
    let at = map(8, MapFlags::NORESERVE).unwrap();
    assert_eq!(commit.pages(), 8);
    // Given back and asked for again at once.
    space.unmap(cpu, at, 8 * P).unwrap();
    let at = map(8, none).unwrap();
    let object = Object::shared_memory(&bench.machine, 8 * P).unwrap();
    let other = space.map(cpu, MapRequest::object(&object, 0, 8 * P, RW, true)).unwrap();
    (0..2).for_each(|page| bench.store(&space, other + page * P, 1).unwrap());
    assert_eq!(bench.store(&space, other + 2 * P, 1), Err(FaultError::Refused));
    assert_eq!(bench.load(&space, other + P), Ok(1));
    assert_eq!(space.advise(cpu, other, 8 * P, Advice::PopulateWrite), Err(Error::BadAddress));
    (0..8).for_each(|page| bench.store(&space, at + page * P, 1).unwrap());
    // Truncated, punched, discarded: there is room again.
    object.set_len(cpu, P);
    object.set_len(cpu, 8 * P);
    bench.store(&space, other + 2 * P, 1).unwrap();
    assert_eq!(bench.store(&space, other + 3 * P, 1), Err(FaultError::Refused));
    space.advise(cpu, other, P, Advice::Remove).unwrap();
    bench.store(&space, other + 3 * P, 1).unwrap();
    assert!(Object::anonymous_memory(&bench.machine, 1).is_err());
    drop(object);
    drop(space);
    cpu.quiesce();
    assert_eq!(commit.pages(), 0);
    bench.assert_nothing_left();
}

/// An object, what counts of it, and the pages that it must have.
struct Counted {
    object: Shared<Object<TestHost>>,
    whole: bool,
    pages: BTreeSet<u64>,
}

#[test]
fn shared_memory_counts_wherever_its_pages_are() {
    for seed in 0..6 {
        let bench = Bench::new(400);
        bench.machine.swap_on(Box::new(TestSwap::new(300))).unwrap();
        let (space, cpu) = (bench.space(SpaceConfig::default()), &bench.cpu);
        let mut random = Random::new(seed);
        let mut objects: Vec<Counted> = Vec::new();
        for _ in 0..400 {
            let few = objects.len() < 4;
            let n = random.below(objects.len().max(1) as u64) as usize;
            let index = random.below(20);
            match (random.below(12), objects.get_mut(n)) {
                (0, _) | (_, None) if few => {
                    let (whole, len) = (random.one_in(2), random.below(20 * P));
                    let make = if whole { Object::anonymous_memory } else { Object::shared_memory };
                    let object = make(&bench.machine, len).unwrap();
                    let request = MapRequest::object(&object, 0, 20 * P, RW, true);
                    space.map(cpu, request.fixed(BASE + object.number() * 32 * P)).unwrap();
                    objects.push(Counted { object, whole, pages: BTreeSet::new() });
                }
                (1, Some(_)) => {
                    let gone = objects.swap_remove(n);
                    space.unmap(cpu, BASE + gone.object.number() * 32 * P, 32 * P).unwrap();
                }
                (2, Some(it)) => {
                    let len = random.below(20 * P);
                    it.object.set_len(cpu, len);
                    it.pages.retain(|page| page * P < len);
                }
                (3, Some(it)) => {
                    let holes = index..index + random.below(4);
                    it.object.punch(cpu, holes.clone()).unwrap();
                    let end = it.object.pages();
                    it.pages.retain(|page| !holes.contains(page) || *page >= end);
                }
                (4 | 5, Some(it)) => {
                    let at = BASE + it.object.number() * 32 * P + index * P;
                    page_out(space.mm(), cpu, crate::addr::AddrRange::new(at, at + P));
                }
                (_, Some(it)) => {
                    let at = BASE + it.object.number() * 32 * P + index * P;
                    let beyond = index >= it.object.pages();
                    let expected = if beyond { Err(FaultError::BeyondEnd) } else { Ok(()) };
                    assert_eq!(bench.store(&space, at, 1), expected);
                    if !beyond {
                        it.pages.insert(index);
                    }
                }
                _ => {}
            }
            cpu.quiesce();
            let count = |it: &Counted| if it.whole { it.object.pages() } else { it.pages.len() as u64 };
            let all: u64 = objects.iter().map(count).sum();
            assert_eq!(bench.machine.commit().pages(), all, "seed {seed}");
        }
        drop(space);
        objects.clear();
        bench.cpu.quiesce();
        assert_eq!(bench.machine.commit().pages(), 0);
        bench.assert_nothing_left();
    }
}

#[test]
fn what_is_made_while_it_is_cut_short_counts_no_more() {
    let bench = Bench::new(400);
    let object = &Object::shared_memory(&bench.machine, 8 * P).unwrap();
    let space = &bench.space(SpaceConfig::default());
    let at = space.map(&bench.cpu, MapRequest::object(object, 0, 8 * P, RW, true)).unwrap();
    let meet = &Barrier::new(3);
    const ROUNDS: u64 = 1500;
    let mut left = 0;
    thread::scope(|scope| {
        for thread in 0..2 {
            let machine = &bench.machine;
            scope.spawn(move || {
                let cpu = Cpu::try_new(machine).unwrap();
                let mut random = Random::new(thread);
                for _ in 0..ROUNDS {
                    meet.wait();
                    for _ in 0..4 {
                        let _ = super::store(&cpu, space, at + random.below(8) * P, 1);
                    }
                    meet.wait();
                }
            });
        }
        for round in 0..ROUNDS {
            object.set_len(&bench.cpu, 8 * P);
            meet.wait();
            (0..round % 16 * 20).for_each(|_| spin_loop());
            object.set_len(&bench.cpu, 0);
            meet.wait();
            left += object.resident() as u64 + bench.machine.commit().pages();
            left += space.resident_pages(&bench.cpu);
        }
    });
    assert_eq!(left, 0, "behind the end: in the object, in the account, or mapped");
    space.unmap(&bench.cpu, at, 8 * P).unwrap();
}
