//! `terrane list`: what there is to measure.

use crate::failure::Failure;
use crate::measure::Experiment;
use crate::{bench, experiments};
use std::fmt::Write as _;
use std::io::{self, Write as _};

/// Prints a line for everything that can be measured.
///
/// # Errors
/// [`Failure::Closed`] if nobody reads, [`Failure::Request`] if standard output cannot be written.
pub fn run() -> Result<(), Failure> {
    let mut text = String::new();
    for (command, all) in [("experiments", experiments::ALL), ("bench", bench::ALL)] {
        if !all.is_empty() {
            let _ = writeln!(text, "terrane {command} NAME:\n{}", lines(all, true));
        }
    }
    io::stdout().write_all(text.as_bytes()).map_err(|e| Failure::output("standard output", &e))
}

/// A line for each of `all`: name, title and, `with_source`, where it comes from.
pub fn lines(all: &[&Experiment], with_source: bool) -> String {
    let widest = |f: fn(&Experiment) -> &str| all.iter().map(|e| f(e).chars().count()).max().unwrap_or(0);
    let (id, title) = (widest(|e| e.id), widest(|e| e.title));
    all.iter().fold(String::new(), |mut text, e| {
        let line =
            format!("  {:<id$}  {:<title$}  {}", e.id, e.title, if with_source { e.source } else { "" });
        let _ = writeln!(text, "{}", line.trim_end());
        text
    })
}
