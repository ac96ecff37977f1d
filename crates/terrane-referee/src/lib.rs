//! The running Linux kernel as the referee of Terrane.
//!
//! A helper process prepares a window of its own address space, a Terrane machine has a space with the same window, and the same
//! operations run on both. After each, the two must agree: on the result or errno, on bytes or the signal, on the listing of the window, on the
//! pages that are there. What differs is shrunk to a few operations, which can be replayed.
//!
//! | module | what |
//! |---|---|
//! | [`operation`], [`script`] | the language: operations, and scripts that can be read and replayed |
//! | [`view`] | the form in which both sides show a window |
//! | [`kernel`] | the kernel's side |
//! | [`machine`] | Terrane's side, and what it has |
//! | [`judge`] | carrying out and comparing |
//! | [`deliberate`] | what differs on purpose |
//! | [`generate`] | scripts that are awkward on purpose |
//! | [`shrink`] | making a script that shows a difference small |
//! | [`run`] | many seeds, side by side |
//! | [`model`], [`fuzz`] | a plain model of the language, and Terrane against it, for fuzzers |
//!
//! Linux on x86-64 only.
#![warn(missing_docs)]

pub mod deliberate;
pub mod fuzz;
pub mod generate;
pub mod judge;
pub mod kernel;
pub mod machine;
pub mod model;
pub mod operation;
pub mod run;
pub mod script;
pub mod shrink;
pub mod view;
