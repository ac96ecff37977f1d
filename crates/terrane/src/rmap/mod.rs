//! Reverse mapping: from a page to every mapping of it (requirements E1, E2).
//!
//! | module | what it finds |
//! |---|---|
//! | [`anon_vma`] | the spaces that may share a private page: a tree that follows `fork` |
//! | [`walk`] | every page-table entry that maps a given page, private or of an object |
//! | [`write_back`] | writing an object's dirty pages, with its mappings made clean first |

pub mod anon_vma;
pub mod walk;
pub mod write_back;

pub use anon_vma::AnonVma;
