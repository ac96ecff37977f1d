//! What `/proc` says, in the format of Linux 6.18: the same parsers work on both.
//!
//! | function | file of `/proc` | what it tells |
//! |---|---|---|
//! | [`write_maps`] | `pid/maps` | the mappings: one moment between calls |
//! | [`write_smaps`], [`Smaps`] | `pid/smaps` | the same, and how much memory each holds |
//! | [`write_smaps_rollup`] | `pid/smaps_rollup` | the sums of that |
//! | [`write_status`] | `pid/status` | the lines about memory |
//! | [`write_vmstat`] | `vmstat` | counters of the machine |
//!
//! Each is written into any [`core::fmt::Write`], piece by piece; nothing is kept, and no lock is held while something is
//! written. Listing (all but the last) takes memory for the mappings, and reports its lack.
//!
//! # What is exact, and what is a moment's view
//!
//! * The mappings are one state between calls, however many calls run meanwhile ([`Listing`]). On Linux they are not,
//!   when the text is longer than a page. Names of objects that have ended meanwhile are still there.
//! * The sums of `smaps` are taken entry by entry, mapping after mapping ([`Footprint`]): exact at rest.
//! * `VmSize`, `VmData`, `VmStk`, `VmExe` and `VmLib` are sums over a listing, so of one moment. The counts of pages are kept by
//!   the CPUs each for itself ([`rss`](crate::mm::rss)): exact at rest. `VmHWM` and `VmPeak` may miss a peak that lasted from
//!   one fault to the next by some pages for each CPU, as Linux's do.
//!
//! # What is not there
//!
//! Sizes that Terrane has nothing of are 0 (`KSM`, `ShmemPmdMapped`, `FilePmdMapped`, huge pages from a pool). Lines of `status` that
//! are about a process, not its memory, are the host's to write.

mod maps;
mod smaps;
mod status;
mod vmstat;

pub use maps::write_maps;
pub use smaps::{Smaps, write_smaps, write_smaps_rollup};
pub use status::{Status, write_status};
pub use vmstat::write_vmstat;

use crate::error::Error;
use crate::space::{Footprint, Listing};
use core::fmt;

/// Why a text is not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TextError {
    /// The listing could not be made; nothing has been written.
    List(Error),
    /// The writer has refused.
    Write,
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextError::List(error) => write!(f, "cannot list the mappings: {error}"),
            TextError::Write => f.write_str("the text cannot be written"),
        }
    }
}

impl core::error::Error for TextError {}

impl From<Error> for TextError {
    fn from(error: Error) -> Self {
        TextError::List(error)
    }
}

impl From<fmt::Error> for TextError {
    fn from(_: fmt::Error) -> Self {
        TextError::Write
    }
}

/// A line with a size: `name`, the size in KiB with at least eight places, ` kB`.
fn write_size(out: &mut impl fmt::Write, name: &str, bytes: u64) -> fmt::Result {
    writeln!(out, "{name:<15} {:>8} kB", bytes >> 10)
}
