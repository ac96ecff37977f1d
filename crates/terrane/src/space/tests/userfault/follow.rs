//! Registrations that follow moves and forks.

use super::*;
use crate::sync::Shared;

const FIXED: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);

/// The contexts in the listing of `space`, with the first page and the number of pages, from `base` on.
fn contexts(bench: &Bench, space: &Space) -> Vec<(u64, u64, u16)> {
    let all = space.mappings(&bench.cpu).unwrap();
    all.iter()
        .map(|m| (m.range.start, m.range.pages(), m.flags.user_context()))
        .filter(|m| m.2 != 0)
        .collect()
}

#[test]
fn what_is_moved_stays_registered() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let features = UserFeatures::EVENT_REMAP | UserFeatures::EVENT_UNMAP;
    let faults = &space.user_faults(cpu, features).unwrap();
    let at = map(&bench, space, 8, RW);
    faults.register(cpu, at, 8 * P, MISSING | WP).unwrap();
    faults.copy(cpu, at, &bytes(2, 3), Resolve::WP).unwrap();
    let to = at - 64 * P;
    let range = |from: u64, pages: u64| AddrRange::new(from, from + pages * P);
    // All of it, to a place where nothing is.
    beside(
        &bench,
        |cpu| assert_eq!(space.remap(cpu, at, 8 * P, 8 * P, FIXED, to), Ok(to)),
        || {
            assert_eq!(told(faults, cpu), UserEvent::Remap { from: at, to, len: 8 * P });
            assert_eq!(told(faults, cpu), UserEvent::Unmap(range(at, 8)));
        },
    );
    assert_eq!(contexts(&bench, space), [(to, 8, 1)]);
    assert!(flags_at(&bench, space, to + P).unwrap().contains(PteFlags::USER_WP), "protected still");
    assert_eq!(bench.load(space, to + P), Ok(3));
    // Its faults are told at the new place.
    beside(
        &bench,
        |cpu| store(cpu, space, to + 5 * P, 1),
        || {
            let event = next(faults, cpu);
            assert_eq!(event.addr, to + 5 * P);
            faults.zeropage(cpu, event.addr, P, PLAIN).unwrap();
        },
    )
    .unwrap();
    // A part, cut short, in place of something that is registered, too.
    let other = map(&bench, space, 4, RW);
    faults.register(cpu, other, 4 * P, MISSING).unwrap();
    beside(
        &bench,
        |cpu| assert_eq!(space.remap(cpu, to, 4 * P, 2 * P, FIXED, other), Ok(other)),
        || {
            assert_eq!(told(faults, cpu), UserEvent::Unmap(range(other, 2)));
            assert_eq!(told(faults, cpu), UserEvent::Remap { from: to, to: other, len: 2 * P });
            assert_eq!(told(faults, cpu), UserEvent::Unmap(range(to + 2 * P, 2)));
            assert_eq!(told(faults, cpu), UserEvent::Unmap(range(to, 2)));
        },
    );
    assert_eq!(
        contexts(&bench, space).iter().map(|m| (m.0, m.1)).collect::<Vec<_>>(),
        [(to + 4 * P, 4), (other, 2), (other + 2 * P, 2)]
    );
    // Cut short where it is; grown where it is, which tells nobody anything.
    beside(
        &bench,
        |cpu| assert_eq!(space.remap(cpu, to + 4 * P, 4 * P, P, RemapFlags::empty(), 0), Ok(to + 4 * P)),
        || assert_eq!(told(faults, cpu), UserEvent::Unmap(range(to + 5 * P, 3))),
    );
    assert_eq!(space.remap(cpu, to + 4 * P, P, 2 * P, RemapFlags::empty(), 0), Ok(to + 4 * P));
    assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::Again));
    // What cannot be done tells nothing, and nothing is refused after.
    assert_eq!(space.remap(cpu, other, 64 * P, 64 * P, FIXED, at - 512 * P), Err(Error::BadAddress));
    assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::Again));
    faults.zeropage(cpu, other + 2 * P, P, PLAIN).unwrap();
    // Without unmapping the old place, both are registered.
    let keep = RemapFlags::MAYMOVE | RemapFlags::DONTUNMAP;
    let twice = beside(
        &bench,
        |cpu| space.remap(cpu, other, 2 * P, 2 * P, keep, 0).unwrap(),
        || {
            assert!(
                matches!(told(faults, cpu), UserEvent::Remap { from, len, .. } if from == other && len == 2 * P)
            )
        },
    );
    assert!(contexts(&bench, space).contains(&(twice, 2, 1)));
    assert!(contexts(&bench, space).iter().any(|m| m.0 == other));
}

#[test]
fn a_heap_that_shrinks_tells() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &space.user_faults(cpu, UserFeatures::EVENT_UNMAP).unwrap();
    let heap = 0x200_0000;
    space.set_heap(cpu, heap).unwrap();
    assert_eq!(space.brk(cpu, heap + 8 * P), heap + 8 * P);
    faults.register(cpu, heap, 4 * P, MISSING).unwrap();
    // What is not registered is nobody's business.
    assert_eq!(space.brk(cpu, heap + 5 * P + 1), heap + 5 * P + 1);
    beside(
        &bench,
        |cpu| assert_eq!(space.brk(cpu, heap + 3 * P - 1), heap + 3 * P - 1),
        || assert_eq!(told(faults, cpu), UserEvent::Unmap(AddrRange::new(heap + 3 * P, heap + 6 * P))),
    );
    assert_eq!(space.brk(cpu, heap + 3 * P), heap + 3 * P);
    assert_eq!(space.brk(cpu, heap + 4 * P), heap + 4 * P);
    assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::Again));
}

#[test]
fn a_child_has_a_handler_of_its_own() {
    let bench = Bench::new(512);
    let space = bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = space.user_faults(cpu, UserFeatures::EVENT_FORK).unwrap();
    let quiet = handler(&bench, &space);
    let idle = space.user_faults(cpu, UserFeatures::EVENT_FORK).unwrap();
    let at = map(&bench, &space, 8, RW);
    let other = map(&bench, &space, 2, RW);
    let shared = map_shared(&bench, &space, 4);
    faults.register(cpu, at, 8 * P, MISSING | WP).unwrap();
    faults.register(cpu, shared, 4 * P, WP).unwrap();
    quiet.register(cpu, other, 2 * P, MISSING).unwrap();
    faults.copy(cpu, at, &bytes(3, 7), PLAIN).unwrap();
    faults.write_protect(cpu, at, P, true, PLAIN).unwrap();
    bench.store(&space, shared, 5).unwrap();
    faults.write_protect(cpu, shared, 2 * P, true, PLAIN).unwrap();
    let mut number = 0;
    let child = beside(
        &bench,
        |cpu| space.fork(cpu).unwrap(),
        || {
            while faults.zeropage(cpu, at + 7 * P, P, PLAIN).is_ok() {
                space.advise(cpu, at + 7 * P, P, Advice::DontNeed).unwrap();
            }
            let UserEvent::Fork(told) = told(&faults, cpu) else { panic!("no fork") };
            number = told;
        },
    );
    let own = faults.forked(number).unwrap().unwrap();
    assert!(faults.forked(number).unwrap().is_none(), "once");
    assert_eq!(idle.try_read_events(&mut [none()]), Err(Error::Again), "it has nothing there");
    let list = contexts(&bench, &child);
    assert_eq!(list.len(), 2, "{list:?}");
    // The parent's handler knows nothing of the child's addresses, and the other way round.
    assert_eq!(bench.load(&child, at + P), Ok(7));
    let child_ref = &child;
    beside(
        &bench,
        |cpu| store(cpu, child_ref, at + 4 * P, 1),
        || {
            let event = next(&own, cpu);
            assert_eq!((event.addr, event.kind), (at + 4 * P, FaultKind::Missing));
            assert_eq!(faults.waiting(), 0);
            own.copy(cpu, event.addr, &bytes(1, 9), PLAIN).unwrap();
        },
    )
    .unwrap();
    assert!(space.translate(cpu, at + 4 * P, Access::Read).is_none());
    // What was protected is, in both: private, shared, and what is not there yet.
    for addr in [at, shared, shared + P] {
        for (space, handler) in [(&space, &faults), (&child, &own)] {
            beside(
                &bench,
                |cpu| store(cpu, space, addr, 1),
                || {
                    let event = next(handler, cpu);
                    assert_eq!((event.addr, event.kind), (addr, FaultKind::WriteProtected));
                    handler.write_protect(cpu, addr, P, false, PLAIN).unwrap();
                },
            )
            .unwrap();
        }
    }
    bench.store(&child, shared + 2 * P, 1).unwrap();
    // The range of the handler that did not ask is nobody's in the child.
    assert_eq!(bench.load(&child, other), Ok(0));
    // A handler that goes leaves the other alone.
    drop(faults);
    assert_eq!(bench.load(&space, at + 5 * P), Ok(0));
    own.zeropage(cpu, at + 5 * P, P, PLAIN).unwrap();
    assert_eq!(contexts(&bench, &child).len(), 2);
    drop(own);
    assert!(contexts(&bench, &child).is_empty());
    drop((quiet, idle));
    child.destroy(cpu);
    space.destroy(cpu);
    bench.assert_nothing_left();
}

#[test]
fn children_whose_handlers_nobody_fetches() {
    let bench = Bench::new(512);
    let cpu = &bench.cpu;
    for how in 0..3 {
        let space = bench.space(SpaceConfig::default());
        let faults = space.user_faults(cpu, UserFeatures::EVENT_FORK).unwrap();
        let at = map(&bench, &space, 4, RW);
        faults.register(cpu, at, 4 * P, MISSING).unwrap();
        let shared_space = &space;
        let child = beside(
            &bench,
            |cpu| shared_space.fork(cpu).unwrap(),
            || {
                if how == 0 {
                    // Gone while the fork waits.
                    while faults.zeropage(cpu, at, P, PLAIN) != failed(Error::Again) {
                        space.advise(cpu, at, P, Advice::DontNeed).unwrap();
                    }
                    drop(faults);
                } else {
                    assert!(matches!(told(&faults, cpu), UserEvent::Fork(_)));
                    if how == 1 {
                        drop(faults);
                    } else {
                        // The spaces first.
                        core::mem::forget(faults.clone());
                    }
                }
            },
        );
        if how < 2 {
            assert_eq!(bench.load(&child, at + P), Ok(0), "the child's faults are nobody's");
        }
        child.destroy(cpu);
        space.destroy(cpu);
        if how < 2 {
            bench.assert_nothing_left();
        }
    }
}

#[test]
fn forks_and_handlers_beside_each_other() {
    let bench = Bench::new(2000);
    let space = &bench.space(SpaceConfig::default());
    let at = map(&bench, space, 8, RW);
    let machine: &Shared<_> = &bench.machine;
    thread::scope(|scope| {
        scope.spawn(move || {
            let cpu = Cpu::try_new(machine).unwrap();
            for round in 0..150 {
                let child = space.fork(&cpu).unwrap();
                let _ = load(&cpu, &child, at + (round % 8) * P);
                child.destroy(&cpu);
            }
        });
        // Each handler lives for a while, serves itself and its children, and goes.
        scope.spawn(move || {
            let cpu = Cpu::try_new(machine).unwrap();
            for _ in 0..40 {
                let faults = space.user_faults(&cpu, UserFeatures::EVENT_FORK).unwrap();
                faults.register(&cpu, at, 8 * P, MISSING).unwrap();
                let mut children = Vec::new();
                for _ in 0..20 {
                    let mut events = [none(); 2];
                    let Ok(count) = faults.try_read_events(&mut events) else {
                        thread::yield_now();
                        continue;
                    };
                    for event in &events[..count] {
                        match *event {
                            UserEvent::Fork(number) => children.extend(faults.forked(number).unwrap()),
                            UserEvent::Fault(fault) => drop(faults.zeropage(&cpu, fault.addr, P, PLAIN)),
                            _ => {}
                        }
                    }
                }
            }
        });
    });
    assert!(contexts(&bench, space).is_empty());
}
