//! A machine with a quarter of the memory that its programs use: every byte stays what it is.

mod common;

use common::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;
use terrane::host::IoError;
use terrane::object::Object;
use terrane::stats::Counter;
use terrane::swap::SwapDevice;
use terrane_hosted::{Reclaimer, ReclaimerConfig, SwapFile};

const PAGE: u64 = PAGE_SIZE;

/// A swap file of which some reads and writes fail.
struct Failing {
    file: SwapFile,
    reads: u64,
    writes: u64,
    calls: AtomicU64,
}

impl Failing {
    fn fails(&self, one_in: u64) -> Result<(), IoError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if one_in > 0 && call.is_multiple_of(one_in) { Err(IoError) } else { Ok(()) }
    }
}

impl SwapDevice for Failing {
    fn slots(&self) -> u32 {
        self.file.slots()
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), IoError> {
        self.fails(self.reads)?;
        self.file.read(slot, page)
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), IoError> {
        self.fails(self.writes)?;
        self.file.write(slot, page)
    }
}

/// Does `act` until the page that it needs can be read.
fn again<T>(mut act: impl FnMut() -> Result<T, FaultError>, errors: &AtomicU64) -> T {
    loop {
        match act() {
            Ok(value) => return value,
            Err(FaultError::Io) => errors.fetch_add(1, Ordering::Relaxed),
            Err(error) => panic!("{error}"),
        };
    }
}

/// Threads with private memory, common memory, a common file and forked children, all four times as large as the machine.
fn pressure(machine: &HostedMachine, locking: Locking, failing: Option<(u64, u64)>, background: bool) {
    const THREADS: u64 = 3;
    const PAGES: u64 = 448;
    let directory = tempfile::tempdir().unwrap();
    let swap_bytes = 16 << 20;
    match failing {
        None => {
            machine.swap_on(directory.path().join("swap"), swap_bytes).unwrap();
        }
        Some((reads, writes)) => {
            let file = SwapFile::create(directory.path().join("swap"), swap_bytes).unwrap();
            let device = Failing { file, reads, writes, calls: AtomicU64::new(1) };
            machine.machine().swap_on(Box::new(device)).unwrap();
        }
    }
    let reclaimer = background.then(|| {
        let config =
            ReclaimerConfig { pause: Duration::from_millis(1), ..ReclaimerConfig::for_machine(machine) };
        Reclaimer::start(machine, config).unwrap()
    });
    let path = directory.path().join("file");
    std::fs::write(&path, vec![0; (THREADS * PAGES * PAGE) as usize]).unwrap();
    let object = machine.open(&path, true).unwrap();
    let (cpu, space) = cpu_with(machine, locking);
    let len = THREADS * PAGES * PAGE;
    let place = |request| space.map(cpu.core(), request).unwrap();
    let bases = [
        place(MapRequest::anonymous(len, RW)),
        place(MapRequest::shared_anonymous(len, RW)),
        place(MapRequest::object(&object, 0, len, RW, true)),
    ];
    let errors = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (machine, space, errors) = (machine, &space, &errors);
            scope.spawn(move || {
                let mut cpu = machine.cpu().unwrap();
                cpu.switch_to(space);
                let mut random = Random::new(thread + 7);
                let mut model = [const { [0u64; PAGES as usize] }; 3];
                for round in 1..4000u64 {
                    let kind = random.below(3) as usize;
                    let n = random.below(PAGES);
                    let addr = bases[kind] + (thread * PAGES + n) * PAGE + 8 * (n % 500);
                    if random.one_in(2) {
                        again(|| cpu.store_u64(addr, round), errors);
                        model[kind][n as usize] = round;
                    } else {
                        assert_eq!(again(|| cpu.load_u64(addr), errors), model[kind][n as usize]);
                    }
                    if round % 1000 == 500 {
                        let child = space.fork(cpu.core());
                        let Ok(child) = child else { continue };
                        let child = Shared::try_new(child).unwrap();
                        cpu.switch_to(&child);
                        for n in (0..PAGES).step_by(9) {
                            let addr = bases[0] + (thread * PAGES + n) * PAGE + 8 * (n % 500);
                            assert_eq!(again(|| cpu.load_u64(addr), errors), model[0][n as usize]);
                            again(|| cpu.store_u64(addr, u64::MAX), errors);
                        }
                        cpu.switch_to(space);
                    }
                }
                for (kind, base) in bases.into_iter().enumerate() {
                    for n in 0..PAGES {
                        let addr = base + (thread * PAGES + n) * PAGE + 8 * (n % 500);
                        let value = again(|| cpu.load_u64(addr), errors);
                        assert_eq!(value, model[kind][n as usize], "page {n} of kind {kind}");
                    }
                }
            });
        }
    });
    assert_eq!(errors.load(Ordering::Relaxed) > 0, failing.is_some());
    let stats = machine.machine().stats();
    assert!(stats.sum(Counter::PswpOut) > 1000 && stats.sum(Counter::PswpIn) > 500);
    assert!(stats.sum(Counter::PgStealFile) > 200);
    drop(reclaimer);
    drop((cpu, space));
    Object::write_back(&object, machine.cpu().unwrap().core()).unwrap();
    drop(object);
    let cpu = machine.cpu().unwrap();
    cpu.core().quiesce();
    assert_eq!(machine.machine().swap().usage().1, 0, "slots leaked");
}

/// 4 MiB of memory for 16 MiB of pages.
#[test]
fn a_quarter_of_the_memory_is_enough() {
    let [plain, fenced, shaken] = all_machines(4, 8);
    pressure(&plain, Locking::Speculative, None, true);
    pressure(&fenced, Locking::Classic, None, false);
    pressure(&shaken, Locking::Speculative, None, true);
}

#[test]
fn and_with_a_swap_device_that_fails_now_and_then() {
    let [plain, _, shaken] = all_machines(4, 8);
    pressure(&plain, Locking::Speculative, Some((20, 10)), true);
    pressure(&shaken, Locking::Speculative, Some((7, 5)), false);
}

/// Memory is at an end, and swap too: an error for who asks, and nothing lost.
#[test]
fn the_end_of_memory_and_swap_is_an_error() {
    let machine = machine(2, 2);
    let directory = tempfile::tempdir().unwrap();
    // Two devices, and one that has gone out of use.
    assert!(matches!(machine.swap_on(directory.path().join("gone"), 1 << 20), Ok(0)));
    assert!(matches!(machine.swap_on(directory.path().join("swap"), 1 << 19), Ok(1)));
    assert!(matches!(machine.swap_on(directory.path().join("more"), 1 << 19), Ok(2)));
    let (mut cpu, space) = cpu_with_space(&machine);
    machine.machine().swap_off(cpu.core(), 0).unwrap();
    let at = map(&cpu, 4096, RW);
    let mut stored = 0;
    let error = loop {
        match cpu.store_u64(at + stored * PAGE, stored + 1) {
            Ok(()) => stored += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error, FaultError::OutOfMemory);
    assert!(stored > 700 && stored < 768, "{stored}");
    space.unmap(cpu.core(), at + (stored - 20) * PAGE, 20 * PAGE).unwrap();
    for n in 0..stored - 20 {
        assert_eq!(cpu.load_u64(at + n * PAGE), Ok(n + 1));
    }
}
