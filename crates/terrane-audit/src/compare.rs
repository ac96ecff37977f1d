//! Finding the lines that are written by more than one.

use crate::record::{LINE, Recording, Site};
use std::collections::BTreeMap;
use std::fmt;
use terrane::names::Names;

/// One write to a shared line.
#[derive(Clone, Debug)]
pub struct Write {
    /// Who wrote.
    pub who: String,
    /// What was written: the field, or its address if nobody knows it.
    pub field: String,
    /// Where in the source.
    pub site: Site,
    /// How often.
    pub count: u64,
}

/// A line that more than one wrote.
#[derive(Clone, Debug)]
pub struct SharedLine {
    /// Its address.
    pub line: usize,
    /// All writes to it.
    pub writes: Vec<Write>,
}

impl fmt::Display for SharedLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "line {:#x} is written by more than one:", self.line)?;
        for Write { who, field, site, count } in &self.writes {
            writeln!(f, "  {who} {} {field}, {count} times, at {}:{}", site.verb, site.file, site.line)?;
        }
        Ok(())
    }
}

/// The lines that at least two of `recordings` wrote.
pub fn shared_lines(recordings: &[Recording], names: &Names) -> Vec<SharedLine> {
    let mut writers: BTreeMap<usize, usize> = BTreeMap::new();
    for line in recordings.iter().flat_map(Recording::lines) {
        *writers.entry(line).or_default() += 1;
    }
    let shared = writers.into_iter().filter(|(_, writers)| *writers > 1);
    let line = |line: usize| {
        let writes = recordings.iter().flat_map(|recording| {
            recording.writes_in(line).map(|(addr, site, count)| Write {
                who: recording.who.clone(),
                field: names.of(addr).unwrap_or_else(|| format!("an unnamed word at {addr:#x}")),
                site,
                count,
            })
        });
        SharedLine { line, writes: writes.collect() }
    };
    shared.map(|(at, _)| line(at)).collect()
}

/// A line that may be shared: named, bounded and justified.
#[derive(Clone, Copy, Debug)]
pub struct Exception {
    /// How the field's name begins, in a form without numbers: `machine.frames.pool`.
    pub field: &'static str,
    /// Writes at most, by each, for each hundred operations.
    pub in_a_hundred: u64,
    /// Why it is shared, and why that is all right.
    pub why: &'static str,
}

/// A name with its numbers taken out: `stats[3].pgfault` is `stats[].pgfault`.
fn general(name: &str) -> String {
    let mut general = String::new();
    let mut inside = false;
    for c in name.chars() {
        match c {
            '[' => inside = true,
            ']' => inside = false,
            _ if inside => continue,
            _ => {}
        }
        general.push(c);
    }
    general
}

/// Checks that `recordings`, of `operations` operations each (`u64::MAX`: of any number), have no line in common but those of `exceptions`, within
/// their bounds.
///
/// # Errors
/// What is shared, field by field.
pub fn check(
    recordings: &[Recording],
    names: &Names,
    operations: u64,
    exceptions: &[Exception],
) -> Result<(), String> {
    let mut errors = String::new();
    for recording in recordings.iter().filter(|recording| recording.is_empty()) {
        errors += &format!("{} wrote nothing: there is nothing to compare\n", recording.who);
    }
    // By exception and by who: how many writes there were.
    let mut counts: BTreeMap<(usize, &str), u64> = BTreeMap::new();
    let shared = shared_lines(recordings, names);
    for line in &shared {
        let mut unknown = false;
        for write in &line.writes {
            let field = general(&write.field);
            match exceptions.iter().position(|exception| field.starts_with(exception.field)) {
                Some(index) => *counts.entry((index, &write.who)).or_default() += write.count,
                None => unknown = true,
            }
        }
        if unknown {
            errors += &line.to_string();
        }
    }
    for ((index, who), count) in counts {
        let Exception { field, in_a_hundred, why } = exceptions[index];
        if count.saturating_mul(100) > in_a_hundred.saturating_mul(operations) {
            errors += &format!(
                "{who} writes {field} {count} times in {operations} operations, more than {in_a_hundred} in 100 ({why})\n"
            );
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// What belongs to one CPU, by its name, and lies on a line with what belongs to another: whatever the CPUs do, they would
/// meet there. `owner` gives the CPU whose thing a name is.
pub fn badly_placed(names: &Names, owner: impl Fn(&str) -> Option<u32>) -> Vec<String> {
    let mut lines: BTreeMap<usize, (u32, &str)> = BTreeMap::new();
    let mut found = Vec::new();
    for (range, name) in names.iter() {
        let Some(cpu) = owner(name) else { continue };
        for line in (range.start & !(LINE - 1)..range.end).step_by(LINE) {
            let (other, with) = *lines.entry(line).or_insert((cpu, name));
            if other != cpu {
                found.push(format!("{name} and {with} lie on one line"));
            }
        }
    }
    found
}
