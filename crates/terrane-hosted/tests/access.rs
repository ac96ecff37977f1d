//! One processor against real spaces: what loads, stores, atomics and transfers do, and what they refuse.

mod common;

use common::*;
use std::io::Write;
use std::sync::{Arc, Mutex};
use terrane::page_table::PteFlags;
use terrane::stats::Counter;

const PAGE: u64 = PAGE_SIZE;

#[test]
fn every_size_at_every_offset_across_a_page_boundary() {
    for machine in all_machines(16, 2) {
        let (mut cpu, _space) = cpu_with_space(&machine);
        let at = map(&cpu, 3, RW);
        let mut model = vec![0u8; 3 * PAGE as usize];
        let mut random = Random::new(7);
        for offset in PAGE - 10..PAGE + 10 {
            let (place, value) = (offset as usize, random.next());
            cpu.store_u64(at + offset, value).unwrap();
            model[place..place + 8].copy_from_slice(&value.to_ne_bytes());
            cpu.store_u32(at + offset + 3, value as u32).unwrap();
            model[place + 3..place + 7].copy_from_slice(&(value as u32).to_ne_bytes());
            cpu.store_u16(at + offset + 9, value as u16).unwrap();
            model[place + 9..place + 11].copy_from_slice(&(value as u16).to_ne_bytes());
            cpu.store_u8(at + offset + 1, value as u8).unwrap();
            model[place + 1] = value as u8;
            assert_eq!(cpu.load_u64(at + offset).unwrap().to_ne_bytes(), model[place..place + 8]);
            assert_eq!(cpu.load_u32(at + offset).unwrap().to_ne_bytes(), model[place..place + 4]);
            assert_eq!(cpu.load_u16(at + offset).unwrap().to_ne_bytes(), model[place..place + 2]);
            assert_eq!(cpu.load_u8(at + offset).unwrap(), model[place]);
        }
        let mut all = vec![1; model.len()];
        cpu.read_bytes(at, &mut all).unwrap();
        assert!(all == model);
    }
}

#[test]
fn transfers_of_every_alignment() {
    let machine = machine(16, 2);
    let (mut cpu, _space) = cpu_with_space(&machine);
    let at = map(&cpu, 4, RW);
    let mut model = vec![0u8; 4 * PAGE as usize];
    let mut random = Random::new(11);
    for round in 0..400 {
        let start = random.below(4 * PAGE - 1);
        let len = random.below((4 * PAGE - start).min(if round % 2 == 0 { 40 } else { 4 * PAGE })) as usize;
        let place = start as usize;
        if round % 5 == 0 {
            cpu.fill_bytes(at + start, len, round as u8).unwrap();
            model[place..place + len].fill(round as u8);
        } else {
            random.fill(&mut model[place..place + len]);
            cpu.write_bytes(at + start, &model[place..place + len]).unwrap();
        }
        let from = random.below(4 * PAGE) as usize;
        let mut read = vec![0; random.below(4 * PAGE - from as u64 + 1) as usize];
        cpu.read_bytes(at + from as u64, &mut read).unwrap();
        assert!(read == model[from..from + read.len()], "round {round}");
    }
}

#[test]
fn without_a_space_nothing_is_mapped() {
    let machine = machine(16, 2);
    let mut cpu = machine.cpu().unwrap();
    assert_eq!(cpu.load_u8(0x10000), Err(FaultError::NotMapped));
    let space = space(&cpu, Locking::Speculative);
    cpu.switch_to(&space);
    let at = map(&cpu, 1, RW);
    cpu.store_u64(at, 5).unwrap();
    assert!(space.host_state().contains(cpu.id()));
    cpu.switch_off();
    assert!(!space.host_state().contains(cpu.id()));
    assert_eq!(cpu.load_u64(at), Err(FaultError::NotMapped));
    cpu.switch_to(&space);
    assert_eq!(cpu.load_u64(at), Ok(5));
}

#[test]
fn permissions_are_kept_and_change() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let machine = machine(16, 2);
        let mut cpu = machine.cpu().unwrap();
        let space = space(&cpu, locking);
        cpu.switch_to(&space);
        let at = map(&cpu, 2, RW);
        cpu.store_u64(at, 1).unwrap();
        assert_eq!(cpu.execute(at), Err(FaultError::NotAllowed));
        space.protect(cpu.core(), at, PAGE, Prot::READ).unwrap();
        assert_eq!(cpu.store_u64(at, 2), Err(FaultError::NotAllowed));
        assert_eq!(cpu.fetch_add_u64(at, 2), Err(AtomicError::Fault(FaultError::NotAllowed)));
        assert_eq!(cpu.compare_exchange_u64(at, 9, 9), Err(AtomicError::Fault(FaultError::NotAllowed)));
        assert_eq!(cpu.load_u64(at), Ok(1));
        // The second page may be written, the first not: nothing of a store across both happens.
        cpu.store_u64(at + PAGE, u64::MAX).unwrap();
        assert_eq!(cpu.store_u64(at + PAGE - 4, 0), Err(FaultError::NotAllowed));
        assert_eq!(cpu.load_u64(at + PAGE), Ok(u64::MAX));
        space.protect(cpu.core(), at, PAGE, Prot::empty()).unwrap();
        assert_eq!(cpu.load_u64(at), Err(FaultError::NotAllowed));
        space.protect(cpu.core(), at, PAGE, Prot::READ | Prot::EXEC).unwrap();
        assert_eq!((cpu.load_u64(at), cpu.execute(at)), (Ok(1), Ok(())));
        space.protect(cpu.core(), at, PAGE, RW).unwrap();
        cpu.store_u64(at, 3).unwrap();
        assert_eq!(cpu.execute(at), Err(FaultError::NotAllowed));
        space.unmap(cpu.core(), at, PAGE).unwrap();
        assert_eq!(cpu.load_u64(at), Err(FaultError::NotMapped));
        assert_eq!(cpu.store_u64(at + PAGE - 4, 0), Err(FaultError::NotMapped));
        assert_eq!(cpu.load_u32(u64::MAX - 3), Err(FaultError::NotMapped));
        assert_eq!(cpu.load_u64(u64::MAX - 2), Err(FaultError::NotMapped));
    }
}

#[test]
fn an_interrupted_transfer_says_how_far_it_came() {
    let machine = machine(16, 2);
    let (mut cpu, space) = cpu_with_space(&machine);
    let at = map(&cpu, 3, RW);
    cpu.fill_bytes(at, 3 * PAGE as usize, 0x11).unwrap();
    space.protect(cpu.core(), at + PAGE, PAGE, Prot::READ).unwrap();
    let buffer = vec![0x22; 2 * PAGE as usize];
    let interrupted = Interrupted { done: 100, error: FaultError::NotAllowed };
    assert_eq!(cpu.write_bytes(at + PAGE - 100, &buffer), Err(interrupted));
    assert_eq!(cpu.fill_bytes(at + PAGE - 100, 101, 0x22), Err(interrupted));
    assert_eq!(cpu.load_u8(at + PAGE - 1), Ok(0x22));
    assert_eq!(cpu.load_u8(at + PAGE), Ok(0x11));
    space.unmap(cpu.core(), at + 2 * PAGE, PAGE).unwrap();
    let mut buffer = vec![0; 2 * PAGE as usize + 1];
    let interrupted = Interrupted { done: 2 * PAGE as usize - 100, error: FaultError::NotMapped };
    assert_eq!(cpu.read_bytes(at + 100, &mut buffer), Err(interrupted));
    assert_eq!(
        (buffer[0], buffer[2 * PAGE as usize - 101], buffer[2 * PAGE as usize - 100]),
        (0x11, 0x11, 0)
    );
    assert_eq!(cpu.read_bytes(u64::MAX, &mut buffer).unwrap_err().done, 0);
    assert_eq!(cpu.read_bytes(0, &mut []), Ok(()));
}

#[test]
fn atomics_do_what_they_say_and_refuse_what_is_not_aligned() {
    let machine = machine(16, 2);
    let (mut cpu, _space) = cpu_with_space(&machine);
    let at = map(&cpu, 1, RW);
    assert_eq!(cpu.fetch_add_u64(at, 5), Ok(0));
    assert_eq!(cpu.swap_u64(at, 7), Ok(5));
    assert_eq!(cpu.compare_exchange_u64(at, 5, 9), Ok(Err(7)));
    assert_eq!(cpu.compare_exchange_u64(at, 7, 9), Ok(Ok(7)));
    assert_eq!(cpu.fetch_add_u32(at, u32::MAX), Ok(9));
    assert_eq!(cpu.swap_u32(at, 1), Ok(8));
    assert_eq!(cpu.compare_exchange_u32(at, 1, 2), Ok(Ok(1)));
    assert_eq!(cpu.load_u64(at), Ok(2));
    assert_eq!(cpu.fetch_add_u64(at + 4, 1), Err(AtomicError::Misaligned));
    assert_eq!(cpu.fetch_add_u32(at + 2, 1), Err(AtomicError::Misaligned));
    assert_eq!(cpu.fetch_add_u32(at + PAGE, 1), Err(AtomicError::Fault(FaultError::NotMapped)));
}

#[test]
fn accessed_and_dirty_are_set_when_they_should_be() {
    let machine = machine(16, 2);
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4 * PAGE).unwrap();
    let (mut cpu, space) = cpu_with_space(&machine);
    let object = machine.open(file.path(), true).unwrap();
    let at = space.map(cpu.core(), MapRequest::object(&object, 0, 4 * PAGE, RW, true)).unwrap();
    cpu.load_u8(at).unwrap();
    let flags = space.fault(cpu.core(), at, Access::Read).unwrap().flags;
    assert!(flags.contains(PteFlags::ACCESSED) && !flags.intersects(PteFlags::DIRTY | PteFlags::WRITE));
    // The first store to a clean page of a file is a fault, the second is not even a walk.
    let before = cpu.activity();
    cpu.store_u8(at, 1).unwrap();
    let after = cpu.activity();
    assert_eq!((after.faults, after.walks), (before.faults + 1, before.walks + 1));
    assert!(space.fault(cpu.core(), at, Access::Read).unwrap().flags.contains(PteFlags::DIRTY));
    cpu.store_u8(at + 1, 2).unwrap();
    assert_eq!(cpu.activity(), after);
    // Once written back it is clean again, and the next store is noticed.
    space.sync(cpu.core(), at, PAGE).unwrap();
    cpu.load_u8(at).unwrap();
    assert!(!space.fault(cpu.core(), at, Access::Read).unwrap().flags.contains(PteFlags::DIRTY));
    cpu.store_u8(at, 3).unwrap();
    assert_eq!(cpu.activity().faults, after.faults + 1);
    // Shared memory is mapped writable by a load; the first store finds it clean, and marks it without a fault.
    let at = space.map(cpu.core(), MapRequest::shared_anonymous(PAGE, RW)).unwrap();
    cpu.load_u8(at).unwrap();
    let before = cpu.activity();
    cpu.store_u8(at, 1).unwrap();
    assert_eq!(cpu.activity().faults, before.faults);
    assert!(space.translate(cpu.core(), at, Access::Read).unwrap().flags.contains(PteFlags::DIRTY));
}

#[test]
fn parent_and_child_do_not_see_each_others_bytes() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let machine = machine(32, 2);
        let mut cpu = machine.cpu().unwrap();
        let parent = space(&cpu, locking);
        cpu.switch_to(&parent);
        let at = map(&cpu, 16, RW);
        let shared = parent.map(cpu.core(), MapRequest::shared_anonymous(PAGE, RW)).unwrap();
        for n in 0..8 {
            cpu.fill_bytes(at + n * PAGE, PAGE as usize, n as u8 + 1).unwrap();
        }
        cpu.store_u64(shared, 1).unwrap();
        let child = Shared::try_new(parent.fork(cpu.core()).unwrap()).unwrap();
        // The parent's translations, some of them writable, are in the TLB: they must not be used any more.
        cpu.store_u8(at, 0xaa).unwrap();
        cpu.switch_to(&child);
        for n in 0..16 {
            let expected = if n < 8 { n as u8 + 1 } else { 0 };
            let mut page = vec![0; PAGE as usize];
            cpu.read_bytes(at + n * PAGE, &mut page).unwrap();
            assert!(page.iter().all(|&byte| byte == expected), "page {n}");
        }
        cpu.store_u8(at + PAGE, 0xbb).unwrap();
        cpu.store_u8(at + 9 * PAGE, 0xcc).unwrap();
        cpu.store_u64(shared, 2).unwrap();
        cpu.switch_to(&parent);
        assert_eq!(cpu.load_u8(at), Ok(0xaa));
        assert_eq!(cpu.load_u8(at + 1), Ok(1));
        assert_eq!(cpu.load_u8(at + PAGE), Ok(2));
        assert_eq!(cpu.load_u8(at + 9 * PAGE), Ok(0));
        assert_eq!(cpu.load_u64(shared), Ok(2));
        cpu.switch_off();
        drop((parent, child));
        cpu.core().quiesce();
        let usage = machine.machine().usage();
        assert_eq!((usage.frames_free, usage.vmas), (usage.frames_total - 1, 0));
    }
}

#[test]
fn files_are_read_and_written_on_disk() {
    let machine = machine(32, 2);
    let len = 10 * PAGE as usize + 123;
    let mut contents = vec![0; len];
    Random::new(3).fill(&mut contents);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&contents).unwrap();
    {
        let (mut cpu, space) = cpu_with_space(&machine);
        let object = machine.open(file.path(), true).unwrap();
        let bytes = 11 * PAGE;
        let shared = space.map(cpu.core(), MapRequest::object(&object, 0, bytes, RW, true)).unwrap();
        let private =
            space.map(cpu.core(), MapRequest::object(&object, PAGE, bytes - PAGE, RW, false)).unwrap();
        let mut read = vec![0; len];
        cpu.read_bytes(shared, &mut read).unwrap();
        assert!(read == contents);
        // Behind the end, the rest of the last page reads as zeros.
        assert_eq!(cpu.load_u8(shared + len as u64), Ok(0));
        cpu.write_bytes(private, b"stays here").unwrap();
        cpu.write_bytes(shared + PAGE - 3, b"reaches the file").unwrap();
        contents[PAGE as usize - 3..][..16].copy_from_slice(b"reaches the file");
        let mut read = [0; 10];
        cpu.read_bytes(private, &mut read).unwrap();
        assert_eq!(&read, b"stays here");
        space.sync(cpu.core(), shared, 2 * PAGE).unwrap();
        assert!(std::fs::read(file.path()).unwrap() == contents);
        // What is not synchronised is written when the last mapping and the object go.
        cpu.write_bytes(shared + len as u64 - 5, b"at last and beyond").unwrap();
        contents[len - 5..].copy_from_slice(b"at la");
    }
    assert!(std::fs::read(file.path()).unwrap() == contents);
}

#[test]
fn a_file_opened_for_reading_cannot_be_mapped_shared_and_writable() {
    let machine = machine(16, 2);
    let (mut cpu, space) = cpu_with_space(&machine);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[5; 100]).unwrap();
    let object = machine.open(file.path(), false).unwrap();
    let request = |prot, shared| MapRequest::object(&object, 0, PAGE, prot, shared);
    assert_eq!(space.map(cpu.core(), request(RW, true)), Err(Error::Access));
    let shared = space.map(cpu.core(), request(Prot::READ, true)).unwrap();
    assert_eq!(cpu.load_u8(shared + 99), Ok(5));
    assert_eq!(space.protect(cpu.core(), shared, PAGE, RW), Err(Error::Access));
    let private = space.map(cpu.core(), request(RW, false)).unwrap();
    cpu.store_u8(private, 6).unwrap();
    assert_eq!((cpu.load_u8(private), cpu.load_u8(shared)), (Ok(6), Ok(5)));
    assert!(machine.open("/", false).is_err());
}

#[test]
fn two_machines_live_side_by_side() {
    let (a, b) = (machine(16, 2), machine(16, 2));
    let ((mut cpu_a, space_a), (mut cpu_b, space_b)) = (cpu_with_space(&a), cpu_with_space(&b));
    let request = || MapRequest::anonymous(4 * PAGE, RW).fixed(1 << 30);
    let at = space_a.map(cpu_a.core(), request()).unwrap();
    assert_eq!(space_b.map(cpu_b.core(), request()), Ok(at));
    for n in 0..4 {
        cpu_a.store_u64(at + n * PAGE, n).unwrap();
        cpu_b.store_u64(at + n * PAGE, n + 100).unwrap();
    }
    space_a.unmap(cpu_a.core(), at, PAGE).unwrap();
    for n in 1..4 {
        assert_eq!(cpu_a.load_u64(at + n * PAGE), Ok(n));
    }
    for n in 0..4 {
        assert_eq!(cpu_b.load_u64(at + n * PAGE), Ok(n + 100));
    }
    assert_eq!(cpu_a.load_u64(at), Err(FaultError::NotMapped));
    assert_eq!(a.machine().stats().sum(Counter::Unmap), 1);
    assert_eq!(b.machine().stats().sum(Counter::Unmap), 0);
}

#[test]
fn processors_are_limited_and_come_back() {
    let machine = machine(16, 3);
    let cpus: Vec<Cpu> = (0..3).map(|_| machine.cpu().unwrap()).collect();
    assert_eq!(machine.cpu().err(), Some(HostedError::NoCpuFree));
    let last = cpus[2].id();
    drop(cpus);
    assert!((0..3).map(|_| machine.cpu().unwrap()).all(|cpu| cpu.id() <= last));
    for cpus in [0, terrane_hosted::MAX_CPUS + 1] {
        let config = MachineConfig { cpus, ..MachineConfig::default() };
        assert_eq!(HostedMachine::new(config).err(), Some(HostedError::BadCpuCount { asked: cpus }));
    }
    let config = MachineConfig { memory: 0, ..MachineConfig::default() };
    assert_eq!(HostedMachine::new(config).err(), Some(HostedError::NoMemoryAsked));
    let config =
        MachineConfig { memory: 8 << 20, cpus: terrane_hosted::MAX_CPUS, ..MachineConfig::default() };
    let machine = HostedMachine::new(config).unwrap();
    let all: Vec<Cpu> = (0..terrane_hosted::MAX_CPUS).map(|_| machine.cpu().unwrap()).collect();
    assert!(machine.cpu().is_err());
    drop(all);
}

#[test]
fn events_reach_the_sink_with_their_address() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = {
        let seen = seen.clone();
        Box::new(move |cpu, event: terrane::stats::Event| seen.lock().unwrap().push((cpu, event)))
    };
    let config = MachineConfig { memory: 16 << 20, cpus: 2, ..MachineConfig::default() };
    let machine = HostedMachine::with_events(config, sink).unwrap();
    let (mut cpu, _space) = cpu_with_space(&machine);
    let at = map(&cpu, 2, RW);
    cpu.store_u8(at + PAGE + 5, 1).unwrap();
    let events = seen.lock().unwrap();
    assert!(events.iter().any(|(who, event)| {
        *who == cpu.id() && event.kind == Counter::PgFault && event.address & !(PAGE - 1) == at + PAGE
    }));
}

#[test]
fn running_out_of_memory_is_an_error_and_not_the_end() {
    let machine = machine(2, 2);
    let (mut cpu, space) = cpu_with_space(&machine);
    let at = map(&cpu, 4096, RW);
    let written = cpu.fill_bytes(at, 4096 * PAGE as usize, 1).unwrap_err();
    assert_eq!(written.error, FaultError::OutOfMemory);
    assert!(written.done as u64 > 400 * PAGE);
    assert_eq!(cpu.load_u8(at), Ok(1));
    space.unmap(cpu.core(), at, 4096 * PAGE).unwrap();
    let at = map(&cpu, 100, RW);
    cpu.fill_bytes(at, 100 * PAGE as usize, 2).unwrap();
}

#[test]
fn most_accesses_hit_the_tlb() {
    let machine = machine(16, 2);
    let (mut cpu, space) = cpu_with_space(&machine);
    let at = map(&cpu, 64, RW);
    cpu.fill_bytes(at, 64 * PAGE as usize, 1).unwrap();
    let warm = cpu.activity();
    assert_eq!(warm.faults, 64);
    for n in 0..64 * PAGE / 8 {
        cpu.store_u64(at + n * 8, n).unwrap();
    }
    assert_eq!(cpu.activity(), warm);
    // Unmapping a page elsewhere costs its own translation only.
    let other = map(&cpu, 1, RW);
    cpu.store_u8(other, 1).unwrap();
    space.unmap(cpu.core(), other, PAGE).unwrap();
    let before = cpu.activity();
    for n in 0..64 {
        cpu.load_u8(at + n * PAGE).unwrap();
    }
    assert_eq!(cpu.activity(), before);
}
