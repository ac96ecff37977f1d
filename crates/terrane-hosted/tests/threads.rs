//! Many processors against real spaces.

mod common;

use common::*;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: u64 = PAGE_SIZE;

fn many_threads() -> usize {
    3 * thread::available_parallelism().map_or(2, |n| n.get())
}

/// Stops the others when the thread that would do so panics.
struct StopAll<'a>(&'a AtomicBool);

impl Drop for StopAll<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Lets the others run to their end when the thread that gives out the turns panics.
struct LastTurn<'a>(&'a AtomicU64);

impl Drop for LastTurn<'_> {
    fn drop(&mut self) {
        self.0.store(u64::MAX, Ordering::Release);
    }
}

#[test]
fn atomics_from_many_threads_add_up() {
    for (machine, locking) in variants(16, many_threads() + 1) {
        let (mut cpu, space) = cpu_with(&machine, locking);
        let at = map(&cpu, 2, RW);
        let threads = many_threads() as u64;
        const ROUNDS: u64 = 20_000;
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let mut cpu = machine.cpu().unwrap();
                    cpu.switch_to(&space);
                    for n in 0..ROUNDS {
                        cpu.fetch_add_u64(at, 1).unwrap();
                        cpu.fetch_add_u32(at + PAGE, 1).unwrap();
                        // By hand: add with compare-and-exchange.
                        let mut seen = cpu.load_u64(at + 8).unwrap();
                        while let Err(now) = cpu.compare_exchange_u64(at + 8, seen, seen + n).unwrap() {
                            seen = now;
                        }
                    }
                });
            }
        });
        assert_eq!(cpu.load_u64(at), Ok(threads * ROUNDS));
        assert_eq!(cpu.load_u32(at + PAGE), Ok((threads * ROUNDS) as u32));
        assert_eq!(cpu.load_u64(at + 8), Ok(threads * ROUNDS * (ROUNDS - 1) / 2));
    }
}

/// One thread maps and unmaps pages while others load and store. Each access that starts after the unmapping thread
/// has said that it is done must fault.
#[test]
fn after_unmap_every_access_faults() {
    for (machine, locking) in variants(64, many_threads() + 2) {
        let (mut cpu, space) = cpu_with(&machine, locking);
        const PAGES: u64 = 16;
        let base = map(&cpu, PAGES, RW);
        // Even: mapped (perhaps); odd: unmapped, and nobody maps it again before the number moves on.
        let states = [const { AtomicU64::new(0) }; PAGES as usize];
        let (stop, faults) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            for worker in 0..many_threads() as u64 {
                let (machine, space, states, stop, faults) = (&machine, &space, &states, &stop, &faults);
                scope.spawn(move || {
                    let mut cpu = machine.cpu().unwrap();
                    cpu.switch_to(space);
                    let mut random = Random::new(worker + 1);
                    let mut seen = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let page = random.below(PAGES);
                        let at = base + page * PAGE + worker * 8;
                        let before = states[page as usize].load(Ordering::Acquire);
                        let result = if random.one_in(2) {
                            cpu.load_u64(at).map(|_| ())
                        } else {
                            cpu.store_u64(at, before)
                        };
                        let after = states[page as usize].load(Ordering::Acquire);
                        match result {
                            // Unmapped before the access began, and still when it was over.
                            Ok(()) => assert!(before != after || before % 2 == 0, "an access after unmap"),
                            Err(FaultError::NotMapped) => seen += 1,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    faults.fetch_add(seen, Ordering::Relaxed);
                });
            }
            let _stop = StopAll(&stop);
            let end = Instant::now() + Duration::from_millis(400);
            let mut random = Random::new(99);
            while Instant::now() < end {
                let page = random.below(PAGES);
                let (at, state) = (base + page * PAGE, &states[page as usize]);
                if state.load(Ordering::Relaxed) % 2 == 0 {
                    space.unmap(cpu.core(), at, PAGE).unwrap();
                    state.fetch_add(1, Ordering::Release);
                } else {
                    // Since it was unmapped, many a fault that had begun before has ended.
                    assert_eq!(cpu.load_u64(at), Err(FaultError::NotMapped), "a fault came after the sweep");
                    state.fetch_add(1, Ordering::Release);
                    space.map(cpu.core(), MapRequest::anonymous(PAGE, RW).fixed(at)).unwrap();
                }
                if random.one_in(4) {
                    thread::yield_now();
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(faults.load(Ordering::Relaxed) > 0);
    }
}

/// Memory is short, so frames are used anew as soon as they may. Writers write their mark through whatever their TLB
/// says; the owner of a page that was mapped anew finds its own bytes and nothing else.
#[test]
fn frames_that_were_freed_are_never_written_through_old_translations() {
    for (machine, locking) in variants(4, many_threads() + 2) {
        let (mut cpu, space) = cpu_with(&machine, locking);
        const PAGES: u64 = 64;
        let victim = map(&cpu, PAGES, RW);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for worker in 0..many_threads() as u64 {
                let (machine, space, stop) = (&machine, &space, &stop);
                scope.spawn(move || {
                    let mut cpu = machine.cpu().unwrap();
                    cpu.switch_to(space);
                    let mut random = Random::new(worker + 1);
                    while !stop.load(Ordering::Relaxed) {
                        let at = victim + random.below(PAGES) * PAGE + random.below(PAGE / 8) * 8;
                        match cpu.store_u64(at, u64::MAX) {
                            Ok(()) | Err(FaultError::NotMapped | FaultError::OutOfMemory) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            let _stop = StopAll(&stop);
            let end = Instant::now() + Duration::from_millis(400);
            let mut round = 0u64;
            let mut page = vec![0u8; PAGE as usize];
            // At least some rounds, however busy the machine.
            while Instant::now() < end || round <= 3 {
                round += 1;
                let mark = (round % 200) as u8 + 1;
                // Mapped before, so that it is not where the victim was; filled after, likely with the frames given up.
                let fresh = map(&cpu, PAGES, RW);
                space.unmap(cpu.core(), victim, PAGES * PAGE).unwrap();
                for n in 0..PAGES {
                    match cpu.read_bytes(fresh + n * PAGE, &mut page).and_then(|()| {
                        assert!(page.iter().all(|&byte| byte == 0), "memory that is not fresh");
                        cpu.fill_bytes(fresh + n * PAGE, PAGE as usize, mark)
                    }) {
                        Ok(()) => {}
                        Err(Interrupted { error: FaultError::OutOfMemory, .. }) => break,
                        Err(error) => panic!("{error}"),
                    }
                }
                space.map(cpu.core(), MapRequest::anonymous(PAGES * PAGE, RW).fixed(victim)).unwrap();
                thread::yield_now();
                for n in 0..PAGES {
                    cpu.read_bytes(fresh + n * PAGE, &mut page).unwrap();
                    assert!(page.iter().all(|&byte| byte == page[0]) && page[0] != 0xff, "a late store");
                    assert!(page[0] == mark || page[0] == 0);
                }
                space.unmap(cpu.core(), fresh, PAGES * PAGE).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

/// Threads count up in private pages, two on each, while another forks again and again: in each child the pages stand
/// still, and in the parent no count is lost. (A store through a translation from before the fork would end up in the
/// child; one that arrives while the page is copied, nowhere.)
#[test]
fn no_store_of_the_parent_lands_in_a_child() {
    for (machine, locking) in variants(64, many_threads() + 2) {
        let (mut cpu, parent) = cpu_with(&machine, locking);
        let threads = many_threads() as u64;
        let at = map(&cpu, threads + 400, RW);
        // The others make the fork take its time.
        cpu.fill_bytes(at + threads * PAGE, 400 * PAGE as usize, 1).unwrap();
        let place = |n: u64| at + n / 2 * PAGE + n % 2 * 64;
        let stop = AtomicBool::new(false);
        let begin = Barrier::new(threads as usize + 1);
        thread::scope(|scope| {
            for worker in 0..threads {
                let (machine, parent, stop, begin) = (&machine, &parent, &stop, &begin);
                scope.spawn(move || {
                    let mut cpu = machine.cpu().unwrap();
                    cpu.switch_to(parent);
                    let at = place(worker);
                    let mut count = 0;
                    cpu.store_u64(at, 0).unwrap();
                    begin.wait();
                    while !stop.load(Ordering::Relaxed) {
                        assert_eq!(cpu.fetch_add_u64(at, 1), Ok(count), "a store was lost");
                        cpu.store_u64(at + 8, count).unwrap();
                        assert_eq!(cpu.load_u64(at + 8), Ok(count));
                        count += 1;
                    }
                });
            }
            begin.wait();
            let _stop = StopAll(&stop);
            let end = Instant::now() + Duration::from_millis(400);
            while Instant::now() < end {
                let child = Shared::try_new(parent.fork(cpu.core()).unwrap()).unwrap();
                cpu.switch_to(&child);
                let mut first = Vec::new();
                for n in 0..threads {
                    first.push((cpu.load_u64(place(n)).unwrap(), cpu.load_u64(place(n) + 8).unwrap()));
                }
                thread::yield_now();
                for (n, &(a, b)) in first.iter().enumerate() {
                    let at = place(n as u64);
                    assert_eq!(
                        (cpu.load_u64(at), cpu.load_u64(at + 8)),
                        (Ok(a), Ok(b)),
                        "the child's page moved"
                    );
                    // The first word is added to and then copied, so the second is one or two behind.
                    assert!((1..=2).contains(&(a - b)) || a == 0, "{a} {b}");
                }
                cpu.switch_to(&parent);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

/// When stores have been forbidden, the page stands still: what garbage collectors and compilers to machine code rely on.
#[test]
fn after_protect_no_store_arrives() {
    for (machine, locking) in variants(16, many_threads() + 2) {
        let (mut cpu, space) = cpu_with(&machine, locking);
        let at = map(&cpu, 1, RW);
        let (stop, refused) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            for worker in 0..many_threads() as u64 {
                let (machine, space, stop, refused) = (&machine, &space, &stop, &refused);
                scope.spawn(move || {
                    let mut cpu = machine.cpu().unwrap();
                    cpu.switch_to(space);
                    let mut count = 0;
                    while !stop.load(Ordering::Relaxed) {
                        count += 1;
                        match cpu.store_u64(at + worker * 8, count) {
                            Ok(()) => {}
                            Err(FaultError::NotAllowed) => drop(refused.fetch_add(1, Ordering::Relaxed)),
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            let _stop = StopAll(&stop);
            let end = Instant::now() + Duration::from_millis(400);
            let (mut before, mut after) = (vec![0; PAGE as usize], vec![0; PAGE as usize]);
            while Instant::now() < end {
                space.protect(cpu.core(), at, PAGE, Prot::READ).unwrap();
                cpu.read_bytes(at, &mut before).unwrap();
                thread::yield_now();
                cpu.read_bytes(at, &mut after).unwrap();
                assert!(before == after, "a store arrived");
                space.protect(cpu.core(), at, PAGE, RW).unwrap();
                thread::yield_now();
            }
        });
        assert!(refused.load(Ordering::Relaxed) > 0);
    }
}

/// Threads store to a shared mapping of a file while another writes it back again and again: at the end the file
/// has every last store.
#[test]
fn no_store_is_lost_between_two_write_backs() {
    for (machine, locking) in variants(64, many_threads() + 2) {
        let (cpu, space) = cpu_with(&machine, locking);
        // No more than run at a time: writing back waits for stores under way, hence for threads that are not running.
        let threads = (many_threads() / 3) as u64;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(threads * PAGE).unwrap();
        let object = machine.open(file.path(), true).unwrap();
        let at = space.map(cpu.core(), MapRequest::object(&object, 0, threads * PAGE, RW, true)).unwrap();
        for round in 0..15u64 {
            let stop = AtomicBool::new(false);
            let last: Vec<u64> = thread::scope(|scope| {
                let workers: Vec<_> = (0..threads)
                    .map(|worker| {
                        let (machine, space, stop) = (&machine, &space, &stop);
                        scope.spawn(move || {
                            let mut cpu = machine.cpu().unwrap();
                            cpu.switch_to(space);
                            let mut count = round << 32;
                            loop {
                                count += 1;
                                cpu.store_u64(at + worker * PAGE, count).unwrap();
                                if stop.load(Ordering::Relaxed) {
                                    return count;
                                }
                            }
                        })
                    })
                    .collect();
                let _stop = StopAll(&stop);
                let end = Instant::now() + Duration::from_millis(12);
                while Instant::now() < end {
                    space.sync(cpu.core(), at, threads * PAGE).unwrap();
                }
                stop.store(true, Ordering::Relaxed);
                workers.into_iter().map(|worker| worker.join().unwrap()).collect()
            });
            space.sync(cpu.core(), at, threads * PAGE).unwrap();
            let bytes = std::fs::read(file.path()).unwrap();
            for (worker, last) in last.iter().enumerate() {
                let place = worker * PAGE as usize;
                let on_disk = u64::from_ne_bytes(bytes[place..place + 8].try_into().unwrap());
                assert_eq!(on_disk, *last, "worker {worker} in round {round}");
            }
        }
    }
}

/// Stores to a shared mapping of a file that is unmapped, or loses its permission, and is written back at once: what has
/// succeeded is in the file.
#[test]
fn no_store_is_lost_when_its_mapping_ends() {
    for (machine, locking) in variants(64, many_threads() + 2) {
        let (cpu, space) = cpu_with(&machine, locking);
        let threads = many_threads() as u64 / 2;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(PAGE).unwrap();
        let object = machine.open(file.path(), true).unwrap();
        // Round by round: 2r while round r waits to begin, 2r + 1 while it runs.
        let (turn, begun) = (AtomicU64::new(0), AtomicU64::new(0));
        let last: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(0)).collect();
        let (at, rounds) = (1 << 30, 24);
        thread::scope(|scope| {
            for worker in 0..threads {
                let (machine, space, turn, begun, last) = (&machine, &space, &turn, &begun, &last);
                scope.spawn(move || {
                    let mut cpu = machine.cpu().unwrap();
                    cpu.switch_to(space);
                    let mut count = 0;
                    for round in 0..rounds {
                        while turn.load(Ordering::Acquire) < 2 * round + 1 {
                            thread::yield_now();
                        }
                        begun.fetch_add(1, Ordering::AcqRel);
                        while cpu.store_u64(at + worker * 8, count + 1).is_ok() {
                            count += 1;
                        }
                        last[worker as usize].store(count, Ordering::Relaxed);
                        begun.fetch_sub(1, Ordering::AcqRel);
                    }
                });
            }
            let _turn = LastTurn(&turn);
            for round in 0..rounds {
                let request = MapRequest::object(&object, 0, PAGE, RW, true).fixed(at);
                space.map(cpu.core(), request).unwrap();
                turn.store(2 * round + 1, Ordering::Release);
                while begun.load(Ordering::Acquire) < threads {
                    thread::yield_now();
                }
                if round % 2 == 0 {
                    space.unmap(cpu.core(), at, PAGE).unwrap();
                } else {
                    space.protect(cpu.core(), at, PAGE, Prot::READ).unwrap();
                }
                object.write_back(cpu.core()).unwrap();
                while begun.load(Ordering::Acquire) > 0 {
                    thread::yield_now();
                }
                let bytes = std::fs::read(file.path()).unwrap();
                for (worker, last) in last.iter().enumerate() {
                    let on_disk = u64::from_ne_bytes(bytes[worker * 8..worker * 8 + 8].try_into().unwrap());
                    assert_eq!(on_disk, last.load(Ordering::Relaxed), "worker {worker} in round {round}");
                }
            }
        });
    }
}

/// Message passing: what was stored before a flag is seen by whoever sees the flag, though a third thread forks all
/// the time, so that each store may move its page to another frame.
#[test]
fn stores_are_seen_in_order() {
    for (machine, locking) in variants(64, 4) {
        let (mut cpu, space) = cpu_with(&machine, locking);
        let at = map(&cpu, 1, RW);
        // Not copied, so that the flag is always seen as it is.
        let flag = space.map(cpu.core(), MapRequest::shared_anonymous(PAGE, RW)).unwrap();
        const ROUNDS: u64 = 100_000;
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut cpu = machine.cpu().unwrap();
                cpu.switch_to(&space);
                for round in 1..=ROUNDS {
                    cpu.store_u64(at + 8, round).unwrap();
                    cpu.write_bytes(at + PAGE - 8, &round.to_ne_bytes()).unwrap();
                    cpu.store_u64(flag, round).unwrap();
                }
            });
            scope.spawn(|| {
                let cpu = machine.cpu().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    space.fork(cpu.core()).unwrap().destroy(cpu.core());
                    thread::yield_now();
                }
            });
            let _stop = StopAll(&stop);
            let (mut seen, end) = (0, Instant::now() + Duration::from_secs(60));
            while seen < ROUNDS {
                assert!(Instant::now() < end, "nothing new is seen");
                seen = cpu.load_u64(flag).unwrap();
                assert!(cpu.load_u64(at + 8).unwrap() >= seen);
                let mut bytes = [0; 8];
                cpu.read_bytes(at + PAGE - 8, &mut bytes).unwrap();
                assert!(u64::from_ne_bytes(bytes) >= seen);
            }
        });
    }
}
