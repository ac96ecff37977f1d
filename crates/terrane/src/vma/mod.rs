//! VMAs: the record of one mapping, its flags, and the words of the calls that make and change it.

pub mod flags;
pub mod merge;
pub mod record;

pub use flags::{Access, Advice, MapFlags, Prot, RemapFlags, VmFlags};
pub use record::{Anon, Snapshot, Vma};
