//! What can go wrong, in the words of Linux.
//!
//! [`Error`] is what a call returns and maps one to one to an errno; [`FaultError`] is what a page fault
//! ends in and maps to a signal. Both are `Copy` and small: they cross the border to a program as a number.

use core::fmt;

/// There was not enough memory, physical or of the allocator. The operation has changed nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of memory")
    }
}

impl core::error::Error for OutOfMemory {}

/// Why a call failed. Each variant is one Linux errno; a call that fails has changed nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Error {
    /// `EPERM`: the caller may not do this (a sealed or a forbidden range).
    NotPermitted,
    /// `ENOENT`: nothing that the call could be about: no mapping that is registered, no page to move.
    NotFound,
    /// `ESRCH`: the address space is gone.
    NoSpace,
    /// `EIO`: a file could not be read or written.
    Io,
    /// `EBADF`: no file where one must be.
    BadFile,
    /// `EAGAIN`: a limit on locked memory, or a resource that is busy for a moment.
    Again,
    /// `ENOMEM`: no memory, no free addresses, a limit reached, or a hole where pages must be mapped.
    NoMemory,
    /// `EACCES`: the file or the mapping does not allow this protection.
    Access,
    /// `EFAULT`: a page could not be populated because touching it would raise a signal, or nothing is mapped at an address.
    BadAddress,
    /// `EBUSY`: the mapping is locked in memory, another handler has it, or somebody else uses the page.
    Busy,
    /// `EEXIST`: something is mapped where `FIXED_NOREPLACE` asked for free space.
    Exists,
    /// `ENODEV`: not for memory of a device.
    NoDevice,
    /// `EINVAL`: an argument is malformed: alignment, length, flags.
    Invalid,
    /// `EOVERFLOW`: offset plus length do not fit.
    Overflow,
    /// `EOPNOTSUPP`: a flag that is checked, and that there is not.
    Unsupported,
    /// `EHWPOISON`: the page is lost.
    Poisoned,
}

impl Error {
    /// The Linux errno, as on x86-64 and AArch64.
    pub const fn errno(self) -> i32 {
        match self {
            Error::NotPermitted => 1,
            Error::NotFound => 2,
            Error::NoSpace => 3,
            Error::Io => 5,
            Error::BadFile => 9,
            Error::Again => 11,
            Error::NoMemory => 12,
            Error::Access => 13,
            Error::BadAddress => 14,
            Error::Busy => 16,
            Error::Exists => 17,
            Error::NoDevice => 19,
            Error::Invalid => 22,
            Error::Overflow => 75,
            Error::Unsupported => 95,
            Error::Poisoned => 133,
        }
    }

    /// The errno's name, such as `ENOMEM`.
    pub const fn name(self) -> &'static str {
        match self {
            Error::NotPermitted => "EPERM",
            Error::NotFound => "ENOENT",
            Error::NoSpace => "ESRCH",
            Error::Io => "EIO",
            Error::BadFile => "EBADF",
            Error::Again => "EAGAIN",
            Error::NoMemory => "ENOMEM",
            Error::Access => "EACCES",
            Error::BadAddress => "EFAULT",
            Error::Busy => "EBUSY",
            Error::Exists => "EEXIST",
            Error::NoDevice => "ENODEV",
            Error::Invalid => "EINVAL",
            Error::Overflow => "EOVERFLOW",
            Error::Unsupported => "EOPNOTSUPP",
            Error::Poisoned => "EHWPOISON",
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self {
            Error::NotPermitted => "operation not permitted",
            Error::NotFound => "no such mapping or page",
            Error::NoSpace => "the address space is gone",
            Error::Io => "input or output error",
            Error::BadFile => "no such file",
            Error::Again => "resource temporarily unavailable",
            Error::NoMemory => "out of memory or address space, or nothing mapped there",
            Error::Access => "protection not allowed",
            Error::BadAddress => "bad address",
            Error::Busy => "in use by another, or locked in memory",
            Error::Exists => "range already mapped",
            Error::NoDevice => "not for memory of a device",
            Error::Invalid => "invalid argument",
            Error::Overflow => "offset and length overflow",
            Error::Unsupported => "operation not supported",
            Error::Poisoned => "page lost",
        };
        write!(f, "{words} ({})", self.name())
    }
}

impl core::error::Error for Error {}

impl From<OutOfMemory> for Error {
    fn from(_: OutOfMemory) -> Self {
        Error::NoMemory
    }
}

/// Why a page fault could not be resolved. The page-table entry is as it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FaultError {
    /// Nothing is mapped there: `SIGSEGV`, `SEGV_MAPERR`.
    NotMapped,
    /// The mapping does not allow this access: `SIGSEGV`, `SEGV_ACCERR`.
    NotAllowed,
    /// There is a guard ([`Advice::GuardInstall`](crate::vma::Advice::GuardInstall)): `SIGSEGV`, `SEGV_MAPERR`.
    Guard,
    /// The page lies beyond the end of the file: `SIGBUS`, `BUS_ADRERR`.
    BeyondEnd,
    /// The page could not be read from its file: `SIGBUS`, `BUS_ADRERR`.
    Io,
    /// A handler of user faults has declared the page lost: `SIGBUS`, `BUS_MCEERR_AR`.
    Poisoned,
    /// The fault is for a handler, which wants no events ([`SIGBUS`](crate::space::UserFeatures::SIGBUS)): `SIGBUS`, `BUS_ADRERR`.
    Unresolved,
    /// The page would be more memory than may be promised ([`Overcommit::Never`](crate::commit::Overcommit::Never)), of an object that
    /// counts by page: `SIGBUS`, `BUS_ADRERR`.
    Refused,
    /// No frame or page table could be had. The host decides what to kill or wait for.
    OutOfMemory,
}

impl FaultError {
    /// What `MADV_POPULATE_…` and in-kernel copies report for a page that faults like this.
    pub const fn as_populate_error(self) -> Error {
        match self {
            FaultError::NotMapped | FaultError::OutOfMemory => Error::NoMemory,
            FaultError::NotAllowed
            | FaultError::Guard
            | FaultError::BeyondEnd
            | FaultError::Io
            | FaultError::Refused
            | FaultError::Unresolved => Error::BadAddress,
            FaultError::Poisoned => Error::Poisoned,
        }
    }

    /// The signal a program gets, as a Linux number: 11 (`SIGSEGV`), 7 (`SIGBUS`) or 9 (`SIGKILL`).
    pub const fn signal(self) -> i32 {
        match self {
            FaultError::NotMapped | FaultError::NotAllowed | FaultError::Guard => 11,
            FaultError::BeyondEnd
            | FaultError::Io
            | FaultError::Poisoned
            | FaultError::Refused
            | FaultError::Unresolved => 7,
            FaultError::OutOfMemory => 9,
        }
    }

    /// The `si_code` that goes with [`signal`](Self::signal).
    pub const fn code(self) -> i32 {
        match self {
            FaultError::NotMapped | FaultError::Guard => 1,
            FaultError::NotAllowed => 2,
            FaultError::BeyondEnd | FaultError::Io | FaultError::Refused | FaultError::Unresolved => 2,
            FaultError::Poisoned => 4,
            FaultError::OutOfMemory => 0,
        }
    }
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FaultError::NotMapped => "no mapping at this address",
            FaultError::NotAllowed => "access not allowed by the mapping",
            FaultError::Guard => "guard page",
            FaultError::BeyondEnd => "page beyond the end of the file",
            FaultError::Io => "page could not be read from its file",
            FaultError::Poisoned => "page lost",
            FaultError::Unresolved => "left to a handler that does not answer",
            FaultError::Refused => "more shared memory than may be promised",
            FaultError::OutOfMemory => "out of memory",
        })
    }
}

impl core::error::Error for FaultError {}

impl From<OutOfMemory> for FaultError {
    fn from(_: OutOfMemory) -> Self {
        FaultError::OutOfMemory
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn each_error_is_one_errno() {
        let all = [
            (Error::NotPermitted, 1, "EPERM"),
            (Error::Io, 5, "EIO"),
            (Error::Again, 11, "EAGAIN"),
            (Error::NoMemory, 12, "ENOMEM"),
            (Error::Access, 13, "EACCES"),
            (Error::BadAddress, 14, "EFAULT"),
            (Error::NotFound, 2, "ENOENT"),
            (Error::NoSpace, 3, "ESRCH"),
            (Error::Busy, 16, "EBUSY"),
            (Error::Poisoned, 133, "EHWPOISON"),
            (Error::Exists, 17, "EEXIST"),
            (Error::Invalid, 22, "EINVAL"),
            (Error::Overflow, 75, "EOVERFLOW"),
            (Error::BadFile, 9, "EBADF"),
            (Error::Unsupported, 95, "EOPNOTSUPP"),
        ];
        for (error, number, name) in all {
            assert_eq!((error.errno(), error.name()), (number, name));
            assert!(
                error.to_string().ends_with(name.trim_start_matches('(')) || error.to_string().contains(name)
            );
        }
        assert_eq!(Error::from(OutOfMemory), Error::NoMemory);
    }

    #[test]
    fn faults_end_in_signals() {
        assert_eq!((FaultError::NotMapped.signal(), FaultError::NotMapped.code()), (11, 1));
        assert_eq!((FaultError::NotAllowed.signal(), FaultError::NotAllowed.code()), (11, 2));
        assert_eq!((FaultError::BeyondEnd.signal(), FaultError::Io.signal()), (7, 7));
        assert_eq!(FaultError::from(OutOfMemory).as_populate_error(), Error::NoMemory);
        assert_eq!(FaultError::BeyondEnd.as_populate_error(), Error::BadAddress);
    }
}
