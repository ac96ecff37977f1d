//! Each call by itself, and a test for each error.

use super::Bench;
use crate::addr::{AddrRange, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::object::Object;
use crate::space::{Locking, MapRequest, SpaceConfig};
use crate::stats::Counter;
use crate::testing::TestFile;
use crate::vma::{Access, Advice, MapFlags, Prot};
use alloc::string::ToString;
use alloc::vec::Vec;

const RW: Prot = Prot::READ.union(Prot::WRITE);

fn both(test: impl Fn(&Bench, SpaceConfig)) {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::new(600);
        test(&bench, SpaceConfig::with_locking(locking));
        bench.assert_nothing_left();
    }
}

#[test]
fn private_memory_is_zero_until_stored_and_gone_when_unmapped() {
    both(|b, config| {
        let space = b.space(config);
        let addr = space.map_anonymous(&b.cpu, 10 * PAGE_SIZE).unwrap();
        assert_eq!(b.load(&space, addr + 8), Ok(0));
        b.store(&space, addr + 8, 7).unwrap();
        assert_eq!(b.load(&space, addr + 8), Ok(7));
        assert_eq!(space.resident_pages(&b.cpu), 1);
        space.unmap(&b.cpu, addr, 10 * PAGE_SIZE).unwrap();
        assert_eq!(b.load(&space, addr + 8), Err(FaultError::NotMapped));
        assert_eq!(space.map_count(), 0);
        drop(space);
    });
}

#[test]
fn fork_isolates_stores_both_ways() {
    both(|b, config| {
        let space = b.space(config);
        let addr = space.map_anonymous(&b.cpu, 4 * PAGE_SIZE).unwrap();
        for page in 0..3 {
            b.store(&space, addr + page * PAGE_SIZE, 100 + page).unwrap();
        }
        let child = space.fork(&b.cpu).unwrap();
        let grandchild = child.fork(&b.cpu).unwrap();
        b.store(&child, addr, 1).unwrap();
        b.store(&space, addr + PAGE_SIZE, 2).unwrap();
        b.store(&grandchild, addr + 3 * PAGE_SIZE, 3).unwrap();
        let read = |space: &super::Space| {
            (0..4).map(|page| b.load(space, addr + page * PAGE_SIZE).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(read(&space), [100, 2, 102, 0]);
        assert_eq!(read(&child), [1, 101, 102, 0]);
        assert_eq!(read(&grandchild), [100, 101, 102, 3]);
        drop(child);
        assert_eq!(read(&grandchild), [100, 101, 102, 3]);
        let before = b.machine.stats().sum(Counter::PgReuse);
        drop(space);
        b.store(&grandchild, addr, 5).unwrap();
        assert_eq!(b.machine.stats().sum(Counter::PgReuse), before + 1, "the last sharer keeps its page");
    });
}

#[test]
fn files_are_read_shared_and_copied() {
    both(|b, config| {
        let bytes: Vec<u8> = (0..3 * PAGE_SIZE + 100).map(|n| (n / PAGE_SIZE) as u8 + 1).collect();
        let object = Object::file(&b.machine, TestFile::new(&bytes)).unwrap();
        let space = b.space(config);
        let map = |shared, prot| {
            space.map(&b.cpu, MapRequest::object(&object, 0, 5 * PAGE_SIZE, prot, shared)).unwrap()
        };
        let (shared, private) = (map(true, RW), map(false, RW));
        let word = |n: u64| u64::from_le_bytes([n as u8; 8]);
        assert_eq!(b.load(&space, shared + PAGE_SIZE), Ok(word(2)));
        b.store(&space, private + PAGE_SIZE, 77).unwrap();
        assert_eq!(b.load(&space, shared + PAGE_SIZE), Ok(word(2)));
        b.store(&space, shared + 2 * PAGE_SIZE, 88).unwrap();
        assert_eq!(b.load(&space, private + 2 * PAGE_SIZE), Ok(88));
        assert_eq!(b.load(&space, private + 3 * PAGE_SIZE + 104), Ok(0), "zeros behind the end of the file");
        assert_eq!(b.load(&space, private + 4 * PAGE_SIZE), Err(FaultError::BeyondEnd));
        space.sync(&b.cpu, shared, 5 * PAGE_SIZE).unwrap();
        assert_eq!(b.machine.stats().sum(Counter::PgPgOut), 1);
        b.store(&space, shared + 2 * PAGE_SIZE, 99).unwrap();
        space.sync(&b.cpu, shared, 5 * PAGE_SIZE).unwrap();
        assert_eq!(b.machine.stats().sum(Counter::PgPgOut), 2, "written again, so dirty again");
    });
}

#[test]
fn protection_divides_and_merges() {
    both(|b, config| {
        let space = b.space(config);
        let addr = space.map_anonymous(&b.cpu, 9 * PAGE_SIZE).unwrap();
        for page in 0..9 {
            b.store(&space, addr + page * PAGE_SIZE, page).unwrap();
        }
        let middle = addr + 4 * PAGE_SIZE;
        space.protect(&b.cpu, middle, 1, Prot::empty()).unwrap();
        assert_eq!(space.map_count(), 3);
        assert_eq!(b.load(&space, middle), Err(FaultError::NotAllowed));
        space.protect(&b.cpu, middle, 1, Prot::READ).unwrap();
        assert_eq!(b.load(&space, middle), Ok(4));
        assert_eq!(b.store(&space, middle, 1), Err(FaultError::NotAllowed));
        space.protect(&b.cpu, middle, 1, RW).unwrap();
        assert_eq!(space.map_count(), 1);
        b.store(&space, middle, 5).unwrap();
        assert_eq!(b.load(&space, middle), Ok(5));
        space.protect(&b.cpu, addr, 9 * PAGE_SIZE, Prot::READ).unwrap();
        assert_eq!(space.map_count(), 1);
        assert_eq!(b.store(&space, addr, 1), Err(FaultError::NotAllowed));
    });
}

#[test]
fn the_heap_moves_its_end_without_the_reverse_mapping_lock() {
    both(|b, config| {
        let space = b.space(config);
        space.set_heap(&b.cpu, 0x10_0100).unwrap();
        assert_eq!(space.brk(&b.cpu, 0), 0x10_0100);
        assert_eq!(space.brk(&b.cpu, 0x10_8000), 0x10_8000);
        b.store(&space, 0x10_2000, 3).unwrap();
        for n in 1..50 {
            let end = 0x10_8000 + n * 0x1800;
            assert_eq!(space.brk(&b.cpu, end), end);
            b.store(&space, end - 16, n).unwrap();
            assert_eq!(space.brk(&b.cpu, 0x10_8000), 0x10_8000);
            assert_eq!(space.map_count(), 1);
        }
        assert_eq!(b.load(&space, 0x10_8000), Err(FaultError::NotMapped));
        assert_eq!(b.load(&space, 0x10_2000), Ok(3));
        assert_eq!(b.machine.stats().sum(Counter::RmapLock), 0);
    });
}

#[test]
fn populate_and_dontneed() {
    both(|b, config| {
        let space = b.space(config);
        let addr = space.map_anonymous(&b.cpu, 100 * PAGE_SIZE).unwrap();
        space.advise(&b.cpu, addr, 100 * PAGE_SIZE, Advice::PopulateWrite).unwrap();
        assert_eq!(space.resident_pages(&b.cpu), 100);
        assert_eq!(b.machine.stats().sum(Counter::PgFault), 0);
        b.store(&space, addr, 9).unwrap();
        space.advise(&b.cpu, addr, 50 * PAGE_SIZE, Advice::DontNeed).unwrap();
        assert_eq!(space.resident_pages(&b.cpu), 50);
        assert_eq!(b.load(&space, addr), Ok(0));
        let object = Object::file(&b.machine, TestFile::new(&[5; 40 * 4096])).unwrap();
        let file =
            space.map(&b.cpu, MapRequest::object(&object, 0, 40 * PAGE_SIZE, Prot::READ, true)).unwrap();
        space.advise(&b.cpu, file, 40 * PAGE_SIZE, Advice::PopulateRead).unwrap();
        let faults = b.machine.stats().sum(Counter::PgFault);
        for page in 0..40 {
            assert_eq!(b.load(&space, file + page * PAGE_SIZE), Ok(0x0505_0505_0505_0505));
        }
        assert_eq!(b.machine.stats().sum(Counter::PgFault), faults);
        let again = space.map(
            &b.cpu,
            MapRequest::object(&object, 0, 40 * PAGE_SIZE, Prot::READ, false).with(MapFlags::POPULATE),
        );
        assert_eq!(space.resident_pages(&b.cpu), 50 + 40 + 40);
        space.unmap(&b.cpu, again.unwrap(), 40 * PAGE_SIZE).unwrap();
        assert_eq!(space.advise(&b.cpu, file, PAGE_SIZE, Advice::PopulateWrite), Err(Error::Invalid));
        assert_eq!(
            space.advise(&b.cpu, file - 0x4000_0000, PAGE_SIZE, Advice::PopulateRead),
            Err(Error::NoMemory)
        );
    });
}

#[test]
fn placement_is_from_above_and_merges() {
    both(|b, config| {
        let space = b.space(config);
        let first = space.map_anonymous(&b.cpu, PAGE_SIZE).unwrap();
        assert_eq!(first, space.config().range.end - PAGE_SIZE);
        let second = space.map_anonymous(&b.cpu, PAGE_SIZE).unwrap();
        assert_eq!((second, space.map_count()), (first - PAGE_SIZE, 1));
        let low = space.map(&b.cpu, MapRequest::anonymous(1, RW).with(MapFlags::LOW_2GIB)).unwrap();
        assert_eq!(low, 0x4000_0000);
        let fixed = MapRequest::anonymous(PAGE_SIZE, Prot::READ).fixed(second);
        assert_eq!(space.map(&b.cpu, fixed), Ok(second));
        assert_eq!(space.map_count(), 3);
        let taken =
            MapRequest { addr: second, ..MapRequest::anonymous(1, RW) }.with(MapFlags::FIXED_NOREPLACE);
        assert_eq!(space.map(&b.cpu, taken), Err(Error::Exists));
        let lines: Vec<_> = space.mappings(&b.cpu).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(lines[0], "40000000-40001000 rw-p 00000000 00:00 0");
        let huge = MapRequest { align: 2 << 20, ..MapRequest::anonymous(2 << 20, RW) };
        assert_eq!(space.map(&b.cpu, huge).unwrap() % (2 << 20), 0);
    });
}

#[test]
fn every_call_refuses_what_linux_refuses() {
    both(|b, config| {
        let space = b.space(SpaceConfig { map_limit: Some(3), address_limit: Some(1 << 20), ..config });
        let map = |request| space.map(&b.cpu, request);
        assert_eq!(map(MapRequest::anonymous(0, RW)), Err(Error::Invalid));
        assert_eq!(map(MapRequest::anonymous(u64::MAX, RW)), Err(Error::NoMemory));
        assert_eq!(map(MapRequest::anonymous(1 << 50, RW)), Err(Error::NoMemory));
        assert_eq!(map(MapRequest::anonymous(2 << 20, RW)), Err(Error::NoMemory));
        assert_eq!(map(MapRequest::anonymous(1, RW).with(MapFlags::SHARED)), Err(Error::Invalid));
        assert_eq!(map(MapRequest::anonymous(1, RW).fixed(123)), Err(Error::Invalid));
        assert_eq!(map(MapRequest::anonymous(1, RW).fixed(4096)), Err(Error::NotPermitted));
        assert_eq!(map(MapRequest::anonymous(1, RW).fixed(!0xfff)), Err(Error::NoMemory));
        let object = Object::file(&b.machine, TestFile::read_only(&[1; 10])).unwrap();
        assert_eq!(map(MapRequest::object(&object, 5, 10, Prot::READ, true)), Err(Error::Invalid));
        assert_eq!(map(MapRequest::object(&object, !0xfff, 8192, Prot::READ, true)), Err(Error::Overflow));
        assert_eq!(map(MapRequest::object(&object, 0, 10, RW, true)), Err(Error::Access));
        let file = map(MapRequest::object(&object, 0, 10, Prot::READ, true)).unwrap();
        assert_eq!(space.protect(&b.cpu, file, 1, RW), Err(Error::Access));
        assert_eq!(space.protect(&b.cpu, file + 1, 1, RW), Err(Error::Invalid));
        assert_eq!(space.protect(&b.cpu, file, 8193, Prot::READ), Err(Error::NoMemory));
        assert_eq!(space.unmap(&b.cpu, file + 1, 1), Err(Error::Invalid));
        assert_eq!(space.unmap(&b.cpu, file, 0), Err(Error::Invalid));
        assert_eq!(space.unmap(&b.cpu, file, u64::MAX), Err(Error::Invalid));
        assert_eq!(space.advise(&b.cpu, file + 1, 1, Advice::DontNeed), Err(Error::Invalid));
        assert_eq!(space.advise(&b.cpu, file, 8192, Advice::DontFork), Err(Error::NoMemory));
        assert_eq!(space.advise(&b.cpu, file, 4096, Advice::WipeOnFork), Err(Error::Invalid));
        let memory = map(MapRequest::anonymous(5 * PAGE_SIZE, RW)).unwrap();
        assert_eq!(
            space.protect(&b.cpu, memory + PAGE_SIZE, 1, Prot::READ),
            Err(Error::NoMemory),
            "limit of VMAs"
        );
        map(MapRequest::anonymous(PAGE_SIZE, Prot::READ)).unwrap();
        assert_eq!(map(MapRequest::anonymous(PAGE_SIZE, Prot::EXEC)), Err(Error::NoMemory));
        assert_eq!(space.fault(&b.cpu, u64::MAX, Access::Read).unwrap_err(), FaultError::NotMapped);
        assert_eq!(AddrRange::new(0, 1).pages(), 0);
    });
}
