//! Descriptors of processes (`pidfd`).

use super::abi::{O_RDWR, POLLHUP, POLLIN, POLLRDNORM};
use super::inode::Kind;
use super::{current, descriptors};
use crate::errno::Errno;
use crate::task::process::Process;
use core::sync::atomic::Ordering;
use terrane::sync::Shared;

/// Gives the process a descriptor; `flags` may hold `O_NONBLOCK`.
///
/// # Errors
/// `EMFILE`, `ENOMEM`.
pub fn open_process(process: Shared<Process>, flags: u32) -> Result<u64, Errno> {
    descriptors::open(Kind::Process(process), O_RDWR | flags, true)
}

/// The process that `fd` stands for.
///
/// # Errors
/// `EBADF`.
pub fn process_of(fd: i32) -> Result<Shared<Process>, Errno> {
    match &current::files().get(fd)?.node.kind {
        Kind::Process(process) => Ok(process.clone()),
        _ => Err(Errno::EBADF),
    }
}

/// What `poll` says: it can be read once its threads have ended.
pub fn ready(process: &Process) -> u32 {
    let ended = process.exit_status().is_some() && process.threads.load(Ordering::SeqCst) == 0;
    match ended {
        true if current::exists(process.id()) => POLLIN | POLLRDNORM,
        true => POLLIN | POLLRDNORM | POLLHUP,
        false => 0,
    }
}
