//! The referee at work: short runs, the regressions, and a wrong answer that it must find.

use std::process::Command;
use terrane_referee::machine::Plant;
use terrane_referee::run::{self, Found, Plan, RunError};
use terrane_referee::script::{Script, line};

fn helper() -> Command {
    Command::new(env!("CARGO_BIN_EXE_terrane-referee-helper"))
}

/// What a run gives, or `None` where this kernel cannot be a referee: a sandbox that forbids what the helper needs.
fn possible<T>(result: Result<T, RunError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(RunError::Unable(why)) => {
            eprintln!("skipped: the kernel cannot be a referee here: {why}");
            None
        }
        Err(RunError::Broken(why)) => panic!("{why}"),
    }
}

fn told(found: &Found) -> String {
    format!("seed {:?}\n{}{}", found.seed, found.script, found.difference.told)
}

#[test]
fn a_short_run_finds_no_difference() {
    let plan = Plan { seed: 1, seeds: 20, operations: 300, threads: 2, plant: None };
    let Some(report) = possible(run::run(&plan, &helper, &|_| {})) else { return };
    if let Some(found) = &report.found {
        panic!("{}", told(found));
    }
    assert_eq!(report.scripts, 20);
    let all: u64 = report.tallies.iter().map(|tally| tally.all()).sum();
    assert_eq!(all, 6000);
}

#[test]
fn what_was_found_once_is_right_now() {
    let Some(mut judge) = possible(run::judge(&helper, None)) else { return };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/regressions");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "script")) {
        let text = std::fs::read_to_string(file).unwrap();
        let script: Script = text.parse().unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let Some(difference) = possible(run::replay(&mut judge, &script)) else { return };
        if let Some(difference) = difference {
            let at = script.ops.get(difference.at).map(|op| line(op, &script.setup)).unwrap_or_default();
            panic!("{}: after ‘{at}’\n{}", file.display(), difference.told);
        }
    }
}

#[test]
fn a_wrong_answer_is_found_and_made_small() {
    for (plant, most) in [(Plant::Unmap, 2), (Plant::Protect, 2), (Plant::Store, 9)] {
        let plan = Plan { seed: 100, seeds: 20, operations: 300, threads: 1, plant: Some(plant) };
        let Some(report) = possible(run::run(&plan, &helper, &|_| {})) else { return };
        let found = report.found.unwrap_or_else(|| panic!("{plant:?} was not found"));
        assert!(found.script.ops.len() <= most, "{plant:?}: {}", told(&found));
        assert!(found.before > found.script.ops.len());
        // The script shows it, and without the damage shows nothing.
        for (plant, differs) in [(Some(plant), true), (None, false)] {
            let Some(mut judge) = possible(run::judge(&helper, plant)) else { return };
            let Some(difference) = possible(run::replay(&mut judge, &found.script)) else { return };
            assert_eq!(difference.is_some(), differs, "{}", told(&found));
        }
    }
}

#[test]
fn the_helper_is_not_for_use_by_hand() {
    for arguments in [&[][..], &["x", "y"], &["0", "1"]] {
        let output = helper().args(arguments).stdin(std::process::Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("not by hand"));
    }
}
