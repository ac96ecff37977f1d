//! Which pages are in memory.

use super::*;
use crate::mm::HugePages;
use alloc::vec;

fn residency(b: &Bench, space: &Space, first: u64, count: u64) -> (Result<(), Error>, Vec<u8>) {
    let mut resident = vec![9; count as usize];
    (space.mincore(&b.cpu, page(first), count * PAGE_SIZE, &mut resident), resident)
}

#[test]
fn arguments_are_checked_in_the_order_of_linux() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 2);
        memory(b, &space, 3, 1);
        let mut out = [9; 8];
        let mut mincore = |addr, len, room: usize| space.mincore(&b.cpu, addr, len, &mut out[..room]);
        assert_eq!(mincore(page(0) + 1, u64::MAX, 0), Err(Error::Invalid));
        assert_eq!(mincore(page(0), u64::MAX, 0), Err(Error::NoMemory));
        assert_eq!(mincore(0u64.wrapping_sub(PAGE_SIZE), 8192, 2), Err(Error::NoMemory));
        assert_eq!(mincore(page(50), PAGE_SIZE, 0), Err(Error::BadAddress));
        assert_eq!(mincore(page(50), PAGE_SIZE, 1), Err(Error::NoMemory));
        assert_eq!(mincore(page(50), 0, 0), Ok(()));
        assert_eq!(mincore(page(0), PAGE_SIZE + 1, 1), Err(Error::BadAddress));
        assert_eq!(mincore(page(0), PAGE_SIZE + 1, 2), Ok(()));
        assert_eq!(out, [0, 0, 9, 9, 9, 9, 9, 9]);
        // Before a hole it is filled in.
        b.store(&space, page(0), 1).unwrap();
        b.load(&space, page(3)).unwrap();
        assert_eq!(residency(b, &space, 0, 4), (Err(Error::NoMemory), vec![1, 0, 9, 9]));
    });
}

#[test]
fn pages_count_that_are_mapped_or_cached() {
    both(|b, config| {
        let space = b.space(SpaceConfig { fault_around: PAGE_SIZE, ..config });
        let here = |first, count| residency(b, &space, first, count).1;
        memory(b, &space, 0, 4);
        b.store(&space, page(0), 1).unwrap();
        b.load(&space, page(1)).unwrap();
        assert_eq!(here(0, 4), [1, 1, 0, 0], "the page of zeros is a page");
        space.protect(&b.cpu, page(0), PAGE_SIZE, Prot::empty()).unwrap();
        space.advise(&b.cpu, page(1), PAGE_SIZE, Advice::GuardInstall).unwrap();
        assert_eq!(here(0, 4), [1, 0, 0, 0]);
        // An object: what is in its cache, whoever brought it; private copies where they are mapped.
        let object = Object::shared_memory(&b.machine, 3 * PAGE_SIZE).unwrap();
        map_object(b, &space, &object, 10, 4, true);
        map_object(b, &space, &object, 20, 4, false);
        b.store(&space, page(10), 1).unwrap();
        b.store(&space, page(11), 1).unwrap();
        b.store(&space, page(21), 2).unwrap();
        assert_eq!((here(10, 4), here(20, 4)), (vec![1, 1, 0, 0], vec![1, 1, 0, 0]));
        space.advise(&b.cpu, page(10), PAGE_SIZE, Advice::GuardInstall).unwrap();
        assert_eq!(here(10, 4), [1, 1, 0, 0], "behind a guard as well");
        space.advise(&b.cpu, page(10), 3 * PAGE_SIZE, Advice::Remove).unwrap();
        assert_eq!((here(10, 4), here(20, 4)), (vec![0; 4], vec![0, 1, 0, 0]));
        object.set_len(&b.cpu, 0);
        assert_eq!((here(10, 4), here(20, 4)), (vec![0; 4], vec![0; 4]));
        let file = Object::file(&b.machine, TestFile::new(&[1; 3 * 4096])).unwrap();
        map_object(b, &space, &file, 30, 4, true);
        b.load(&space, page(31)).unwrap();
        assert_eq!(here(30, 4), [0, 1, 0, 0]);
        space.advise(&b.cpu, page(30), 4 * PAGE_SIZE, Advice::WillNeed).unwrap();
        assert_eq!(here(30, 4), [1, 1, 1, 0]);
        space.advise(&b.cpu, page(30), 4 * PAGE_SIZE, Advice::DontNeed).unwrap();
        assert_eq!(here(30, 4), [1, 1, 1, 0]);
    });
}

#[test]
fn huge_pages_count_whole() {
    both(|b, config| {
        let space = b.space(SpaceConfig { huge_pages: HugePages::Always, ..config });
        memory(b, &space, 0, 1536);
        b.store(&space, page(512 + 7), 1).unwrap();
        let (result, resident) = residency(b, &space, 1, 1534);
        assert_eq!(result, Ok(()));
        assert!((1..1535).all(|n| resident[n - 1] == u8::from((512..1024).contains(&n))));
    });
}
