//! Limits, and the account of memory that was promised.

use super::model::Random;
use super::{Bench, Space};
use crate::addr::PAGE_SIZE as P;
use crate::commit::Overcommit;
use crate::error::Error;
use crate::object::Object;
use crate::space::{Limit, MapRequest, SpaceConfig};
use crate::testing::TestFile;
use crate::vma::{MapFlags, Prot, RemapFlags, VmFlags};
use alloc::vec::Vec;

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
