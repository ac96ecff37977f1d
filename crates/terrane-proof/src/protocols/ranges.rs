//! Range locks: exclusion, order of the memory they guard, no lost wake-up (a sleeper that nobody wakes takes more steps
//! than a model may).

use crate::host::Model;
use crate::orders::Orders::Total;
use crate::orders::{check, check_caught};
use loom::cell::UnsafeCell;
use loom::thread;
use std::sync::Arc;
use terrane::AddrRange;
use terrane::range_lock::{Mode, Node, RangeLock};
use terrane::sync::CpuId;
use terrane::sync::atomic::{AtomicU32, Ordering, fence_behind_locked};

/// A lock, the nodes of its users, and what the range guards.
struct Scene {
    host: Model,
    nodes: [Node; 3],
    lock: RangeLock,
    guarded: UnsafeCell<u64>,
}

// SAFETY: loom checks who uses the cell.
unsafe impl Sync for Scene {}
// SAFETY: as above.
unsafe impl Send for Scene {}

const ZONE: u64 = 1 << 21;
const NARROW: AddrRange = AddrRange { start: 4096, end: 8192 };
const WIDE: AddrRange = AddrRange { start: 4096, end: 2 * ZONE };

impl Scene {
    fn new() -> Arc<Self> {
        let lock = RangeLock::try_new(AddrRange::new(0, 1 << 31), 1).unwrap();
        assert_eq!(lock.zone_len(), ZONE);
        let nodes = [Node::new(), Node::new(), Node::new()];
        let scene = Self { host: Model::new(1, true), nodes, lock, guarded: UnsafeCell::new(0) };
        for n in 0..scene.nodes.len() {
            scene.write(n, NARROW);
            scene.write(n, WIDE);
        }
        Arc::new(scene)
    }

    /// Changes what `range` guards, as the user of node `n`.
    fn write(&self, n: usize, range: AddrRange) {
        // SAFETY: one thread uses the node.
        let held =
            unsafe { self.lock.lock(&self.host, CpuId(n as u32), &self.nodes[n], range, Mode::Exclusive) };
        // SAFETY: loom checks it.
        self.guarded.with_mut(|value| unsafe { *value += 1 });
        drop(held);
    }

    /// Reads it.
    fn read(&self, n: usize, range: AddrRange) -> u64 {
        // SAFETY: one thread uses the node.
        let held =
            unsafe { self.lock.lock(&self.host, CpuId(n as u32), &self.nodes[n], range, Mode::Shared) };
        // SAFETY: loom checks it.
        let value = self.guarded.with(|value| unsafe { *value });
        drop(held);
        value
    }
}

fn two(mine: AddrRange, others: AddrRange) {
    let scene = Scene::new();
    let other = Arc::clone(&scene);
    let thread = thread::spawn(move || other.write(1, others));
    scene.write(0, mine);
    thread.join().unwrap();
    assert_eq!(scene.read(0, WIDE), 6 + 2);
}

fn narrow() {
    two(NARROW, NARROW);
}

fn wide() {
    two(WIDE, WIDE);
}

fn narrow_and_wide() {
    two(WIDE, NARROW);
}

/// One writes, two read: the readers do not shut each other out, and each is waited for.
fn readers() {
    let scene = Scene::new();
    let threads = [1, 2].map(|n| {
        let other = Arc::clone(&scene);
        thread::spawn(move || other.read(n, NARROW))
    });
    scene.write(0, NARROW);
    for thread in threads {
        assert!(matches!(thread.join().unwrap(), 6 | 7));
    }
}

#[test]
fn ranges_exclude_each_other() {
    check(Total, 3, narrow);
    check(Total, 3, wide);
    check(Total, 1, readers);
}

#[test]
fn narrow_and_wide_ranges_exclude_each_other() {
    check(Total, 3, narrow_and_wide);
}

#[test]
fn narrow_ranges_need_their_orders_and_the_wake_up() {
    for name in ["range_told_relaxed", "range_turn_relaxed", "range_nobody_told", "range_no_conflict"] {
        check_caught(name, Total, 2, narrow);
    }
}

#[test]
fn wide_ranges_need_the_announcement_and_the_look_at_the_buckets() {
    for name in
        ["range_not_announced", "range_announced_relaxed", "range_wide_looks_nowhere", "range_no_event"]
    {
        check_caught(name, Total, 2, narrow_and_wide);
    }
}

/// What a change in one step works on: the version of a leaf, odd while it is locked, and what the leaf guards.
struct Steps {
    ranges: Arc<Scene>,
    version: AtomicU32,
}

impl Steps {
    fn new() -> Arc<Self> {
        let steps = Self { ranges: Scene::new(), version: AtomicU32::new(0) };
        // Before there are threads: see `sync::atomic`.
        assert!(steps.ranges.lock.is_quiet(NARROW));
        assert_eq!(steps.version.load(Ordering::Acquire), 0);
        Arc::new(steps)
    }

    /// A step: locks the leaf, looks whether the range is held, and goes on if it is not.
    fn step(&self) {
        self.version.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).unwrap();
        fence_behind_locked();
        if self.ranges.lock.is_quiet(NARROW) {
            // SAFETY: loom checks it.
            self.ranges.guarded.with_mut(|value| unsafe { *value += 1 });
        }
        self.version.store(2, Ordering::Release);
    }

    /// A call that holds the range, looks at the leaf, and relies on what it has seen.
    fn hold(&self, range: AddrRange) {
        let Scene { host, nodes, lock, guarded } = &*self.ranges;
        // SAFETY: one thread uses the node.
        let held = unsafe { lock.lock(host, CpuId(1), &nodes[1], range, Mode::Exclusive) };
        while self.version.load(Ordering::Acquire) == 1 {
            thread::yield_now();
        }
        // SAFETY: loom checks it.
        guarded.with_mut(|value| unsafe { *value += 1 });
        drop(held);
    }
}

fn step_beside(range: AddrRange) {
    let steps = Steps::new();
    let other = Arc::clone(&steps);
    let holder = thread::spawn(move || other.hold(range));
    steps.step();
    holder.join().unwrap();
}

fn step_beside_narrow() {
    step_beside(NARROW);
}

fn step_beside_wide() {
    step_beside(WIDE);
}

#[test]
fn a_step_goes_on_where_nobody_holds_the_range() {
    check(Total, 3, step_beside_narrow);
    check(Total, 3, step_beside_wide);
}

#[test]
fn a_step_needs_the_look_and_holders_their_order() {
    for model in [step_beside_narrow as fn(), step_beside_wide] {
        check_caught("range_always_quiet", Total, 2, model);
        check_caught("range_registered_unordered", Total, 2, model);
    }
    check_caught("range_left_relaxed", Total, 2, step_beside_narrow);
}
