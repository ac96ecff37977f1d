//! `vfork`: the parent waits until the child has left the space that they share.

use core::sync::atomic::{AtomicBool, Ordering};

use super::wait::Queue;

/// What a child tells its parent, once.
pub struct Vfork {
    done: AtomicBool,
    parent: Queue,
}

impl Vfork {
    /// The child has not left yet.
    pub const fn new() -> Self {
        Self { done: AtomicBool::new(false), parent: Queue::new() }
    }

    /// It has.
    pub fn done(&self) {
        self.done.store(true, Ordering::SeqCst);
        self.parent.wake_all();
    }

    /// Waits for that; false when the parent is to end first.
    pub fn wait(&self, ends: impl Fn() -> bool) {
        self.parent.wait_uninterrupted(|| self.done.load(Ordering::SeqCst) || ends());
    }
}
