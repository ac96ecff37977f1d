//! The built command, from outside: exit status, one line for what is wrong, and the documented form of reports.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

fn terrane(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_terrane")).args(arguments).output().expect("the command starts")
}

/// Asserts that `output` refuses a request: status 2, nothing on standard output, one line on standard error.
fn refused(output: &Output) -> String {
    let error = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(output.stdout.is_empty());
    assert!(error.starts_with("terrane: ") && error.ends_with('\n'), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn wrong_arguments_are_one_line_and_status_2() {
    for (arguments, part) in [
        (&[][..], "command is missing"),
        (&["fly"], "unrecognized subcommand 'fly'"),
        (&["experiments", "no-such"], "‘no-such’ is unknown"),
        (&["bench", "index", "multi-fault"], "‘multi-fault’ is unknown"),
        (&["bench", "--threads", "0"], "--threads"),
        (&["bench", "--threads", "many"], "many"),
        (&["bench", "--threads"], "value is required"),
        (&["bench", "--seconds", "-1"], "--seconds"),
        (&["bench", "--seconds", "0"], "0.001 to 3600"),
        (&["bench", "--runs", "100000"], "--runs"),
        (&["bench", "--colour"], "--colour"),
        (&["experiments", "--files", "0"], "--files"),
        (&["experiments", "multi-fault", "--threads", "1000"], "1000 threads are too many"),
        (&["soak", "--seconds", "0"], "0.1 to 10000000"),
        (&["soak", "--threads", "65"], "--threads"),
        (&["soak", "--memory", "1"], "--memory"),
        (&["soak", "--json", "/proc/nothing"], "/proc/nothing"),
        (&["referee", "--operations", "0"], "--operations"),
        (&["referee", "--threads", "65"], "--threads"),
        (&["referee", "--replay", "/nonexistent"], "/nonexistent"),
        (&["referee", "--replay", "/dev/null"], "no valid window"),
        (&["referee-helper"], "not by hand"),
        (&["boot"], "<PROGRAM>"),
        (&["boot", "/no/such/program"], "cannot read /no/such/program: No such file"),
        (&["boot", "/"], "is a folder"),
        (&["boot", "/proc/version"], "is not an ELF program"),
        (&["boot", "--memory", "1M", "x"], "a guest needs 32M at least"),
        (&["boot", "--cpus", "0", "x"], "--cpus"),
        (&["boot", "--file", "x", "y"], "HOST=GUEST"),
        (&["boot", "--locking", "none", "x"], "classic, speculative"),
        (&["boot", "--env", "x", "y"], "NAME=VALUE"),
        (&["compare", "--linux", "/proc/version", "/no/such/program"], "/no/such/program"),
        (&["compare", "--runs", "0", "x"], "--runs"),
        (&["list", "more"], "more"),
        (&["linux-probe"], "PROBE"),
        (&["linux-probe", "x"], "not by hand"),
    ] {
        let error = refused(&terrane(arguments));
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}

#[test]
fn places_that_cannot_be_written_are_refused_before_anything_is_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    std::fs::write(&file, "kept").expect("a file");
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let slow = ["bench", "fork", "--seconds", "1"];
    for (option, place) in [
        ("--json", text(folder.path())),
        ("--json", text(&folder.path().join("no/folder"))),
        ("--json", "/proc/nothing".to_owned()),
        ("--plot", text(&file)),
        ("--plot", text(&file.join("below"))),
        ("--plot", "/proc/nothing".to_owned()),
    ] {
        let error = refused(&terrane(&[&slow[..], &[option, &place]].concat()));
        assert!(error.contains(&place), "{error}");
    }
    assert_eq!(std::fs::read_to_string(&file).expect("still there"), "kept");
}

#[test]
fn too_little_memory_is_refused() {
    let command = format!("ulimit -v 100000; exec '{}' bench fork", env!("CARGO_BIN_EXE_terrane"));
    let error = refused(&Command::new("sh").args(["-c", &command]).output().expect("a shell"));
    assert!(error.contains("needs 768 MiB of memory"), "{error}");
}

#[test]
fn help_and_list_teach() {
    for (arguments, parts) in [
        (&["--help"][..], &["experiments", "Exit status", "Examples"][..]),
        (&["experiments", "--help"], &["multi-fault", "median", "published", "--threads <N>"]),
        (&["bench", "--help"], &["index", "fork", "standard output"]),
        (&["soak", "--help"], &["every byte", "--seed <N>", "Exit status"]),
        (&["referee", "--help"], &["kernel", "--replay <FILE>", "Exit status"]),
        (&["list"], &["terrane bench NAME", "multi-fault", "source C"]),
        (&["--version"], &["terrane 0."]),
    ] {
        let output = terrane(arguments);
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(output.status.success() && output.stderr.is_empty());
        for part in parts {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }
}

/// The paths of all fields of `value`, in the manner of docs/json.md.
fn paths(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = match path {
                    "" => name.clone(),
                    "experiments[].counters" => format!("{path}.VARIANT"),
                    "experiments[].counters.VARIANT" | "soak.counters" | "soak.operations" => {
                        format!("{path}.NAME")
                    }
                    _ => format!("{path}.{name}"),
                };
                paths(value, &path, found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| paths(item, &format!("{path}[]"), found)),
        _ => {
            found.insert(path.to_owned());
        }
    }
}

/// The fields in `docs/json.md`: of a report, and those that only the reports of a soak and of the referee have.
fn documented() -> [BTreeSet<String>; 3] {
    let text = include_str!("../../../docs/json.md");
    let mut parts = text.split("\n# ");
    let report = parts.next().expect("a first part");
    // Behind the line for what all have.
    let mut own =
        || parts.next().and_then(|part| Some(part.split_once("`command` |")?.1)).expect("more parts");
    [report, own(), own()].map(|part| {
        part.lines()
            .filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned()))
            .collect()
    })
}

#[test]
fn a_soak_finds_nothing_and_reports_the_documented_fields() {
    let arguments = ["soak", "--seconds", "2", "--seed", "3", "--json", "-"];
    let output = terrane(&arguments);
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("every byte was right") && text.contains("stores"), "{text}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("standard output is the report alone");
    let mut found = BTreeSet::new();
    paths(&report, "", &mut found);
    let [common, own, _] = documented();
    let common = common.into_iter().filter(|path| !path.starts_with("experiments"));
    assert_eq!(found, common.chain(own).collect());
    for what in ["stores", "loads", "changes"] {
        assert!(report["soak"]["operations"][what].as_u64() > Some(100), "too few {what} in\n{text}");
    }
}

#[test]
fn a_soak_notices_damage() {
    for (plant, part) in
        [("byte", "in memory, not"), ("frame", "frames were free, not"), ("file", "in the file, not")]
    {
        let output = terrane(&["soak", "--seconds", "1", "--seed", "5", "--plant", plant]);
        let text = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(1), "{plant}: {text}");
        assert!(text.contains(part) && text.contains("with seed 5"), "{plant}: {text}");
        assert!(plant != "byte" || text.contains("The last operations of the thread:"), "{text}");
    }
}

/// A quarter of the memory, and swap errors: see `docs/proof.md`.
#[test]
fn under_pressure_every_byte_is_kept() {
    let pressure = ["soak", "--pressure", "--seconds", "2", "--seed", "4", "--threads", "4"];
    let output = terrane(&pressure);
    let text = String::from_utf8([output.stdout, output.stderr].concat()).expect("UTF-8");
    assert!(output.status.success() && text.contains("every byte was right"), "{text}");
    for counter in ["pswpout", "pswpin", "shortages"] {
        assert!(text.contains(counter), "no {counter} in\n{text}");
    }
    for (plant, part) in
        [("byte", "of memory at"), ("frame", "frames were free, not"), ("file", "of the file is")]
    {
        let output = terrane(&[&pressure[..], &["--plant", plant]].concat());
        let text = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(1), "{plant}: {text}");
        assert!(text.contains(part), "{plant}: {text}");
    }
}

#[test]
fn a_report_has_exactly_the_documented_fields() {
    let folder = tempfile::tempdir().expect("a folder");
    let plot = folder.path().join("pictures");
    let plot_text = plot.to_str().expect("UTF-8");
    let output = terrane(&[
        "bench",
        "fault",
        "populate",
        "--seconds",
        "0.02",
        "--runs",
        "2",
        "--threads",
        "2",
        "--json",
        "-",
        "--plot",
        plot_text,
    ]);
    let tables = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(output.status.success(), "{tables}");
    assert!(tables.contains("clear a page [ns, less is better]"), "tables go to standard error:\n{tables}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("standard output is the report alone");

    let mut found = BTreeSet::new();
    paths(&report, "", &mut found);
    let [documented, ..] = documented();
    assert_eq!(found, documented);

    assert_eq!(report["schema"], 1);
    let ids: Vec<_> = report["experiments"].as_array().expect("a list").iter().map(|e| &e["id"]).collect();
    assert_eq!(ids, ["fault", "populate"]);
    for experiment in report["experiments"].as_array().expect("a list") {
        for row in experiment["rows"].as_array().expect("a list") {
            let figure = |name: &str| row[name].as_f64().expect("a number");
            assert!(figure("min") <= figure("median") && figure("median") <= figure("max"), "{row}");
        }
    }
    for name in ["bench-fault.svg", "bench-populate.svg"] {
        let image = std::fs::read_to_string(plot.join(name)).expect("a picture");
        assert!(image.starts_with("<svg") && image.contains("less is better"));
    }
}

/// The fields of the referee's report, and what it says.
#[test]
fn the_referee_finds_what_is_wrong_and_reports_the_documented_fields() {
    let folder = tempfile::tempdir().expect("a folder");
    let common = ["referee", "--operations", "2000", "--each", "200", "--seed", "5", "--json", "-"];
    let output = terrane(&[&common[..], &["--plant", "unmap"]].concat());
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    if text.contains("cannot be a referee here") {
        eprintln!("skipped: {text}");
        return;
    }
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("Linux and Terrane differ, with seed") && text.contains("munmap"), "{text}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("standard output is the report alone");
    let mut found = BTreeSet::new();
    paths(&report, "", &mut found);
    let [common, _, own] = documented();
    let common = common.into_iter().filter(|path| !path.starts_with("experiments"));
    // An object where there is a difference.
    let own = own.into_iter().filter(|path| path != "referee.difference");
    assert_eq!(found, common.chain(own).collect());

    // Without the damage the script shows nothing.
    let script = folder.path().join("script");
    std::fs::write(&script, report["referee"]["difference"]["script"].as_str().expect("text"))
        .expect("a file");
    let path = script.to_str().expect("UTF-8");
    let output = terrane(&["referee", "--replay", path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = terrane(&["referee", "--replay", path, "--plant", "unmap"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let command = format!("'{}' list | true", env!("CARGO_BIN_EXE_terrane"));
    let output = Command::new("sh").args(["-c", &command]).output().expect("a shell");
    assert!(output.status.success() && output.stderr.is_empty());
}
