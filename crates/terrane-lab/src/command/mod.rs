//! The commands, one file each: what the user calls.

pub mod list;
pub mod measure;
