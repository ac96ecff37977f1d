//! What can go wrong when a machine is set up.

use core::fmt;
use rustix::io::Errno;
use terrane::{Error, OutOfMemory};

/// Why a machine, a processor or a file could not be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum HostedError {
    /// A machine with less than one frame of memory was asked for.
    NoMemoryAsked,
    /// More memory was asked for than the system has to give. Both in bytes.
    MemoryTooLarge {
        /// What was asked for.
        asked: u64,
        /// What `MemAvailable` in `/proc/meminfo` says is left, or the most that frame numbers reach.
        available: u64,
    },
    /// A machine with no processor, or with more than [`MAX_CPUS`](crate::MAX_CPUS), was asked for.
    BadCpuCount {
        /// What was asked for.
        asked: usize,
    },
    /// Every processor of the machine is in use.
    NoCpuFree,
    /// What was opened is not a regular file, so it has no pages to map.
    NotAFile,
    /// The operating system refused.
    System(Errno),
    /// Terrane refused.
    Refused(Error),
    /// The program's own memory is exhausted.
    OutOfMemory,
}

impl fmt::Display for HostedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostedError::NoMemoryAsked => f.write_str("a machine needs at least one frame of memory"),
            HostedError::MemoryTooLarge { asked, available } => {
                write!(f, "{asked} bytes of memory asked for, but only {available} are available")
            }
            HostedError::BadCpuCount { asked } => {
                write!(f, "{asked} processors asked for; a machine has 1 to {}", crate::MAX_CPUS)
            }
            HostedError::NoCpuFree => f.write_str("every processor of the machine is in use"),
            HostedError::NotAFile => f.write_str("not a regular file"),
            HostedError::System(errno) => errno.fmt(f),
            HostedError::Refused(error) => error.fmt(f),
            HostedError::OutOfMemory => f.write_str("out of memory"),
        }
    }
}

impl std::error::Error for HostedError {}

impl From<Errno> for HostedError {
    fn from(errno: Errno) -> Self {
        HostedError::System(errno)
    }
}

impl From<Error> for HostedError {
    fn from(error: Error) -> Self {
        HostedError::Refused(error)
    }
}

impl From<OutOfMemory> for HostedError {
    fn from(_: OutOfMemory) -> Self {
        HostedError::OutOfMemory
    }
}
