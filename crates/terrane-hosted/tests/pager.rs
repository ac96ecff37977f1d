//! Pages that a program supplies: on demand, in the background, not at all; and processors that look at every byte.

mod common;

use common::*;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use terrane::addr::AddrRange;
use terrane::host::IoError;
use terrane_hosted::{Pager, PagerConfig, Paging};

const PAGES: u64 = 300;
const BASE: u64 = 1 << 30;
const RANGE: AddrRange = AddrRange::new(BASE, BASE + PAGES * PAGE_SIZE);

/// What the word at `offset` is.
fn word(offset: u64) -> u64 {
    offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// Supplies words that tell where they belong, each page once.
struct Words {
    asked: Arc<Mutex<HashSet<u64>>>,
    fails_from: u64,
    pause: Duration,
}

impl Words {
    fn new() -> (Self, Arc<Mutex<HashSet<u64>>>) {
        let asked = Arc::new(Mutex::new(HashSet::new()));
        (Self { asked: Arc::clone(&asked), fails_from: u64::MAX, pause: Duration::ZERO }, asked)
    }
}

impl Pager for Words {
    fn supply(&self, offset: u64, pages: &mut [u8]) -> Result<(), IoError> {
        for page in (0..pages.len() as u64).step_by(PAGE_SIZE as usize) {
            assert!(self.asked.lock().unwrap().insert(offset + page), "a page is asked for twice");
        }
        thread::sleep(self.pause);
        if offset + pages.len() as u64 > self.fails_from {
            return Err(IoError);
        }
        for (n, bytes) in pages.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word(offset + 8 * n as u64).to_ne_bytes());
        }
        Ok(())
    }
}

fn scene(cpu: &mut Cpu) -> Shared<Space> {
    let space = Shared::try_new(Space::try_new(cpu.core(), SpaceConfig::default()).unwrap()).unwrap();
    space.map(cpu.core(), MapRequest::anonymous(RANGE.len(), RW).fixed(BASE)).unwrap();
    cpu.switch_to(&space);
    space
}

fn on_demand(threads: usize) -> PagerConfig {
    PagerConfig { threads, batch: 8, background: 0 }
}

#[test]
fn pages_come_when_they_are_asked_for_with_their_neighbours() {
    let machine = machine(16, 6);
    let mut cpu = machine.cpu().unwrap();
    let space = scene(&mut cpu);
    let (pager, asked) = Words::new();
    let paging = Paging::start(&machine, &space, RANGE, pager, on_demand(1)).unwrap();
    for page in [3, 5, 100, 299] {
        let offset = page * PAGE_SIZE + 64;
        assert_eq!(cpu.load_u64(BASE + offset), Ok(word(offset)));
    }
    // From the page to the end of its window.
    let mut pages: Vec<u64> = asked.lock().unwrap().iter().map(|offset| offset / PAGE_SIZE).collect();
    pages.sort_unstable();
    assert_eq!(pages, (3..8).chain(100..104).chain(299..300).collect::<Vec<_>>());
    let progress = paging.progress();
    assert_eq!((progress.drained, progress.failed), (0, 0));
    assert_eq!(progress.missing, PAGES - pages.len() as u64);
    assert_eq!(progress.demanded, pages.len() as u64);
    drop(paging);
    // Nobody supplies the rest.
    assert_eq!(cpu.load_u64(BASE + 200 * PAGE_SIZE), Ok(0));
}

#[test]
fn the_rest_comes_in_the_background() {
    let machine = machine(16, 6);
    let mut cpu = machine.cpu().unwrap();
    let space = scene(&mut cpu);
    let (pager, asked) = Words::new();
    let paging = Paging::start(&machine, &space, RANGE, pager, PagerConfig::default()).unwrap();
    paging.wait();
    assert_eq!((paging.progress().missing, paging.progress().failed), (0, 0));
    assert_eq!(asked.lock().unwrap().len() as u64, PAGES);
    let faults = cpu.activity().faults;
    for offset in (0..RANGE.len()).step_by(8) {
        assert_eq!(cpu.load_u64(BASE + offset), Ok(word(offset)));
    }
    assert_eq!(cpu.activity().faults, faults, "everything was there");
    // What is given back reads as zeros then.
    space.advise(cpu.core(), BASE, PAGE_SIZE, Advice::DontNeed).unwrap();
    assert_eq!(cpu.load_u64(BASE), Ok(0));
    drop(paging);
    assert!(space.mappings(cpu.core()).unwrap().iter().all(|m| m.flags.user_context() == 0));
}

#[test]
fn what_cannot_be_supplied_is_a_bus_error_and_what_is_discarded_is_zero() {
    let machine = machine(16, 6);
    let mut cpu = machine.cpu().unwrap();
    let space = scene(&mut cpu);
    let (pager, asked) = Words::new();
    let pager = Words { fails_from: 200 * PAGE_SIZE, ..pager };
    let paging = Paging::start(&machine, &space, RANGE, pager, on_demand(2)).unwrap();
    paging.discard(AddrRange::new(BASE, BASE + 2 * PAGE_SIZE));
    assert_eq!(cpu.load_u64(BASE + PAGE_SIZE), Ok(0));
    assert_eq!(cpu.load_u64(BASE + 2 * PAGE_SIZE), Ok(word(2 * PAGE_SIZE)));
    assert_eq!(cpu.load_u64(BASE + 250 * PAGE_SIZE), Err(FaultError::Poisoned));
    assert_eq!(cpu.store_u64(BASE + 250 * PAGE_SIZE, 1), Err(FaultError::Poisoned));
    assert_eq!(cpu.load_u64(BASE + 199 * PAGE_SIZE), Ok(word(199 * PAGE_SIZE)));
    assert!(!asked.lock().unwrap().contains(&0));
    assert_eq!(paging.progress().failed, 6);
}

#[test]
fn what_is_given_back_on_its_way_is_zero() {
    let machine = machine(16, 8);
    let mut cpu = machine.cpu().unwrap();
    let space = scene(&mut cpu);
    let (pager, asked) = Words::new();
    let pager = Words { pause: Duration::from_millis(5), ..pager };
    // One thread, which must read the event between two copies.
    let paging =
        Paging::start(&machine, &space, RANGE, pager, PagerConfig { threads: 1, batch: 8, background: 16 });
    let paging = paging.unwrap();
    let mut given = Vec::new();
    for page in (0..PAGES).step_by(7) {
        // While some page or other is on its way.
        while asked.lock().unwrap().len() as u64 <= page / 2 {
            thread::yield_now();
        }
        space.advise(cpu.core(), BASE + page * PAGE_SIZE, PAGE_SIZE, Advice::DontNeed).unwrap();
        given.push(page);
        assert_eq!(cpu.load_u64(BASE + page * PAGE_SIZE), Ok(0), "page {page}");
    }
    paging.wait();
    for page in 0..PAGES {
        let offset = page * PAGE_SIZE + 24;
        let expected = if given.contains(&page) { 0 } else { word(offset) };
        assert_eq!(cpu.load_u64(BASE + offset), Ok(expected), "page {page}");
    }
    // Unmapped, the rest of a window comes all the same.
    space.unmap(cpu.core(), BASE + 8 * PAGE_SIZE, PAGE_SIZE).unwrap();
    assert_eq!(cpu.load_u64(BASE + 8 * PAGE_SIZE), Err(FaultError::NotMapped));
    drop(paging);
}

/// Processors load and store everywhere while others fork the space and give pages back.
#[test]
fn many_processors_find_every_byte() {
    for (machine, _) in variants(32, 12) {
        let mut main = machine.cpu().unwrap();
        let space = scene(&mut main);
        let (pager, _) = Words::new();
        let pager = Words { pause: Duration::from_micros(300), ..pager };
        let config = PagerConfig { threads: 3, batch: 4, background: 2 };
        let paging = Paging::start(&machine, &space, RANGE, pager, config).unwrap();
        let end = Instant::now() + Duration::from_millis(300);
        let failed = AtomicBool::new(false);
        thread::scope(|scope| {
            let (machine, space, failed) = (&machine, &space, &failed);
            let goes_on = move || Instant::now() < end && !failed.load(Ordering::Relaxed);
            for me in 0..4 {
                scope.spawn(move || {
                    let mut cpu = machine.cpu().unwrap();
                    cpu.switch_to(space);
                    let mut random = Random::new(me + 1);
                    let mut stored = vec![None; PAGES as usize];
                    while goes_on() {
                        // The last pages are given back by the main thread.
                        let page = random.below(PAGES);
                        let offset = page * PAGE_SIZE + 8 * me;
                        if random.one_in(3) && page < 250 {
                            let value = random.next();
                            cpu.store_u64(BASE + offset, value).unwrap();
                            stored[page as usize] = Some(value);
                        }
                        let found = cpu.load_u64(BASE + offset);
                        let expected = stored[page as usize].unwrap_or(word(offset));
                        if found != Ok(expected) && !(page >= 250 && found == Ok(0)) {
                            failed.store(true, Ordering::Relaxed);
                            panic!("{found:x?} in page {page} instead of {expected:#x}");
                        }
                    }
                });
            }
            let mut random = Random::new(9);
            let mut cpu = machine.cpu().unwrap();
            while goes_on() {
                if random.one_in(3) {
                    let child = Shared::try_new(space.fork(cpu.core()).unwrap()).unwrap();
                    cpu.switch_to(&child);
                    let page = random.below(PAGES);
                    cpu.store_u64(BASE + page * PAGE_SIZE, 7).unwrap();
                    cpu.switch_off();
                } else {
                    let page = 250 + random.below(50);
                    space.advise(cpu.core(), BASE + page * PAGE_SIZE, PAGE_SIZE, Advice::DontNeed).unwrap();
                }
            }
        });
        drop(paging);
    }
}
