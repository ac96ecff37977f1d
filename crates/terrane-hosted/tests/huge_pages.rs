//! Huge pages under processors with TLBs of their own: translations of a page of a block are translations of pages, and all
//! of them go when the block is divided, gathered, shared or unmapped.

mod common;

use common::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use terrane::space::HugePages;
use terrane::stats::Counter;
use terrane_hosted::{Collapser, CollapserConfig};

const BLOCK: u64 = 2 << 20;
const BASE: u64 = (1 << 30) - BLOCK;

fn huge_space(cpu: &Cpu, locking: Locking, huge_pages: HugePages, blocks: u64) -> Shared<Space> {
    let mut config = SpaceConfig::with_locking(locking);
    config.huge_pages = huge_pages;
    let space = Shared::try_new(Space::try_new(cpu.core(), config).unwrap()).unwrap();
    space.map(cpu.core(), MapRequest::anonymous(blocks * BLOCK, RW).fixed(BASE)).unwrap();
    space
}

#[test]
fn an_access_to_each_page_of_a_block_takes_one_fault() {
    let machine = machine(16, 2);
    let mut cpu = machine.cpu().unwrap();
    let space = huge_space(&cpu, Locking::Speculative, HugePages::Always, 2);
    cpu.switch_to(&space);
    for n in 0..1024 {
        cpu.store_u64(BASE + n * PAGE_SIZE + 8, n).unwrap();
    }
    assert_eq!(cpu.activity().faults, 2);
    assert_eq!(machine.machine().stats().sum(Counter::ThpFaultAlloc), 2);
    let child = Shared::try_new(space.fork(cpu.core()).unwrap()).unwrap();
    cpu.store_u64(BASE + 8, 5).unwrap();
    cpu.switch_to(&child);
    for n in 0..1024 {
        assert_eq!(cpu.load_u64(BASE + n * PAGE_SIZE + 8), Ok(n));
    }
}

/// Threads store to words of their own in two blocks, and find them again, while another gathers, divides, shares and protects.
#[test]
fn stores_survive_collapse_division_and_forks() {
    for (machine, locking) in variants(64, 6) {
        let main = machine.cpu().unwrap();
        let space = huge_space(&main, locking, HugePages::Always, 2);
        let end = Instant::now() + Duration::from_millis(300);
        let failed = AtomicBool::new(false);
        thread::scope(|scope| {
            let (machine, space, failed) = (&machine, &space, &failed);
            let goes_on = move || Instant::now() < end && !failed.load(Ordering::Relaxed);
            for word in 0..3 {
                scope.spawn(move || {
                    let mut cpu = machine.cpu().unwrap();
                    cpu.switch_to(space);
                    let mut random = Random::new(word + 1);
                    let mut stored = vec![0; 1024];
                    while goes_on() {
                        let n = random.below(40) * 25;
                        let at = BASE + n * PAGE_SIZE + word * 8;
                        if random.one_in(2) {
                            let value = random.next();
                            if cpu.store_u64(at, value).is_ok() {
                                stored[n as usize] = value;
                            }
                        }
                        if cpu.load_u64(at) != Ok(stored[n as usize]) {
                            failed.store(true, Ordering::Relaxed);
                            panic!("{at:#x} is not {:#x}", stored[n as usize]);
                        }
                    }
                });
            }
            let mut random = Random::new(9);
            while goes_on() {
                let cpu = main.core();
                let block = BASE + random.below(2) * BLOCK;
                match random.below(6) {
                    0..=2 => drop(space.advise(cpu, block, BLOCK, Advice::Collapse)),
                    3 => {
                        let part = block + (1 + random.below(400)) * PAGE_SIZE;
                        space.protect(cpu, part, 50 * PAGE_SIZE, Prot::READ).unwrap();
                        space.protect(cpu, part, 50 * PAGE_SIZE, RW).unwrap();
                    }
                    // Nobody stores to these pages.
                    4 => space.advise(cpu, block + 3 * PAGE_SIZE, 9 * PAGE_SIZE, Advice::DontNeed).unwrap(),
                    _ => drop(space.fork(cpu).unwrap()),
                }
            }
        });
        let made = machine.machine().stats().sum(Counter::ThpCollapseAlloc);
        assert!(made > 0, "nothing was gathered");
    }
}

#[test]
fn the_collapser_finds_what_may_be_huge() {
    let machine = machine(32, 3);
    let mut cpu = machine.cpu().unwrap();
    let space = huge_space(&cpu, Locking::Speculative, HugePages::Madvise, 3);
    cpu.switch_to(&space);
    for n in 0..3 * 512 {
        cpu.store_u64(BASE + n * PAGE_SIZE, n).unwrap();
    }
    space.advise(cpu.core(), BASE, 2 * BLOCK, Advice::HugePage).unwrap();
    let config = CollapserConfig { pause: Duration::from_millis(1), budget: 4 };
    let collapser = Collapser::start(&machine, config).unwrap();
    collapser.watch(&space);
    collapser.watch(&space);
    let end = Instant::now() + Duration::from_secs(20);
    while collapser.collapsed() < 2 && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    let rounds = collapser.rounds();
    while collapser.rounds() < rounds + 2 && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(collapser.collapsed(), 2);
    for n in 0..3 * 512 {
        assert_eq!(cpu.load_u64(BASE + n * PAGE_SIZE), Ok(n));
    }
    // The last other owner goes: so does the space.
    cpu.switch_off();
    drop(space);
    while machine.machine().usage().vmas > 0 && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    cpu.core().quiesce();
    assert_eq!(machine.machine().usage().vmas, 0);
    drop(collapser);
    assert!(matches!(
        [machine.cpu(), machine.cpu(), machine.cpu()],
        [Ok(_), Ok(_), Err(HostedError::NoCpuFree)]
    ));
}
