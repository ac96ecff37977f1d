//! How often processors are asked to forget translations, and which.

mod common;

use common::*;
use std::sync::Barrier;
use std::thread;
use terrane::stats::{Counter, Snapshot};

const PAGE: u64 = PAGE_SIZE;
const REGION: u64 = 2 << 20;

fn snapshot(machine: &HostedMachine) -> Snapshot {
    machine.machine().stats().snapshot()
}

fn touch(cpu: &mut Cpu, at: u64, pages: u64) {
    for page in 0..pages {
        cpu.store_u64(at + page * PAGE, page).unwrap();
    }
}

/// What was counted while `act` ran: shoot-downs that asked others, requests received, and calls without one.
fn counted(machine: &HostedMachine, act: impl FnOnce()) -> [u64; 3] {
    let before = snapshot(machine);
    act();
    let since = snapshot(machine).since(&before);
    [Counter::TlbRemoteFlush, Counter::TlbRemoteFlushReceived, Counter::TlbFlushSkipped]
        .map(|counter| since.get(counter))
}

#[test]
fn a_call_asks_once_however_many_pages_it_is_about() {
    let machine = machine(16, 2);
    let (mut cpu, space) = cpu_with_space(&machine);
    let mut other = machine.cpu().unwrap();
    other.switch_to(&space);
    let at = map(&cpu, 1000, RW);
    let idle = space.map(cpu.core(), MapRequest::anonymous(1000 * PAGE, RW).fixed(0x10_0000_0000)).unwrap();
    touch(&mut cpu, at, 1000);
    touch(&mut other, at, 1000);
    let length = 1000 * PAGE;
    assert_eq!(counted(&machine, || space.protect(cpu.core(), at, length, Prot::READ).unwrap()), [1, 0, 0]);
    assert_eq!(other.load_u64(at), Ok(0));
    let received = counted(&machine, || {
        space.unmap(cpu.core(), at, length).unwrap();
        assert_eq!(other.load_u64(at), Err(FaultError::NotMapped));
    });
    assert_eq!(received, [1, 1, 0]);
    // Nothing was ever touched there: no call needs a shoot-down.
    let nothing = counted(&machine, || {
        space.protect(cpu.core(), idle, length, Prot::READ).unwrap();
        space.advise(cpu.core(), idle, length, Advice::DontNeed).unwrap();
        space.unmap(cpu.core(), idle, length).unwrap();
    });
    assert_eq!(nothing, [0, 0, 3]);
}

#[test]
fn a_space_on_one_processor_asks_nobody() {
    let machine = machine(16, 3);
    let (mut cpu, space) = cpu_with_space(&machine);
    // One that runs another space, and one that has been here and holds nothing any more.
    let (mut elsewhere, _space) = cpu_with_space(&machine);
    let there = map(&elsewhere, 10, RW);
    touch(&mut elsewhere, there, 10);
    let at = map(&cpu, 100, RW);
    let mut gone = machine.cpu().unwrap();
    gone.switch_to(&space);
    touch(&mut gone, at, 100);
    gone.switch_off();
    let before = snapshot(&machine);
    for _ in 0..10 {
        touch(&mut cpu, at, 100);
        space.protect(cpu.core(), at, 50 * PAGE, Prot::READ).unwrap();
        space.protect(cpu.core(), at, 50 * PAGE, RW).unwrap();
        space.advise(cpu.core(), at, 100 * PAGE, Advice::DontNeed).unwrap();
    }
    drop(space.fork(cpu.core()).unwrap());
    touch(&mut cpu, at, 100);
    space.unmap(cpu.core(), at, 100 * PAGE).unwrap();
    assert_eq!(cpu.load_u64(at), Err(FaultError::NotMapped));
    let since = snapshot(&machine).since(&before);
    assert_eq!(since.get(Counter::TlbRemoteFlush), 0);
    assert_eq!(since.get(Counter::TlbRemoteFlushReceived), 0);
    assert!(since.get(Counter::TlbLocalFlushAll) > 0, "its own TLB is flushed all the same");
}

#[test]
fn few_pages_are_dropped_one_by_one() {
    let machine = machine(16, 1);
    let (mut cpu, space) = cpu_with_space(&machine);
    let at = map(&cpu, 8, RW);
    touch(&mut cpu, at, 8);
    let before = snapshot(&machine);
    space.advise(cpu.core(), at, 3 * PAGE, Advice::DontNeed).unwrap();
    assert_eq!(cpu.load_u64(at), Ok(0));
    let since = snapshot(&machine).since(&before);
    assert_eq!((since.get(Counter::TlbLocalFlushOne), since.get(Counter::TlbLocalFlushAll)), (3, 0));
}

/// Processors that work in areas of their own, in one space, have nothing to say to each other.
#[test]
fn own_areas_ask_nobody() {
    for shaken in [false, true] {
        let config = MachineConfig { memory: 64 << 20, cpus: 4, shaken, ..MachineConfig::default() };
        let machine = HostedMachine::new(config).unwrap();
        let (cpu, space) = cpu_with_space(&machine);
        let start = Barrier::new(3);
        let before = snapshot(&machine);
        thread::scope(|scope| {
            for area in 0..3u64 {
                let (machine, space, start) = (&machine, &space, &start);
                scope.spawn(move || {
                    let mut cpu = machine.cpu().unwrap();
                    cpu.switch_to(space);
                    start.wait();
                    let at = 0x10_0000_0000 + area * 4 * REGION;
                    for round in 0..60 {
                        let request = MapRequest::anonymous(4 * REGION, RW).fixed(at);
                        assert_eq!(space.map(cpu.core(), request).unwrap(), at);
                        for page in (0..2048).step_by(61) {
                            cpu.store_u64(at + page * PAGE, round).unwrap();
                        }
                        space.protect(cpu.core(), at, 2 * REGION, Prot::READ).unwrap();
                        assert_eq!(cpu.store_u64(at, 1), Err(FaultError::NotAllowed));
                        space.advise(cpu.core(), at + 2 * REGION, 2 * REGION, Advice::DontNeed).unwrap();
                        assert_eq!(cpu.load_u64(at + 33 * 61 * PAGE), Ok(0));
                        assert_eq!(cpu.load_u64(at), Ok(round));
                        space.unmap(cpu.core(), at, 4 * REGION).unwrap();
                        assert_eq!(cpu.load_u64(at), Err(FaultError::NotMapped));
                    }
                });
            }
        });
        let since = snapshot(&machine).since(&before);
        assert_eq!(since.get(Counter::TlbRemoteFlush), 0);
        assert_eq!(since.get(Counter::TlbRemoteFlushReceived), 0);
        assert!(since.get(Counter::TlbLocalFlushAll) >= 3 * 60);
        drop(cpu);
    }
}

#[test]
fn write_back_and_truncation_ask_once_a_batch_and_mapping() {
    const PAGES: u64 = 200;
    let machine = machine(16, 2);
    let (mut cpu, space) = cpu_with_space(&machine);
    let mut other = machine.cpu().unwrap();
    other.switch_to(&space);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, &vec![1; (PAGES * PAGE) as usize]).unwrap();
    let object = machine.open(file.path(), true).unwrap();
    let request = || MapRequest::object(&object, 0, PAGES * PAGE, RW, true);
    let maps = [(); 2].map(|()| space.map(cpu.core(), request()).unwrap());
    let private = space.map(cpu.core(), MapRequest::object(&object, 0, PAGES * PAGE, RW, false)).unwrap();
    for at in [maps[0], maps[1], private] {
        touch(&mut cpu, at, PAGES);
        touch(&mut other, at, PAGES);
    }
    // 64 pages to a batch.
    let [asked, ..] = counted(&machine, || object.write_back(cpu.core()).unwrap());
    assert_eq!(asked, PAGES.div_ceil(64) * maps.len() as u64);
    assert_eq!(machine.machine().stats().sum(Counter::PgPgOut), PAGES);
    let [asked, ..] = counted(&machine, || object.write_back(cpu.core()).unwrap());
    assert_eq!(asked, 0, "nothing is dirty");
    // Dirty pages far from each other: a batch each, as the pages between them are not to be gone over.
    cpu.store_u64(maps[0], 7).unwrap();
    other.store_u64(maps[1] + (PAGES - 1) * PAGE, 8).unwrap();
    object.write_back(cpu.core()).unwrap();
    let bytes = std::fs::read(file.path()).unwrap();
    assert_eq!((bytes[0], bytes[((PAGES - 1) * PAGE) as usize]), (7, 8));
    for at in [maps[0], maps[1], private] {
        touch(&mut other, at, PAGES);
    }
    let [asked, ..] = counted(&machine, || object.set_len(cpu.core(), 10 * PAGE));
    assert_eq!(asked, 3);
    for at in [maps[0], maps[1], private] {
        assert_eq!(other.load_u64(at + 9 * PAGE), Ok(9));
        assert_eq!(other.load_u64(at + 10 * PAGE), Err(FaultError::BeyondEnd));
    }
}
