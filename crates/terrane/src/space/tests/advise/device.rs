//! Device memory, mappings whose pages may vanish, and files that end within a mapping.

use super::*;
use crate::addr::Frame;
use crate::fault::may_vanish;
use crate::host::FrameRange;
use crate::page_table::{Pte, PteFlags};
use crate::vma::{Access, VmFlags};

/// Far above the machine's frames.
const DEVICE: FrameRange = FrameRange { first: Frame(0x10_0000), count: 8 };

#[test]
fn device_memory_is_mapped_as_it_is_and_nobodys_to_keep() {
    both(|b, config| {
        let space = b.space(config);
        let device = Object::device(&b.machine, DEVICE).unwrap();
        let len = 4 * PAGE_SIZE;
        let at = page(0);
        let request = || MapRequest::device(&device, 2 * PAGE_SIZE, len, RW).fixed(at);
        space.map(&b.cpu, request().with(crate::vma::MapFlags::POPULATE)).unwrap();
        let flags = space.mappings(&b.cpu).unwrap()[0].flags;
        assert!(flags.contains(VmFlags::SPECIAL | VmFlags::DONTDUMP | VmFlags::SHARED));
        assert_eq!(space.resident_pages(&b.cpu), 0, "never filled in");
        let frame =
            |space: &Space, n: u64, access| space.fault(&b.cpu, page(n), access).map(|found| found.frame.0);
        assert_eq!(frame(&space, 0, Access::Read), Ok(0x10_0002));
        assert_eq!(frame(&space, 3, Access::Write), Ok(0x10_0005));
        assert_eq!(space.fault(&b.cpu, page(4), Access::Read).unwrap_err(), FaultError::NotMapped);
        assert_eq!(space.mm().rss().resident(), 0);
        // Protection is as anywhere.
        space.protect(&b.cpu, page(3), PAGE_SIZE, Prot::READ).unwrap();
        assert_eq!(frame(&space, 3, Access::Write), Err(FaultError::NotAllowed));
        assert_eq!(frame(&space, 3, Access::Read), Ok(0x10_0005));
        space.protect(&b.cpu, page(3), PAGE_SIZE, RW).unwrap();
        assert_eq!(frame(&space, 3, Access::Write), Ok(0x10_0005));
        assert_eq!(space.map_count(), 1);
        // A child has it too.
        let child = space.fork(&b.cpu).unwrap();
        assert_eq!(frame(&child, 0, Access::Write), Ok(0x10_0002));
        // Advice, as for a device of Linux.
        let advise = |number| space.madvise(&b.cpu, at, len, number).err();
        for number in [4, 8, 11, 14, 15, 17, 18, 20, 21, 22, 23, 24, 25, 102, 103] {
            assert_eq!(advise(number), Some(Error::Invalid), "{number}");
        }
        for number in [0, 1, 2, 3, 10, 16, 19] {
            assert_eq!(advise(number), None, "{number}");
        }
        assert_eq!(advise(9), Some(Error::NoDevice));
        // Locking passes over it.
        space.mlock(&b.cpu, at, len).unwrap();
        space.mlockall(&b.cpu, 3).unwrap();
        space.map(&b.cpu, request()).unwrap();
        assert_eq!(space.locked_bytes(), 0);
        let mut resident = [9; 4];
        frame(&space, 0, Access::Write).unwrap();
        space.mincore(&b.cpu, at, len, &mut resident).unwrap();
        assert_eq!(resident, [0; 4]);
        space.msync(&b.cpu, at, len, 4).unwrap();
        device.set_len(&b.cpu, 0);
        assert_eq!(frame(&space, 1, Access::Read), Ok(0x10_0003));
        // Beyond its end there is nothing.
        let request = MapRequest::device(&device, 6 * PAGE_SIZE, len, RW).fixed(page(10));
        space.map(&b.cpu, request).unwrap();
        assert_eq!(frame(&space, 12, Access::Read), Err(FaultError::BeyondEnd));
        let private = MapRequest::object(&device, 0, len, RW, false);
        assert_eq!(space.map(&b.cpu, private), Err(Error::Invalid));
        // Not the machine's memory, and not nothing.
        let last = b.machine.frames().total() as u32;
        for (first, count) in [(1, 1), (last, 5), (0, 9), (0x10_0000, 0), (u32::MAX, 2)] {
            let frames = FrameRange { first: Frame(first), count };
            assert_eq!(Object::device(&b.machine, frames).err(), Some(Error::Invalid), "{first}");
        }
        assert!(Object::device(&b.machine, FrameRange { first: Frame(last + 1), count: 5 }).is_ok());
    });
}

#[test]
fn what_may_vanish_does_so_though_it_was_stored_to() {
    both(|b, config| {
        let space = b.space(SpaceConfig { huge_pages: crate::mm::HugePages::Always, ..config });
        let at = memory(b, &space, 0, 1024);
        // What a mapping made as droppable has.
        let set = |flags: VmFlags| {
            let pin = b.cpu.pin();
            let vma = space.mm().index.find(&pin, at).unwrap();
            vma.change(|vma| vma.set_flags(vma.flags() | flags));
        };
        set(VmFlags::DROPPABLE | VmFlags::WIPEONFORK | VmFlags::DONTDUMP | VmFlags::NORESERVE);
        b.store(&space, at, 5).unwrap();
        assert_eq!(space.resident_pages(&b.cpu), 1, "no huge pages, which would be kept");
        {
            let pin = b.cpu.pin();
            let slot = space.mm().page_table.lookup(&space.mm().ram(&pin), at).unwrap();
            let Pte::Page { frame, flags } = slot.decode::<crate::testing::TestFormat>() else { panic!() };
            assert!(flags.contains(PteFlags::DIRTY) && may_vanish(b.machine.frames().meta(frame), flags));
        }
        let child = space.fork(&b.cpu).unwrap();
        assert_eq!((b.load(&child, at), b.load(&space, at)), (Ok(0), Ok(5)));
        for advice in [Advice::KeepOnFork, Advice::DoDump, Advice::Collapse] {
            assert_eq!(space.advise(&b.cpu, at, 4 << 20, advice), Err(Error::Invalid));
        }
        space.mlock(&b.cpu, at, PAGE_SIZE).unwrap();
        assert_eq!(space.locked_bytes(), 0, "passed over");
    });
}

#[test]
fn files_that_end_within_a_mapping() {
    both(|b, config| {
        let file = TestFile::new(&[7; 2 * 4096 + 100]);
        let object = Object::file(&b.machine, file.clone()).unwrap();
        let space = b.space(config);
        map_object(b, &space, &object, 0, 6, true);
        map_object(b, &space, &object, 10, 6, false);
        let word = 0x0707_0707_0707_0707;
        for first in [0, 10] {
            assert_eq!(b.load(&space, page(first + 2) + 88), Ok(word));
            assert_eq!(b.load(&space, page(first + 2) + 96), Ok(0x0707_0707), "zeros to the end of the page");
            assert_eq!(b.load(&space, page(first + 2) + 4088), Ok(0));
            for n in 3..6 {
                assert_eq!(b.load(&space, page(first + n)), Err(FaultError::BeyondEnd));
                assert_eq!(b.store(&space, page(first + n), 1), Err(FaultError::BeyondEnd));
                let populated = space.advise(&b.cpu, page(first + n), PAGE_SIZE, Advice::PopulateRead);
                assert_eq!(populated, Err(Error::BadAddress));
            }
        }
        // Cut short under the mappings: private copies go too, and the rest of the last page is zeros.
        b.store(&space, page(11), 1).unwrap();
        b.store(&space, page(10), 2).unwrap();
        object.set_len(&b.cpu, 8);
        file.set_len(8);
        assert_eq!((b.load(&space, page(0)), b.load(&space, page(0) + 8)), (Ok(word), Ok(0)));
        assert_eq!(b.load(&space, page(10)), Ok(2), "a copy of the last page stays as it is");
        for n in [1, 2, 11, 12] {
            assert_eq!(b.load(&space, page(n)), Err(FaultError::BeyondEnd));
        }
        // Longer again: zeros, also where the copy was.
        file.set_len(3 * 4096);
        object.set_len(&b.cpu, 3 * PAGE_SIZE);
        for n in [1, 2, 11, 12] {
            assert_eq!(b.load(&space, page(n)), Ok(0));
        }
        assert_eq!((b.load(&space, page(0)), b.load(&space, page(0) + 8)), (Ok(word), Ok(0)));
        b.store(&space, page(2), 3).unwrap();
        space.sync(&b.cpu, page(0), 3 * PAGE_SIZE).unwrap();
        assert_eq!(file.contents()[2 * 4096], 3);
    });
}
