//! Reverse mapping: from a page to every mapping of it (requirements E1, E2).
//!
//! | module | what it finds |
//! |---|---|
//! | [`anon_vma`] | the spaces that may share a private page: a tree that follows `fork` |
//! | [`relocations`] | where moved pages are, whose number is not that of their address |
//! | `punch` | holes in objects |
//! | [`walk`] | every page-table entry that maps a given page, private or of an object |
//! | [`write_back`] | writing an object's dirty pages, with its mappings made clean first |

pub mod anon_vma;
mod punch;
pub mod relocations;
pub mod walk;
pub mod write_back;

pub use anon_vma::AnonVma;
pub use relocations::Relocations;
