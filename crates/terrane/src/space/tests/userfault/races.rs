//! Faults, handlers and calls side by side, with real threads: every byte is looked at, and a watchdog looks for faults that wait for ever.

use super::{FaultKind, Faults, MINOR, MISSING, P, PLAIN, RW, Space, WP, bytes, fault_of, none};
use crate::addr::PAGE_SHIFT;
use crate::error::Error;
use crate::machine::{Cpu, Machine};
use crate::object::Object;
use crate::space::tests::{Bench, load, store};
use crate::space::{Incomplete, MapRequest, Resolve, SpaceConfig, UserFault, UserFeatures};
use crate::sync::Shared;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::testing::TestHost;
use crate::vma::Advice;
use alloc::vec::Vec;
use std::thread;
use std::time::{Duration, Instant};

/// How long a race runs.
fn duration() -> Duration {
    let ms = std::env::var("TERRANE_RACES_MS").ok().and_then(|ms| ms.parse().ok()).unwrap_or(300);
    Duration::from_millis(ms)
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// What a page reads as when the handler has filled it in.
fn content(addr: u64) -> u64 {
    addr ^ 0x5555
}

/// A race: it ends after some time, and if nothing moves for long before that, somebody waits for ever.
struct Race {
    ends: Instant,
    stop: AtomicBool,
    steps: AtomicU64,
}

impl Race {
    fn new() -> Self {
        Self { ends: Instant::now() + duration(), stop: AtomicBool::new(false), steps: AtomicU64::new(0) }
    }

    /// Counts a step of a faulting thread; false when it is to end.
    fn step(&self) -> bool {
        self.steps.fetch_add(1, Ordering::Relaxed);
        Instant::now() < self.ends && !self.stop.load(Ordering::Relaxed)
    }

    /// Watches until `done`. A stand-still is a wake-up that was lost: told before the program is ended, since threads that wait cannot be.
    fn watch(&self, faults: &Faults, done: impl Fn() -> bool) {
        let (mut seen, mut since) = (0, Instant::now());
        while !done() {
            thread::sleep(Duration::from_millis(2));
            let now = self.steps.load(Ordering::Relaxed);
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            if since.elapsed() > Duration::from_secs(20) {
                std::eprintln!("no fault has ended for 20 s; {} wait", faults.waiting());
                std::process::abort();
            }
        }
    }
}

/// Reads events and resolves them until interrupted at the end.
fn handle(
    race: &Race,
    machine: &Shared<Machine<TestHost>>,
    faults: &Faults,
    mut resolve: impl FnMut(&Cpu<TestHost>, UserFault),
) {
    let cpu = Cpu::try_new(machine).unwrap();
    let mut events = [none(); 3];
    while !race.stop.load(Ordering::Relaxed) {
        let count = faults.read_events(&cpu, &mut events).unwrap();
        for &event in &events[..count] {
            resolve(&cpu, fault_of(event));
        }
    }
}

/// Copies the page's content there, however often it takes, and wakes.
fn supply(faults: &Faults, cpu: &Cpu<TestHost>, addr: u64, how: Resolve) {
    match faults.copy(cpu, addr, &bytes(1, content(addr)), how) {
        // Somebody was faster, or the page is nobody's any more: the fault looks again.
        Ok(()) => {}
        Err(Incomplete { error: Error::Exists | Error::NotFound | Error::BadAddress, .. }) => {
            let _ = faults.wake(addr, P);
        }
        Err(other) => panic!("copy: {other}"),
    }
}

/// Threads that fault, threads that resolve, and `beside`, which changes things meanwhile.
fn run(
    bench: &Bench,
    faults: &Faults,
    faulting: usize,
    handling: usize,
    fault: impl Fn(&Cpu<TestHost>, &mut Random) + Sync,
    resolve: impl Fn(&Cpu<TestHost>, UserFault) + Sync,
    beside: impl Fn(&Cpu<TestHost>, &mut Random) + Sync,
) {
    let race = &Race::new();
    let running = &AtomicU64::new(faulting as u64);
    let machine = &bench.machine;
    let (fault, resolve, beside) = (&fault, &resolve, &beside);
    thread::scope(|scope| {
        let handlers: Vec<_> =
            (0..handling).map(|_| scope.spawn(move || handle(race, machine, faults, resolve))).collect();
        for n in 0..faulting {
            scope.spawn(move || {
                let cpu = Cpu::try_new(machine).unwrap();
                let mut random = Random(0x1234_5678 + n as u64 * 77);
                while race.step() {
                    fault(&cpu, &mut random);
                }
                running.fetch_sub(1, Ordering::Relaxed);
            });
        }
        scope.spawn(move || {
            let cpu = Cpu::try_new(machine).unwrap();
            let mut random = Random(99);
            while running.load(Ordering::Relaxed) > 0 {
                beside(&cpu, &mut random);
                thread::yield_now();
            }
        });
        race.watch(faults, || running.load(Ordering::Relaxed) == 0);
        race.stop.store(true, Ordering::Relaxed);
        // Again, for one may be between its look at the mark and its wait.
        while handlers.iter().any(|handler| !handler.is_finished()) {
            faults.interrupt();
            thread::yield_now();
        }
    });
}

const PAGES: u64 = 24;

/// A space with a handler of the missing pages of its first pages.
fn scene(bench: &Bench, features: UserFeatures) -> (Space, Faults, u64) {
    let space = bench.space(SpaceConfig::default());
    let faults = space.user_faults(&bench.cpu, features).unwrap();
    let at = space.map(&bench.cpu, MapRequest::anonymous(PAGES * P, RW)).unwrap();
    (space, faults, at)
}

fn end(bench: &Bench, space: Space, faults: Faults) {
    drop(faults);
    assert!(space.mappings(&bench.cpu).unwrap().iter().all(|m| m.flags.user_context() == 0));
    space.destroy(&bench.cpu);
    bench.assert_nothing_left();
}

#[test]
fn pages_are_supplied_while_they_are_forgotten() {
    let bench = Bench::on(TestHost::with_tickets(1, 2048), 16);
    let (space, faults, at) = scene(&bench, UserFeatures::empty());
    faults.register(&bench.cpu, at, PAGES * P, MISSING).unwrap();
    let page = |random: &mut Random| at + random.below(PAGES) * P;
    run(
        &bench,
        &faults,
        4,
        2,
        |cpu, random| {
            let addr = page(random);
            assert_eq!(load(cpu, &space, addr + 8 * random.below(512)), Ok(content(addr)));
        },
        |cpu, event| supply(&faults, cpu, event.addr, PLAIN),
        |cpu, random| {
            let first = random.below(PAGES);
            let pages = 1 + random.below(PAGES - first);
            space.advise(cpu, at + first * P, pages * P, Advice::DontNeed).unwrap();
            // The background: several pages at a time.
            let first = random.below(PAGES - 4);
            let all: Vec<u8> = (first..first + 4).flat_map(|page| bytes(1, content(at + page * P))).collect();
            match faults.copy(cpu, at + first * P, &all, PLAIN) {
                Ok(()) | Err(Incomplete { error: Error::Exists | Error::Again, .. }) => {}
                Err(other) => panic!("copy: {other}"),
            }
        },
    );
    end(&bench, space, faults);
}

#[test]
fn pages_are_supplied_while_the_layout_changes() {
    let bench = Bench::on(TestHost::with_tickets(1, 4096), 16);
    let (space, faults, at) = scene(&bench, UserFeatures::empty());
    faults.register(&bench.cpu, at, PAGES * P, MISSING).unwrap();
    run(
        &bench,
        &faults,
        4,
        2,
        |cpu, random| {
            let addr = at + random.below(PAGES) * P;
            // Not mapped at all, mapped anew and empty, or filled in.
            if let Ok(value) = load(cpu, &space, addr + 16) {
                assert!(value == 0 || value == content(addr), "{value:#x} at {addr:#x}");
            }
        },
        |cpu, event| supply(&faults, cpu, event.addr, PLAIN),
        |cpu, random| {
            let first = random.below(PAGES);
            let (addr, len) = (at + first * P, (1 + random.below(4).min(PAGES - first - 1)) * P);
            match random.below(5) {
                0 => space.unmap(cpu, addr, len).unwrap(),
                1 => {
                    space.map(cpu, MapRequest::anonymous(len, RW).fixed(addr)).unwrap();
                }
                2 => {
                    let child = space.fork(cpu).unwrap();
                    for page in 0..PAGES {
                        if let Ok(value) = load(cpu, &child, at + page * P) {
                            assert!(value == 0 || value == content(at + page * P));
                        }
                    }
                    child.destroy(cpu);
                }
                3 => match faults.unregister(cpu, addr, len) {
                    Ok(()) | Err(Error::Invalid) => {}
                    Err(other) => panic!("unregister: {other}"),
                },
                _ => match faults.register(cpu, addr, len, MISSING) {
                    Ok(()) | Err(Error::Invalid) => {}
                    Err(other) => panic!("register: {other}"),
                },
            }
            // A fault whose mapping has gone waits until somebody tells it to look.
            faults.wake(addr, len).unwrap();
        },
    );
    end(&bench, space, faults);
}

#[test]
fn a_protected_page_stands_still() {
    let bench = Bench::on(TestHost::with_tickets(1, 2048), 16);
    let (space, faults, at) = scene(&bench, UserFeatures::WP_UNPOPULATED);
    let object = Object::shared_memory(&bench.machine, PAGES * P).unwrap();
    let shared = space.map(&bench.cpu, MapRequest::object(&object, 0, PAGES * P, RW, true)).unwrap();
    for start in [at, shared] {
        faults.register(&bench.cpu, start, PAGES * P, WP).unwrap();
    }
    // How many stores each page has seen, counted by those who make them, each in a word of its own.
    let stores: Vec<AtomicU64> = (0..4 * 2 * PAGES).map(|_| AtomicU64::new(0)).collect();
    let threads = AtomicU64::new(0);
    std::thread_local!(static ME: core::cell::Cell<u64> = const { core::cell::Cell::new(u64::MAX) });
    run(
        &bench,
        &faults,
        4,
        1,
        |cpu, random| {
            if ME.get() == u64::MAX {
                ME.set(threads.fetch_add(1, Ordering::Relaxed));
            }
            let page = random.below(2 * PAGES);
            let addr = if page < PAGES { at + page * P } else { shared + (page - PAGES) * P } + 8 * ME.get();
            let count = &stores[(page * 4 + ME.get()) as usize];
            let next = count.load(Ordering::Relaxed) + 1;
            store(cpu, &space, addr, next).unwrap();
            count.store(next, Ordering::Relaxed);
            assert_eq!(load(cpu, &space, addr), Ok(next));
        },
        |cpu, event| {
            assert_eq!((event.kind, event.write), (FaultKind::WriteProtected, true));
            faults.write_protect(cpu, event.addr, P, false, PLAIN).unwrap();
        },
        |cpu, random| {
            let start = if random.below(2) == 0 { at } else { shared };
            let first = random.below(PAGES);
            let (addr, pages) = (start + first * P, 1 + random.below(PAGES - first));
            faults.write_protect(cpu, addr, pages * P, true, PLAIN).unwrap();
            // Unless somebody has asked for it meanwhile, it reads the same twice.
            for page in 0..pages {
                let words = || [0, 8, 16, 24].map(|word| load(cpu, &space, addr + page * P + word).unwrap());
                let before = words();
                let protected = || {
                    let found = space.translate(cpu, addr + page * P, crate::vma::Access::Read);
                    found.is_some_and(|found| found.flags.contains(crate::page_table::PteFlags::USER_WP))
                };
                if protected() {
                    let first = words();
                    if protected() {
                        assert_eq!(first, words_if(&words, protected).unwrap_or(first));
                    }
                }
                assert!(before.iter().zip(words()).all(|(old, new)| *old <= new));
            }
            if random.below(8) == 0 {
                let child = space.fork(cpu).unwrap();
                store(cpu, &child, at, u64::MAX).unwrap();
                child.destroy(cpu);
            }
        },
    );
    for page in 0..2 * PAGES {
        let addr = if page < PAGES { at + page * P } else { shared + (page - PAGES) * P };
        faults.write_protect(&bench.cpu, addr, P, false, PLAIN).unwrap();
        for me in 0..4 {
            let count = stores[(page * 4 + me) as usize].load(Ordering::Relaxed);
            assert_eq!(bench.load(&space, addr + 8 * me), Ok(count), "a store is lost");
        }
    }
    drop(object);
    end(&bench, space, faults);
}

/// What `words` gives, if the page is protected afterwards, too.
fn words_if(words: &impl Fn() -> [u64; 4], protected: impl Fn() -> bool) -> Option<[u64; 4]> {
    let read = words();
    protected().then_some(read)
}

#[test]
fn minor_faults_beside_truncation() {
    let bench = Bench::on(TestHost::with_tickets(1, 2048), 16);
    let (space, faults, plain) = scene(&bench, UserFeatures::empty());
    let object = Object::shared_memory(&bench.machine, PAGES * P).unwrap();
    let at = space.map(&bench.cpu, MapRequest::object(&object, 0, PAGES * P, RW, true)).unwrap();
    faults.register(&bench.cpu, at, PAGES * P, MISSING | MINOR).unwrap();
    space.unmap(&bench.cpu, plain, PAGES * P).unwrap();
    run(
        &bench,
        &faults,
        4,
        2,
        |cpu, random| {
            let addr = at + random.below(PAGES) * P;
            if let Ok(value) = load(cpu, &space, addr + 8) {
                assert_eq!(value, content(addr));
            }
        },
        |cpu, event| match event.kind {
            FaultKind::Minor => match faults.resume(cpu, event.addr, P, PLAIN) {
                Ok(()) => {}
                Err(Incomplete { error: Error::Exists | Error::BadAddress | Error::Invalid, .. }) => {
                    faults.wake(event.addr, P).unwrap();
                }
                Err(other) => panic!("resume: {other}"),
            },
            _ => supply(&faults, cpu, event.addr, PLAIN),
        },
        |cpu, random| {
            if random.below(2) == 0 {
                space.advise(cpu, at, PAGES * P, Advice::DontNeed).unwrap();
            } else {
                object.set_len(cpu, random.below(PAGES + 1) << PAGE_SHIFT);
                object.set_len(cpu, PAGES * P);
            }
        },
    );
    drop(object);
    end(&bench, space, faults);
}

#[test]
fn pages_move_back_and_forth() {
    let bench = Bench::on(TestHost::with_tickets(1, 2048), 16);
    let (space, faults, at) = scene(&bench, UserFeatures::empty());
    let other =
        space.map(&bench.cpu, MapRequest::anonymous(PAGES * P, RW).fixed(at - 4 * PAGES * P)).unwrap();
    for start in [at, other] {
        faults.register(&bench.cpu, start, PAGES * P, MISSING).unwrap();
    }
    // Each page is at one of two places; the word in it says how often it was stored to.
    let holes = Resolve::ALLOW_SOURCE_HOLES;
    faults.copy(&bench.cpu, at, &bytes(PAGES, 0), PLAIN).unwrap();
    let counts: Vec<AtomicU64> = (0..4 * PAGES).map(|_| AtomicU64::new(0)).collect();
    let threads = AtomicU64::new(0);
    std::thread_local!(static ME: core::cell::Cell<u64> = const { core::cell::Cell::new(u64::MAX) });
    run(
        &bench,
        &faults,
        3,
        2,
        |cpu, random| {
            if ME.get() == u64::MAX {
                ME.set(threads.fetch_add(1, Ordering::Relaxed));
            }
            let page = random.below(PAGES);
            let start = if random.below(2) == 0 { at } else { other };
            let addr = start + page * P + 8 * ME.get();
            let count = &counts[(page * 4 + ME.get()) as usize];
            let next = count.load(Ordering::Relaxed) + 1;
            store(cpu, &space, addr, next).unwrap();
            count.store(next, Ordering::Relaxed);
        },
        |cpu, event| {
            // From wherever it is.
            let away = if event.addr >= at { event.addr - at + other } else { event.addr - other + at };
            match faults.move_pages(cpu, event.addr, away, P, PLAIN) {
                Ok(()) => {}
                Err(Incomplete { error: Error::Exists | Error::NotFound | Error::Busy, .. }) => {
                    faults.wake(event.addr, P).unwrap();
                }
                Err(error) => panic!("move: {error}"),
            }
        },
        |cpu, random| {
            let first = random.below(PAGES);
            let len = (1 + random.below(PAGES - first)) * P;
            let (to, from) = if random.below(2) == 0 { (at, other) } else { (other, at) };
            match faults.move_pages(cpu, to + first * P, from + first * P, len, holes) {
                Ok(()) | Err(Incomplete { error: Error::Exists | Error::Again | Error::Busy, .. }) => {}
                Err(error) => panic!("move: {error}"),
            }
            if random.below(16) == 0 {
                space.fork(cpu).unwrap().destroy(cpu);
            }
        },
    );
    let _ = faults.move_pages(&bench.cpu, at, other, PAGES * P, holes);
    for page in 0..PAGES {
        let from = other + page * P;
        if space.translate(&bench.cpu, at + page * P, crate::vma::Access::Read).is_none() {
            faults.move_pages(&bench.cpu, at + page * P, from, P, PLAIN).unwrap();
        }
        assert!(
            space.translate(&bench.cpu, from, crate::vma::Access::Read).is_none(),
            "a page is in two places"
        );
        for me in 0..3 {
            let count = counts[(page * 4 + me) as usize].load(Ordering::Relaxed);
            assert_eq!(bench.load(&space, at + page * P + 8 * me), Ok(count), "a store is lost");
        }
    }
    end(&bench, space, faults);
}

#[test]
fn handlers_come_and_go() {
    let bench = Bench::on(TestHost::with_tickets(1, 2048), 16);
    let (space, watched, at) = scene(&bench, UserFeatures::empty());
    run(
        &bench,
        &watched,
        4,
        1,
        |cpu, random| {
            let addr = at + random.below(PAGES) * P;
            let value = load(cpu, &space, addr).unwrap();
            assert!(value == 0 || value == content(addr));
        },
        |_, _| {},
        |cpu, random| {
            let faults = space.user_faults(cpu, UserFeatures::empty()).unwrap();
            let first = random.below(PAGES);
            let (addr, len) = (at + first * P, (1 + random.below(PAGES - first)) * P);
            faults.register(cpu, addr, len, MISSING).unwrap();
            space.advise(cpu, at, PAGES * P, Advice::DontNeed).unwrap();
            let mut events = [none(); 2];
            for _ in 0..random.below(20) {
                if let Ok(count) = faults.try_read_events(&mut events) {
                    events[..count]
                        .iter()
                        .for_each(|&event| supply(&faults, cpu, fault_of(event).addr, PLAIN));
                }
                thread::yield_now();
            }
        },
    );
    end(&bench, space, watched);
}
