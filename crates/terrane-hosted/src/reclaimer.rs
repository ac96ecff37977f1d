//! The reclaimer: a thread that keeps some memory free, as `kswapd` does in Linux.
//!
//! The library has no threads of its own; it offers [`reclaim::balance`], and this calls it for the machine, with a pause between
//! looks. Whoever finds no memory all the same reclaims for itself, so the reclaimer may be late, and need not be there.
//!
//! [`reclaim::balance`]: terrane::reclaim::balance

use crate::cpu::Cpu;
use crate::error::HostedError;
use crate::machine::HostedMachine;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use terrane::reclaim;

/// When a [`Reclaimer`] begins and when it is content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReclaimerConfig {
    /// It reclaims when fewer frames are free,
    pub low: usize,
    /// and until so many are.
    pub high: usize,
    /// How long it sleeps between looks.
    pub pause: Duration,
}

impl ReclaimerConfig {
    /// A 64th of the machine's memory, and a 32nd; a look every 5 ms, for a machine has no interrupt to wake it.
    pub fn for_machine(machine: &HostedMachine) -> Self {
        let total = machine.machine().frames().total();
        Self { low: (total / 64).max(16), high: (total / 32).max(32), pause: Duration::from_millis(5) }
    }
}

/// A thread that keeps frames of a machine free. Dropping it ends the thread, after the pages that it may be writing.
pub struct Reclaimer {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    ends: Mutex<bool>,
    /// Notified when the reclaimer is to look, or to end.
    changed: Condvar,
    freed: AtomicU64,
    rounds: AtomicU64,
}

impl Reclaimer {
    /// Starts the thread, which takes one of the machine's processors.
    ///
    /// # Errors
    /// [`HostedError::NoCpuFree`]; [`HostedError::OutOfMemory`]; [`HostedError::System`] when the system has no thread.
    pub fn start(machine: &HostedMachine, config: ReclaimerConfig) -> Result<Self, HostedError> {
        let cpu = Cpu::new(machine)?;
        let state = Arc::new(State::default());
        let run = {
            let state = state.clone();
            move || state.run(&cpu, config)
        };
        let thread = thread::Builder::new()
            .name("reclaimer".into())
            .spawn(run)
            .map_err(|error| HostedError::System(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        Ok(Self { state, thread: Some(thread) })
    }

    /// Has it look now instead of at the end of its pause.
    pub fn wake(&self) {
        self.state.changed.notify_all();
    }

    /// Pages freed so far.
    pub fn freed(&self) -> u64 {
        self.state.freed.load(Ordering::Relaxed)
    }

    /// Looks so far.
    pub fn rounds(&self) -> u64 {
        self.state.rounds.load(Ordering::Relaxed)
    }
}

impl State {
    fn run(&self, cpu: &Cpu, config: ReclaimerConfig) {
        loop {
            let freed = reclaim::balance(cpu.core(), config.low, config.high);
            self.freed.fetch_add(freed as u64, Ordering::Relaxed);
            self.rounds.fetch_add(1, Ordering::Relaxed);
            let mut ends = self.ends.lock();
            if !*ends {
                // Woken early or late is all the same.
                self.changed.wait_for(&mut ends, config.pause);
            }
            if *ends {
                return;
            }
        }
    }
}

impl Drop for Reclaimer {
    fn drop(&mut self) {
        *self.state.ends.lock() = true;
        self.state.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to say.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Reclaimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reclaimer").field("freed", &self.freed()).finish_non_exhaustive()
    }
}
