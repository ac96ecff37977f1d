//! The published experiments of the five sources, one file each; [`hosted`], [`files`] and [`program`] are what they share.

mod ebizzy;
mod files;
mod gaps;
mod heap;
pub mod hosted;
mod multi_fault;
mod populate;
mod processes;
mod program;
mod split_merge;
mod startup;

use crate::failure::Failure;
use crate::measure::Experiment;

/// Every experiment, in the order in which they run.
pub static ALL: &[&Experiment] = &[
    &multi_fault::EXPERIMENT,
    &ebizzy::EXPERIMENT,
    &processes::EXPERIMENT,
    &startup::EXPERIMENT,
    &gaps::EXPERIMENT,
    &split_merge::EXPERIMENT,
    &populate::EXPERIMENT,
    &heap::EXPERIMENT,
];

/// Fails unless this machine has what `selected` need beside memory for their threads: before anything is printed or
/// measured. `threads` and `files` are what the user asked for.
///
/// # Errors
/// [`Failure::Request`].
pub fn check(
    selected: &[&'static Experiment],
    threads: Option<usize>,
    files: Option<usize>,
) -> Result<(), Failure> {
    let selects = |one: &Experiment| selected.iter().any(|experiment| experiment.id == one.id);
    if [
        &multi_fault::EXPERIMENT,
        &ebizzy::EXPERIMENT,
        &processes::EXPERIMENT,
        &startup::EXPERIMENT,
        &heap::EXPERIMENT,
    ]
    .into_iter()
    .any(selects)
    {
        // One sets up, and one maps and unmaps beside those that fault.
        hosted::check_threads(threads.unwrap_or(1), 2)?;
    }
    if selects(&populate::EXPERIMENT) {
        populate::check(threads, files)?;
    }
    if [&processes::EXPERIMENT, &startup::EXPERIMENT, &populate::EXPERIMENT].into_iter().any(selects) {
        files::check()?;
    }
    Ok(())
}
