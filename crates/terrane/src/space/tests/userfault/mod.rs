//! Handlers of user faults: what each call does and refuses.

mod races;

use super::{Bench, Space, load, store};
use crate::addr::{AddrRange, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::machine::Cpu;
use crate::object::Object;
use crate::page_table::PteFlags;
use crate::space::{
    FaultKind, HugePages, Incomplete, MapRequest, Resolve, SpaceConfig, UserEvent, UserFault, UserFaultModes,
    UserFaults, UserFeatures,
};
use crate::testing::{TestFile, TestHost};
use crate::vma::{Access, Advice, Prot, RemapFlags, VmFlags};
use alloc::vec::Vec;
use std::thread;

type Faults = UserFaults<TestHost>;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const MISSING: UserFaultModes = UserFaultModes::MISSING;
const WP: UserFaultModes = UserFaultModes::WP;
const MINOR: UserFaultModes = UserFaultModes::MINOR;
const PLAIN: Resolve = Resolve::empty();
const P: u64 = PAGE_SIZE;

/// Pages whose words all are `value`.
fn bytes(pages: u64, value: u64) -> Vec<u8> {
    value.to_ne_bytes().repeat((pages * P / 8) as usize)
}

fn none() -> UserEvent {
    UserEvent::Unmap(AddrRange::new(0, 0))
}

/// The fault that an event is about.
fn fault_of(event: UserEvent) -> UserFault {
    match event {
        UserEvent::Fault(fault) => fault,
        other => panic!("{other:?}"),
    }
}

/// The next event, waited for.
fn next(faults: &Faults, cpu: &Cpu<TestHost>) -> UserFault {
    let mut events = [none()];
    while faults.read_events(cpu, &mut events).unwrap() == 0 {}
    fault_of(events[0])
}

fn map(bench: &Bench, space: &Space, pages: u64, prot: Prot) -> u64 {
    space.map(&bench.cpu, MapRequest::anonymous(pages * P, prot)).unwrap()
}

fn map_shared(bench: &Bench, space: &Space, pages: u64) -> u64 {
    space.map(&bench.cpu, MapRequest::shared_anonymous(pages * P, RW)).unwrap()
}

fn handler(bench: &Bench, space: &Space) -> Faults {
    space.user_faults(&bench.cpu, UserFeatures::empty()).unwrap()
}

fn failed(error: Error) -> Result<(), Incomplete> {
    Err(Incomplete { done: 0, error })
}

fn partly(pages: u64) -> Result<(), Incomplete> {
    Err(Incomplete { done: pages * P, error: Error::Again })
}

/// What `addr` translates to, without a fault.
fn flags_at(bench: &Bench, space: &Space, addr: u64) -> Option<PteFlags> {
    space.translate(&bench.cpu, addr, Access::Read).map(|found| found.flags)
}

/// Runs `fault` on a thread of its own while `handle` runs here.
fn beside<R: Send>(
    bench: &Bench,
    fault: impl FnOnce(&Cpu<TestHost>) -> R + Send,
    handle: impl FnOnce(),
) -> R {
    let machine = &bench.machine;
    thread::scope(|scope| {
        let thread = scope.spawn(move || fault(&Cpu::try_new(machine).unwrap()));
        handle();
        thread.join().unwrap()
    })
}

#[test]
fn registering_checks_as_linux_does() {
    let bench = Bench::new(512);
    let space = bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let (mine, other) = (handler(&bench, &space), handler(&bench, &space));
    let at = map(&bench, &space, 8, RW);
    let register = |addr, len, modes| mine.register(cpu, addr, len, modes);
    // Arguments.
    assert_eq!(register(at, P, UserFaultModes::empty()), Err(Error::Invalid));
    assert_eq!(register(at, P, UserFaultModes::from_bits_retain(8)), Err(Error::Invalid));
    assert_eq!(register(at + 1, P, MISSING), Err(Error::Invalid));
    assert_eq!(register(at, P + 1, MISSING), Err(Error::Invalid));
    assert_eq!(register(at, 0, MISSING), Err(Error::Invalid));
    assert_eq!(register(0, P, MISSING), Err(Error::Invalid));
    assert_eq!(register(at, 1 << 63, MISSING), Err(Error::Invalid));
    assert_eq!(register(at, !(P - 1), MISSING), Err(Error::Invalid));
    assert_eq!(register(at + 16 * P, P, MISSING), Err(Error::Invalid), "nothing mapped");
    // Kinds.
    assert_eq!(register(at, P, MINOR), Err(Error::Invalid), "private memory knows no minor faults");
    let shared = map_shared(&bench, &space, 2);
    assert_eq!(register(shared, 2 * P, MISSING | WP | MINOR), Ok(()));
    let file = Object::file(&bench.machine, TestFile::new(&[1; 64])).unwrap();
    let of_file = space.map(cpu, MapRequest::object(&file, 0, P, RW, true)).unwrap();
    for modes in [MISSING, WP, MINOR] {
        assert_eq!(register(of_file, P, modes), Err(Error::Invalid));
    }
    assert_eq!(mine.unregister(cpu, of_file, P), Err(Error::Invalid));
    let read_only = Object::file(&bench.machine, TestFile::read_only(&[1; 64])).unwrap();
    let never = space.map(cpu, MapRequest::object(&read_only, 0, P, Prot::READ, true)).unwrap();
    assert_eq!(register(never, P, MISSING), Err(Error::Invalid));
    // Whose.
    assert_eq!(register(at + P, 2 * P, MISSING), Ok(()));
    assert_eq!(other.register(cpu, at, 8 * P, WP), Err(Error::Busy));
    assert_eq!(other.register(cpu, at + 3 * P, P, WP), Ok(()));
    assert_eq!(other.unregister(cpu, at, 8 * P), Err(Error::Invalid));
    assert_eq!(mine.unregister(cpu, at + 3 * P, P), Err(Error::Invalid));
    // Records: not registered, mine, other's, not registered.
    let list = |space: &Space| {
        let all = space.mappings(cpu).unwrap();
        all.iter()
            .filter(|m| m.range.start >= at && m.range.end <= at + 8 * P)
            .map(|m| ((m.range.start - at) / P, m.flags & VmFlags::UFFD_MODES, m.flags.user_context()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        list(&space),
        [
            (0, VmFlags::empty(), 0),
            (1, VmFlags::UFFD_MISSING, 1),
            (3, VmFlags::UFFD_WP, 2),
            (4, VmFlags::empty(), 0)
        ]
    );
    // Modes that are among those there change nothing; others replace them.
    assert_eq!(register(at + P, 2 * P, MISSING | WP), Ok(()));
    assert_eq!(register(at + P, P, WP), Ok(()));
    assert_eq!(list(&space)[1].1, VmFlags::UFFD_MISSING | VmFlags::UFFD_WP);
    assert_eq!(list(&space).len(), 4);
    // A range of two mappings with a hole between them is one request.
    space.unmap(cpu, at + 5 * P, P).unwrap();
    assert_eq!(register(at + 4 * P, 4 * P, MISSING), Ok(()));
    assert_eq!(other.unregister(cpu, at + 3 * P, P), Ok(()));
    assert_eq!(mine.unregister(cpu, at, 8 * P), Ok(()));
    assert_eq!(list(&space).iter().map(|m| (m.0, m.2)).collect::<Vec<_>>(), [(0, 0), (6, 0)]);
    drop((mine, other));
    space.destroy(cpu);
    drop((file, read_only));
    bench.assert_nothing_left();
}

#[test]
fn numbers_are_given_out_again_and_handlers_outlive_their_space() {
    let bench = Bench::new(256);
    let space = bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let at = map(&bench, &space, 4, RW);
    let number = |page: u64| {
        let all = space.mappings(cpu).unwrap();
        all.iter().find(|m| m.range.contains(at + page * P)).unwrap().flags.user_context()
    };
    let (a, b) = (handler(&bench, &space), handler(&bench, &space));
    a.register(cpu, at, P, MISSING).unwrap();
    b.register(cpu, at + P, P, MISSING).unwrap();
    assert_eq!([0, 1, 2].map(number), [1, 2, 0]);
    let again = a.clone();
    drop(a);
    assert_eq!(number(0), 1, "a clone is left");
    drop(again);
    assert_eq!([0, 1, 2].map(number), [0, 2, 0]);
    let c = handler(&bench, &space);
    c.register(cpu, at + 2 * P, P, MISSING).unwrap();
    assert_eq!([0, 1, 2].map(number), [0, 2, 1]);
    space.destroy(cpu);
    for faults in [b, c] {
        assert_eq!(faults.register(cpu, at, P, MISSING), Err(Error::NoSpace));
        assert_eq!(faults.copy(cpu, at, &bytes(1, 0), PLAIN), failed(Error::NoSpace));
        assert_eq!(faults.wake(at, P), Err(Error::NoSpace));
        assert_eq!(faults.read_events(cpu, &mut [none()]), Err(Error::NoSpace));
        assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::NoSpace));
    }
    bench.assert_nothing_left();
}

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

#[test]
fn pages_move_without_being_copied() {
    let bench = Bench::new(512);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &handler(&bench, space);
    let to = map(&bench, space, 64, RW);
    space.protect(cpu, to + 40 * P, P, Prot::READ).unwrap();
    let from = space.map(cpu, MapRequest::anonymous(64 * P, RW).fixed(to - 128 * P)).unwrap();
    let go = |to, from, pages: u64, how| faults.move_pages(cpu, to, from, pages * P, how);
    assert_eq!(go(to, from, 1, PLAIN), failed(Error::Invalid), "not registered");
    faults.register(cpu, to, 64 * P, MISSING).unwrap();
    assert_eq!(go(to + 1, from, 1, PLAIN), failed(Error::Invalid));
    assert_eq!(go(to, from + 1, 1, PLAIN), failed(Error::Invalid));
    assert_eq!(go(to, from, 0, PLAIN), failed(Error::Invalid));
    assert_eq!(go(to, from, 1, Resolve::WP), failed(Error::Invalid));
    assert_eq!(go(to, from, 41, PLAIN), failed(Error::Invalid), "not in one mapping");
    assert_eq!(go(to + 40 * P, from, 1, PLAIN), failed(Error::Invalid), "not the same protection");
    assert_eq!(go(to, from + 80 * P, 1, PLAIN), failed(Error::NotFound), "nothing mapped");
    let shared = map_shared(&bench, space, 1);
    assert_eq!(go(to, shared, 1, PLAIN), failed(Error::Invalid));
    assert_eq!(go(to, from, 1, PLAIN), failed(Error::NotFound), "no page");
    assert_eq!(go(to, from, 1, Resolve::ALLOW_SOURCE_HOLES), Ok(()));
    for page in 0..40 {
        bench.store(space, from + page * P, 100 + page).unwrap();
    }
    let frame = space.translate(cpu, from + 3 * P, Access::Read).unwrap().frame;
    go(to, from, 40, PLAIN).unwrap();
    for page in 0..40 {
        assert_eq!(bench.load(space, to + page * P), Ok(100 + page));
        assert!(space.translate(cpu, from + page * P, Access::Read).is_none());
    }
    assert_eq!(space.translate(cpu, to + 3 * P, Access::Read).unwrap().frame, frame);
    // The reverse mapping finds it where it is.
    let mut found = Vec::new();
    assert!(crate::rmap::walk::for_each_mapping(cpu, frame, |_, _, addr, _| found.push(addr)));
    assert_eq!(found, [to + 3 * P]);
    // What is there already, and what others map too.
    bench.store(space, from, 1).unwrap();
    assert_eq!(go(to, from, 1, PLAIN), failed(Error::Exists));
    bench.store(space, from + 41 * P, 2).unwrap();
    bench.store(space, from + 42 * P, 3).unwrap();
    bench.load(space, from + 43 * P).unwrap();
    assert_eq!(go(to + 41 * P, from + 41 * P, 4, PLAIN), partly(3), "the page of zeros moves, too");
    assert_eq!(bench.load(space, to + 43 * P), Ok(0));
    let child = space.fork(cpu).unwrap();
    assert_eq!(go(to + 50 * P, from, 1, PLAIN), failed(Error::Busy));
    assert_eq!(bench.load(space, from), Ok(1));
    child.destroy(cpu);
    assert_eq!(go(to + 50 * P, from, 1, PLAIN), Ok(()));
    // A fault that waits is woken.
    bench.store(space, from + P, 77).unwrap();
    let seen = beside(
        &bench,
        |cpu| load(cpu, space, to + 60 * P),
        || {
            let event = next(faults, cpu);
            go(event.addr, from + P, 1, PLAIN).unwrap();
        },
    );
    assert_eq!(seen, Ok(77));
}

#[test]
fn huge_pages_make_way() {
    let bench = Bench::new(4096);
    let config = SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() };
    let space = &bench.space(config);
    let cpu = &bench.cpu;
    let faults = &handler(&bench, space);
    let block = 512 * P;
    let request = MapRequest { align: block, ..MapRequest::anonymous(3 * block, RW) };
    let at = space.map(cpu, request).unwrap();
    bench.store(space, at, 1).unwrap();
    assert_eq!(space.page_tables(), 3, "a block");
    // Registered for missing pages, the block stays; no new one comes.
    faults.register(cpu, at, 3 * block, MISSING | WP).unwrap();
    assert_eq!(faults.copy(cpu, at + P, &bytes(1, 1), PLAIN), failed(Error::Exists));
    faults.copy(cpu, at + block, &bytes(1, 2), PLAIN).unwrap();
    assert_eq!(bench.load(space, at + block), Ok(2));
    beside(
        &bench,
        |cpu| store(cpu, space, at + 2 * block, 3),
        || {
            let event = next(faults, cpu);
            faults.zeropage(cpu, event.addr, P, PLAIN).unwrap();
        },
    )
    .unwrap();
    // Protected, it is divided.
    faults.write_protect(cpu, at + 5 * P, P, true, PLAIN).unwrap();
    assert!(flags_at(&bench, space, at + 5 * P).unwrap().contains(PteFlags::USER_WP));
    assert!(!flags_at(&bench, space, at + 6 * P).unwrap().contains(PteFlags::USER_WP));
    assert!(space.advise(cpu, at, block, Advice::Collapse).is_err());
    // And moved from, too.
    let from = space.map(cpu, MapRequest { align: block, ..MapRequest::anonymous(block, RW) }).unwrap();
    bench.store(space, from + 9 * P, 9).unwrap();
    faults.move_pages(cpu, at + block + P, from + 9 * P, P, PLAIN).unwrap();
    assert_eq!(bench.load(space, at + block + P), Ok(9));
    assert_eq!(bench.load(space, from + 9 * P), Ok(0));
    assert_eq!(bench.load(space, from + 8 * P), Ok(0));
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

#[test]
fn a_handler_may_want_signals() {
    let bench = Bench::new(128);
    let space = &bench.space(SpaceConfig::default());
    let faults = space.user_faults(&bench.cpu, UserFeatures::SIGBUS).unwrap();
    let at = map(&bench, space, 4, RW);
    faults.register(&bench.cpu, at, 2 * P, MISSING | WP).unwrap();
    assert_eq!(bench.load(space, at), Err(FaultError::Unresolved));
    assert_eq!(space.advise(&bench.cpu, at, P, Advice::PopulateWrite), Err(Error::BadAddress));
    faults.copy(&bench.cpu, at, &bytes(1, 3), Resolve::WP).unwrap();
    assert_eq!(bench.load(space, at), Ok(3));
    assert_eq!(bench.store(space, at, 1), Err(FaultError::Unresolved));
    faults.write_protect(&bench.cpu, at, P, false, PLAIN).unwrap();
    bench.store(space, at, 1).unwrap();
    assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::Again));
    drop(faults);
    assert_eq!(bench.load(space, at + P), Ok(0));
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
