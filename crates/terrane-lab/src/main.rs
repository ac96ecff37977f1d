//! The command `terrane`: measures Terrane beside its baselines, on the machine it runs on.
//!
//! `terrane experiments` repeats the published experiments of the five sources, `terrane bench` measures single
//! operations, `terrane list` says what there is. Every comparison is made within one run, with the variants
//! taking turns, because figures of different machines or different hours do not compare.
//!
//! The layers, from the bottom: [`measure`] times work and knows nothing of what it measures; [`report`] holds
//! results and shows them as tables, JSON and pictures; [`baseline`] is what Terrane is compared with;
//! [`experiments`] and [`bench`] say what is measured, one file each; [`command`] is what the user calls. [`soak`] measures
//! nothing: it checks. [`boot`] runs programs on Terrane's kernel,
//! [`compare`] also on the host and on Linux kernels beside it.

mod baseline;
mod bench;
mod boot;
mod cli;
mod command;
mod compare;
mod experiments;
mod failure;
mod measure;
mod referee;
mod report;
mod soak;

fn main() -> std::process::ExitCode {
    match cli::run() {
        Ok(status) => status.into(),
        Err(failure) => failure.report(),
    }
}
