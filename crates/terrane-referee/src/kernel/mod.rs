//! The kernel's side: processes that carry operations out, and what `/proc` says of them.
//!
//! The first helper is this same program, started again with a hidden command, so that nothing of the referee is in its address
//! space. It fills that address space but for an arena. For each script it forks; the fork fills the arena but for the
//! script's window, makes the files, and gives privileges up. So each script begins alike, within half a millisecond.
//!
//! What is mapped in a process is read from its `/proc/PID/maps`, where the window comes early, and what is present from `pagemap`: the
//! process itself is not asked, and not changed by being looked at.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod channel;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod prepare;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod probe;
mod proc;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod serve;

pub use serve::serve;

use crate::operation::{Op, Outcome, WORDS};
use crate::script::{FILES, PROCESSES, Setup};
use crate::view::{Area, Present};
use channel::{Slot, ask, status};
use proc::Proc;
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Why the kernel cannot be asked.
#[derive(Debug)]
pub enum KernelError {
    /// This kernel, or what it runs in, forbids what the helper needs.
    Unable(String),
    /// A helper has ended, or does not answer.
    Lost(String),
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Unable(what) | Self::Lost(what)) = self;
        f.write_str(what)
    }
}

impl std::error::Error for KernelError {}

fn unable(what: &str, error: impl Into<io::Error>) -> KernelError {
    KernelError::Unable(format!("{what}: {}", error.into()))
}

/// How long an operation may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// The helpers of one thread.
pub struct Kernel {
    slots: *const Slot,
    first: Child,
    /// Of the script that runs.
    setup: Setup,
    processes: [Option<Proc>; PROCESSES],
    inodes: [u64; FILES],
    has_swap: bool,
}

// SAFETY: the slots are shared memory that belongs to no thread; the value has one user at a time.
unsafe impl Send for Kernel {}

impl Kernel {
    /// Starts the first helper: `command` runs a program that passes its last two arguments to [`serve`].
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn start(mut command: Command) -> Result<Self, KernelError> {
        let size = size_of::<Slot>() * (PROCESSES + 1);
        let memory = rustix::fs::memfd_create("referee", rustix::fs::MemfdFlags::empty())
            .and_then(|memory| rustix::fs::ftruncate(&memory, size as u64).map(|()| memory))
            .map_err(|error| unable("shared memory for the helper", error))?;
        // SAFETY: a new mapping.
        let slots = unsafe {
            rustix::mm::mmap(
                core::ptr::null_mut(),
                size,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::SHARED,
                &memory,
                0,
            )
        };
        let slots = slots.map_err(|error| unable("shared memory for the helper", error))?.cast_const().cast();
        let command = command
            .arg(memory.as_raw_fd().to_string())
            .arg(std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let first = command.spawn().map_err(|error| unable("starting the helper", error))?;
        let setup = Setup::of_pages(64);
        // A head, and a line for each; where it cannot be read there may be some.
        let has_swap = std::fs::read_to_string("/proc/swaps").map_or(true, |text| text.lines().count() > 1);
        Ok(Self { slots, first, setup, processes: Default::default(), inodes: [0; FILES], has_swap })
    }

    fn slot(&self, number: usize) -> &Slot {
        debug_assert!(number <= PROCESSES);
        // SAFETY: inside the mapping, which lives as long as this value; zeros are a valid slot.
        unsafe { &*self.slots.add(number) }
    }

    /// Has slot `number` do something; returns what the message says then.
    fn ask(&mut self, number: usize, kind: u64, words: &[u64; WORDS]) -> Result<Outcome, KernelError> {
        let slot = self.slot(number);
        // SAFETY: `&mut self`, and nothing is under way.
        let message = unsafe { slot.message() };
        message.kind = kind;
        message.words = *words;
        slot.ask();
        if !slot.await_answer(PATIENCE) {
            return Err(self.lost(number));
        }
        // SAFETY: it has been answered.
        let message = unsafe { self.slot(number).message() };
        let bytes = message.data.get(..message.len as usize).unwrap_or_default().to_vec();
        Ok(match message.status {
            status::VALUE => Outcome::Value(message.value, bytes),
            status::ERRNO => Outcome::Errno(message.value as i32),
            status::SIGNAL => Outcome::Signal {
                signal: message.extra[0] as i32,
                code: message.extra[1] as i32,
                done: message.value,
                bytes,
            },
            _ => {
                let what = String::from_utf8_lossy(&bytes).into_owned();
                let error = match message.value as i32 {
                    0 => String::new(),
                    errno => format!(": {}", io::Error::from_raw_os_error(errno)),
                };
                return Err(KernelError::Unable(format!("{what}{error}")));
            }
        })
    }

    fn lost(&mut self, number: usize) -> KernelError {
        KernelError::Lost(match self.first.try_wait() {
            Ok(Some(status)) => format!("the helper has ended: {status}"),
            _ => format!("process {number} of the helper does not answer"),
        })
    }

    /// Makes process 0 of a new script; those of the last script end. Returns how many bytes it may lock, if there is a limit.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn begin(&mut self, setup: &Setup) -> Result<Option<u64>, KernelError> {
        self.end()?;
        self.setup = *setup;
        let pid = self.ask(0, ask::FORK, &[1, 0, 0, 0, 0, 0])?;
        let optional = |value: Option<u64>| value.unwrap_or(u64::MAX);
        let words =
            [setup.start, setup.pages, setup.heap, optional(setup.memlock), optional(setup.mapped), 0];
        let prepared = self.ask(1, ask::PREPARE, &words)?;
        let mut memlock = u64::MAX;
        if let Outcome::Value(limit, bytes) = prepared {
            memlock = limit;
            for (place, bytes) in self.inodes.iter_mut().zip(bytes.chunks_exact(8)) {
                *place = bytes.try_into().map_or(0, u64::from_le_bytes);
            }
        }
        self.processes[0] = Some(self.open(pid)?);
        Ok((memlock != libc::RLIM_INFINITY).then_some(memlock))
    }

    fn open(&self, pid: Outcome) -> Result<Proc, KernelError> {
        let Outcome::Value(pid, _) = pid else {
            return Err(KernelError::Lost("a helper has not forked".to_owned()));
        };
        Proc::open(pid).map_err(|error| unable("looking into /proc", error))
    }

    /// Ends the processes of the script.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn end(&mut self) -> Result<(), KernelError> {
        for process in 0..PROCESSES {
            if self.processes[process].take().is_some() {
                self.ask(process + 1, ask::EXIT, &[0; WORDS])?;
            }
        }
        Ok(())
    }

    /// Whether pages may be swapped out.
    pub fn has_swap(&self) -> bool {
        self.has_swap
    }

    /// Has process `process` carry out `op`, which is no fork, switch or exit.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn act(&mut self, process: usize, op: &Op) -> Result<Outcome, KernelError> {
        self.ask(process + 1, op.kind() as u64, &op.words())
    }

    /// Makes process `child`, forked from `parent`.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn fork(&mut self, parent: usize, child: usize) -> Result<(), KernelError> {
        let pid = self.ask(parent + 1, ask::FORK, &[child as u64 + 1, 0, 0, 0, 0, 0])?;
        self.processes[child] = Some(self.open(pid)?);
        Ok(())
    }

    /// Ends a process.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn exit(&mut self, process: usize) -> Result<(), KernelError> {
        self.ask(process + 1, ask::EXIT, &[0; WORDS])?;
        // Until it is gone others seem to share its pages.
        if let Some(gone) = self.processes[process].take() {
            gone.await_end();
        }
        Ok(())
    }

    fn proc(&mut self, process: usize) -> Result<&mut Proc, KernelError> {
        let process = self.processes.get_mut(process).and_then(Option::as_mut);
        process.ok_or_else(|| KernelError::Lost("there is no such process".to_owned()))
    }

    /// The mappings in the window of a process.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn areas(&mut self, process: usize) -> Result<Vec<Area>, KernelError> {
        let (setup, inodes) = (self.setup, self.inodes);
        self.proc(process)?.areas(&setup, &inodes).map_err(|error| unable("reading maps", error))
    }

    /// What is present in the window of a process, by page.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn present(&mut self, process: usize) -> Result<Vec<Present>, KernelError> {
        let setup = self.setup;
        self.proc(process)?.present(&setup).map_err(|error| unable("reading pagemap", error))
    }

    /// The attributes of the mappings in the window, in Linux's bits as far as `smaps` shows them, and its counts.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn details(&mut self, process: usize) -> Result<Vec<Detail>, KernelError> {
        let setup = self.setup;
        self.proc(process)?.details(&setup).map_err(|error| unable("reading smaps", error))
    }
}

pub use proc::Detail;

impl Drop for Kernel {
    fn drop(&mut self) {
        let _ = self.end();
        if self.ask(0, ask::EXIT, &[0; WORDS]).is_err() {
            let _ = self.first.kill();
        }
        let _ = self.first.wait();
        let size = size_of::<Slot>() * (PROCESSES + 1);
        // SAFETY: our mapping, and nobody refers to its slots any more.
        let _ = unsafe { rustix::mm::munmap(self.slots.cast_mut().cast(), size) };
    }
}

/// The attributes that `smaps` shows, in Linux's bits.
pub fn known_flags() -> u64 {
    proc::KNOWN_FLAGS
}
