//! What `madvise` checks, in which order, and what it does about holes.

use super::*;

const SOME: [i32; 20] = [0, 1, 2, 3, 4, 8, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21, 24, 102, 103, 22];

#[test]
fn arguments_are_checked_in_the_order_of_linux() {
    both(|b, config| {
        let space = b.space(config);
        let at = memory(b, &space, 0, 4);
        let madvise = |addr, len, number| space.madvise(&b.cpu, addr, len, number);
        for number in [5, 6, 7, 12, 13, 26, 99, 100, 101, -1, i32::MAX] {
            assert_eq!(madvise(at, 0, number), Err(Error::Invalid), "{number}");
            assert_eq!(madvise(at, PAGE_SIZE, number), Err(Error::Invalid), "{number}");
        }
        for number in SOME {
            assert_eq!(madvise(at + 1, 0, number), Err(Error::Invalid));
            assert_eq!(madvise(at, u64::MAX, number), Err(Error::Invalid));
            assert_eq!(madvise(at, 0u64.wrapping_sub(PAGE_SIZE), number), Err(Error::Invalid));
            assert_eq!(madvise(page(99), 0, number), Ok(()));
            assert_eq!(madvise(page(99), PAGE_SIZE, number), Err(Error::NoMemory), "{number}");
            assert_eq!(madvise(at, 1, number), Ok(()), "{number}");
        }
    });
}

#[test]
fn advice_goes_on_behind_holes() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 4);
        memory(b, &space, 6, 4);
        let all = |advice| space.advise(&b.cpu, page(0), 10 * PAGE_SIZE, advice);
        let flags = || space.mappings(&b.cpu).unwrap().iter().map(|m| m.flags).collect::<Vec<_>>();
        for (advice, undo) in [(Advice::DontFork, Advice::DoFork), (Advice::Random, Advice::Normal)] {
            let before = flags();
            assert_eq!(all(advice), Err(Error::NoMemory));
            assert!(flags().iter().zip(&before).all(|(now, before)| now != before), "both parts");
            assert_eq!(all(undo), Err(Error::NoMemory));
            assert_eq!(flags(), before);
        }
        for n in [0, 3, 6, 9] {
            b.store(&space, page(n), 1).unwrap();
        }
        for advice in [Advice::Cold, Advice::PageOut, Advice::Free, Advice::WillNeed] {
            assert_eq!(all(advice), Err(Error::NoMemory));
        }
        assert_eq!(space.resident_pages(&b.cpu), 4);
        // The hole first, then something; something, then the hole; the hole alone.
        for (start, count) in [(4, 3), (9, 3), (4, 2)] {
            let result = space.advise(&b.cpu, page(start), count * PAGE_SIZE, Advice::DontNeed);
            assert_eq!(result, Err(Error::NoMemory));
        }
        assert_eq!(space.resident_pages(&b.cpu), 2);
        // Populating stops there.
        assert_eq!(all(Advice::PopulateWrite), Err(Error::NoMemory));
        assert_eq!(space.resident_pages(&b.cpu), 4);
        assert_eq!(all(Advice::GuardInstall), Err(Error::NoMemory));
        assert_eq!(b.load(&space, page(9)), Err(FaultError::Guard));
        assert_eq!(all(Advice::GuardRemove), Err(Error::NoMemory));
        assert_eq!(b.load(&space, page(9)), Ok(0));
        // The first mapping that refuses ends it, and is met before a hole behind it.
        assert_eq!(all(Advice::Remove), Err(Error::Invalid));
    });
}

#[test]
fn attributes_divide_and_merge_one_mapping_after_the_other() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 9);
        space.advise(&b.cpu, page(2), 3 * PAGE_SIZE, Advice::DontDump).unwrap();
        assert_eq!(listing(b, &space), [(0, 2), (2, 5), (5, 9)]);
        space.advise(&b.cpu, page(1), 7 * PAGE_SIZE, Advice::DontDump).unwrap();
        assert_eq!(listing(b, &space), [(0, 1), (1, 8), (8, 9)]);
        space.advise(&b.cpu, page(0), 9 * PAGE_SIZE, Advice::DoDump).unwrap();
        assert_eq!(listing(b, &space), [(0, 9)]);
        // What lies before a mapping that refuses is done.
        let object = Object::shared_memory(&b.machine, PAGE_SIZE).unwrap();
        map_object(b, &space, &object, 3, 1, true);
        let result = space.advise(&b.cpu, page(1), 5 * PAGE_SIZE, Advice::WipeOnFork);
        assert_eq!(result, Err(Error::Invalid));
        assert_eq!(listing(b, &space), [(0, 1), (1, 3), (3, 4), (4, 9)]);
    });
}

#[test]
fn the_limit_of_mappings_is_a_resource_that_is_missing_for_a_moment() {
    both(|b, config| {
        let space = b.space(SpaceConfig { map_limit: Some(2), ..config });
        memory(b, &space, 0, 5);
        assert_eq!(space.advise(&b.cpu, page(1), PAGE_SIZE, Advice::DontFork), Err(Error::Again));
        assert_eq!(space.advise(&b.cpu, page(0), PAGE_SIZE, Advice::DontFork), Ok(()));
        assert_eq!(listing(b, &space), [(0, 1), (1, 5)]);
    });
}

#[test]
fn each_kind_of_mapping_takes_and_refuses_what_it_does_on_linux() {
    const E: Option<Error> = Some(Error::Invalid);
    const A: Option<Error> = Some(Error::Access);
    const O: Option<Error> = None;
    let numbers = [0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 102, 103];
    both(|b, config| {
        let space = b.space(config);
        let file = Object::file(&b.machine, TestFile::new(&[1; 8 * 4096])).unwrap();
        let read_only = Object::file(&b.machine, TestFile::read_only(&[1; 8 * 4096])).unwrap();
        let len = 4 * PAGE_SIZE;
        type Kind = (&'static str, MapRequest<TestHost>, [Option<Error>; 23]);
        let kinds: [Kind; 8] = [
            (
                "memory",
                MapRequest::anonymous(len, RW),
                [O, O, O, O, O, O, E, O, O, O, O, O, O, O, O, O, O, O, O, O, E, O, O],
            ),
            (
                "shared memory",
                MapRequest::shared_anonymous(len, RW),
                [O, O, O, O, O, E, O, O, O, O, O, O, O, E, O, O, O, O, O, O, E, O, O],
            ),
            (
                "private file",
                MapRequest::object(&file, 0, len, RW, false),
                [O, O, O, O, O, E, A, O, O, O, O, O, O, E, O, O, O, O, O, O, E, O, O],
            ),
            (
                "shared file",
                MapRequest::object(&file, 0, len, RW, true),
                [O, O, O, O, O, E, O, O, O, O, O, O, O, E, O, O, O, O, O, O, E, O, O],
            ),
            (
                "shared file to read",
                MapRequest::object(&file, 0, len, Prot::READ, true),
                [O, O, O, O, O, E, O, O, O, O, O, O, O, E, O, O, O, O, E, O, E, O, O],
            ),
            (
                "file that is read-only",
                MapRequest::object(&read_only, 0, len, Prot::READ, true),
                [O, O, O, O, O, E, A, O, O, O, O, O, O, E, O, O, O, O, E, O, E, O, O],
            ),
            (
                "memory to read",
                MapRequest::anonymous(len, Prot::READ),
                [O, O, O, O, O, O, E, O, O, O, O, O, O, O, O, O, O, O, E, O, E, O, O],
            ),
            (
                "memory for nobody",
                MapRequest::anonymous(len, Prot::empty()),
                [O, O, O, O, O, O, E, O, O, O, O, O, O, O, O, O, O, E, E, O, E, O, O],
            ),
        ];
        for (name, request, expected) in kinds {
            let MapRequest { prot, flags, object, .. } = request;
            for (number, expected) in numbers.into_iter().zip(expected) {
                let object = object.clone();
                let again = MapRequest { prot, flags, object, ..MapRequest::anonymous(len, prot) };
                let addr = space.map(&b.cpu, again).unwrap();
                assert_eq!(space.madvise(&b.cpu, addr, len, number).err(), expected, "{name}, {number}");
                space.unmap(&b.cpu, addr, len).unwrap();
            }
        }
    });
}

#[test]
fn several_ranges_end_at_the_first_that_is_refused() {
    both(|b, config| {
        let space = b.space(config);
        memory(b, &space, 0, 6);
        let call = |ranges: &[(u64, u64)], number, from_outside| {
            space.process_madvise(&b.cpu, ranges, number, from_outside)
        };
        let (p, cold) = (PAGE_SIZE, 20);
        for number in [0, 4, 8, 9, 10, 14, 16, 22, 24, 99, 102] {
            assert_eq!(call(&[(page(0), p)], number, true), Err(Error::Invalid), "{number}");
            assert_eq!(call(&[], number, true), Err(Error::Invalid), "{number}");
        }
        for number in [3, 20, 21] {
            assert_eq!(call(&[(page(0), p), (page(3), 2 * p)], number, true), Ok(3 * p), "{number}");
        }
        assert_eq!(call(&[(page(0), p), (page(3), 0)], 10, false), Ok(p));
        assert_eq!(call(&[(page(0), p), (page(1) + 1, p)], cold, true), Ok(p));
        assert_eq!(call(&[(page(1) + 1, p), (page(0), p)], cold, true), Err(Error::Invalid));
        assert_eq!(call(&[(page(0), p), (page(9), p)], cold, true), Ok(p));
        assert_eq!(call(&[(page(9), p)], cold, true), Err(Error::NoMemory));
        assert_eq!(call(&[(page(0), p + 1)], cold, true), Ok(p + 1));
        assert_eq!(call(&[], cold, true), Ok(0));
        assert_eq!(call(&[(page(0), 0); 1025], cold, true), Err(Error::Invalid));
        assert_eq!(call(&[(page(0), p), (page(0), u64::MAX)], cold, true), Err(Error::Invalid));
        assert_eq!(call(&[(page(0), p), (1 << 60, p)], cold, true), Err(Error::BadAddress));
        // Bytes beyond 2^31 are cut off.
        assert_eq!(call(&[(page(0), p), (page(0), 4 << 30)], cold, true), Ok(p), "the rest has holes");
    });
}
