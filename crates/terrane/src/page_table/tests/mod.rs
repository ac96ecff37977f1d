//! Tests of the page tables as a whole, each for both formats.

mod machine;
mod model;
mod race;
mod tree;

/// Runs the same generic test once for each format.
macro_rules! for_both_formats {
    ($($(#[$meta:meta])* $name:ident;)*) => {
        mod x86_64 {
            $(#[test] $(#[$meta])* fn $name() { super::$name::<crate::page_table::X86_64>(); })*
        }
        mod aarch64 {
            $(#[test] $(#[$meta])* fn $name() { super::$name::<crate::page_table::Aarch64>(); })*
        }
    };
}
use for_both_formats;
