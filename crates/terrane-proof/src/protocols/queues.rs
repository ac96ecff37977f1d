//! The queue of faults for a handler: who is woken sees what was done before.

use crate::host::Model;
use crate::orders::Orders::Messages;
use crate::orders::{check, check_caught};
use loom::cell::UnsafeCell;
use loom::thread;
use std::sync::Arc;
use terrane::AddrRange;
use terrane::fault::user::queue::Queue;
use terrane::fault::user::{FaultKind, UserEvent, UserFault};
use terrane::sync::CpuId;

struct Scene {
    host: Model,
    queue: Queue<Model>,
    page: UnsafeCell<u64>,
}

// SAFETY: loom checks who uses the cell.
unsafe impl Sync for Scene {}
// SAFETY: as above.
unsafe impl Send for Scene {}

/// A fault that waits, and the handler that answers it.
fn answered() {
    let scene =
        Scene { host: Model::new(4, true), queue: Queue::try_new(1).unwrap(), page: UnsafeCell::new(0) };
    let cpu = CpuId(0);
    let fault = UserFault { addr: 0, kind: FaultKind::Missing, write: false, cpu };
    assert!(scene.queue.enter(&scene.host, cpu, UserEvent::Fault(fault)));
    let scene = Arc::new(scene);
    let other = Arc::clone(&scene);
    let handler = thread::spawn(move || {
        // SAFETY: loom sees to it that nobody else does anything with it.
        other.page.with_mut(|page| unsafe { *page = 7 });
        assert_eq!(other.queue.wake(&other.host, AddrRange::new(0, 4096)), 1);
    });
    scene.queue.wait(&scene.host, cpu);
    // SAFETY: loom sees to it that nobody writes it.
    assert_eq!(scene.page.with(|page| unsafe { *page }), 7);
    scene.queue.leave(cpu);
    handler.join().unwrap();
}

#[test]
fn who_is_woken_sees_what_was_done() {
    check(Messages, 2, answered);
}

#[test]
fn waking_needs_its_orders() {
    check_caught("user_wait_relaxed", Messages, 2, answered);
    check_caught("user_wake_relaxed", Messages, 2, answered);
}
