//! Calls beside a handler: what they tell it, and what becomes of its registrations.

use super::*;

#[test]
fn what_is_moved_is_registered_no_more() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &handler(&bench, space);
    let at = map(&bench, space, 4, RW);
    faults.register(cpu, at, 4 * P, MISSING | WP).unwrap();
    faults.copy(cpu, at, &bytes(4, 3), Resolve::WP).unwrap();
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    let new = space.remap(cpu, at, 4 * P, 4 * P, flags, at - 64 * P).unwrap();
    assert!(space.mappings(cpu).unwrap().iter().all(|m| m.flags.user_context() == 0));
    assert!(!flags_at(&bench, space, new).unwrap().contains(PteFlags::USER_WP));
    bench.store(space, new, 4).unwrap();
    assert_eq!([0, 1].map(|page| bench.load(space, new + page * P)), [Ok(4), Ok(3)]);
    assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::Again));
}

#[test]
fn calls_wait_until_the_handler_knows() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let features = UserFeatures::EVENT_REMOVE | UserFeatures::EVENT_UNMAP;
    let faults = &space.user_faults(cpu, features).unwrap();
    let at = map(&bench, space, 12, RW);
    faults.register(cpu, at + 2 * P, 8 * P, MISSING | WP).unwrap();
    let wait = || {
        let mut events = [none(), none()];
        loop {
            let count = faults.read_events(cpu, &mut events[..1]).unwrap();
            if count == 1 {
                return events[0];
            }
        }
    };
    faults.copy(cpu, at + 2 * P, &bytes(8, 1), PLAIN).unwrap();
    // Forgotten: only what is registered is told, before it happens; nothing can be put in place until it has been read.
    let busy = failed(Error::Again);
    beside(
        &bench,
        |cpu| space.advise(cpu, at, 4 * P, Advice::DontNeed),
        || {
            while faults.copy(cpu, at + 2 * P, &bytes(1, 2), PLAIN) != busy {
                thread::yield_now();
            }
            assert_eq!(faults.zeropage(cpu, at + 2 * P, P, PLAIN), busy);
            assert_eq!(faults.write_protect(cpu, at + 2 * P, P, true, PLAIN), Err(Error::Again));
            assert_eq!(faults.waiting(), 0, "that is no fault");
            assert_eq!(wait(), UserEvent::Remove(AddrRange::new(at + 2 * P, at + 4 * P)));
            assert_ne!(faults.copy(cpu, at + 4 * P, &bytes(1, 2), PLAIN), busy);
        },
    )
    .unwrap();
    assert!(space.translate(cpu, at + 2 * P, Access::Read).is_none());
    // Unmapped, also by a mapping in its place: told after it has happened, as a whole.
    for replace in [false, true] {
        let range =
            AddrRange::new(at + (3 + 4 * u64::from(replace)) * P, at + (6 + 4 * u64::from(replace)) * P);
        beside(
            &bench,
            |cpu| match replace {
                false => space.unmap(cpu, range.start, range.len()).unwrap(),
                true => {
                    let request = MapRequest::anonymous(range.len(), RW).fixed(range.start);
                    assert_eq!(space.map(cpu, request), Ok(range.start));
                }
            },
            || assert_eq!(wait(), UserEvent::Unmap(range)),
        );
    }
    // Who waits for a reader goes on when there is none any more; what is not registered waits for nobody.
    space.advise(cpu, at, 2 * P, Advice::DontNeed).unwrap();
    let last = space.user_faults(cpu, features).unwrap();
    last.register(cpu, at, P, MISSING).unwrap();
    beside(
        &bench,
        |cpu| space.unmap(cpu, at, P),
        || {
            while last.zeropage(cpu, at, P, PLAIN) != busy {
                thread::yield_now();
            }
            drop(last);
        },
    )
    .unwrap();
    assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::Again));
}
