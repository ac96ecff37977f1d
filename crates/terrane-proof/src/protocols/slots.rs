//! Slots of a swap device: who has one, and what is counted on it.

use crate::orders::Orders::Messages;
use crate::orders::{check, check_caught};
use loom::cell::UnsafeCell;
use loom::thread;
use std::sync::Arc;
use terrane::swap::bare::BareSlots;
use terrane::sync::CpuId;

/// One slot, and the place on the device that it stands for.
struct Scene {
    slots: BareSlots,
    place: UnsafeCell<u64>,
}

// SAFETY: loom checks who uses the cell.
unsafe impl Sync for Scene {}
// SAFETY: as above.
unsafe impl Send for Scene {}

impl Scene {
    /// With the slot taken by the first processor.
    fn new() -> (Arc<Self>, u64) {
        let scene = Self { slots: BareSlots::try_new(1, 2).unwrap(), place: UnsafeCell::new(1) };
        for cpu in [CpuId(1), CpuId(0)] {
            // Each processor does everything once, before there are threads: see `sync::atomic`.
            let number = scene.slots.allocate(cpu).unwrap();
            scene.slots.remove_helper(number, cpu);
        }
        let number = scene.slots.allocate(CpuId(0)).unwrap();
        (Arc::new(scene), number)
    }

    fn read(&self) -> u64 {
        // SAFETY: loom sees to it that nobody writes it.
        self.place.with(|place| unsafe { *place })
    }

    fn write(&self, value: u64) {
        // SAFETY: loom sees to it that nobody else does anything with it.
        self.place.with_mut(|place| unsafe { *place = value });
    }
}

/// Two who count on a slot: both are counted.
fn counts() {
    let (scene, number) = Scene::new();
    let other = Arc::clone(&scene);
    let counts = thread::spawn(move || other.slots.add_entry(number, CpuId(1)));
    scene.slots.add_entry(number, CpuId(0));
    counts.join().unwrap();
    assert_eq!(scene.slots.entries(number, CpuId(0)), Some(2), "an entry was not counted");
}

/// A slot is given back by who has read its page, and taken by who writes another there.
fn anew() {
    let (scene, number) = Scene::new();
    let other = Arc::clone(&scene);
    let takes = thread::spawn(move || {
        if other.slots.allocate(CpuId(1)).is_some() {
            other.write(2);
        }
    });
    assert_eq!(scene.read(), 1);
    scene.slots.remove_helper(number, CpuId(0));
    takes.join().unwrap();
}

#[test]
fn a_slot_counts_everybody_and_has_one_owner() {
    check(Messages, 2, counts);
    check(Messages, 2, anew);
}

#[test]
fn slots_need_their_orders() {
    check_caught("slot_locked_relaxed", Messages, 1, counts);
    check_caught("slot_unlocked_relaxed", Messages, 1, counts);
    check_caught("slot_unlocked_relaxed", Messages, 2, anew);
    check_caught("slot_taken_relaxed", Messages, 2, anew);
}
