//! Frames: physical memory, from the bits of a machine's RAM to records of one type.
//!
//! | module | what it gives |
//! |---|---|
//! | [`meta`] | the 32 bytes that are known about each frame, and who may write them |
//! | [`frames`] | the allocator: a cache for each CPU over a shared pool |
//! | `pool` | the shared pool: a bit for each frame, in blocks of 2 MiB that form again |
//! | [`nodes`] | which frames are near to which processors |
//! | [`limbo`] | freeing later: when no CPU can still use a translation or a pointer |
//! | `late` | references to shared pages that are given back when a shoot-down has passed |
//! | [`list`] | a list of frames that needs no memory of its own |
//! | [`ram`] | physical memory as a pinned CPU sees it: bytes, tables, zeroing, copying |
//! | [`slab`] | records of one type on cache lines of their own |
//!
//! # The rule of ownership
//!
//! A [`Frame`](crate::Frame) is a number and can be copied; the right to it cannot. [`Frames::allocate`] hands the
//! right to one caller, who passes it on (to a page-table entry, to a page cache, to a [`FrameList`]) or gives it
//! back with [`Frames::free`] or [`Frames::defer`]. Nothing checks this but debug assertions: a frame freed twice
//! would be handed out twice. All frames and pins given to a [`Frames`], a [`Ram`] or a [`Slab`] are those of
//! the one machine it belongs to; a pin of another machine would not own the CPU's private state.

mod cache;
pub mod frames;
mod late;
pub mod limbo;
pub mod list;
pub mod meta;
pub mod nodes;
mod pool;
pub mod ram;
pub mod slab;
#[cfg(test)]
mod tests;
pub(crate) mod zeroed;

pub use frames::Frames;
pub use limbo::Grace;
pub use list::FrameList;
pub use meta::{FrameFlags, FrameMeta};
pub use nodes::{MAX_NODES, Node, NodeMask};
pub use ram::Ram;
pub use slab::Slab;

/// Frames in a block: 2 MiB, what one entry of a level-2 table maps.
pub const BLOCK_FRAMES: usize = 512;
