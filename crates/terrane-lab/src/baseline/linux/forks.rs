//! fork, and the faults that follow from it.

use super::memory::{Memory, page_size};
use crate::failure::Failure;
use crate::measure::Sample;
use crate::measure::plan::Runner;
use crate::measure::timing::timed;
use crate::report::Counters;
use rustix::mm::{MprotectFlags, ProtFlags};
use std::io;
use std::time::{Duration, Instant};

/// How much memory is touched before the fork whose child then writes.
const WRITTEN: usize = 8 << 20;

/// A child process.
struct Child(libc::pid_t);

impl Child {
    /// Forks; the child runs `work`, which must not allocate or lock, and exits with its result.
    fn start(work: impl FnOnce() -> i32) -> Result<Self, Failure> {
        // SAFETY: the child does nothing but `work`, which the callers keep to memory and exit, so it does not
        // matter what other threads held when it was made.
        match unsafe { libc::fork() } {
            -1 => Err(Failure::broken("cannot fork", io::Error::last_os_error())),
            0 => {
                let status = work();
                // SAFETY: ends the child, without the exit handlers, which are the parent's.
                unsafe { libc::_exit(status) }
            }
            child => Ok(Self(child)),
        }
    }

    /// Waits for its end; fails unless it ended well.
    fn wait(self) -> Result<(), Failure> {
        let mut status = 0;
        // SAFETY: the status is ours, and the child is ours and not yet waited for.
        while unsafe { libc::waitpid(self.0, &raw mut status, 0) } == -1 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(Failure::broken("cannot wait for a child", error));
            }
        }
        if status == 0 { Ok(()) } else { Err(Failure::Broken("a forked child failed".into())) }
    }
}

/// fork with `mib` MiB touched, to a child that exits at once.
pub fn fork(mib: usize) -> Result<Runner<'static>, Failure> {
    let memory = Memory::anonymous(mib << 20, ProtFlags::READ | ProtFlags::WRITE)?;
    memory.write_pages(0, memory.length());
    Ok(forks(memory))
}

/// fork with `mappings` of a page, all touched, to a child that exits at once.
pub fn fork_mappings(mappings: usize) -> Result<Runner<'static>, Failure> {
    let read_write = ProtFlags::READ | ProtFlags::WRITE;
    let all = Memory::anonymous(mappings * page_size(), read_write)?;
    all.write_pages(0, all.length());
    // Every other page gets another protection, so that each is a mapping.
    for page in (1..mappings).step_by(2) {
        all.protect(page * page_size(), page_size(), MprotectFlags::READ)?;
    }
    Ok(forks(all))
}

/// A fork to a child that exits at once, and that it has exited; how long both took.
pub fn fork_once() -> Result<Duration, Failure> {
    let (took, result) = timed(|| Child::start(|| 0)?.wait());
    result.map(|()| took)
}

/// Forks again and again, with `alive` mapped.
fn forks(alive: Memory) -> Runner<'static> {
    Box::new(move |time| {
        let _alive = &alive;
        let start = Instant::now();
        let (mut forks, mut wholes, mut rounds) = (Duration::ZERO, Duration::ZERO, 0u32);
        while rounds == 0 || start.elapsed() < time {
            let begun = Instant::now();
            let child = Child::start(|| 0)?;
            forks += begun.elapsed();
            child.wait()?;
            wholes += begun.elapsed();
            rounds += 1;
        }
        let each = |sum: Duration| sum.as_nanos() as f64 / 1000.0 / f64::from(rounds);
        Ok(Sample { values: vec![each(forks), each(wholes)], counters: Counters::default() })
    })
}

/// A child that writes to every page it shares with its parent, and says how long that took.
pub fn copy_on_write() -> Result<Runner<'static>, Failure> {
    let memory = Memory::anonymous(WRITTEN, ProtFlags::READ | ProtFlags::WRITE)?;
    memory.write_pages(0, WRITTEN);
    // What the child finds out comes back through a pipe: its memory is no longer ours.
    let (mut from, to) = io::pipe().map_err(|e| Failure::broken("cannot make a pipe", e))?;
    Ok(Box::new(move |time| {
        let start = Instant::now();
        let (mut sum, mut rounds) = (0u64, 0u64);
        while rounds == 0 || start.elapsed() < time {
            let child = Child::start(|| {
                let (took, ()) = timed(|| memory.write_pages(0, WRITTEN));
                let said = io::Write::write_all(&mut &to, &(took.as_nanos() as u64).to_le_bytes());
                i32::from(said.is_err())
            })?;
            child.wait()?;
            let mut took = [0; 8];
            io::Read::read_exact(&mut from, &mut took)
                .map_err(|e| Failure::broken("cannot hear a child", e))?;
            sum += u64::from_le_bytes(took);
            rounds += 1;
        }
        let pages = (WRITTEN / page_size()) as u64 * rounds;
        Ok(Sample::from(sum as f64 / pages as f64))
    }))
}
