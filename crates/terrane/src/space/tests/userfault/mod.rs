//! Handlers of user faults: what each call does and refuses.

mod calls;
mod follow;
mod missing;
mod moves;
mod protect;
mod races;
mod swapped;
mod written;

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

/// The next event that is no fault, waited for.
fn told(faults: &Faults, cpu: &Cpu<TestHost>) -> UserEvent {
    let mut events = [none()];
    while faults.read_events(cpu, &mut events).unwrap() == 0 {}
    events[0]
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
    // No more mappings than there may be.
    let limited = bench.space(SpaceConfig { map_limit: Some(3), ..SpaceConfig::default() });
    let at = map(&bench, &limited, 8, RW);
    let faults = handler(&bench, &limited);
    assert_eq!(faults.register(cpu, at + P, 6 * P, MISSING), Ok(()));
    assert_eq!(faults.unregister(cpu, at + 2 * P, P), Err(Error::NoMemory));
    assert_eq!(faults.register(cpu, at + 2 * P, P, WP), Err(Error::NoMemory));
    assert_eq!(faults.unregister(cpu, at + P, 6 * P), Ok(()));
    assert_eq!(faults.register(cpu, at, 4 * P, MISSING), Ok(()));
    drop(faults);
    limited.destroy(cpu);
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
