//! Threads on one space: what each stores, it finds again, whatever the others do to the space meanwhile.
//!
//! Every thread is a CPU of a host with tickets (see [`testing`](crate::testing)), and lingers in some of its accesses as
//! if it were interrupted between the translation and the touch, so that shoot-downs pass late. Each test takes
//! `TERRANE_RACES_MS` milliseconds for each way of locking (default 350).

use super::model::{Random, from_env};
use super::rmap::check_private;
use super::{Bench, Space, access};
use crate::addr::{Frame, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::machine::Cpu;
use crate::object::Object;
use crate::rmap::walk::for_each_mapping;
use crate::space::{Locking, MapRequest, SpaceConfig};
use crate::sync::Shared;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::testing::{TestFile, TestHost};
use crate::vma::{Access, Advice, Prot};
use alloc::vec::Vec;
use std::time::{Duration, Instant};

const RW: Prot = Prot::READ.union(Prot::WRITE);
pub(super) const WORKERS: u64 = 3;
const FRAMES: usize = 1500;

/// One thread: its CPU, its random numbers, and when it ends.
pub(super) struct Worker<'a> {
    pub(super) cpu: Cpu<TestHost>,
    pub(super) random: Random,
    /// It lingers once in so many accesses.
    lingers_in: u64,
    stage: &'a Stage,
}

/// The time that a test takes; ends early when a thread has failed.
pub(super) struct Stage {
    end: Instant,
    failed: AtomicBool,
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.stage.failed.store(true, Ordering::Relaxed);
        }
    }
}

impl Stage {
    pub(super) fn new() -> Self {
        let time = Duration::from_millis(from_env("TERRANE_RACES_MS").unwrap_or(350));
        Self { end: Instant::now() + time, failed: AtomicBool::new(false) }
    }

    pub(super) fn worker(&self, bench: &Bench, seed: u64) -> Worker<'_> {
        Worker {
            cpu: Cpu::try_new(&bench.machine).unwrap(),
            random: Random::new(seed),
            lingers_in: 16,
            stage: self,
        }
    }
}

impl Worker<'_> {
    pub(super) fn goes_on(&self) -> bool {
        Instant::now() < self.stage.end && !self.stage.failed.load(Ordering::Relaxed)
    }

    /// How long to stay in an access: as a rule not at all.
    fn lingers(&mut self) -> u64 {
        if self.random.one_in(self.lingers_in) { self.random.below(8) } else { 0 }
    }

    pub(super) fn load(&mut self, space: &Space, addr: u64) -> Result<u64, FaultError> {
        let lingers = self.lingers();
        access(&self.cpu, space, addr, Access::Read, |word| {
            (0..lingers).for_each(|_| std::thread::yield_now());
            word.load(Ordering::SeqCst)
        })
    }

    pub(super) fn store(&mut self, space: &Space, addr: u64, value: u64) -> Result<(), FaultError> {
        let lingers = self.lingers();
        access(&self.cpu, space, addr, Access::Write, |word| {
            (0..lingers).for_each(|_| std::thread::yield_now());
            word.store(value, Ordering::SeqCst);
        })
    }
}

fn both(test: impl Fn(&Bench, SpaceConfig, &Stage)) {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::on(TestHost::with_tickets(1, FRAMES), 12);
        test(&bench, SpaceConfig::with_locking(locking), &Stage::new());
        bench.assert_nothing_left();
    }
}

/// Stores to own words of pages that all threads use, and sees each of them again.
pub(super) fn own_words(mut me: Worker<'_>, space: &Space, pages: &[u64], number: u64) {
    let mut expected: Vec<u64> = pages.iter().map(|_| 0).collect();
    let mut value = number << 48;
    while me.goes_on() {
        let n = me.random.below(pages.len() as u64) as usize;
        let addr = pages[n] + number * 8;
        if me.random.one_in(2) {
            value += 1;
            match me.store(space, addr, value) {
                Ok(()) => expected[n] = value,
                Err(error) => assert_eq!(error, FaultError::NotAllowed),
            }
        }
        match me.load(space, addr) {
            Ok(found) => assert_eq!(found, expected[n], "{addr:#x}"),
            Err(error) => assert_eq!(error, FaultError::NotAllowed),
        }
    }
    for (&page, &expected) in pages.iter().zip(&expected) {
        assert_eq!(me.load(space, page + number * 8), Ok(expected));
    }
}

/// Uses pages that are its own, changes their mapping, and knows what is in them at any time.
pub(super) fn own_pages(mut me: Worker<'_>, space: &Space, base: u64, pages: u64) {
    let mut expected: Vec<Option<u64>> = (0..pages).map(|_| Some(0)).collect();
    let mut value = 0;
    while me.goes_on() {
        let n = me.random.below(pages);
        let addr = base + n * PAGE_SIZE;
        let place = &mut expected[n as usize];
        match me.random.below(24) {
            0 => {
                space.unmap(&me.cpu, addr, PAGE_SIZE).unwrap();
                *place = None;
            }
            1 => {
                space.map(&me.cpu, MapRequest::anonymous(PAGE_SIZE, RW).fixed(addr)).unwrap();
                *place = Some(0);
            }
            2 if place.is_some() => {
                space.advise(&me.cpu, addr, PAGE_SIZE, Advice::DontNeed).unwrap();
                *place = Some(0);
            }
            3 if place.is_some() => {
                space.protect(&me.cpu, addr, PAGE_SIZE, Prot::READ).unwrap();
                assert_eq!(me.store(space, addr + 16, 1), Err(FaultError::NotAllowed));
                assert_eq!(me.load(space, addr + 16), Ok(place.unwrap()));
                space.protect(&me.cpu, addr, PAGE_SIZE, RW).unwrap();
            }
            4 if place.is_some() => {
                space.protect(&me.cpu, addr, PAGE_SIZE, Prot::empty()).unwrap();
                assert_eq!(me.load(space, addr), Err(FaultError::NotAllowed));
                space.protect(&me.cpu, addr, PAGE_SIZE, RW).unwrap();
            }
            5 if place.is_some() => space.advise(&me.cpu, addr, PAGE_SIZE, Advice::PopulateWrite).unwrap(),
            6..=12 => {
                value += 1;
                let stored = me.store(space, addr + 16, value);
                match place {
                    Some(place) => {
                        assert_eq!(stored, Ok(()));
                        *place = value;
                    }
                    None => assert_eq!(stored, Err(FaultError::NotMapped)),
                }
            }
            _ => {
                let found = me.load(space, addr + 16);
                assert_eq!(found, place.ok_or(FaultError::NotMapped));
            }
        }
    }
}

/// Forks, and sees that the children stand still.
pub(super) fn fork_all_the_time(mut me: Worker<'_>, space: &Space, pages: &[u64]) {
    let mut children: Vec<Space> = Vec::new();
    while me.goes_on() {
        let child = space.fork(&me.cpu).unwrap();
        let words = |me: &mut Worker<'_>, child: &Space| -> Vec<_> {
            pages
                .iter()
                .flat_map(|page| (0..WORKERS).map(move |n| page + n * 8))
                .map(|at| me.load(child, at))
                .collect()
        };
        let before = words(&mut me, &child);
        for &page in pages {
            if me.random.one_in(2) {
                let stored = me.store(&child, page + 4000, 1);
                assert!(matches!(stored, Ok(()) | Err(FaultError::NotAllowed)));
            }
        }
        std::thread::yield_now();
        assert_eq!(words(&mut me, &child), before, "a child's private page has changed");
        if me.random.one_in(2) {
            children.push(child.fork(&me.cpu).unwrap());
        }
        children.push(child);
        while children.len() > 4 {
            let gone = children.remove(me.random.below(4) as usize);
            if me.random.one_in(2) {
                gone.destroy(&me.cpu);
            }
        }
    }
}

fn map_fixed(bench: &Bench, space: &Space, request: MapRequest<TestHost>, addr: u64) {
    map_fixed_on(&bench.cpu, space, request, addr);
}

fn map_fixed_on(cpu: &Cpu<TestHost>, space: &Space, request: MapRequest<TestHost>, addr: u64) {
    assert_eq!(space.map(cpu, request.fixed(addr)), Ok(addr));
}

const BASE: u64 = (8 << 20) - 24 * PAGE_SIZE;

#[test]
fn all_kinds_of_calls_at_once() {
    both(|bench, config, stage| {
        let space = bench.space(config);
        let page = |n: u64| BASE + n * PAGE_SIZE;
        // Common pages, own pages of each worker side by side, and room between them for others to map.
        let common: Vec<u64> = (0..5).map(page).collect();
        map_fixed(bench, &space, MapRequest::anonymous(5 * PAGE_SIZE, RW), page(0));
        map_fixed(bench, &space, MapRequest::anonymous(6 * WORKERS * PAGE_SIZE, RW), page(6));
        let file = TestFile::new(&[0; 6 * 4096]);
        let object = Object::file(&bench.machine, file.clone()).unwrap();
        let mapped: Vec<u64> = (30..36).map(page).collect();
        map_fixed(bench, &space, MapRequest::object(&object, 0, 6 * PAGE_SIZE, RW, true), page(30));
        std::thread::scope(|scope| {
            let (space, common, mapped, object) = (&space, &common[..], &mapped[..], &object);
            for n in 0..WORKERS {
                let [a, b, c] = [1, 2, 3].map(|kind| stage.worker(bench, n * 10 + kind));
                if n < 2 {
                    scope.spawn(move || own_words(a, space, common, n));
                    scope.spawn(move || own_words(b, space, mapped, n));
                }
                if n != 1 {
                    scope.spawn(move || own_pages(c, space, page(6 + n * 6), 6));
                }
            }
            let mut me = stage.worker(bench, 100);
            scope.spawn(move || fork_all_the_time(me, space, &common[..2]));
            me = stage.worker(bench, 101);
            scope.spawn(move || {
                while me.goes_on() {
                    let addr = page(24 + me.random.below(5));
                    match me.random.below(12) {
                        0 => space.unmap(&me.cpu, addr, 2 * PAGE_SIZE).unwrap(),
                        1 => map_fixed_on(&me.cpu, space, MapRequest::anonymous(2 * PAGE_SIZE, RW), page(24)),
                        2 => {
                            let request =
                                MapRequest::object(object, 0, 2 * PAGE_SIZE, RW, me.random.one_in(2));
                            space.map(&me.cpu, request.fixed(page(26))).unwrap();
                        }
                        3 => space
                            .protect(&me.cpu, page(me.random.below(3)), 2 * PAGE_SIZE, Prot::READ)
                            .unwrap(),
                        4 => space.protect(&me.cpu, page(31), 2 * PAGE_SIZE, Prot::READ).unwrap(),
                        5 | 6 => object.write_back(&me.cpu).unwrap(),
                        7 => drop(space.advise(&me.cpu, page(0), 40 * PAGE_SIZE, Advice::PopulateRead)),
                        8 => space.advise(&me.cpu, page(30), 6 * PAGE_SIZE, Advice::DontNeed).unwrap(),
                        9 => assert!(space.mappings(&me.cpu).unwrap().len() > 2),
                        10 => drop(me.load(space, page(26))),
                        _ => {
                            let frame = Frame(1 + me.random.below(FRAMES as u64) as u32);
                            for_each_mapping(&me.cpu, frame, |_, _, _, _| {});
                        }
                    }
                    // Common pages are not readable only for long.
                    space.protect(&me.cpu, page(0), 5 * PAGE_SIZE, RW).unwrap();
                    space.protect(&me.cpu, page(30), 6 * PAGE_SIZE, RW).unwrap();
                }
            });
        });
        check_private(&bench.cpu, &[&space]);
        object.write_back(&bench.cpu).unwrap();
        let contents = file.contents();
        for (n, &addr) in mapped.iter().enumerate() {
            for offset in (0..8 * WORKERS).step_by(8) {
                let at = n * 4096 + offset as usize;
                assert_eq!(bench.load(&space, addr + offset).unwrap().to_le_bytes(), contents[at..][..8]);
            }
        }
    });
}

#[test]
fn first_touches_while_neighbours_merge_and_split() {
    both(|bench, config, stage| {
        let space = bench.space(config);
        let part = |n: u64| BASE + n * 6 * PAGE_SIZE;
        map_fixed(bench, &space, MapRequest::anonymous(18 * PAGE_SIZE, RW), part(0));
        std::thread::scope(|scope| {
            let space = &space;
            for n in 0..3 {
                let mut me = stage.worker(bench, n);
                scope.spawn(move || {
                    let mut round = 0;
                    while me.goes_on() {
                        round += 1;
                        for page in 0..6 {
                            me.store(space, part(n) + page * PAGE_SIZE + 8, round).unwrap();
                        }
                        for page in 0..6 {
                            assert_eq!(me.load(space, part(n) + page * PAGE_SIZE + 8), Ok(round));
                        }
                        if me.random.one_in(3) {
                            // A new mapping: no anon_vma until the next store.
                            let request = MapRequest::anonymous(6 * PAGE_SIZE, RW);
                            space.map(&me.cpu, request.fixed(part(n))).unwrap();
                        }
                    }
                });
            }
            for seed in [10, 11] {
                let mut me = stage.worker(bench, seed);
                scope.spawn(move || {
                    while me.goes_on() {
                        let addr = BASE + me.random.below(16) * PAGE_SIZE;
                        let prot = if me.random.one_in(2) { RW } else { Prot::all() };
                        let done = space.protect(&me.cpu, addr, (1 + me.random.below(9)) * PAGE_SIZE, prot);
                        assert!(matches!(done, Ok(()) | Err(Error::NoMemory)));
                        if me.random.one_in(20) {
                            check_fork(&mut me, space);
                        }
                    }
                });
            }
        });
        check_private(&bench.cpu, &[&space]);
        let child = space.fork(&bench.cpu).unwrap();
        check_private(&bench.cpu, &[&space, &child]);
    });
}

fn check_fork(me: &mut Worker<'_>, space: &Space) {
    let child = space.fork(&me.cpu).unwrap();
    for n in 0..18 {
        let at = BASE + n * PAGE_SIZE + 8;
        let before = me.load(&child, at);
        me.store(&child, at, 77).unwrap();
        assert!(before.is_ok() && me.load(&child, at) == Ok(77));
    }
}

#[test]
fn forks_while_the_file_below_is_cut_short() {
    both(|bench, config, stage| {
        const PAGES: u64 = 6;
        let file = TestFile::new(&[0; PAGES as usize * 4096]);
        let object = Object::file(&bench.machine, file.clone()).unwrap();
        let space = bench.space(config);
        map_fixed(bench, &space, MapRequest::object(&object, 0, PAGES * PAGE_SIZE, RW, false), BASE);
        map_fixed(
            bench,
            &space,
            MapRequest::object(&object, 0, PAGES * PAGE_SIZE, RW, true),
            BASE + (1 << 20),
        );
        std::thread::scope(|scope| {
            let (space, object): (_, &Shared<_>) = (&space, &object);
            let mut me = stage.worker(bench, 1);
            scope.spawn(move || {
                while me.goes_on() {
                    let keep = me.random.below(PAGES) * PAGE_SIZE;
                    object.set_len(&me.cpu, keep);
                    file.set_len(keep as usize);
                    file.set_len(PAGES as usize * 4096);
                    object.set_len(&me.cpu, PAGES * PAGE_SIZE);
                    (0..me.random.below(4)).for_each(|_| std::thread::yield_now());
                }
            });
            for seed in [2, 3] {
                let mut me = stage.worker(bench, seed);
                scope.spawn(move || {
                    while me.goes_on() {
                        let at = BASE + me.random.below(PAGES) * PAGE_SIZE + seed * 8;
                        let shared = at + (1 << 20);
                        for done in [
                            me.store(space, at, seed),
                            me.load(space, at).map(drop),
                            me.load(space, shared).map(drop),
                        ] {
                            assert!(matches!(done, Ok(()) | Err(FaultError::BeyondEnd)), "{done:?}");
                        }
                        // Zero, or what was stored here: nobody else stores to these words.
                        if let Ok(found) = me.load(space, at) {
                            assert!(found == 0 || found == seed, "{found:#x}");
                        }
                        if me.random.one_in(30) {
                            let _ = space.advise(&me.cpu, at & !(PAGE_SIZE - 1), PAGE_SIZE, Advice::DontNeed);
                        }
                    }
                });
            }
            let mut me = stage.worker(bench, 4);
            scope.spawn(move || {
                let mut children: Vec<Space> = Vec::new();
                while me.goes_on() {
                    let child = space.fork(&me.cpu).unwrap();
                    let at = BASE + me.random.below(PAGES) * PAGE_SIZE;
                    let _ = me.store(&child, at, 9);
                    children.push(child);
                    if children.len() > 2 {
                        children.remove(0);
                    }
                }
            });
        });
        check_private(&bench.cpu, &[&space]);
    });
}

#[test]
fn shared_memory_that_goes_under_a_store_is_not_used_anew_too_soon() {
    both(|bench, config, stage| {
        // Few frames, so that one that is given up is soon someone else's.
        let hoard: Vec<Frame> = {
            let pin = bench.cpu.pin();
            (0..FRAMES - 120).filter_map(|_| bench.machine.frames().allocate(&pin)).collect()
        };
        let (space, other) = (bench.space(config), bench.space(config));
        map_fixed(bench, &other, MapRequest::anonymous(16 * PAGE_SIZE, RW), BASE);
        let file = TestFile::new(&[0; 4 * 4096]);
        let object = Object::file(&bench.machine, file.clone()).unwrap();
        let cut = BASE + (1 << 20);
        map_fixed(bench, &space, MapRequest::object(&object, 0, 4 * PAGE_SIZE, RW, true), cut);
        std::thread::scope(|scope| {
            let (space, other, object) = (&space, &other, &object);
            for seed in [1, 2] {
                let mut me = stage.worker(bench, seed);
                me.lingers_in = 2;
                scope.spawn(move || {
                    while me.goes_on() {
                        // Wherever that store arrives, it must not be in `other`.
                        let at = [BASE, cut][me.random.below(2) as usize] + me.random.below(4) * PAGE_SIZE;
                        let done = me.store(space, at, u64::MAX);
                        assert!(matches!(
                            done,
                            Ok(())
                                | Err(FaultError::NotMapped
                                    | FaultError::BeyondEnd
                                    | FaultError::OutOfMemory)
                        ));
                    }
                });
            }
            let mut me = stage.worker(bench, 3);
            scope.spawn(move || {
                while me.goes_on() {
                    let request = MapRequest::shared_anonymous(4 * PAGE_SIZE, RW).fixed(BASE);
                    let mapped = space.map(&me.cpu, request);
                    (0..me.random.below(6)).for_each(|_| std::thread::yield_now());
                    match mapped {
                        Ok(_) => space.unmap(&me.cpu, BASE, 4 * PAGE_SIZE).unwrap(),
                        Err(error) => assert_eq!(error, Error::NoMemory),
                    }
                    if me.random.one_in(3) {
                        space.advise(&me.cpu, cut, 4 * PAGE_SIZE, Advice::DontNeed).unwrap();
                        object.set_len(&me.cpu, 0);
                        object.set_len(&me.cpu, 4 * PAGE_SIZE);
                    }
                    me.cpu.quiesce();
                }
            });
            let mut me = stage.worker(bench, 4);
            scope.spawn(move || {
                while me.goes_on() {
                    for page in 0..16 {
                        match me.store(other, BASE + page * PAGE_SIZE, page) {
                            Ok(()) => assert_eq!(me.load(other, BASE + page * PAGE_SIZE), Ok(page)),
                            Err(error) => assert_eq!(error, FaultError::OutOfMemory),
                        }
                    }
                    for page in 0..16 {
                        if let Ok(found) = me.load(other, BASE + page * PAGE_SIZE) {
                            assert!(found == page || found == 0, "a store of another space: {found:#x}");
                        }
                    }
                    other.advise(&me.cpu, BASE, 16 * PAGE_SIZE, Advice::DontNeed).unwrap();
                }
            });
        });
        drop((space, other, object));
        let pin = bench.cpu.pin();
        hoard.into_iter().for_each(|frame| bench.machine.frames().free(&pin, frame));
    });
}

#[test]
fn memory_runs_out_under_all_threads() {
    both(|bench, config, stage| {
        let space = bench.space(config);
        let hoard: Vec<Frame> = {
            let pin = bench.cpu.pin();
            (0..FRAMES - 160).filter_map(|_| bench.machine.frames().allocate(&pin)).collect()
        };
        let each = 80 * PAGE_SIZE;
        map_fixed(bench, &space, MapRequest::anonymous(4 * each, RW), BASE);
        std::thread::scope(|scope| {
            let space = &space;
            for n in 0..3 {
                let mut me = stage.worker(bench, n);
                scope.spawn(move || {
                    let base = BASE + n * each;
                    while me.goes_on() {
                        let mut stored = 0;
                        for page in 0..80 {
                            match me.store(space, base + page * PAGE_SIZE, page + 1) {
                                Ok(()) => stored += 1,
                                Err(error) => {
                                    assert_eq!(error, FaultError::OutOfMemory);
                                    break;
                                }
                            }
                        }
                        for page in 0..stored {
                            assert_eq!(me.load(space, base + page * PAGE_SIZE), Ok(page + 1));
                        }
                        if me.random.one_in(4) {
                            match space.fork(&me.cpu) {
                                Ok(child) => drop(child),
                                Err(error) => assert_eq!(error, Error::NoMemory),
                            }
                        }
                        space.advise(&me.cpu, base, each, Advice::DontNeed).unwrap();
                    }
                });
            }
        });
        drop(space);
        let pin = bench.cpu.pin();
        hoard.into_iter().for_each(|frame| bench.machine.frames().free(&pin, frame));
    });
}
