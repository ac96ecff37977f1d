//! Missing pages: what fills them, and who waits for that.

use super::*;

#[test]
fn copies_fill_what_is_empty() {
    let bench = Bench::new(1024);
    let space = bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = handler(&bench, &space);
    // Something above, so that what lies behind is an address of the space.
    map(&bench, &space, 8, RW);
    let at = map(&bench, &space, 600, RW);
    assert_eq!(faults.copy(cpu, at, &bytes(1, 7), PLAIN), failed(Error::NotFound), "not registered");
    faults.register(cpu, at, 600 * P, MISSING).unwrap();
    // Arguments.
    let page = bytes(1, 7);
    assert_eq!(faults.copy(cpu, at + 1, &page, PLAIN), failed(Error::Invalid));
    assert_eq!(faults.copy(cpu, at, &page[1..], PLAIN), failed(Error::Invalid));
    assert_eq!(faults.copy(cpu, at, &[], PLAIN), failed(Error::Invalid));
    assert_eq!(faults.copy(cpu, at, &page, Resolve::ALLOW_SOURCE_HOLES), failed(Error::Invalid));
    assert_eq!(faults.copy(cpu, at, &page, Resolve::WP), failed(Error::Invalid), "not registered for it");
    assert_eq!(faults.zeropage(cpu, at, P, Resolve::WP), failed(Error::Invalid));
    assert_eq!(faults.resume(cpu, at, P, PLAIN), failed(Error::Invalid), "private memory");
    assert_eq!(faults.copy(cpu, at + 599 * P, &bytes(2, 7), PLAIN), failed(Error::NotFound));
    assert_eq!(faults.copy(cpu, at - 4096 * P, &page, PLAIN), failed(Error::NotFound));
    // More than a table's worth, and more than a batch's.
    let mut all = Vec::new();
    for n in 0..590 {
        all.extend(bytes(1, 1000 + n));
    }
    faults.copy(cpu, at + 5 * P, &all, PLAIN).unwrap();
    for n in 0..590 {
        assert_eq!(bench.load(&space, at + (5 + n) * P + 8 * (n % 512)), Ok(1000 + n));
    }
    assert_eq!(space.mm().rss().anon, 590);
    // What is there stays, and stops the call.
    assert_eq!(faults.copy(cpu, at + 5 * P, &page, PLAIN), failed(Error::Exists));
    assert_eq!(faults.copy(cpu, at + 3 * P, &bytes(3, 7), PLAIN), partly(2));
    assert_eq!(faults.zeropage(cpu, at + 4 * P, P, PLAIN), failed(Error::Exists));
    assert_eq!(faults.zeropage(cpu, at + 2 * P, 2 * P, PLAIN), partly(1));
    assert_eq!(bench.load(&space, at + 2 * P), Ok(0));
    bench.store(&space, at + 2 * P, 9).unwrap();
    assert_eq!(bench.load(&space, at + 2 * P), Ok(9));
    assert_eq!(bench.load(&space, at + 3 * P), Ok(7));
    // Pages for a mapping that allows nothing yet, or only loads.
    space.protect(cpu, at, P, Prot::empty()).unwrap();
    faults.copy(cpu, at, &bytes(1, 11), PLAIN).unwrap();
    space.protect(cpu, at, 2 * P, Prot::READ).unwrap();
    faults.copy(cpu, at + P, &bytes(1, 12), PLAIN).unwrap();
    assert_eq!([0, 1].map(|n| bench.load(&space, at + n * P)), [Ok(11), Ok(12)]);
    assert_eq!(bench.store(&space, at, 1), Err(FaultError::NotAllowed));
    space.protect(cpu, at, 2 * P, RW).unwrap();
    bench.store(&space, at, 13).unwrap();
    assert_eq!(bench.load(&space, at), Ok(13));
    drop(faults);
    space.destroy(cpu);
    bench.assert_nothing_left();
}

#[test]
fn poison_is_a_bus_error_until_it_is_forgotten() {
    let bench = Bench::new(128);
    let space = bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = handler(&bench, &space);
    let at = map(&bench, &space, 4, RW);
    faults.register(cpu, at, 4 * P, MISSING).unwrap();
    faults.poison(cpu, at, 2 * P, PLAIN).unwrap();
    assert_eq!(faults.poison(cpu, at, P, PLAIN), failed(Error::Exists));
    assert_eq!(faults.zeropage(cpu, at, P, PLAIN), failed(Error::Exists));
    assert_eq!(bench.load(&space, at), Err(FaultError::Poisoned));
    assert_eq!(bench.store(&space, at + P, 1), Err(FaultError::Poisoned));
    assert_eq!(space.advise(cpu, at, P, Advice::PopulateRead), Err(Error::Poisoned));
    space.protect(cpu, at, 4 * P, Prot::READ).unwrap();
    space.protect(cpu, at, 4 * P, RW).unwrap();
    assert_eq!(bench.load(&space, at), Err(FaultError::Poisoned));
    space.advise(cpu, at, P, Advice::DontNeed).unwrap();
    faults.copy(cpu, at, &bytes(1, 5), PLAIN).unwrap();
    assert_eq!(bench.load(&space, at), Ok(5));
    // As in Linux: a copy comes in its place.
    faults.poison(cpu, at + 2 * P, P, PLAIN).unwrap();
    faults.copy(cpu, at + 2 * P, &bytes(1, 6), PLAIN).unwrap();
    assert_eq!(bench.load(&space, at + 2 * P), Ok(6));
    drop(faults);
    assert_eq!(bench.load(&space, at + P), Err(FaultError::Poisoned));
    space.destroy(cpu);
    bench.assert_nothing_left();
}

#[test]
fn missing_pages_wait_for_their_handler() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let faults = &handler(&bench, space);
    let at = map(&bench, space, 8, RW);
    faults.register(&bench.cpu, at, 8 * P, MISSING).unwrap();
    assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::Again));
    // A load, by copy.
    let seen = beside(
        &bench,
        |cpu| load(cpu, space, at + 16),
        || {
            let event = next(faults, &bench.cpu);
            assert_eq!((event.addr, event.kind, event.write), (at, FaultKind::Missing, false));
            assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::Again), "delivered once");
            assert_eq!(faults.waiting(), 1);
            faults.copy(&bench.cpu, at, &bytes(1, 21), PLAIN).unwrap();
        },
    );
    assert_eq!((seen, faults.waiting()), (Ok(21), 0));
    // A store, by a page of zeros: the store is copied then, without another event.
    beside(
        &bench,
        |cpu| store(cpu, space, at + P, 4),
        || {
            assert!(next(faults, &bench.cpu).write);
            faults.zeropage(&bench.cpu, at + P, P, PLAIN).unwrap();
        },
    )
    .unwrap();
    assert_eq!(bench.load(space, at + P), Ok(4));
    // Without waking, and woken by hand.
    let seen = beside(
        &bench,
        |cpu| load(cpu, space, at + 2 * P),
        || {
            let event = next(faults, &bench.cpu);
            faults.copy(&bench.cpu, event.addr, &bytes(1, 33), Resolve::DONT_WAKE).unwrap();
            assert_eq!(faults.waiting(), 1);
            faults.wake(event.addr, P).unwrap();
        },
    );
    assert_eq!(seen, Ok(33));
    // Woken without a page: there is another event.
    let seen = beside(
        &bench,
        |cpu| load(cpu, space, at + 3 * P),
        || {
            let first = next(faults, &bench.cpu);
            faults.wake(at, 8 * P).unwrap();
            assert_eq!(next(faults, &bench.cpu), first);
            faults.copy(&bench.cpu, first.addr, &bytes(1, 34), PLAIN).unwrap();
        },
    );
    assert_eq!(seen, Ok(34));
    // Poison ends the wait, too; so does the end of the registration, and of the mapping with a wake.
    let seen = beside(
        &bench,
        |cpu| load(cpu, space, at + 4 * P),
        || {
            let event = next(faults, &bench.cpu);
            faults.poison(&bench.cpu, event.addr, P, PLAIN).unwrap();
        },
    );
    assert_eq!(seen, Err(FaultError::Poisoned));
    let seen = beside(
        &bench,
        |cpu| load(cpu, space, at + 5 * P),
        || {
            next(faults, &bench.cpu);
            faults.unregister(&bench.cpu, at + 5 * P, P).unwrap();
        },
    );
    assert_eq!(seen, Ok(0));
    let seen = beside(
        &bench,
        |cpu| load(cpu, space, at + 6 * P),
        || {
            let event = next(faults, &bench.cpu);
            space.unmap(&bench.cpu, event.addr, P).unwrap();
            assert_eq!(faults.copy(&bench.cpu, event.addr, &bytes(1, 1), PLAIN), failed(Error::NotFound));
            faults.wake(event.addr, P).unwrap();
        },
    );
    assert_eq!(seen, Err(FaultError::NotMapped));
    // Populating waits like a fault, page by page.
    space.advise(&bench.cpu, at, 5 * P, Advice::DontNeed).unwrap();
    let seen = beside(
        &bench,
        |cpu| space.advise(cpu, at, 4 * P, Advice::PopulateWrite),
        || {
            for _ in 0..4 {
                let event = next(faults, &bench.cpu);
                faults.copy(&bench.cpu, event.addr, &bytes(1, event.addr), PLAIN).unwrap();
            }
        },
    );
    assert_eq!(seen, Ok(()));
    assert_eq!(bench.load(space, at + 3 * P), Ok(at + 3 * P));
}

#[test]
fn who_waits_goes_on_when_the_handler_is_gone() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let faults = handler(&bench, space);
    let at = map(&bench, space, 8, RW);
    faults.register(&bench.cpu, at, 8 * P, MISSING).unwrap();
    let seen = beside(
        &bench,
        |cpu| store(cpu, space, at, 3),
        || {
            next(&faults, &bench.cpu);
            drop(faults);
        },
    );
    assert_eq!(seen, Ok(()));
    assert_eq!(bench.load(space, at), Ok(3));
    assert_eq!(space.map_count(), 1);
}

#[test]
fn events_come_in_order_and_in_batches() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let faults = &handler(&bench, space);
    let at = map(&bench, space, 8, RW);
    faults.register(&bench.cpu, at, 8 * P, MISSING).unwrap();
    let machine = &bench.machine;
    thread::scope(|scope| {
        for n in 0..6u64 {
            // One after the other, so that the order is known; the last two meet at one page.
            scope.spawn(move || load(&Cpu::try_new(machine).unwrap(), space, at + n.min(4) * P));
            while faults.waiting() <= n as usize {
                thread::yield_now();
            }
        }
        let mut events = [none(); 4];
        assert_eq!(faults.try_read_events(&mut events), Ok(4));
        assert_eq!(events.map(|event| fault_of(event).addr), [0, 1, 2, 3].map(|n| at + n * P));
        assert_eq!(faults.try_read_events(&mut events), Ok(2));
        assert_eq!([events[0], events[1]].map(|event| fault_of(event).addr), [at + 4 * P; 2]);
        assert_ne!(fault_of(events[0]).cpu, fault_of(events[1]).cpu);
        faults.copy(&bench.cpu, at, &bytes(5, 1), PLAIN).unwrap();
    });
    assert_eq!(faults.waiting(), 0);
}

#[test]
fn shared_memory_is_filled_in_the_object() {
    let bench = Bench::new(256);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &handler(&bench, space);
    let object = Object::shared_memory(&bench.machine, 4 * P).unwrap();
    let at = space.map(cpu, MapRequest::object(&object, 0, 6 * P, RW, true)).unwrap();
    let plain = space.map(cpu, MapRequest::object(&object, 0, 4 * P, RW, true)).unwrap();
    let private = space.map(cpu, MapRequest::object(&object, 0, 6 * P, RW, false)).unwrap();
    faults.register(cpu, at, 6 * P, MISSING | MINOR).unwrap();
    faults.register(cpu, private, 6 * P, MISSING | MINOR).unwrap();
    faults.copy(cpu, at, &bytes(1, 3), PLAIN).unwrap();
    assert_eq!(bench.load(space, plain), Ok(3), "it is in the object");
    faults.zeropage(cpu, at + P, P, PLAIN).unwrap();
    assert_eq!((bench.load(space, at + P), object.resident()), (Ok(0), 2));
    // In the object, and not mapped: a page is there.
    bench.store(space, plain + 2 * P, 5).unwrap();
    assert_eq!(faults.copy(cpu, at + 2 * P, &bytes(1, 9), PLAIN), failed(Error::Exists));
    let minor = |addr: u64| {
        beside(
            &bench,
            |cpu| load(cpu, space, addr),
            || {
                let event = next(faults, cpu);
                assert_eq!((event.addr, event.kind), (addr, FaultKind::Minor));
                faults.resume(cpu, addr, P, PLAIN).unwrap();
            },
        )
    };
    assert_eq!(minor(at + 2 * P), Ok(5));
    assert_eq!(minor(private + 2 * P), Ok(5));
    assert_eq!(faults.resume(cpu, at + 2 * P, P, PLAIN), failed(Error::Exists));
    assert_eq!(faults.resume(cpu, at + 3 * P, P, PLAIN), failed(Error::BadAddress), "not in memory");
    // A private page goes to nobody else.
    faults.copy(cpu, private + 3 * P, &bytes(1, 8), PLAIN).unwrap();
    assert_eq!((bench.load(space, private + 3 * P), object.resident()), (Ok(8), 3));
    bench.store(space, private + 2 * P, 6).unwrap();
    assert_eq!(bench.load(space, at + 2 * P), Ok(5));
    faults.zeropage(cpu, private, P, PLAIN).unwrap();
    assert_eq!((bench.load(space, private), bench.load(space, at)), (Ok(0), Ok(3)));
    bench.store(space, private, 1).unwrap();
    assert_eq!((bench.load(space, private), bench.load(space, at)), (Ok(1), Ok(3)));
    // Beyond the end.
    for addr in [at + 4 * P, private + 4 * P] {
        assert_eq!(faults.copy(cpu, addr, &bytes(1, 8), PLAIN), failed(Error::BadAddress));
        assert_eq!(faults.zeropage(cpu, addr, P, PLAIN), failed(Error::BadAddress));
        assert_eq!(faults.resume(cpu, addr, P, PLAIN), failed(Error::Invalid));
        assert_eq!(bench.load(space, addr), Err(FaultError::BeyondEnd));
    }
    assert_eq!(faults.poison(cpu, at + 4 * P, P, PLAIN), failed(Error::BadAddress));
}

#[test]
fn memory_runs_out_without_harm() {
    let bench = Bench::new(64);
    let space = bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = handler(&bench, &space);
    let at = map(&bench, &space, 128, RW);
    faults.register(cpu, at, 128 * P, MISSING).unwrap();
    let all = bytes(128, 5);
    let Err(Incomplete { done, error: Error::Again }) = faults.copy(cpu, at, &all, PLAIN) else {
        panic!("there are not so many frames");
    };
    assert!(done > 32 * P && done < 64 * P);
    assert_eq!(faults.copy(cpu, at + done, &all[..P as usize], PLAIN), failed(Error::NoMemory));
    space.advise(cpu, at, P, Advice::DontNeed).unwrap();
    faults.copy(cpu, at + done, &all[..P as usize], PLAIN).unwrap();
    for addr in (at + P..=at + done).step_by(P as usize) {
        assert_eq!(bench.load(&space, addr), Ok(5));
    }
    drop(faults);
    space.destroy(cpu);
    bench.assert_nothing_left();
}
