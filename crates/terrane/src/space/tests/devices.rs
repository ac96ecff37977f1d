//! Swap devices that come and go: what is on one comes back, or the device stays.

use super::model::Random;
use super::reclaim::{RW, bench, count, word};
use super::{Bench, load, store};
use crate::addr::PAGE_SIZE;
use crate::machine::Cpu;
use crate::object::Object;
use crate::space::{MapRequest, SpaceConfig};
use crate::stats::Counter;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::testing::{TestHost, TestSwap};
use crate::vma::{Advice, Prot};
use alloc::boxed::Box;

/// Everything of one space that can be in swap: private pages, some shared with a child, and shared memory.
struct Full {
    space: crate::space::AddressSpace<TestHost>,
    child: crate::space::AddressSpace<TestHost>,
    memory: crate::sync::Shared<Object<TestHost>>,
    at: u64,
    common: u64,
}

const EACH: u64 = 60;

fn full(bench: &Bench) -> Full {
    let space = bench.space(SpaceConfig::default());
    let memory = Object::shared_memory(&bench.machine, EACH * PAGE_SIZE).unwrap();
    let at = space.map(&bench.cpu, MapRequest::anonymous(2 * EACH * PAGE_SIZE, RW)).unwrap();
    let request = MapRequest::object(&memory, 0, EACH * PAGE_SIZE, RW, true);
    let common = space.map(&bench.cpu, request).unwrap();
    for n in 0..EACH {
        bench.store(&space, at + n * PAGE_SIZE, word(n, 1)).unwrap();
        bench.store(&space, common + n * PAGE_SIZE, word(n, 2)).unwrap();
    }
    space.advise(&bench.cpu, at, EACH * PAGE_SIZE, Advice::PageOut).unwrap();
    let child = space.fork(&bench.cpu).unwrap();
    for n in EACH..2 * EACH {
        bench.store(&space, at + n * PAGE_SIZE, word(n, 1)).unwrap();
    }
    space.advise(&bench.cpu, at, 2 * EACH * PAGE_SIZE, Advice::PageOut).unwrap();
    space.advise(&bench.cpu, common, EACH * PAGE_SIZE, Advice::PageOut).unwrap();
    assert_eq!(bench.machine.swap().usage().1 as u64, 3 * EACH);
    Full { space, child, memory, at, common }
}

impl Full {
    fn check(&self, bench: &Bench) {
        for n in 0..EACH {
            assert_eq!(bench.load(&self.space, self.at + n * PAGE_SIZE), Ok(word(n, 1)));
            assert_eq!(bench.load(&self.child, self.at + n * PAGE_SIZE), Ok(word(n, 1)));
            assert_eq!(bench.load(&self.space, self.at + (EACH + n) * PAGE_SIZE), Ok(word(EACH + n, 1)));
            assert_eq!(bench.load(&self.space, self.common + n * PAGE_SIZE), Ok(word(n, 2)));
        }
    }

    fn end(self, bench: &Bench) {
        self.child.destroy(&bench.cpu);
        self.space.destroy(&bench.cpu);
        drop(self.memory);
        bench.cpu.quiesce();
        assert_eq!(bench.machine.swap().usage().1, 0);
        bench.assert_nothing_left();
    }
}

#[test]
fn a_device_goes_out_of_use() {
    let (bench, swap) = bench(800, 400);
    let (machine, cpu) = (&bench.machine, &bench.cpu);
    assert_eq!(machine.swap_off(cpu, 1), Err(crate::error::Error::Invalid));
    let all = full(&bench);
    // A page that may not be accessed comes back, too; it has no entry that maps it.
    all.space.protect(cpu, all.at, PAGE_SIZE, Prot::empty()).unwrap();
    machine.swap_off(cpu, 0).unwrap();
    assert!(!machine.swap().is_on());
    assert!(machine.swap().usage().1 <= 1);
    assert_eq!(machine.swap_off(cpu, 0), Err(crate::error::Error::Invalid));
    // Nothing is asked of it any more.
    swap.fail_reads(1);
    swap.fail_writes(1);
    let before = count(&bench, Counter::SwapWriteError) + count(&bench, Counter::SwapReadError);
    all.space.advise(cpu, all.at, 2 * EACH * PAGE_SIZE, Advice::PageOut).unwrap();
    all.space.advise(cpu, all.common, EACH * PAGE_SIZE, Advice::PageOut).unwrap();
    all.space.protect(cpu, all.at, PAGE_SIZE, RW).unwrap();
    all.check(&bench);
    assert_eq!(count(&bench, Counter::SwapWriteError) + count(&bench, Counter::SwapReadError), before);
    // Another takes its place.
    assert_eq!(machine.swap_on(Box::new(TestSwap::new(400))), Ok(1));
    all.space.advise(cpu, all.at, 2 * EACH * PAGE_SIZE, Advice::PageOut).unwrap();
    assert!(machine.swap().usage().1 as u64 >= EACH);
    all.check(&bench);
    all.end(&bench);
}

#[test]
fn a_device_that_cannot_be_emptied_stays_in_use() {
    // A page cannot be read.
    let (bench, swap) = bench(800, 400);
    let all = full(&bench);
    for one_in in [1, 50] {
        swap.fail_reads(one_in);
        assert_eq!(bench.machine.swap_off(&bench.cpu, 0), Err(crate::error::Error::Io));
        assert!(bench.machine.swap().is_on());
    }
    swap.fail_reads(0);
    all.check(&bench);
    all.end(&bench);
    // There is no room for all.
    let (bench, _) = self::bench(140, 400);
    let all = full(&bench);
    assert_eq!(bench.machine.swap_off(&bench.cpu, 0), Err(crate::error::Error::NoMemory));
    all.check(&bench);
    all.end(&bench);
}

#[test]
fn pages_go_from_one_device_to_another() {
    let (bench, _) = bench(140, 400);
    bench.machine.swap_on(Box::new(TestSwap::new(400))).unwrap();
    let all = full(&bench);
    // There is no room for all in memory, but on the other device.
    bench.machine.swap_off(&bench.cpu, 0).unwrap();
    assert!(bench.machine.swap().is_on());
    all.check(&bench);
    assert_eq!(bench.machine.swap_off(&bench.cpu, 1), Err(crate::error::Error::NoMemory));
    all.check(&bench);
    all.end(&bench);
}

/// A device that takes its time, and then must not have gone out of use.
struct Slow(TestSwap, &'static [AtomicBool; 8], usize);

impl crate::swap::SwapDevice for Slow {
    fn slots(&self) -> u32 {
        self.0.slots()
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), crate::host::IoError> {
        std::thread::yield_now();
        self.0.read(slot, page)
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), crate::host::IoError> {
        self.0.write(slot, page)?;
        std::thread::sleep(std::time::Duration::from_micros(500));
        assert!(!self.1[self.2].load(Ordering::SeqCst), "a device is used that is out of use");
        Ok(())
    }
}

#[test]
fn devices_come_and_go_beside_faults_and_reclaim() {
    let bench = Bench::new(300);
    let machine = &bench.machine;
    static GONE: [AtomicBool; 8] = [const { AtomicBool::new(false) }; 8];
    let mut device = TestSwap::new(600);
    machine.swap_on(Box::new(Slow(device.clone(), &GONE, 0))).unwrap();
    let space = &bench.space(SpaceConfig::default());
    let pages = 200u64;
    let at = space.map(&bench.cpu, MapRequest::anonymous(pages * PAGE_SIZE, RW)).unwrap();
    let common = space.map(&bench.cpu, MapRequest::shared_anonymous(pages / 2 * PAGE_SIZE, RW)).unwrap();
    let stop = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                let cpu = Cpu::try_new(machine).unwrap();
                let mut random = Random::new(thread);
                let mut last = alloc::vec![0; 300];
                while !stop.load(Ordering::Relaxed) {
                    // Each page is one thread's.
                    let n = random.below(150) * 2 + thread;
                    let addr = if n < 200 { at + n * PAGE_SIZE } else { common + (n - 200) * PAGE_SIZE };
                    match random.below(4) {
                        0 => {
                            let _ = space.advise(&cpu, addr, PAGE_SIZE, Advice::PageOut);
                        }
                        1 => {
                            let value = random.below(1 << 40);
                            store(&cpu, space, addr, value).unwrap();
                            last[n as usize] = value;
                        }
                        2 if n.is_multiple_of(50) => drop(space.fork(&cpu)),
                        _ => assert_eq!(load(&cpu, space, addr), Ok(last[n as usize])),
                    }
                }
            });
        }
        for number in 0..7 {
            for _ in 0..3 {
                std::thread::yield_now();
            }
            let next = TestSwap::new(600);
            assert_eq!(
                machine.swap_on(Box::new(Slow(next.clone(), &GONE, number as usize + 1))),
                Ok(number + 1)
            );
            machine.swap_off(&bench.cpu, number).unwrap();
            GONE[number as usize].store(true, Ordering::SeqCst);
            // What was on it alone would be lost.
            device.fail_reads(1);
            device = next;
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(machine.swap_on(Box::new(TestSwap::new(1))).is_err(), "eight in all");
}
