//! The sequence counter as a lock for readers, the spin lock, the shared pointer.

use crate::orders::Orders::Messages;
use crate::orders::{check, check_caught};
use loom::cell::UnsafeCell;
use loom::thread;
use std::sync::Arc;
use terrane::sync::atomic::{AtomicU64, Ordering::Relaxed};
use terrane::sync::{SeqCount, Shared, SpinLock};

/// Two attributes that a writer changes together are never seen apart.
fn attributes() {
    let vma = Arc::new((SeqCount::new(), AtomicU64::new(0), AtomicU64::new(0)));
    vma.0.read().unwrap();
    assert_eq!((vma.1.load(Relaxed), vma.2.load(Relaxed)), (0, 0));
    let other = Arc::clone(&vma);
    let writer = thread::spawn(move || {
        for value in 1..=2 {
            other.0.write_begin();
            other.1.store(value, Relaxed);
            other.2.store(value, Relaxed);
            other.0.write_end();
        }
    });
    if let Some(seq) = vma.0.read() {
        let seen = (vma.1.load(Relaxed), vma.2.load(Relaxed));
        if vma.0.unchanged(seq) {
            assert_eq!(seen.0, seen.1);
            assert_eq!(u64::from(seq), seen.0 * 2);
        }
    }
    writer.join().unwrap();
}

#[test]
fn attributes_are_one_state() {
    check(Messages, 3, attributes);
}

#[test]
fn attributes_need_every_ordering() {
    for name in ["unchanged_without_fence", "write_end_relaxed", "read_relaxed", "write_begin_unordered"] {
        check_caught(name, Messages, 3, attributes);
    }
}

/// What a holder of the lock wrote, the next one finds.
fn lock() {
    let total = Arc::new(SpinLock::new(UnsafeCell::new(0)));
    drop(total.lock());
    let add = |total: &SpinLock<UnsafeCell<u64>>| {
        // SAFETY: the lock is held; loom checks it.
        total.lock().with_mut(|total| unsafe { *total += 1 });
    };
    let other = Arc::clone(&total);
    let thread = thread::spawn(move || add(&other));
    add(&total);
    thread.join().unwrap();
    // SAFETY: as above.
    assert_eq!(total.lock().with(|total| unsafe { *total }), 2);
}

#[test]
fn a_lock_orders_its_holders() {
    check(Messages, 3, lock);
}

#[test]
fn a_lock_needs_both_orderings() {
    check_caught("spin_lock_relaxed", Messages, 3, lock);
    check_caught("spin_unlock_relaxed", Messages, 3, lock);
}

/// Fails the model if somebody's use of the value is not ordered before its end.
struct Value(UnsafeCell<u64>);

impl Value {
    fn used(&self) -> u64 {
        // SAFETY: loom checks it.
        self.0.with(|value| unsafe { *value })
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: as above.
            self.0.with_mut(|value| unsafe { *value += 1 });
        }
    }
}

// SAFETY: loom checks who uses the cell.
unsafe impl Sync for Value {}

/// Every use of a shared value comes before its end.
fn shared() {
    let mut first = Shared::try_new(Value(UnsafeCell::new(7))).unwrap();
    let second = first.clone();
    let thread = thread::spawn(move || {
        assert_eq!(second.used(), 7);
        drop(second.clone());
        drop(second);
    });
    assert_eq!(first.used(), 7);
    if let Some(alone) = Shared::get_mut(&mut first) {
        // SAFETY: as above: the only owner.
        alone.0.with_mut(|value| unsafe { *value = 8 });
    }
    drop(first);
    thread.join().unwrap();
}

#[test]
fn a_shared_value_ends_after_its_uses() {
    check(Messages, 3, shared);
}

#[test]
fn a_shared_value_needs_every_ordering() {
    for name in ["shared_drop_relaxed", "shared_drop_without_acquire", "shared_only_owner_relaxed"] {
        check_caught(name, Messages, 3, shared);
    }
}
