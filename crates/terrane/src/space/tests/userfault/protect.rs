//! Write-protection by a handler.

use super::*;

#[test]
fn protected_pages_tell_of_stores() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &handler(&bench, space);
    let private = map(&bench, space, 8, RW);
    let shared = map_shared(&bench, space, 8);
    let protect = |addr, pages: u64, on| faults.write_protect(cpu, addr, pages * P, on, PLAIN);
    assert_eq!(protect(private, 1, true), Err(Error::NotFound));
    faults.register(cpu, private, 8 * P, MISSING).unwrap();
    assert_eq!(protect(private, 1, true), Err(Error::NotFound), "not registered for it");
    faults.register(cpu, private, 8 * P, WP).unwrap();
    faults.register(cpu, shared, 8 * P, WP).unwrap();
    assert_eq!(faults.write_protect(cpu, private, P, true, Resolve::DONT_WAKE), Err(Error::Invalid));
    assert_eq!(faults.write_protect(cpu, private, P, false, Resolve::WP), Err(Error::Invalid));
    assert_eq!(protect(private + 1, 1, true), Err(Error::Invalid));
    for at in [private, shared] {
        bench.store(space, at, 1).unwrap();
        assert_eq!(bench.load(space, at + P), Ok(0));
        protect(at, 2, true).unwrap();
        for page in 0..2 {
            // Loads go on; a store waits until it is allowed.
            let addr = at + page * P;
            assert_eq!(bench.load(space, addr), Ok(1 - page));
            beside(
                &bench,
                |cpu| store(cpu, space, addr, 7),
                || {
                    let event = next(faults, cpu);
                    assert_eq!(
                        (event.addr, event.kind, event.write),
                        (addr, FaultKind::WriteProtected, true)
                    );
                    assert_eq!(bench.load(space, addr), Ok(1 - page));
                    protect(addr, 1, false).unwrap();
                },
            )
            .unwrap();
            assert_eq!(bench.load(space, addr), Ok(7));
            bench.store(space, addr, 8).unwrap();
        }
    }
    // The protection outlives a change of what the program may do.
    protect(private, 1, true).unwrap();
    for prot in [Prot::READ, Prot::empty(), RW] {
        space.protect(cpu, private, P, prot).unwrap();
    }
    assert_eq!(bench.load(space, private), Ok(8));
    assert!(flags_at(&bench, space, private).unwrap().contains(PteFlags::USER_WP));
    // And a fork, but not in the child.
    let child = space.fork(cpu).unwrap();
    bench.store(&child, private, 99).unwrap();
    assert!(child.mappings(cpu).unwrap().iter().all(|m| !m.flags.intersects(VmFlags::UFFD)));
    child.destroy(cpu);
    beside(
        &bench,
        |cpu| store(cpu, space, private, 10),
        || {
            assert_eq!(next(faults, cpu).kind, FaultKind::WriteProtected);
            protect(private, 1, false).unwrap();
        },
    )
    .unwrap();
    assert_eq!(bench.load(space, private), Ok(10));
    // Private memory that is not there is not protected, shared memory is.
    protect(private + 4 * P, 1, true).unwrap();
    bench.store(space, private + 4 * P, 1).unwrap();
    protect(shared + 4 * P, 1, true).unwrap();
    assert_eq!(bench.load(space, shared + 4 * P), Ok(0));
    assert!(flags_at(&bench, space, shared + 4 * P).unwrap().contains(PteFlags::USER_WP));
    // Without the registration it is gone.
    protect(private, 8, true).unwrap();
    protect(shared, 8, true).unwrap();
    for at in [private, shared] {
        faults.unregister(cpu, at, 8 * P).unwrap();
        for page in 0..8 {
            bench.store(space, at + page * P, 5).unwrap();
            assert!(!flags_at(&bench, space, at + page * P).unwrap().contains(PteFlags::USER_WP));
        }
    }
}

#[test]
fn protection_of_shared_memory_outlasts_its_pages() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &handler(&bench, space);
    let object = Object::shared_memory(&bench.machine, 8 * P).unwrap();
    for shared in [true, false] {
        let at = space.map(cpu, MapRequest::object(&object, 0, 8 * P, RW, shared)).unwrap();
        let is_protected = |page: u64| {
            bench.load(space, at + page * P).unwrap();
            flags_at(&bench, space, at + page * P).unwrap().contains(PteFlags::USER_WP)
        };
        faults.register(cpu, at, 8 * P, WP).unwrap();
        bench.store(space, at, 1).unwrap();
        faults.write_protect(cpu, at, 4 * P, true, PLAIN).unwrap();
        bench.load(space, at + P).unwrap();
        space.advise(cpu, at, 8 * P, Advice::DontNeed).unwrap();
        assert_eq!([0, 1, 2, 4].map(is_protected), [true, true, true, false]);
        object.set_len(cpu, 0);
        object.set_len(cpu, 8 * P);
        assert_eq!([0, 1, 3, 4].map(is_protected), [true, true, true, false]);
        // Unmapped, everything is gone, and the table with it.
        space.unmap(cpu, at, 8 * P).unwrap();
        space.map(cpu, MapRequest::object(&object, 0, 8 * P, RW, shared).fixed(at)).unwrap();
        assert_eq!([0, 1, 3].map(is_protected), [false; 3]);
    }
}

#[test]
fn what_is_not_there_yet_can_be_protected() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &space.user_faults(cpu, UserFeatures::WP_UNPOPULATED).unwrap();
    let at = map(&bench, space, 8, RW);
    faults.register(cpu, at, 8 * P, WP).unwrap();
    faults.write_protect(cpu, at, 4 * P, true, PLAIN).unwrap();
    assert_eq!(bench.load(space, at), Ok(0));
    for page in 0..2 {
        beside(
            &bench,
            |cpu| store(cpu, space, at + page * P, 7),
            || {
                assert_eq!(next(faults, cpu).kind, FaultKind::WriteProtected);
                faults.write_protect(cpu, at + page * P, P, false, PLAIN).unwrap();
            },
        )
        .unwrap();
        assert_eq!(bench.load(space, at + page * P), Ok(7));
    }
    // Forgetting forgets the protection; so does the end of the registration.
    space.advise(cpu, at + 2 * P, P, Advice::DontNeed).unwrap();
    bench.store(space, at + 2 * P, 7).unwrap();
    faults.unregister(cpu, at, 8 * P).unwrap();
    bench.store(space, at + 3 * P, 7).unwrap();
    // A copy comes protected if it is asked for.
    faults.register(cpu, at, 8 * P, MISSING | WP).unwrap();
    faults.copy(cpu, at + 5 * P, &bytes(1, 4), Resolve::WP).unwrap();
    beside(
        &bench,
        |cpu| store(cpu, space, at + 5 * P, 6),
        || {
            let event = next(faults, cpu);
            assert_eq!(event.kind, FaultKind::WriteProtected);
            faults.write_protect(cpu, event.addr, P, false, PLAIN).unwrap();
        },
    )
    .unwrap();
    assert_eq!(bench.load(space, at + 5 * P), Ok(6));
}
