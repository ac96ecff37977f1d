//! What Terrane is compared with: a standard map under a lock, another crate for the same purpose, and the kernel
//! that the command runs on.

pub mod areas;
pub mod btree;
pub mod linux;
pub mod memory_set;
pub mod zeroing;
