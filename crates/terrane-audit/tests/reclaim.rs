//! Pages that come back from swap, and faults beside reclaim and beside handlers of other memory.
#![cfg(terrane_watch)]

mod stage;

use stage::*;
use std::sync::Mutex;
use terrane::host::IoError;
use terrane::object::Object;
use terrane::space::{UserFaultModes, UserFeatures};
use terrane::swap::SwapDevice;

/// Faults of one processor in one round.
const FAULTS: u64 = 128;

const NONE: &[Exception] = &[];

/// A device in memory, page by page.
struct Device(Vec<Mutex<Vec<u8>>>);

impl Device {
    fn new(slots: usize) -> Box<Self> {
        Box::new(Self((0..slots).map(|_| Mutex::new(vec![0; PAGE as usize])).collect()))
    }
}

impl SwapDevice for Device {
    fn slots(&self) -> u32 {
        self.0.len() as u32
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), IoError> {
        page.copy_from_slice(&self.0[slot as usize].lock().unwrap());
        Ok(())
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), IoError> {
        self.0[slot as usize].lock().unwrap().copy_from_slice(page);
        Ok(())
    }
}

/// A stage with swap, and private memory.
fn swapping() -> Stage {
    let stage = Stage::new(SpaceConfig::default());
    stage.machine.machine().swap_on(Device::new(8192)).unwrap();
    stage.space.map(stage.cpus[0].core(), MapRequest::anonymous(LENGTH, RW).fixed(BASE)).unwrap();
    stage
}

fn stores(cpu: &mut Cpu, at: u64) {
    for page in 0..FAULTS {
        cpu.store_u64(at + page * PAGE, page).unwrap();
    }
}

fn loads(cpu: &mut Cpu, at: u64) {
    for page in 0..FAULTS {
        assert_eq!(cpu.load_u64(at + page * PAGE), Ok(page));
    }
}

/// Stores to an area and has it swapped out.
fn swapped_out(cpu: &mut Cpu, space: &Space, at: u64) {
    stores(cpu, at);
    space.advise(cpu.core(), at, FAULTS * PAGE, Advice::PageOut).unwrap();
}

fn assert_apart(result: Result<(), String>) {
    if let Err(shared) = result {
        panic!("lines in common:\n{shared}");
    }
}

#[test]
fn swap_in() {
    let mut stage = swapping();
    assert_apart(stage.audit(FAULTS, NONE, swapped_out, |cpu, _, at| loads(cpu, at)));
    assert_eq!(stage.machine.machine().swap().usage().1, 0, "something is in swap still");
}

#[test]
fn swap_in_by_stores() {
    let mut stage = swapping();
    assert_apart(stage.audit(FAULTS, NONE, swapped_out, |cpu, _, at| stores(cpu, at)));
}

#[test]
fn swap_in_of_shared_memory() {
    let mut stage = Stage::new(SpaceConfig::default());
    let machine = stage.machine.machine();
    machine.swap_on(Device::new(8192)).unwrap();
    let object = Object::shared_memory(machine, LENGTH).unwrap();
    let cpu = stage.cpus[0].core();
    stage.space.map(cpu, MapRequest::object(&object, 0, LENGTH, RW, true).fixed(BASE)).unwrap();
    stage.names.field("owners of the object", &object);
    let exceptions = [
        Exception {
            field: "owners of the object",
            in_a_hundred: 400,
            why: "a fault that waits for a device holds nothing but the object: it becomes an owner, and ceases to be one",
        },
        Exception {
            field: "machine.frames.pool",
            in_a_hundred: 4,
            why: "the frames of the pages that went out are not in the cache of who brings them back",
        },
    ];
    assert_apart(stage.audit(FAULTS, &exceptions, swapped_out, |cpu, _, at| loads(cpu, at)));
    assert_eq!(stage.machine.machine().swap().usage().1, 0, "something is in swap still");
}

/// Two slots share a line, as two frames' metadata do. Pages that one processor swaps out together lie together, so they meet where pages of
/// two who fault lie beside each other: here every second one.
#[test]
fn swap_in_of_what_was_swapped_out_by_turns() {
    let mut stage = swapping();
    stage.warm_up();
    for round in 0..=ROUNDS {
        for k in 0..2 {
            stores(&mut stage.cpus[k], area(k, round));
        }
        for page in 0..FAULTS {
            for k in 0..2 {
                let at = area(k, round) + page * PAGE;
                stage.space.advise(stage.cpus[0].core(), at, PAGE, Advice::PageOut).unwrap();
            }
        }
    }
    let exceptions = [Exception {
        field: "machine.swap.slots",
        in_a_hundred: 2400,
        why: "two slots of 32 bytes share a line; the pages in them were swapped out one after the other, and belong to two who fault",
    }];
    assert_apart(stage.again(FAULTS, &exceptions, |cpu, _, at| loads(cpu, at)));
}

/// Reclaim goes round once beside who faults, on the other processor, and takes what it finds.
#[test]
fn faults_beside_reclaim() {
    let mut stage = swapping();
    stage.sharing = Sharing::Written;
    let exceptions = [
        Exception {
            field: "machine.frames.metas",
            in_a_hundred: 1200,
            why: "reclaim marks pages whose marks it has taken, and gives the frames of those that go another life",
        },
        Exception {
            field: "space.page_table.table of level 1",
            in_a_hundred: 1200,
            why: "reclaim takes marks from the entries of pages, and the entries themselves",
        },
        Exception {
            field: "machine.frames.pool",
            in_a_hundred: 20,
            why: "the frames of pages that went come back by way of the pool, 64 at a time",
        },
        Exception {
            field: "machine.epoch.slots",
            in_a_hundred: 1200,
            why: "reclaim that has freed pages looks, in the name of the other CPUs, what frames wait there",
        },
    ];
    let act = |cpu: &mut Cpu, _: &Space, at: u64| {
        if at < BASE + (ROUNDS + 1) * AREA {
            stores(cpu, at);
        } else {
            terrane::reclaim::balance(cpu.core(), usize::MAX, usize::MAX);
        }
    };
    assert_apart(stage.audit(FAULTS, &exceptions, |_, _, _| (), act));
    assert!(stage.machine.machine().swap().usage().1 > 0, "nothing was reclaimed");
}

/// A handler has faults of other memory of the space: those here are none of its business.
#[test]
fn faults_beside_a_registration() {
    let mut stage = swapping();
    let space = stage.space.clone();
    let other = BASE + (1 << 38);
    let cpu = stage.cpus[0].core();
    space.map(cpu, MapRequest::anonymous(AREA, RW).fixed(other)).unwrap();
    let faults = space.user_faults(cpu, UserFeatures::empty()).unwrap();
    faults.register(cpu, other, AREA, UserFaultModes::MISSING | UserFaultModes::WP).unwrap();
    let with_table = |cpu: &mut Cpu, _: &Space, at: u64| {
        cpu.load_u64(at + TABLE - PAGE).unwrap();
    };
    assert_apart(stage.audit(FAULTS, NONE, with_table, |cpu, _, at| stores(cpu, at)));
    drop(faults);
}

/// The same, while the handler resolves faults of its own memory.
#[test]
fn faults_beside_copies_of_a_handler() {
    let mut stage = swapping();
    let space = stage.space.clone();
    let faults = {
        let cpu = stage.cpus[0].core();
        let faults = space.user_faults(cpu, UserFeatures::empty()).unwrap();
        let second = area(1, 0);
        faults.register(cpu, second, LENGTH / 2, UserFaultModes::MISSING).unwrap();
        faults
    };
    let with_table = |cpu: &mut Cpu, _: &Space, at: u64| {
        if at < area(1, 0) {
            cpu.load_u64(at + TABLE - PAGE).unwrap();
        } else {
            faults.zeropage(cpu.core(), at + TABLE - PAGE, PAGE, terrane::space::Resolve::empty()).unwrap();
        }
    };
    let bytes = vec![7; PAGE as usize];
    let act = |cpu: &mut Cpu, _: &Space, at: u64| {
        if at < area(1, 0) {
            return stores(cpu, at);
        }
        for page in 0..FAULTS {
            let to = at + page * PAGE;
            faults.copy(cpu.core(), to, &bytes, terrane::space::Resolve::empty()).unwrap();
        }
    };
    assert_apart(stage.audit(FAULTS, NONE, with_table, act));
}
