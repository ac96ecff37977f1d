//! Range locks among several: nobody overtakes, nobody sleeps for ever, nobody holds what another holds.

use crate::host::Model;
use crate::schedules::{Effort, check, check_caught};
use std::sync::Arc;
use terrane::AddrRange;
use terrane::range_lock::{Mode, Node, RangeLock};
use terrane::sync::CpuId;
use terrane::sync::atomic::{AtomicU64, Ordering};

const ZONE: u64 = 1 << 21;
/// Users of the lock.
const USERS: usize = 4;

struct Scene {
    host: Model,
    nodes: [[Node; 2]; USERS],
    lock: RangeLock,
    /// For each unit of addresses: the holder that writes in the upper half, readers in the lower.
    units: [AtomicU64; 6],
}

/// Units of half a zone, so that some ranges span zones and some do not.
const UNIT: u64 = ZONE / 2;
const WRITER: u64 = 1 << 32;

impl Scene {
    fn units(from: u64, to: u64) -> AddrRange {
        AddrRange::new(from * UNIT, to * UNIT)
    }

    /// Notes that a range is held, and looks whether anybody else holds a part of it.
    fn use_it(&self, range: AddrRange, mode: Mode) {
        let units = &self.units[(range.start / UNIT) as usize..(range.end / UNIT) as usize];
        let mine = if mode == Mode::Exclusive { WRITER } else { 1 };
        for unit in units {
            let before = unit.fetch_add(mine, Ordering::SeqCst);
            assert!(before < WRITER && (mine == 1 || before == 0), "held twice");
        }
        for unit in units {
            unit.fetch_sub(mine, Ordering::SeqCst);
        }
    }

    fn lock(&self, user: usize, from: u64, to: u64, mode: Mode) {
        let cpu = CpuId(user as u32);
        // SAFETY: one thread is this user.
        let held =
            unsafe { self.lock.lock(&self.host, cpu, &self.nodes[user][0], Self::units(from, to), mode) };
        self.use_it(held.range(), mode);
    }

    fn lock_two(&self, user: usize, a: (u64, u64), b: (u64, u64)) {
        let (cpu, [first, second]) = (CpuId(user as u32), &self.nodes[user]);
        let ranges = [Self::units(a.0, a.1), Self::units(b.0, b.1)];
        // SAFETY: one thread is this user.
        let held = unsafe { self.lock.lock_both(&self.host, cpu, [first, second], ranges, Mode::Exclusive) };
        for held in &held {
            self.use_it(held.range(), Mode::Exclusive);
        }
    }
}

/// Four users, narrow and wide, shared and exclusive, one of them with two ranges.
fn several() {
    let scene = Arc::new(Scene {
        host: Model::new(1, true),
        nodes: std::array::from_fn(|_| [Node::new(), Node::new()]),
        lock: RangeLock::try_new(AddrRange::new(0, 1 << 31), 2).unwrap(),
        units: [const { AtomicU64::new(0) }; 6],
    });
    let user = |act: fn(&Scene)| {
        let scene = Arc::clone(&scene);
        shuttle::thread::spawn(move || act(&scene))
    };
    let users = [
        user(|scene| {
            scene.lock(0, 0, 1, Mode::Exclusive);
            scene.lock(0, 2, 4, Mode::Shared);
            scene.lock(0, 1, 3, Mode::Exclusive);
        }),
        user(|scene| {
            scene.lock(1, 0, 6, Mode::Exclusive);
            scene.lock(1, 0, 2, Mode::Exclusive);
        }),
        user(|scene| {
            scene.lock(2, 2, 3, Mode::Shared);
            scene.lock(2, 0, 4, Mode::Shared);
            scene.lock(2, 3, 4, Mode::Exclusive);
        }),
        user(|scene| {
            scene.lock_two(3, (3, 4), (0, 1));
            scene.lock(3, 0, 1, Mode::Exclusive);
        }),
    ];
    for user in users {
        user.join().unwrap();
    }
}

const FEW_STEPS: Effort = Effort { schedules: 1000, steps: 20_000 };

#[test]
fn several_users_of_range_locks() {
    check(FEW_STEPS, several);
}

#[test]
fn range_locks_need_their_looks_and_wake_ups() {
    let names = [
        "range_no_conflict",
        "range_nobody_told",
        "range_not_announced",
        "range_wide_looks_nowhere",
        "range_no_event",
    ];
    for name in names {
        check_caught(name, FEW_STEPS, several);
    }
}
