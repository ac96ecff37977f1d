//! Range locks against a model that knows who holds which page, alone and with many threads.

use super::*;
use crate::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize};
use alloc::vec;
use parking_lot::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A host that really sleeps: a wake-up that is lost is a test that hangs, and a watchdog that tells.
struct Sleeper {
    lock: Mutex<()>,
    woken: Condvar,
    sleeps: AtomicUsize,
    asleep: AtomicUsize,
}

/// Longer than any wait of a test that is right.
const LOST: Duration = Duration::from_secs(10);

impl Sleeper {
    fn new() -> Self {
        let zero = || AtomicUsize::new(0);
        Self { lock: Mutex::new(()), woken: Condvar::new(), sleeps: zero(), asleep: zero() }
    }

    /// Waits until `count` threads sleep.
    fn await_asleep(&self, count: usize) {
        let begun = Instant::now();
        while self.asleep.load(Ordering::SeqCst) < count {
            assert!(begun.elapsed() < LOST, "nobody waits");
            thread::yield_now();
        }
    }
}

impl Wait for Sleeper {
    fn wait(&self, _: CpuId, word: &AtomicU32, value: u32) {
        let mut lock = self.lock.lock();
        self.sleeps.fetch_add(1, Ordering::Relaxed);
        while word.load(Ordering::Acquire) == value {
            self.asleep.fetch_add(1, Ordering::SeqCst);
            let late = self.woken.wait_for(&mut lock, LOST).timed_out();
            self.asleep.fetch_sub(1, Ordering::SeqCst);
            assert!(!late, "a wake-up was lost");
        }
    }

    fn wake_all(&self, _: &AtomicU32) {
        // So that nobody is between looking at its word and falling asleep.
        let _lock = self.lock.lock();
        self.woken.notify_all();
    }

    fn relax(&self, _: CpuId, _: u32) {
        thread::yield_now();
    }
}

/// 64 zones of the smallest size.
const LIMITS: AddrRange = AddrRange { start: 0, end: 64 << MIN_ZONE_SHIFT };
const ZONE: u64 = 1 << MIN_ZONE_SHIFT;

fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % below
    }
}

fn lock<'a>(
    lock: &'a RangeLock,
    host: &'a Sleeper,
    node: &'a Node,
    range: (u64, u64),
    mode: Mode,
) -> Held<'a, Sleeper> {
    // SAFETY: each node is of one thread, and they are made before the locks.
    unsafe { lock.lock(host, CpuId(0), node, AddrRange::new(range.0, range.1), mode) }
}

fn try_lock<'a>(
    lock: &'a RangeLock,
    host: &'a Sleeper,
    node: &'a Node,
    range: (u64, u64),
    mode: Mode,
) -> Option<Held<'a, Sleeper>> {
    // SAFETY: as above.
    unsafe { lock.try_lock(host, CpuId(0), node, AddrRange::new(range.0, range.1), mode) }
}

fn lock_both<'a>(
    lock: &'a RangeLock,
    host: &'a Sleeper,
    nodes: [&'a Node; 2],
    ranges: [(u64, u64); 2],
    mode: Mode,
) -> [Held<'a, Sleeper>; 2] {
    let ranges = ranges.map(|range| AddrRange::new(range.0, range.1));
    // SAFETY: as above.
    unsafe { lock.lock_both(host, CpuId(0), nodes, ranges, mode) }
}

fn is_at_rest(locks: &RangeLock) {
    for bucket in &locks.buckets {
        let nodes = bucket.nodes.lock();
        assert!(nodes.iter().next().is_none() && !nodes.has_waiting());
    }
    let wide = locks.wide.nodes.lock();
    assert!(wide.iter().next().is_none() && !wide.has_waiting());
    assert_eq!(locks.announced.load(Ordering::SeqCst), 0);
}

/// Ranges of every kind: a page, within a zone, over a boundary, over several zones, all.
const KINDS: [(u64, u64); 8] = [
    (ZONE, ZONE + 0x1000),
    (ZONE, ZONE + 0x8000),
    (ZONE + 0x4000, ZONE + 0xc000),
    (2 * ZONE - 0x1000, 2 * ZONE),
    (2 * ZONE - 0x1000, 2 * ZONE + 0x1000),
    (0, 5 * ZONE),
    (4 * ZONE, 9 * ZONE),
    (0, 64 * ZONE),
];

#[test]
fn what_excludes_what() {
    let (nodes, host) = ([Node::new(), Node::new()], Sleeper::new());
    let locks = RangeLock::try_new(LIMITS, 4).unwrap();
    for first in KINDS {
        for second in KINDS {
            for (a, b) in [(Mode::Shared, Mode::Shared), (Mode::Shared, Mode::Exclusive)]
                .into_iter()
                .chain([(Mode::Exclusive, Mode::Shared), (Mode::Exclusive, Mode::Exclusive)])
            {
                let held = lock(&locks, &host, &nodes[0], first, a);
                assert!(held.mode() == a && held.range() == AddrRange::new(first.0, first.1));
                let overlap = first.0 < second.1 && second.0 < first.1;
                let both = try_lock(&locks, &host, &nodes[1], second, b);
                let excluded = overlap && (a == Mode::Exclusive || b == Mode::Exclusive);
                assert_eq!(both.is_none(), excluded, "{first:x?} {a:?}, {second:x?} {b:?}");
                drop(held);
                assert_eq!(both.is_some(), nodes[1].is_busy());
                drop(both);
                let again = try_lock(&locks, &host, &nodes[1], second, b);
                assert!(again.is_some_and(|held| !held.waited()));
                is_at_rest(&locks);
            }
        }
    }
    assert_eq!(host.sleeps.load(Ordering::Relaxed), 0);
}

#[test]
fn neighbouring_zones_are_in_different_buckets() {
    for cpus in [1, 2, 3, 8, 100] {
        let locks = RangeLock::try_new(AddrRange::new(0, 1 << 47), cpus).unwrap();
        assert_eq!(locks.zone_len(), 4 << 30);
        let count = locks.buckets.len() as u64;
        assert!((4..=64).contains(&count) && (count >= 2 * cpus as u64 || count == 64));
        for zone in 0..1 << 15 {
            assert_ne!(locks.bucket_of_zone(zone), locks.bucket_of_zone(zone + 1));
        }
        // CPUs whose areas are a power of two of zones apart.
        for stride in (0..=2 * count.ilog2()).map(|shift| 1 << shift) {
            let mut seen = vec![false; count as usize];
            (0..count).for_each(|cpu| seen[locks.bucket_of_zone(cpu * stride)] = true);
            assert!(seen.iter().all(|seen| *seen), "{count} buckets, {stride} zones");
        }
        // A wide range announces itself for all its zones.
        for (first, len) in [(0, 2), (7, 3), (1000, count), (12345, 2 * count)] {
            let range = AddrRange::new(first << locks.zone_shift, (first + len) << locks.zone_shift);
            assert!(locks.bucket_of(range).is_none());
            let bits = locks.buckets_of(range);
            assert!((first..first + len).all(|zone| bits & (1 << locks.bucket_of_zone(zone)) != 0));
        }
    }
    // Any address at all is in some bucket.
    let locks = RangeLock::try_new(LIMITS, 2).unwrap();
    let (node, host) = (Node::new(), Sleeper::new());
    for range in [(0, 0), (u64::MAX, u64::MAX), (0, u64::MAX), (u64::MAX - 1, u64::MAX)] {
        drop(lock(&locks, &host, &node, range, Mode::Exclusive));
    }
    is_at_rest(&locks);
}

/// Locks ranges one after the other, each by a thread that then waits, while the first is held; and then sees them granted in
/// that order.
fn in_order(ranges: &[(u64, u64)]) {
    let nodes: std::vec::Vec<_> = (0..ranges.len()).map(|_| Node::new()).collect();
    let host = Sleeper::new();
    let locks = RangeLock::try_new(LIMITS, 4).unwrap();
    let order = Mutex::new(vec![]);
    thread::scope(|scope| {
        let first = lock(&locks, &host, &nodes[0], ranges[0], Mode::Exclusive);
        for (index, range) in ranges.iter().enumerate().skip(1) {
            let (host, locks, node, order) = (&host, &locks, &nodes[index], &order);
            scope.spawn(move || {
                let held = lock(locks, host, node, *range, Mode::Exclusive);
                order.lock().push(index);
                assert!(held.waited());
            });
            host.await_asleep(index);
        }
        drop(first);
    });
    assert_eq!(*order.lock(), (1..ranges.len()).collect::<std::vec::Vec<_>>());
    is_at_rest(&locks);
}

#[test]
fn those_that_conflict_go_in_the_order_of_arrival() {
    let page = (ZONE, ZONE + 0x1000);
    let pages = (ZONE, ZONE + 0x3000);
    let straddling = (0, 2 * ZONE);
    let all = (0, 64 * ZONE);
    in_order(&[page, page, pages, page]);
    in_order(&[straddling, all, straddling, all]);
    // Narrow ones that come after a wide one wait behind it, and before the next.
    in_order(&[page, all, page]);
    in_order(&[all, page, all, pages]);
    in_order(&[page, straddling, page, all, pages]);
}

#[test]
fn a_waiter_keeps_later_ones_behind_it_but_not_those_beside_it() {
    let (nodes, host) = ([const { Node::new() }; 5], Sleeper::new());
    let locks = RangeLock::try_new(LIMITS, 4).unwrap();
    let shared = lock(&locks, &host, &nodes[0], (0, 0x2000), Mode::Shared);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| drop(lock(&locks, &host, &nodes[1], (0, 0x4000), Mode::Exclusive)));
        host.await_asleep(1);
        assert!(try_lock(&locks, &host, &nodes[2], (0, 0x1000), Mode::Shared).is_none());
        assert!(try_lock(&locks, &host, &nodes[2], (0x3000, 0x5000), Mode::Shared).is_none());
        let beside = try_lock(&locks, &host, &nodes[2], (0x4000, 0x5000), Mode::Exclusive);
        assert!(beside.is_some());
        // A wide one too: its like, and narrow ones, wait behind it.
        let wide = scope.spawn(|| drop(lock(&locks, &host, &nodes[3], (0, 2 * ZONE), Mode::Exclusive)));
        host.await_asleep(2);
        assert!(try_lock(&locks, &host, &nodes[4], (ZONE, ZONE + 0x1000), Mode::Shared).is_none());
        assert!(try_lock(&locks, &host, &nodes[4], (ZONE, 3 * ZONE), Mode::Shared).is_none());
        assert!(try_lock(&locks, &host, &nodes[4], (2 * ZONE, 3 * ZONE), Mode::Shared).is_some());
        assert!(!waiter.is_finished() && !wide.is_finished());
        drop((shared, beside));
    });
    is_at_rest(&locks);
}

/// Who holds each page: -1 exclusively, else how many share it.
struct Pages(std::vec::Vec<AtomicI64>);

impl Pages {
    /// The first pages of each zone stand for the zone.
    const OF_ZONE: u64 = 8;

    fn new() -> Self {
        Self((0..64 * Self::OF_ZONE).map(|_| AtomicI64::new(0)).collect())
    }

    fn of(&self, range: (u64, u64)) -> impl Iterator<Item = &AtomicI64> {
        self.0.iter().enumerate().filter_map(move |(index, page)| {
            let at = index as u64 / Self::OF_ZONE * ZONE + index as u64 % Self::OF_ZONE * 0x1000;
            (range.0 <= at && at < range.1).then_some(page)
        })
    }

    fn enter(&self, range: (u64, u64), mode: Mode) {
        for page in self.of(range) {
            match mode {
                Mode::Shared => assert!(page.fetch_add(1, Ordering::Relaxed) >= 0, "shared beside exclusive"),
                Mode::Exclusive => assert_eq!(page.swap(-1, Ordering::Relaxed), 0, "not exclusive"),
            }
        }
    }

    fn leave(&self, range: (u64, u64), mode: Mode) {
        for page in self.of(range) {
            match mode {
                Mode::Shared => assert!(page.fetch_sub(1, Ordering::Relaxed) > 0, "exclusive beside shared"),
                Mode::Exclusive => assert_eq!(page.swap(0, Ordering::Relaxed), -1, "not exclusive"),
            }
        }
    }
}

/// A range of a random kind within the first `zones` zones.
fn some_range(next: &mut impl FnMut(u64) -> u64, zones: u64, wide: u64) -> (u64, u64) {
    if next(100) < wide {
        let first = next(zones - 1);
        let last = first + 1 + next(zones - 1 - first);
        return (
            first * ZONE + next(Pages::OF_ZONE) * 0x1000,
            last * ZONE + (1 + next(Pages::OF_ZONE)) * 0x1000,
        );
    }
    let (zone, first) = (next(zones) * ZONE, next(Pages::OF_ZONE));
    (zone + first * 0x1000, zone + (first + 1 + next(Pages::OF_ZONE - first)) * 0x1000)
}

fn storm(seed: u64, threads: usize, rounds: usize, zones: u64, wide: u64) {
    let nodes: std::vec::Vec<_> = (0..2 * threads).map(|_| Node::new()).collect();
    let (host, pages) = (Sleeper::new(), Pages::new());
    let locks = RangeLock::try_new(LIMITS, 2).unwrap();
    thread::scope(|scope| {
        for (thread, nodes) in nodes.chunks(2).enumerate() {
            let (host, pages, locks) = (&host, &pages, &locks);
            scope.spawn(move || {
                let mut next = numbers(seed * 1000 + thread as u64);
                for _ in 0..rounds {
                    let range = some_range(&mut next, zones, wide);
                    let other = some_range(&mut next, zones, wide);
                    let mode = if next(3) == 0 { Mode::Shared } else { Mode::Exclusive };
                    let apart = range.1 <= other.0 || other.1 <= range.0;
                    let (held, ranges) = match next(8) {
                        0 => match try_lock(locks, host, &nodes[0], range, mode) {
                            Some(held) => (vec![held], vec![range]),
                            None => continue,
                        },
                        1 if apart => {
                            let both = [&nodes[0], &nodes[1]];
                            (lock_both(locks, host, both, [range, other], mode).into(), vec![range, other])
                        }
                        _ => (vec![lock(locks, host, &nodes[0], range, mode)], vec![range]),
                    };
                    ranges.iter().for_each(|range| pages.enter(*range, mode));
                    (0..next(3)).for_each(|_| thread::yield_now());
                    ranges.iter().for_each(|range| pages.leave(*range, mode));
                    drop(held);
                }
            });
        }
    });
    is_at_rest(&locks);
    assert!(nodes.iter().all(|node| !node.is_busy()));
}

#[test]
fn narrow_ranges_exclude_each_other() {
    storm(1, 4, 1500, 1, 0);
    storm(2, 4, 1500, 5, 0);
}

#[test]
fn wide_ranges_exclude_each_other() {
    storm(3, 4, 400, 4, 100);
    storm(4, 4, 400, 40, 100);
}

#[test]
fn wide_and_narrow_ranges_exclude_each_other() {
    storm(5, 5, 500, 3, 20);
    storm(6, 5, 500, 3, 50);
    storm(7, 5, 700, 20, 5);
}

/// Neither kind waits for ever while the other comes and comes again.
#[test]
fn nobody_starves() {
    let (nodes, host) = ([const { Node::new() }; 5], Sleeper::new());
    let locks = RangeLock::try_new(LIMITS, 4).unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for (index, range) in
            [(0, 0x2000), (0x1000, 0x3000), (0, 3 * ZONE), (0, 64 * ZONE)].into_iter().enumerate()
        {
            let (host, locks, node, over) = (&host, &locks, &nodes[index], &over);
            scope.spawn(move || {
                let mut rounds = 0;
                while !over.load(Ordering::Relaxed) || rounds < 100 {
                    drop(lock(locks, host, node, range, Mode::Exclusive));
                    rounds += 1;
                }
            });
        }
        for round in 0..200 {
            let range = if round % 2 == 0 { (0x1000, 0x2000) } else { (0x1000, ZONE + 0x1000) };
            drop(lock(&locks, &host, &nodes[4], range, Mode::Exclusive));
        }
        over.store(true, Ordering::Relaxed);
    });
    is_at_rest(&locks);
}

#[test]
fn who_does_not_know_the_moment_is_waited_for() {
    let (nodes, host) = ([const { Node::new() }; 4], Sleeper::new());
    let (late, later_still) = (Node::new(), Node::new());
    let locks = RangeLock::try_new(LIMITS, 4).unwrap();
    for (range, moment) in [((0, 0x1000), 7), ((0, 2 * ZONE), 8)] {
        let held = lock(&locks, &host, &nodes[0], range, Mode::Exclusive);
        // Of no concern: it shares; it knows; it has committed; it waits.
        let shared = lock(&locks, &host, &nodes[1], (5 * ZONE, 5 * ZONE + 1), Mode::Shared);
        let aware = lock(&locks, &host, &nodes[2], (6 * ZONE, 8 * ZONE), Mode::Exclusive);
        aware.aware_of(moment);
        thread::scope(|scope| {
            let behind = scope.spawn(|| drop(lock(&locks, &host, &nodes[3], range, Mode::Exclusive)));
            host.await_asleep(1);
            let lister = scope.spawn(|| locks.await_aware(&host, CpuId(1), moment));
            thread::sleep(Duration::from_millis(20));
            let waits = !lister.is_finished();
            // Who comes later knows.
            let later = try_lock(&locks, &host, &late, (9 * ZONE, 9 * ZONE + 1), Mode::Exclusive);
            let wide = try_lock(&locks, &host, &later_still, (9 * ZONE + 1, 12 * ZONE), Mode::Exclusive);
            let both = later.is_some() && wide.is_some();
            held.committed();
            let begun = Instant::now();
            while !lister.is_finished() && begun.elapsed() < LOST {
                thread::yield_now();
            }
            let goes_on = lister.is_finished() && !behind.is_finished();
            // Before the checks, or a thread that waits would never end.
            drop((held, shared, aware, later, wide));
            assert!(waits && both && goes_on, "{range:x?}: {waits} {both} {goes_on}");
        });
    }
    is_at_rest(&locks);
}
