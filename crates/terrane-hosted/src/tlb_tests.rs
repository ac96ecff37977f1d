//! The shoot-down protocol by itself: fake pages, fake frames, real threads.

use crate::cpu_set::CpuSet;
use crate::tlb::{Forget, Port, Tlb};
use crate::translations::{Needs, Translations};
use crossbeam_utils::CachePadded;
use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};
use terrane::addr::{AddrRange, PAGE_SIZE};
use terrane::host::{ShootDown, Ticket};
use terrane::sync::CpuId;
use terrane::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// What the owner of a lane is told to forget; `None` for everything.
fn requests(port: &mut Port) -> Vec<Option<AddrRange>> {
    let mut told = Vec::new();
    if !port.enter() {
        port.catch_up(|what| {
            told.push(match what {
                Forget::All => None,
                Forget::Range(range) => Some(range),
            });
        });
    }
    port.leave();
    // After a full flush it holds nothing until it walks again.
    port.will_hold(0, |_| panic!("full"));
    told
}

fn page(n: u64) -> AddrRange {
    AddrRange::new(n * PAGE_SIZE, (n + 1) * PAGE_SIZE)
}

fn owner(tlb: &Tlb, cpu: u32, space: &CpuSet) -> Port {
    // SAFETY: each test makes one port a processor and drops it before the `Tlb`.
    let mut port = unsafe { tlb.port(CpuId(cpu)) };
    port.on();
    space.insert(CpuId(cpu));
    // The first 512 pages, which most tests are about.
    port.will_hold(0, |_| panic!("full"));
    port
}

#[test]
fn only_who_may_hold_the_range_is_asked() {
    let (tlb, space) = (Tlb::new(4, true).unwrap(), CpuSet::default());
    let (mut a, mut b) = (owner(&tlb, 1, &space), owner(&tlb, 2, &space));
    let me = CpuId(0);
    let region = |n: u64| AddrRange::new(n << 21, (n + 1) << 21);
    assert_eq!(tlb.shoot_down(me, &space, region(7)), ShootDown::PASSED);
    a.will_hold(region(7).start + 5, |_| ());
    assert_eq!(tlb.shoot_down(me, &space, region(7)).asked, 1);
    assert_eq!(tlb.shoot_down(me, &space, page(0)).asked, 2);
    assert_eq!(tlb.shoot_down(me, &space, AddrRange::new(0, 1 << 46)).asked, 2);
    // One of the own: nobody is asked, and only the own TLB is told.
    assert_eq!(tlb.shoot_down(CpuId(1), &space, region(7)), ShootDown::PASSED);
    assert!(!a.enter());
    assert_eq!(a.catch_up(|_| ()), 3, "its own request does not count as received");
    a.leave();
    assert!(!b.enter());
    assert_eq!(b.catch_up(|_| ()), 2);
    b.leave();
    // A flush of all ends it.
    a.flush(|_| ());
    assert_eq!(tlb.shoot_down(me, &space, region(7)), ShootDown::PASSED);
    // So does having come to many places.
    let mut flushes = 0;
    for n in 0..2000 {
        b.will_hold(region(n).start, |_| flushes += 1);
    }
    assert_eq!(flushes, 7);
    assert_eq!(tlb.shoot_down(me, &space, region(1)).asked, 0);
    assert_eq!(tlb.shoot_down(me, &space, region(1999)).asked, 1);
}

#[test]
fn few_pages_are_named_and_many_flush_everything() {
    for membarrier in [true, false] {
        let (tlb, space) = (Tlb::new(2, membarrier).unwrap(), CpuSet::default());
        assert!(membarrier || tlb.is_fenced());
        let mut port = owner(&tlb, 0, &space);
        assert!(requests(&mut port).is_empty());
        tlb.shoot_down(CpuId(0), &space, page(5));
        tlb.shoot_down(CpuId(0), &space, page(9));
        assert_eq!(requests(&mut port), [Some(page(5)), Some(page(9))]);
        assert!(requests(&mut port).is_empty());
        for n in 0..5 {
            tlb.shoot_down(CpuId(0), &space, page(n));
        }
        assert_eq!(requests(&mut port), [None]);
        tlb.shoot_down(CpuId(0), &space, AddrRange::new(0, 1 << 30));
        assert_eq!(requests(&mut port), [None]);
        tlb.shoot_down(CpuId(0), &space, page(3));
        assert_eq!(requests(&mut port), [Some(page(3))]);
    }
}

#[test]
fn a_processor_alone_asks_nobody() {
    let (tlb, space) = (Tlb::new(4, true).unwrap(), CpuSet::default());
    let _port = owner(&tlb, 2, &space);
    assert_eq!(tlb.shoot_down(CpuId(2), &space, page(1)), ShootDown::PASSED);
    space.remove(CpuId(2));
    // Nobody runs the space: there is nothing to forget.
    assert_eq!(tlb.shoot_down(CpuId(1), &space, page(1)), ShootDown::PASSED);
}

#[test]
fn a_ticket_passes_when_every_target_has_answered() {
    let (tlb, space) = (Tlb::new(256, true).unwrap(), CpuSet::default());
    let mut a = owner(&tlb, 1, &space);
    let mut b = owner(&tlb, 255, &space);
    let me = CpuId(0);
    let first = tlb.shoot_down(me, &space, page(1)).ticket;
    assert!(!tlb.has_passed(me, first));
    requests(&mut a);
    let second = tlb.shoot_down(me, &space, page(2)).ticket;
    requests(&mut b);
    assert!(tlb.has_passed(me, first));
    assert!(!tlb.has_passed(me, second), "the first target has not seen the second request");
    requests(&mut a);
    assert!(tlb.has_passed(me, second) && tlb.has_passed(me, first) && tlb.has_passed(me, Ticket::PASSED));
    // Thousands in flight at a time confuse nothing.
    let tickets: Vec<_> = (0..5000).map(|_| tlb.shoot_down(me, &space, page(3)).ticket).collect();
    assert!(!tlb.has_passed(me, tickets[0]));
    requests(&mut a);
    requests(&mut b);
    assert!(tickets.iter().all(|&ticket| tlb.has_passed(me, ticket)));
}

#[test]
fn who_rests_or_is_off_holds_nobody_up() {
    for membarrier in [true, false] {
        let (tlb, space) = (Tlb::new(3, membarrier).unwrap(), CpuSet::default());
        let mut resting = owner(&tlb, 1, &space);
        let me = CpuId(0);
        let ticket = tlb.shoot_down(me, &space, page(1)).ticket;
        // It never answers, but asking often enough sweeps.
        assert!((0..1000).any(|_| tlb.has_passed(me, ticket)));
        let ticket = tlb.shoot_down(me, &space, page(1)).ticket;
        assert!(!tlb.has_passed(me, ticket));
        tlb.settle(me, ticket);
        assert!(tlb.has_passed(me, ticket));
        let ticket = tlb.shoot_down(me, &space, page(1)).ticket;
        resting.off();
        assert!(tlb.has_passed(me, ticket));
        // Back again, it has nothing to catch up with, and must answer what comes now.
        resting.on();
        assert_eq!(tlb.shoot_down(me, &space, page(1)), ShootDown::PASSED);
        assert!(requests(&mut resting).is_empty());
        let ticket = tlb.shoot_down(me, &space, page(1)).ticket;
        assert!(!tlb.has_passed(me, ticket));
    }
}

#[test]
fn settling_waits_for_an_access_under_way_and_no_longer() {
    let (tlb, space) = (Tlb::new(2, true).unwrap(), CpuSet::default());
    let (inside, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut port = owner(&tlb, 1, &space);
            assert!(port.enter());
            inside.store(true, Ordering::Release);
            thread::sleep(Duration::from_millis(30));
            over.store(true, Ordering::Release);
            port.leave();
            // Stays on, resting, until the other has settled.
            thread::sleep(Duration::from_millis(30));
        });
        while !inside.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let ticket = tlb.shoot_down(CpuId(0), &space, page(1)).ticket;
        for _ in 0..1000 {
            assert!(!tlb.has_passed(CpuId(0), ticket) || over.load(Ordering::Acquire));
        }
        tlb.settle(CpuId(0), ticket);
        assert!(over.load(Ordering::Acquire), "settled in the middle of an access");
    });
}

const PAGES: usize = 24;
/// From one page of the world to the next: each has a bit of its own in the filters.
const STRIDE: u64 = (2 << 20) + PAGE_SIZE;
const POISON: u64 = u64::MAX;

/// A frame that knows what it should hold: `page << 32 | version` while mapped, `POISON` while free.
struct Frame {
    content: AtomicU64,
    /// Written by workers through their translations.
    scratch: AtomicU64,
}

/// Fake page table, fake memory, and for each page the version that a finished shoot-down has announced.
struct World {
    tlb: Tlb,
    space: CpuSet,
    slots: [AtomicUsize; PAGES],
    announced: [AtomicU64; PAGES],
    frames: Vec<Frame>,
    stop: AtomicBool,
    accesses: AtomicU64,
}

impl World {
    /// Reads or writes through the protocol, and checks everything that it promises.
    fn work(&self, cpu: u32, mut random: u64) {
        let mut port = owner(&self.tlb, cpu, &self.space);
        let mut tlb = Translations::new().unwrap();
        let (mut announced, mut done) = ([0; PAGES], 0);
        while !self.stop.load(Ordering::Relaxed) {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let page = (random >> 33) as usize % PAGES;
            let addr = page as u64 * STRIDE;
            announced[page] = self.announced[page].load(Ordering::Acquire);
            if random >> 20 & 0xfff == 0 {
                // Now and then leave the space and come back.
                tlb.forget_all();
                self.space.remove(CpuId(cpu));
                port.off();
                thread::yield_now();
                port.on();
                self.space.insert(CpuId(cpu));
            }
            if random >> 8 & 3 == 0 {
                // Elsewhere too, until the filter is full and everything is flushed.
                port.will_hold(random & !0xfff, |what| tlb.forget(what));
            }
            loop {
                if !port.enter() {
                    port.catch_up(|what| tlb.forget(what));
                }
                if let Some(frame) = tlb.lookup(addr, Needs::LOAD) {
                    let frame = &self.frames[frame.addr() / PAGE_SIZE as usize];
                    let before = frame.content.load(Ordering::Relaxed);
                    frame.scratch.store(random >> 1, Ordering::Relaxed);
                    let after = frame.content.load(Ordering::Relaxed);
                    port.leave();
                    assert_eq!(before, after, "the frame changed hands during an access");
                    assert_eq!(before >> 32, page as u64, "the frame of another page");
                    assert!(
                        before as u32 as u64 >= announced[page],
                        "an access began with a stale translation"
                    );
                    break;
                }
                port.leave();
                port.will_hold(addr, |what| tlb.forget(what));
                // The walk. The fake host address of a frame is its number in pages; 0 is no frame.
                match self.slots[page].load(Ordering::Acquire) {
                    0 => break,
                    frame => {
                        let location = core::ptr::without_provenance_mut(frame * PAGE_SIZE as usize);
                        tlb.insert(addr, location, Needs::LOAD);
                    }
                }
            }
            done += 1;
        }
        self.accesses.fetch_add(done, Ordering::Relaxed);
        tlb.forget_all();
        self.space.remove(CpuId(cpu));
        port.off();
    }

    /// Remaps pages of its own (`first`, `first + step`, ...) and reuses frames as soon as it may.
    fn shoot(&self, cpu: u32, first: usize, step: usize, mut free: Vec<usize>) {
        let me = CpuId(cpu);
        let (mut limbo, mut version, mut rounds) = (VecDeque::new(), 0, 0u64);
        let release = |frame: usize, free: &mut Vec<usize>| {
            self.frames[frame].content.store(POISON, Ordering::Relaxed);
            self.frames[frame].scratch.store(POISON, Ordering::Relaxed);
            free.push(frame);
        };
        while !self.stop.load(Ordering::Relaxed) {
            version += 1;
            for page in (first..PAGES).step_by(step) {
                while let Some((frame, ticket)) = limbo.pop_front() {
                    if !self.tlb.has_passed(me, ticket) {
                        limbo.push_front((frame, ticket));
                        break;
                    }
                    release(frame, &mut free);
                }
                if free.is_empty() {
                    let (frame, ticket) = limbo.pop_front().unwrap();
                    self.tlb.settle(me, ticket);
                    assert!(self.tlb.has_passed(me, ticket));
                    release(frame, &mut free);
                }
                let new = free.swap_remove(rounds as usize % free.len());
                rounds += 1;
                assert_eq!(
                    self.frames[new].scratch.load(Ordering::Relaxed),
                    POISON,
                    "a free frame was written"
                );
                self.frames[new].content.store((page as u64) << 32 | version, Ordering::Relaxed);
                let old = self.slots[page].swap(new, Ordering::SeqCst);
                let at = page as u64 * STRIDE;
                let ticket = self.tlb.shoot_down(me, &self.space, AddrRange::new(at, at + PAGE_SIZE)).ticket;
                self.announced[page].store(version, Ordering::Release);
                if old != 0 {
                    limbo.push_back((old, ticket));
                }
            }
        }
    }
}

fn hammer(workers: u32, membarrier: bool, time: Duration) {
    const SHOOTERS: usize = 2;
    const FRAMES_EACH: usize = PAGES;
    let world = World {
        tlb: Tlb::new(workers as usize + SHOOTERS + 1, membarrier).unwrap(),
        space: CpuSet::default(),
        slots: [const { AtomicUsize::new(0) }; PAGES],
        announced: [const { AtomicU64::new(0) }; PAGES],
        frames: (0..=SHOOTERS * FRAMES_EACH)
            .map(|_| Frame { content: AtomicU64::new(POISON), scratch: AtomicU64::new(POISON) })
            .collect(),
        stop: AtomicBool::new(false),
        accesses: AtomicU64::new(0),
    };
    // One processor runs the space and never does anything.
    let _resting = owner(&world.tlb, workers + SHOOTERS as u32, &world.space);
    thread::scope(|scope| {
        let world = &world;
        for worker in 0..workers {
            scope.spawn(move || world.work(worker, 1 + u64::from(worker) * 0x9e37_79b9));
        }
        for shooter in 0..SHOOTERS {
            let frames = (1 + shooter * FRAMES_EACH..1 + (shooter + 1) * FRAMES_EACH).collect();
            scope.spawn(move || world.shoot(workers + shooter as u32, shooter, SHOOTERS, frames));
        }
        let end = Instant::now() + time;
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
        world.stop.store(true, Ordering::Relaxed);
    });
    assert!(world.accesses.load(Ordering::Relaxed) > 100);
    assert!(world.announced.iter().all(|version| version.load(Ordering::Relaxed) > 0));
}

#[test]
fn no_access_touches_a_frame_that_is_free() {
    hammer(3, true, Duration::from_millis(600));
}

#[test]
fn nor_does_it_without_membarrier() {
    hammer(3, false, Duration::from_millis(600));
}

#[test]
fn nor_with_many_more_threads_than_processors() {
    let processors = thread::available_parallelism().map_or(2, |n| n.get()) as u32;
    hammer(3 * processors + 2, true, Duration::from_millis(600));
}

/// The window that the asymmetric fence closes is a store buffer wide. Here a shooter that settles at once meets
/// a worker that starts single accesses from rest, as often as possible.
///
/// With `flushing`, the worker empties its TLB before each access: then the two meet at the filter.
fn meet(membarrier: bool, flushing: bool, time: Duration) {
    let (tlb, space) = (Tlb::new(2, membarrier).unwrap(), CpuSet::default());
    let slot = AtomicUsize::new(1);
    let frames = [const { CachePadded::new(AtomicU64::new(POISON)) }; 2];
    // Far more than the caches hold: a store here keeps the worker's store buffer from draining.
    let far: Vec<AtomicU64> = (0..1 << 24).map(AtomicU64::new).collect();
    let (stop, on) = (AtomicBool::new(false), AtomicBool::new(false));
    frames[1].store(1, Ordering::Relaxed);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut port = owner(&tlb, 1, &space);
            let mut translations = Translations::new().unwrap();
            on.store(true, Ordering::Release);
            let mut pause = 0u32;
            while !stop.load(Ordering::Relaxed) {
                pause = pause.wrapping_mul(1664525).wrapping_add(1013904223);
                for _ in 0..pause >> 26 {
                    core::hint::spin_loop();
                }
                if flushing {
                    port.flush(|what| translations.forget(what));
                }
                for n in 0..4 {
                    far[(pause as usize).wrapping_mul(77773 + n) % far.len()].store(0, Ordering::Relaxed);
                }
                loop {
                    if !port.enter() {
                        port.catch_up(|what| translations.forget(what));
                    }
                    if let Some(frame) = translations.lookup(0, Needs::LOAD) {
                        let content = frames[frame.addr() / PAGE_SIZE as usize].load(Ordering::Relaxed);
                        port.leave();
                        assert_ne!(content, POISON, "a free frame was read");
                        break;
                    }
                    port.leave();
                    port.will_hold(0, |what| translations.forget(what));
                    let frame = slot.load(Ordering::Acquire) * PAGE_SIZE as usize;
                    translations.insert(0, core::ptr::without_provenance_mut(frame), Needs::LOAD);
                    for _ in 0..pause >> 16 & 63 {
                        core::hint::spin_loop();
                    }
                }
            }
        });
        while !on.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let (end, mut pause) = (Instant::now() + time, 1u32);
        while Instant::now() < end {
            for _ in 0..100 {
                let new = 1 - slot.load(Ordering::Relaxed);
                frames[new].store(1, Ordering::Relaxed);
                pause = pause.wrapping_mul(1664525).wrapping_add(1013904223);
                for _ in 0..pause >> 26 {
                    core::hint::spin_loop();
                }
                let old = slot.swap(new, Ordering::SeqCst);
                let ticket = tlb.shoot_down(CpuId(0), &space, page(0)).ticket;
                tlb.settle(CpuId(0), ticket);
                frames[old].store(POISON, Ordering::Relaxed);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn accesses_from_rest_meet_a_shooter_that_settles_at_once() {
    meet(true, false, Duration::from_millis(400));
    meet(false, false, Duration::from_millis(400));
}

#[test]
fn walks_meet_a_shooter_at_the_filter() {
    meet(true, true, Duration::from_millis(500));
}
