//! Finding the lines that one writes and another writes or reads.

use crate::record::{LINE, Recording, Site};
use std::collections::BTreeMap;
use std::fmt;
use terrane::names::Names;

/// Which shared lines count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// Those that two write.
    Written,
    /// Also those that one writes and another reads.
    Read,
}

/// One use of a shared line.
#[derive(Clone, Debug)]
pub struct Use {
    /// Who.
    pub who: String,
    /// What was written or read: the field; or, if nobody knows it (it is gone by now, say), the file of the source that
    /// does it, and the address.
    pub field: String,
    /// Where in the source.
    pub site: Site,
    /// How often.
    pub count: u64,
}

/// A line that more than one used.
#[derive(Clone, Debug)]
pub struct SharedLine {
    /// Its address.
    pub line: usize,
    /// Only one wrote it; others read it.
    pub only_read: bool,
    /// All uses of it.
    pub uses: Vec<Use>,
}

impl fmt::Display for SharedLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how =
            if self.only_read { "written by one and read by another" } else { "written by more than one" };
        writeln!(f, "line {:#x} is {how}:", self.line)?;
        for Use { who, field, site, count } in &self.uses {
            writeln!(f, "  {who} {} {field}, {count} times, at {}:{}", site.verb, site.file, site.line)?;
        }
        Ok(())
    }
}

/// The lines that at least two of `recordings` wrote, or, if that counts, one wrote and another read.
pub fn shared_lines(recordings: &[Recording], names: &Names, sharing: Sharing) -> Vec<SharedLine> {
    // How many wrote it, and how many had to do with it.
    let mut lines: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    for (line, written) in recordings.iter().flat_map(Recording::lines) {
        let (writers, all) = lines.entry(line).or_default();
        *writers += usize::from(written);
        *all += 1;
    }
    let counts = |writers, all| writers > 1 || sharing == Sharing::Read && writers == 1 && all > 1;
    let shared = lines.into_iter().filter(|(_, (writers, all))| counts(*writers, *all));
    let line = |line: usize, writers: usize| {
        let uses = recordings.iter().flat_map(|recording| {
            let uses =
                recording.in_line(line).filter(|(_, site, _)| sharing == Sharing::Read || site.writes());
            uses.map(|(addr, site, count)| Use {
                who: recording.who.clone(),
                field: names
                    .of(addr)
                    .unwrap_or_else(|| format!("an unnamed word of {} at {addr:#x}", site.file)),
                site,
                count,
            })
        });
        SharedLine { line, only_read: writers == 1, uses: uses.collect() }
    };
    shared.map(|(at, (writers, _))| line(at, writers)).collect()
}

/// A line that may be shared: named, bounded and justified.
#[derive(Clone, Copy, Debug)]
pub struct Exception {
    /// How the field's name begins, in a form without numbers: `machine.frames.pool`.
    pub field: &'static str,
    /// Writes at most, by each, for each hundred operations. (Reads are not counted: where nobody writes they cost nothing.)
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

/// Checks that `recordings`, of `operations` operations each (`None`: never mind how often), have no line in common but those of `exceptions`, within
/// their bounds.
///
/// # Errors
/// What is shared, field by field.
pub fn check(
    recordings: &[Recording],
    names: &Names,
    sharing: Sharing,
    operations: Option<u64>,
    exceptions: &[Exception],
) -> Result<(), String> {
    let mut errors = String::new();
    for recording in recordings.iter().filter(|recording| recording.is_empty()) {
        errors += &format!("{} wrote nothing: there is nothing to compare\n", recording.who);
    }
    // By exception and by who: how many writes there were.
    let mut counts: BTreeMap<(usize, &str), u64> = BTreeMap::new();
    let shared = shared_lines(recordings, names, sharing);
    for line in &shared {
        let mut unknown = false;
        for write in &line.uses {
            let field = general(&write.field);
            if line.only_read && !write.site.writes() {
                continue; // what matters is what is written beside it
            }
            match exceptions.iter().position(|exception| field.starts_with(exception.field)) {
                Some(index) if write.site.writes() => {
                    *counts.entry((index, &write.who)).or_default() += write.count;
                }
                Some(_) => {}
                None => unknown = true,
            }
        }
        if unknown {
            errors += &line.to_string();
        }
    }
    for ((index, who), count) in counts {
        let Exception { field, in_a_hundred, why } = exceptions[index];
        if let Some(operations) = operations.filter(|operations| count * 100 > in_a_hundred * operations) {
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
