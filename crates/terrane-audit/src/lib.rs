//! The cache-line audit: who writes which lines of memory, told by the names of the fields.
//!
//! The promise that it checks: a page fault never writes a cache line that another CPU's fault writes. `docs/audit.md` says
//! what is audited, how to run it, and which lines are shared all the same, and why.
//!
//! | module | what it does |
//! |---|---|
//! | `record` | notes every write of one thread, with its place in the source |
//! | `compare` | finds the lines that two recordings have in common, and says what they are |
//!
//! Empty without `--cfg terrane_watch`: the library tells of its writes only then.
#![cfg(terrane_watch)]
#![warn(missing_docs)]

pub mod compare;
pub mod record;

pub use compare::{Exception, SharedLine, Sharing, check, shared_lines};
pub use record::{Recording, record};
