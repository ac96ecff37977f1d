//! Reclaim and swap: with a quarter of the memory that is in use, every byte stays what it is.

use super::model::{Random, from_env};
use super::{Bench, load, store};
use crate::addr::PAGE_SIZE;
use crate::error::{Error, FaultError};
use crate::host::Memory;
use crate::machine::Cpu;
use crate::object::Object;
use crate::reclaim::{balance, migrate, page_out};
use crate::space::{HugePages, Locking, MapRequest, SpaceConfig};
use crate::stats::Counter;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::testing::{TestFile, TestHost, TestSwap};
use crate::vma::{Access, Advice, Prot};
use alloc::boxed::Box;
use alloc::vec::Vec;

pub(super) const RW: Prot = Prot::READ.union(Prot::WRITE);

pub(super) fn bench(frames: usize, slots: usize) -> (Bench, TestSwap) {
    let bench = Bench::new(frames);
    let swap = TestSwap::new(slots);
    bench.machine.swap_on(Box::new(swap.clone())).unwrap();
    (bench, swap)
}

pub(super) fn count(bench: &Bench, counter: Counter) -> u64 {
    bench.machine.stats().sum(counter)
}

/// What page `n` holds in round `round`.
pub(super) fn word(n: u64, round: u64) -> u64 {
    (n + 1) << 32 | round
}

#[test]
fn private_memory_four_times_as_large_as_the_machine() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let (bench, _) = bench(160, 2048);
        let space = bench.space(SpaceConfig::with_locking(locking));
        let pages = 600;
        let at = space.map(&bench.cpu, MapRequest::anonymous(pages * PAGE_SIZE, RW)).unwrap();
        for round in 0..3 {
            for n in 0..pages {
                if round > 0 {
                    assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(word(n, round - 1)));
                }
                bench.store(&space, at + n * PAGE_SIZE, word(n, round)).unwrap();
            }
        }
        assert!(count(&bench, Counter::PswpOut) > 3 * (pages - 160));
        assert!(count(&bench, Counter::PswpIn) > 2 * (pages - 160));
        assert!(count(&bench, Counter::PgMajFault) >= 2 * (pages - 160));
        // What is unmapped is gone from swap too.
        space.unmap(&bench.cpu, at, pages / 2 * PAGE_SIZE).unwrap();
        assert!(bench.machine.swap().usage().1 <= 300);
        space
            .advise(&bench.cpu, at + pages / 2 * PAGE_SIZE, PAGE_SIZE * pages / 2, Advice::DontNeed)
            .unwrap();
        assert_eq!(bench.machine.swap().usage().1, 0);
        assert_eq!(bench.load(&space, at + (pages - 1) * PAGE_SIZE), Ok(0));
        space.destroy(&bench.cpu);
        bench.assert_nothing_left();
    }
}

#[test]
fn files_and_shared_memory_larger_than_the_machine() {
    let (bench, _) = bench(200, 1024);
    let pages = 500u64;
    let file = TestFile::new(&alloc::vec![7; (pages * PAGE_SIZE) as usize]);
    let object = Object::file(&bench.machine, file.clone()).unwrap();
    let memory = Object::shared_memory(&bench.machine, pages * PAGE_SIZE).unwrap();
    let space = bench.space(SpaceConfig::default());
    let map = |object, shared| {
        space.map(&bench.cpu, MapRequest::object(object, 0, pages * PAGE_SIZE, RW, shared)).unwrap()
    };
    let (shared, private, common) = (map(&object, true), map(&object, false), map(&memory, true));
    for n in 0..pages {
        assert_eq!(bench.load(&space, private + n * PAGE_SIZE + 8), Ok(0x0707_0707_0707_0707));
        bench.store(&space, shared + n * PAGE_SIZE, word(n, 1)).unwrap();
        bench.store(&space, common + n * PAGE_SIZE, word(n, 2)).unwrap();
        if n % 5 == 0 {
            bench.store(&space, private + n * PAGE_SIZE, word(n, 3)).unwrap();
        }
    }
    for n in 0..pages {
        let private_word = if n % 5 == 0 { word(n, 3) } else { word(n, 1) };
        assert_eq!(bench.load(&space, shared + n * PAGE_SIZE), Ok(word(n, 1)));
        assert_eq!(bench.load(&space, private + n * PAGE_SIZE), Ok(private_word));
        assert_eq!(bench.load(&space, common + n * PAGE_SIZE), Ok(word(n, 2)));
    }
    assert!(object.resident() + memory.resident() < 200);
    assert!(count(&bench, Counter::PgStealFile) > 1000 && count(&bench, Counter::PgStealAnon) > 0);
    // Cut short: what is in swap goes too.
    memory.set_len(&bench.cpu, pages / 2 * PAGE_SIZE);
    assert_eq!(bench.load(&space, common + (pages - 1) * PAGE_SIZE), Err(FaultError::BeyondEnd));
    object.set_len(&bench.cpu, PAGE_SIZE);
    memory.set_len(&bench.cpu, pages * PAGE_SIZE);
    assert_eq!(bench.load(&space, common + (pages - 1) * PAGE_SIZE), Ok(0));
    assert_eq!(bench.load(&space, common), Ok(word(0, 2)));
    space.destroy(&bench.cpu);
    drop((object, memory));
    bench.cpu.quiesce();
    assert_eq!(bench.machine.swap().usage().1, 0);
    bench.assert_nothing_left();
    let contents = file.contents();
    for n in 0..pages as usize {
        assert_eq!(contents[n * PAGE_SIZE as usize..][..8], word(n as u64, 1).to_le_bytes(), "page {n}");
    }
}

#[test]
fn forked_pages_stay_shared_and_diverge() {
    let (bench, _) = bench(200, 2048);
    let pages = 300;
    let parent = bench.space(SpaceConfig::default());
    let at = parent.map(&bench.cpu, MapRequest::anonymous(pages * PAGE_SIZE, RW)).unwrap();
    for n in 0..pages {
        bench.store(&parent, at + n * PAGE_SIZE, word(n, 0)).unwrap();
    }
    let child = parent.fork(&bench.cpu).unwrap();
    let grandchild = child.fork(&bench.cpu).unwrap();
    for n in 0..pages {
        match n % 3 {
            0 => bench.store(&parent, at + n * PAGE_SIZE, word(n, 1)).unwrap(),
            1 => bench.store(&child, at + n * PAGE_SIZE, word(n, 2)).unwrap(),
            _ => bench.store(&grandchild, at + n * PAGE_SIZE, word(n, 3)).unwrap(),
        }
    }
    for n in 0..pages {
        let of = |who: u64| if n % 3 == who { word(n, who + 1) } else { word(n, 0) };
        assert_eq!(bench.load(&parent, at + n * PAGE_SIZE), Ok(of(0)));
        assert_eq!(bench.load(&child, at + n * PAGE_SIZE), Ok(of(1)));
        assert_eq!(bench.load(&grandchild, at + n * PAGE_SIZE), Ok(of(2)));
    }
    // Shared pages take one slot: at most the three versions that exist.
    assert!(bench.machine.swap().usage().1 as u64 <= 2 * pages);
    parent.destroy(&bench.cpu);
    for n in 0..pages {
        let of = |who: u64| if n % 3 == who { word(n, who + 1) } else { word(n, 0) };
        assert_eq!(bench.load(&child, at + n * PAGE_SIZE), Ok(of(1)));
        assert_eq!(bench.load(&grandchild, at + n * PAGE_SIZE), Ok(of(2)));
    }
    grandchild.destroy(&bench.cpu);
    child.destroy(&bench.cpu);
    assert_eq!(bench.machine.swap().usage().1, 0);
    bench.assert_nothing_left();
}

#[test]
fn a_page_that_swap_does_not_give_is_a_bus_error_and_nothing_else() {
    let (bench, swap) = bench(100, 512);
    let space = bench.space(SpaceConfig::default());
    let at = space.map(&bench.cpu, MapRequest::anonymous(8 * PAGE_SIZE, RW)).unwrap();
    let memory = space.map(&bench.cpu, MapRequest::shared_anonymous(8 * PAGE_SIZE, RW)).unwrap();
    for n in 0..8 {
        bench.store(&space, at + n * PAGE_SIZE, word(n, 0)).unwrap();
        bench.store(&space, memory + n * PAGE_SIZE, word(n, 1)).unwrap();
    }
    let mm = space.mm();
    assert_eq!(page_out(mm, &bench.cpu, crate::AddrRange::new(at, at + 7 * PAGE_SIZE)), 7);
    assert_eq!(page_out(mm, &bench.cpu, crate::AddrRange::new(memory, memory + 7 * PAGE_SIZE)), 7);
    assert_eq!(bench.machine.swap().usage().1, 14);
    swap.fail_reads(1);
    for base in [at, memory] {
        assert_eq!(bench.load(&space, base), Err(FaultError::Io));
        assert_eq!(bench.store(&space, base + PAGE_SIZE, 1), Err(FaultError::Io));
    }
    assert_eq!(bench.load(&space, at + 7 * PAGE_SIZE), Ok(word(7, 0)));
    assert_eq!(count(&bench, Counter::SwapReadError), 4);
    swap.fail_reads(0);
    for n in 0..8 {
        assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(word(n, 0)));
        assert_eq!(bench.load(&space, memory + n * PAGE_SIZE), Ok(word(n, 1)));
    }
    assert_eq!(bench.machine.swap().usage().1, 0);
    space.destroy(&bench.cpu);
    bench.assert_nothing_left();
}

#[test]
fn a_page_that_swap_does_not_take_stays() {
    let (bench, swap) = bench(100, 512);
    let space = bench.space(SpaceConfig::default());
    let at = space.map(&bench.cpu, MapRequest::anonymous(200 * PAGE_SIZE, RW)).unwrap();
    swap.fail_writes(1);
    let mut stored = 0;
    let error = loop {
        match bench.store(&space, at + stored * PAGE_SIZE, word(stored, 0)) {
            Ok(()) => stored += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error, FaultError::OutOfMemory);
    assert!(stored > 60 && count(&bench, Counter::SwapWriteError) > 0);
    for n in 0..stored {
        assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(word(n, 0)));
    }
    // A fork shares what is known to slots and in memory, too.
    swap.fail_writes(2);
    for n in stored..200 {
        bench.store(&space, at + n * PAGE_SIZE, word(n, 0)).unwrap();
    }
    for n in 0..200 {
        assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(word(n, 0)));
    }
    space.destroy(&bench.cpu);
    assert_eq!(bench.machine.swap().usage().1, 0);
    bench.assert_nothing_left();
}

#[test]
fn without_swap_or_with_too_little_memory_runs_out_as_an_error() {
    for slots in [0, 50] {
        let bench = Bench::new(100);
        if slots > 0 {
            bench.machine.swap_on(Box::new(TestSwap::new(slots))).unwrap();
        }
        let space = bench.space(SpaceConfig::default());
        let at = space.map(&bench.cpu, MapRequest::anonymous(400 * PAGE_SIZE, RW)).unwrap();
        let stored =
            (0..400).find(|n| bench.store(&space, at + n * PAGE_SIZE, word(*n, 0)).is_err()).unwrap();
        assert!(stored > 80 + slots as u64 / 2 && stored < 100 + slots as u64);
        // To bring one page in there must be room for another.
        space.unmap(&bench.cpu, at + (stored - 10) * PAGE_SIZE, 10 * PAGE_SIZE).unwrap();
        for n in 0..stored - 10 {
            assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(word(n, 0)));
        }
        space.destroy(&bench.cpu);
        bench.assert_nothing_left();
    }
}

#[test]
fn blocks_are_divided_when_cold_and_go_page_by_page() {
    let (bench, _) = bench(1200, 2048);
    let space = bench.space(SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() });
    let pages = 512 * 4;
    let request = MapRequest { align: 2 << 20, ..MapRequest::anonymous(pages * PAGE_SIZE, RW) };
    let at = space.map(&bench.cpu, request).unwrap();
    for n in 0..pages {
        bench.store(&space, at + n * PAGE_SIZE, word(n, 0)).unwrap();
    }
    for n in 0..pages {
        assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(word(n, 0)));
    }
    assert!(count(&bench, Counter::ThpFaultAlloc) > 0 && count(&bench, Counter::ThpSplitPmd) > 0);
    space.destroy(&bench.cpu);
    assert_eq!(bench.machine.swap().usage().1, 0);
    bench.assert_nothing_left();
}

#[test]
fn the_background_keeps_between_the_marks_and_spares_what_is_used() {
    let (bench, _) = bench(400, 1024);
    let space = bench.space(SpaceConfig::default());
    let at = space.map(&bench.cpu, MapRequest::anonymous(300 * PAGE_SIZE, RW)).unwrap();
    for n in 0..300 {
        bench.store(&space, at + n * PAGE_SIZE, word(n, 0)).unwrap();
    }
    assert_eq!(balance(&bench.cpu, 10, 20), 0);
    // The marks go in the first round, and those who come back in between stay.
    assert!(balance(&bench.cpu, 350, 120) == 0 || bench.machine.usage().frames_free >= 100);
    let freed = balance(&bench.cpu, 350, 200);
    assert!(freed >= 50 && bench.machine.usage().frames_free >= 190, "{freed}");
    assert!(count(&bench, Counter::PgStealKswapd) > 0 && count(&bench, Counter::PgScanDirect) == 0);
    for n in 0..300 {
        assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(word(n, 0)));
    }
    space.destroy(&bench.cpu);
    bench.assert_nothing_left();
}

/// Threads that load, store, fork, unmap and protect, each in its own pages of common spaces, with a quarter of the memory
/// that they use.
fn pressure(seed: u64, locking: Locking, read_errors: u32, write_errors: u32) {
    const THREADS: u64 = 4;
    const PAGES: u64 = 60;
    let bench = Bench::on(TestHost::with_tickets(1, 240), 8);
    let swap = TestSwap::new(4096);
    bench.machine.swap_on(Box::new(swap.clone())).unwrap();
    swap.fail_reads(read_errors);
    swap.fail_writes(write_errors);
    let total = THREADS * PAGES;
    let file = TestFile::new(&alloc::vec![0; (total * PAGE_SIZE) as usize]);
    let object = Object::file(&bench.machine, file).unwrap();
    let space = bench.space(SpaceConfig::with_locking(locking));
    let map = |request| space.map(&bench.cpu, request).unwrap();
    let private = map(MapRequest::anonymous(total * PAGE_SIZE, RW));
    let shared = map(MapRequest::shared_anonymous(total * PAGE_SIZE, RW));
    let of_file = map(MapRequest::object(&object, 0, total * PAGE_SIZE, RW, true));
    let errors = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    // A page that swap does not give now may be given the next time.
    let again = |errors: &AtomicU64, act: &mut dyn FnMut() -> Result<u64, FaultError>| {
        loop {
            match act() {
                Ok(value) => break value,
                Err(FaultError::Io) if read_errors > 0 => _ = errors.fetch_add(1, Ordering::Relaxed),
                Err(error) => panic!("{error:?}"),
            }
        }
    };
    std::thread::scope(|scope| {
        let (machine, space, errors, again, stop) = (&bench.machine, &space, &errors, &again, &stop);
        let background = scope.spawn(move || {
            let cpu = Cpu::try_new(machine).unwrap();
            while !stop.load(Ordering::Relaxed) {
                balance(&cpu, 40, 60);
                std::thread::yield_now();
            }
        });
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || {
                    let cpu = Cpu::try_new(machine).unwrap();
                    let mut random = Random::new(seed * 31 + thread);
                    let mut model = alloc::vec![[0u64; PAGES as usize]; 3];
                    for round in 1..600 {
                        let kind = random.below(3) as usize;
                        let n = random.below(PAGES);
                        let base = [private, shared, of_file][kind] + thread * PAGES * PAGE_SIZE;
                        let addr = base + n * PAGE_SIZE + thread * 8;
                        match random.below(20) {
                            0..8 => {
                                again(errors, &mut || store(&cpu, space, addr, round).map(|()| 0));
                                model[kind][n as usize] = round;
                            }
                            8..16 => {
                                let value = again(errors, &mut || load(&cpu, space, addr));
                                assert_eq!(value, model[kind][n as usize], "page {n} of kind {kind}");
                            }
                            16 if kind == 0 => {
                                space
                                    .advise(&cpu, base + n * PAGE_SIZE, PAGE_SIZE, Advice::DontNeed)
                                    .unwrap();
                                model[0][n as usize] = 0;
                            }
                            17 => {
                                let page = base + n * PAGE_SIZE;
                                space.protect(&cpu, page, PAGE_SIZE, Prot::READ).unwrap();
                                let value = again(errors, &mut || load(&cpu, space, addr));
                                assert_eq!(value, model[kind][n as usize]);
                                space.protect(&cpu, page, PAGE_SIZE, RW).unwrap();
                            }
                            18 if round % 8 == 0 => {
                                let Ok(child) = space.fork(&cpu) else { continue };
                                for n in 0..8 {
                                    let n = n * 7 % PAGES;
                                    let addr = private + (thread * PAGES + n) * PAGE_SIZE + thread * 8;
                                    let expected = model[0][n as usize];
                                    assert_eq!(again(errors, &mut || load(&cpu, &child, addr)), expected);
                                    again(errors, &mut || store(&cpu, &child, addr, 77).map(|()| 0));
                                    assert_eq!(again(errors, &mut || load(&cpu, space, addr)), expected);
                                    assert_eq!(again(errors, &mut || load(&cpu, &child, addr)), 77);
                                }
                                child.destroy(&cpu);
                            }
                            19 => {
                                page_out(space.mm(), &cpu, crate::AddrRange::new(base, base + 8 * PAGE_SIZE));
                            }
                            _ => {}
                        }
                    }
                    for (kind, base) in [private, shared, of_file].into_iter().enumerate() {
                        for n in 0..PAGES {
                            let addr = base + (thread * PAGES + n) * PAGE_SIZE + thread * 8;
                            let value = again(errors, &mut || load(&cpu, space, addr));
                            assert_eq!(value, model[kind][n as usize], "page {n} of kind {kind} at the end");
                        }
                    }
                })
            })
            .collect();
        let results: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        stop.store(true, Ordering::Relaxed);
        background.join().unwrap();
        results.into_iter().for_each(|result| result.unwrap());
    });
    assert_eq!(errors.load(Ordering::Relaxed) > 0, read_errors > 0);
    assert!(count(&bench, Counter::PswpIn) > 100);
    swap.fail_reads(0);
    space.destroy(&bench.cpu);
    drop(object);
    bench.cpu.quiesce();
    assert_eq!(bench.machine.swap().usage().1, 0, "slots leaked");
    bench.assert_nothing_left();
}

#[test]
fn threads_under_pressure_keep_every_byte() {
    for seed in 0..from_env("TERRANE_RECLAIM_SEEDS").unwrap_or(3) {
        pressure(seed, Locking::Speculative, 0, 0);
        pressure(seed, Locking::Classic, 0, 0);
    }
}

#[test]
fn threads_under_pressure_keep_every_byte_with_failing_swap() {
    for seed in 0..from_env("TERRANE_RECLAIM_SEEDS").unwrap_or(3) {
        pressure(seed + 100, Locking::Speculative, 5, 3);
    }
}

/// Moves every page of the machine once.
fn move_all(cpu: &Cpu<TestHost>) -> usize {
    let machine = &**cpu.machine();
    let range = machine.frames().range();
    let mut moved = 0;
    for number in range.first.0..range.first.0 + range.count as u32 {
        let to = {
            let pin = cpu.pin();
            machine.ram(&pin).allocate()
        };
        let Some(to) = to else { continue };
        if migrate(cpu, crate::Frame(number), to) {
            moved += 1;
        } else {
            let pin = cpu.pin();
            machine.ram(&pin).free(to);
        }
    }
    cpu.quiesce();
    moved
}

#[test]
fn pages_of_all_kinds_move() {
    let bench = Bench::new(400);
    let file = TestFile::new(&alloc::vec![3; 20 * PAGE_SIZE as usize]);
    let object = Object::file(&bench.machine, file.clone()).unwrap();
    let space = bench.space(SpaceConfig::default());
    let map = |request| space.map(&bench.cpu, request).unwrap();
    let private = map(MapRequest::anonymous(20 * PAGE_SIZE, RW));
    let common = map(MapRequest::shared_anonymous(20 * PAGE_SIZE, RW));
    let of_file = map(MapRequest::object(&object, 0, 20 * PAGE_SIZE, RW, true));
    let bases = [private, common, of_file];
    for (kind, base) in bases.into_iter().enumerate() {
        for n in 0..20 {
            bench.store(&space, base + n * PAGE_SIZE, word(n, kind as u64)).unwrap();
        }
    }
    let child = space.fork(&bench.cpu).unwrap();
    let before: Vec<_> = (0..20)
        .map(|n| space.translate(&bench.cpu, private + n * PAGE_SIZE, Access::Read).unwrap().frame)
        .collect();
    assert!(move_all(&bench.cpu) >= 60);
    for n in 0..20 {
        // Mapped again at once, and elsewhere.
        let now = space.translate(&bench.cpu, private + n * PAGE_SIZE, Access::Read).unwrap().frame;
        assert!(now != before[n as usize]);
        assert_eq!(child.translate(&bench.cpu, private + n * PAGE_SIZE, Access::Read).unwrap().frame, now);
    }
    for round in 0..3 {
        for space in [&space, &child] {
            for (kind, base) in bases.into_iter().enumerate() {
                for n in 0..20 {
                    assert_eq!(bench.load(space, base + n * PAGE_SIZE), Ok(word(n, kind as u64)), "{round}");
                }
            }
        }
        move_all(&bench.cpu);
    }
    bench.store(&child, private, 5).unwrap();
    assert_eq!((bench.load(&space, private), bench.load(&child, private)), (Ok(word(0, 0)), Ok(5)));
    assert!(count(&bench, Counter::PgMigrate) > 200);
    object.write_back(&bench.cpu).unwrap();
    for n in 0..20 {
        assert_eq!(file.contents()[n * PAGE_SIZE as usize..][..8], word(n as u64, 2).to_le_bytes());
    }
    space.destroy(&bench.cpu);
    child.destroy(&bench.cpu);
    drop(object);
    bench.cpu.quiesce();
    bench.assert_nothing_left();
}

#[test]
fn pages_move_under_stores() {
    let bench = Bench::on(TestHost::with_tickets(1, 300), 8);
    let space = bench.space(SpaceConfig::default());
    let map = |request| space.map(&bench.cpu, request).unwrap();
    let bases = [
        map(MapRequest::anonymous(16 * PAGE_SIZE, RW)),
        map(MapRequest::shared_anonymous(16 * PAGE_SIZE, RW)),
    ];
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (machine, space, stop) = (&bench.machine, &space, &stop);
        let workers: Vec<_> = (0..3u64)
            .map(|thread| {
                scope.spawn(move || {
                    let cpu = Cpu::try_new(machine).unwrap();
                    let mut random = Random::new(thread);
                    let mut model = [[0u64; 16]; 2];
                    for round in 1..30_000 {
                        let (kind, n) = (random.below(2) as usize, random.below(16));
                        let addr = bases[kind] + n * PAGE_SIZE + thread * 8;
                        assert_eq!(load(&cpu, space, addr), Ok(model[kind][n as usize]));
                        match store(&cpu, space, addr, round) {
                            Ok(()) => model[kind][n as usize] = round,
                            Err(error) => assert_eq!(error, FaultError::OutOfMemory),
                        }
                        if round % 500 == 0 {
                            // Frames that wait for a thread which does not run now may be missing: then nothing has happened.
                            let child = match space.fork(&cpu) {
                                Ok(child) => child,
                                Err(error) => {
                                    assert_eq!(error, Error::NoMemory);
                                    continue;
                                }
                            };
                            let addr = bases[0] + n * PAGE_SIZE + thread * 8;
                            match load(&cpu, &child, addr) {
                                Err(FaultError::OutOfMemory) => {}
                                found => assert_eq!(found, Ok(model[0][n as usize])),
                            }
                            child.destroy(&cpu);
                        }
                    }
                })
            })
            .collect();
        let mover = scope.spawn(move || {
            let cpu = Cpu::try_new(machine).unwrap();
            let mut moved = 0;
            while !stop.load(Ordering::Relaxed) {
                moved += move_all(&cpu);
            }
            moved
        });
        let results: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        stop.store(true, Ordering::Relaxed);
        assert!(mover.join().unwrap() > 50);
        results.into_iter().for_each(|result| result.unwrap());
    });
    space.destroy(&bench.cpu);
    bench.cpu.quiesce();
    bench.assert_nothing_left();
}

#[test]
fn huge_pages_are_paged_out_by_advice() {
    let bench = Bench::new(4000);
    bench.machine.swap_on(Box::new(TestSwap::new(2000))).unwrap();
    let config = SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() };
    let space = bench.space(config);
    let block = 512 * PAGE_SIZE;
    let request = MapRequest { align: block, ..MapRequest::anonymous(3 * block, RW) };
    let at = space.map(&bench.cpu, request).unwrap();
    for n in (0..3 * 512).step_by(7) {
        bench.store(&space, at + n * PAGE_SIZE, word(n, 1)).unwrap();
    }
    // A part of the first, all of the second, and the third is locked.
    space.mlock(&bench.cpu, at + 2 * block, block).unwrap();
    space.advise(&bench.cpu, at + block / 2, 3 * block / 2, Advice::PageOut).unwrap();
    assert_eq!(bench.machine.swap().usage().1, 256 + 512);
    space.advise(&bench.cpu, at, 3 * block, Advice::PageOut).unwrap_err();
    assert_eq!(bench.machine.swap().usage().1, 2 * 512);
    assert_eq!(count(&bench, Counter::ThpSplitPmd), 2, "what is locked stays a huge page");
    for n in (0..3 * 512).step_by(7) {
        assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(word(n, 1)));
    }
    // Shared with a child it stays.
    space.munlock(&bench.cpu, at + 2 * block, block).unwrap();
    let child = space.fork(&bench.cpu).unwrap();
    space.advise(&bench.cpu, at + 2 * block, block, Advice::PageOut).unwrap();
    assert_eq!(count(&bench, Counter::ThpSplitPmd), 2);
    child.destroy(&bench.cpu);
    space.destroy(&bench.cpu);
    assert_eq!(bench.machine.swap().usage().1, 0);
    bench.assert_nothing_left();
}

#[test]
fn swap_is_shared_out_in_smaps() {
    let (bench, _) = bench(300, 200);
    let space = bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let at = space.map(cpu, MapRequest::anonymous(8 * PAGE_SIZE, RW)).unwrap();
    let memory = Object::shared_memory(&bench.machine, 8 * PAGE_SIZE).unwrap();
    let map = |shared| space.map(cpu, MapRequest::object(&memory, 0, 8 * PAGE_SIZE, RW, shared)).unwrap();
    let (common, private) = (map(true), map(false));
    for n in 0..8 {
        bench.store(&space, at + n * PAGE_SIZE, 1).unwrap();
        bench.store(&space, common + n * PAGE_SIZE, 1).unwrap();
    }
    let of = |space: &crate::space::AddressSpace<TestHost>, addr: u64| {
        let all = space.mappings(cpu).unwrap();
        let mapping = all.iter().find(|mapping| mapping.range.contains(addr)).unwrap();
        let found = space.footprint(cpu, mapping);
        (found.swap / PAGE_SIZE, found.share_swap.bytes())
    };
    space.advise(cpu, at, 8 * PAGE_SIZE, Advice::PageOut).unwrap();
    assert_eq!(of(&space, at), (8, 8 * PAGE_SIZE));
    let child = space.fork(cpu).unwrap();
    assert_eq!(of(&space, at), (8, 4 * PAGE_SIZE));
    assert_eq!(of(&child, at), (8, 4 * PAGE_SIZE));
    bench.load(&child, at).unwrap();
    assert_eq!(of(&child, at), (7, 7 * PAGE_SIZE / 2));
    assert_eq!(of(&space, at), (8, PAGE_SIZE + 7 * PAGE_SIZE / 2));
    // Shared memory has no share, as in Linux; of a private mapping what it has no copy of counts.
    bench.store(&space, private, 2).unwrap();
    space.advise(cpu, common, 8 * PAGE_SIZE, Advice::PageOut).unwrap();
    assert_eq!(of(&space, common), (8, 0));
    assert_eq!(of(&space, private), (7, 0));
    child.destroy(cpu);
    space.destroy(cpu);
    drop(memory);
    bench.assert_nothing_left();
}

/// A page that is moved while a processor is in the middle of a store to it, and another stores to it as well.
#[test]
fn a_store_under_way_outlasts_a_fault_on_the_moving_page() {
    let bench = Bench::on(TestHost::with_tickets(1, 300), 8);
    let space = bench.space(SpaceConfig::default());
    let at = space.map(&bench.cpu, MapRequest::anonymous(PAGE_SIZE, RW)).unwrap();
    bench.store(&space, at, 1).unwrap();
    let host = bench.machine.host();
    let under_way = host.access(bench.cpu.id());
    let found = space.translate(&bench.cpu, at, Access::Write).unwrap();
    let (machine, space_ref) = (&bench.machine, &space);
    std::thread::scope(|scope| {
        let mover = scope.spawn(move || {
            let cpu = Cpu::try_new(machine).unwrap();
            let to = machine.ram(&cpu.pin()).allocate().unwrap();
            migrate(&cpu, found.frame, to)
        });
        let other = scope.spawn(move || {
            let cpu = Cpu::try_new(machine).unwrap();
            while space_ref.translate(&cpu, at, Access::Write).is_some() {
                std::thread::yield_now();
            }
            store(&cpu, space_ref, at + 8, 2).unwrap();
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        let word = host.bytes(found.frame);
        // SAFETY: a word of a frame that is not used anew before the access has ended.
        unsafe { &*word.as_ptr().cast::<AtomicU64>() }.store(3, Ordering::SeqCst);
        drop(under_way);
        other.join().unwrap();
        mover.join().unwrap();
    });
    assert_eq!((bench.load(&space, at), bench.load(&space, at + 8)), (Ok(3), Ok(2)));
}
