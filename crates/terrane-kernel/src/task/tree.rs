//! All threads and processes, by number, and who is whose child.
//!
//! One lock for all of it, held for a look or a step: starting and ending threads are rare beside what they do in between.

use alloc::vec::Vec;
use core::cell::Cell;
use core::mem;
use core::sync::atomic::{AtomicUsize, Ordering};

use terrane::sync::Shared;

use super::children;
use super::lock::{Guard, Lock};
use super::process::Process;
use super::thread::Thread;
use crate::errno::Errno;

/// Numbers are below this (`pid_max`).
const ID_MAX: u32 = 1 << 22;
/// Threads at most.
const THREADS_MAX: usize = 32_000;

/// What a parent can learn about a child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It has ended, with this status.
    Ended(u32),
    /// This signal has stopped it.
    Stopped(u32),
    /// It goes on.
    Continued,
}

/// A process in the tree.
pub struct Node {
    pub process: Shared<Process>,
    /// [`children::NOBODY`] for the first process, and for orphans.
    pub parent: u32,
    pub group: u32,
    pub session: u32,
    /// What its parent has not been told yet. With the tree's lock held.
    pub change: Cell<Option<Change>>,
}

impl Node {
    /// It has ended, and its parent has not asked yet.
    pub fn is_zombie(&self) -> bool {
        matches!(self.change.get(), Some(Change::Ended(_)))
    }
}

/// The threads and processes.
pub struct Tree {
    threads: Vec<Shared<Thread>>,
    processes: Vec<Node>,
    last: u32,
}

static TREE: Lock<Tree> =
    Lock::new(Tree { threads: Vec::new(), processes: Vec::new(), last: children::NOBODY });
/// Threads that can be freed, perhaps.
static GONE: AtomicUsize = AtomicUsize::new(0);

/// Takes the tree's lock.
pub fn tree() -> Guard<'static, Tree> {
    TREE.lock()
}

impl Tree {
    /// A number that no thread, process or group has.
    ///
    /// # Errors
    /// [`Errno::EAGAIN`] when there are too many threads.
    pub fn new_id(&mut self) -> Result<u32, Errno> {
        if self.threads.len() >= THREADS_MAX {
            return Err(Errno::EAGAIN);
        }
        loop {
            self.last = if self.last + 1 >= ID_MAX { 300 } else { self.last + 1 };
            let id = self.last;
            let used = self.threads.iter().any(|thread| thread.id() == id)
                || self
                    .processes
                    .iter()
                    .any(|node| node.process.id() == id || node.group == id || node.session == id);
            if !used {
                return Ok(id);
            }
        }
    }

    /// The thread with this number.
    pub fn thread(&self, id: u32) -> Option<&Shared<Thread>> {
        self.threads().find(|thread| thread.id() == id)
    }

    /// The process with this number.
    pub fn process(&self, id: u32) -> Option<&Node> {
        self.processes.iter().find(|node| node.process.id() == id)
    }

    /// The same, for change.
    pub fn process_mut(&mut self, id: u32) -> Option<&mut Node> {
        self.processes.iter_mut().find(|node| node.process.id() == id)
    }

    /// All processes.
    pub fn processes(&self) -> &[Node] {
        &self.processes
    }

    /// All processes, for change.
    pub fn processes_mut(&mut self) -> &mut [Node] {
        &mut self.processes
    }

    /// All threads that have not ended.
    pub fn threads(&self) -> impl Iterator<Item = &Shared<Thread>> {
        self.threads.iter().filter(|thread| thread.state.load(Ordering::Relaxed) != super::sched::DEAD)
    }

    /// The threads of a process that have not ended.
    pub fn threads_of<'a>(&'a self, process: &'a Process) -> impl Iterator<Item = &'a Thread> {
        self.threads()
            .map(|thread| &**thread)
            .filter(move |thread| core::ptr::eq(&raw const **thread.process(), process))
    }

    /// Makes sure that a thread and a process can be added.
    ///
    /// # Errors
    /// [`Errno::ENOMEM`].
    pub fn reserve(&mut self) -> Result<(), Errno> {
        self.threads.try_reserve(1)?;
        self.processes.try_reserve(1)?;
        Ok(())
    }

    /// Adds a thread, for which there is room.
    pub fn add_thread(&mut self, thread: Shared<Thread>) {
        thread.process().threads.fetch_add(1, Ordering::SeqCst);
        self.threads.push(thread);
    }

    /// Adds a process, for which there is room.
    pub fn add_process(&mut self, node: Node) {
        self.processes.push(node);
    }

    /// Takes a process out: its number is free. The caller drops it without the lock.
    pub fn remove_process(&mut self, id: u32) -> Option<Node> {
        let place = self.processes.iter().position(|node| node.process.id() == id)?;
        Some(self.processes.swap_remove(place))
    }
}

/// Notes that a thread has ended, and can be freed once it has left its CPU.
pub fn note_gone() {
    GONE.fetch_add(1, Ordering::SeqCst);
}

/// Frees threads that have ended. May block; not with a lock held.
pub fn collect() {
    if GONE.load(Ordering::Relaxed) == 0 {
        return;
    }
    loop {
        let gone = {
            let mut tree = tree();
            let place = tree.threads.iter().position(|thread| thread.is_gone());
            place.map(|place| tree.threads.swap_remove(place))
        };
        // Dropped without the lock: its stack goes back to the kernel's heap.
        match gone {
            Some(thread) => {
                GONE.fetch_sub(1, Ordering::SeqCst);
                mem::drop(thread);
            }
            None => return,
        }
    }
}
