//! The collapser: a thread that makes huge pages of small ones in the background, as `khugepaged` does in Linux.
//!
//! The library has no threads of its own; it offers [`AddressSpace::collapse_step`], and this calls it for one space after
//! the other, with a pause between rounds. A space that nobody else owns any more is given up at the end of a round.
//!
//! [`AddressSpace::collapse_step`]: terrane::space::AddressSpace::collapse_step

use crate::cpu::Cpu;
use crate::error::HostedError;
use crate::machine::{HostedMachine, Space};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use terrane::sync::Shared;

/// How hard a [`Collapser`] tries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CollapserConfig {
    /// How long it sleeps between rounds through its spaces.
    pub pause: Duration,
    /// How many VMAs and page tables it looks at in each space in a round. Each huge page that it makes takes some 300 us.
    pub budget: usize,
}

impl Default for CollapserConfig {
    /// 8 page tables, which is 4096 pages, every 10 seconds: `pages_to_scan` and `scan_sleep_millisecs` of Linux.
    fn default() -> Self {
        Self { pause: Duration::from_secs(10), budget: 8 }
    }
}

/// A thread that makes huge pages in the spaces it [watches](Self::watch). Dropping it ends the thread, after the huge page
/// that it may be making.
pub struct Collapser {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    todo: Mutex<Todo>,
    /// Notified when the collapser is to end.
    changed: Condvar,
    collapsed: AtomicU64,
    rounds: AtomicU64,
}

#[derive(Default)]
struct Todo {
    spaces: Vec<Shared<Space>>,
    ends: bool,
}

impl Collapser {
    /// Starts the thread, which takes one of the machine's processors.
    ///
    /// # Errors
    /// [`HostedError::NoCpuFree`]; [`HostedError::OutOfMemory`]; [`HostedError::System`] when the system has no thread.
    pub fn start(machine: &HostedMachine, config: CollapserConfig) -> Result<Self, HostedError> {
        let cpu = Cpu::new(machine)?;
        let state = Arc::new(State {
            todo: Mutex::new(Todo::default()),
            changed: Condvar::new(),
            collapsed: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
        });
        let builder = thread::Builder::new().name("collapser".into());
        let run = {
            let state = state.clone();
            move || state.run(&cpu, config)
        };
        let thread = builder
            .spawn(run)
            .map_err(|error| HostedError::System(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        Ok(Self { state, thread: Some(thread) })
    }

    /// Looks after `space`, of the same machine, from the next round on, for as long as somebody else owns it.
    pub fn watch(&self, space: &Shared<Space>) {
        let mut todo = self.state.todo.lock();
        if !todo.spaces.iter().any(|watched| Shared::ptr_eq(watched, space)) {
            todo.spaces.push(space.clone());
        }
    }

    /// Leaves `space` alone from the next round on.
    pub fn leave(&self, space: &Shared<Space>) {
        self.state.todo.lock().spaces.retain(|watched| !Shared::ptr_eq(watched, space));
    }

    /// Huge pages made so far.
    pub fn collapsed(&self) -> u64 {
        self.state.collapsed.load(Ordering::Relaxed)
    }

    /// Rounds made so far.
    pub fn rounds(&self) -> u64 {
        self.state.rounds.load(Ordering::Relaxed)
    }
}

impl State {
    fn run(&self, cpu: &Cpu, config: CollapserConfig) {
        loop {
            let mut next = 0;
            loop {
                // Held by a clone while it is worked on, and no lock: `watch` does not wait for a collapse.
                let space = {
                    let todo = self.todo.lock();
                    if todo.ends {
                        return;
                    }
                    todo.spaces.get(next).cloned()
                };
                let Some(space) = space else { break };
                let progress = space.collapse_step(cpu.core(), config.budget);
                self.collapsed.fetch_add(progress.collapsed as u64, Ordering::Relaxed);
                next += 1;
            }
            self.rounds.fetch_add(1, Ordering::Relaxed);
            let mut todo = self.todo.lock();
            // The last owner frees all memory of the space, which takes its time.
            let (kept, gone) = core::mem::take(&mut todo.spaces)
                .into_iter()
                .partition::<Vec<_>, _>(|space| Shared::references(space) > 1);
            todo.spaces = kept;
            if !gone.is_empty() {
                drop(todo);
                drop(gone);
                todo = self.todo.lock();
            }
            if !todo.ends {
                // Woken early or late is all the same.
                self.changed.wait_for(&mut todo, config.pause);
            }
        }
    }
}

impl Drop for Collapser {
    fn drop(&mut self) {
        self.state.todo.lock().ends = true;
        self.state.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to say.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Collapser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collapser")
            .field("spaces", &self.state.todo.lock().spaces.len())
            .field("collapsed", &self.collapsed())
            .finish_non_exhaustive()
    }
}
