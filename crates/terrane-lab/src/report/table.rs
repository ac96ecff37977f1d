//! Reports as text for a terminal.

use super::{Asked, Better, Counters, Experiment, Ratio, Report, Row};
use std::fmt::Write;

/// What stands above the tables: where and with what it was measured.
pub fn head(report: &Report) -> String {
    let machine = &report.machine;
    format!(
        "Terrane {} · {} × {} · {} · {}\n",
        report.terrane,
        machine.cpus,
        machine.model,
        bytes(machine.memory),
        machine.kernel
    )
}

/// An experiment: its figures grouped by metric, its ratios beside the published ones, its counters.
pub fn experiment(experiment: &Experiment) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "\n{} — {}", experiment.id, experiment.title);
    let _ = writeln!(text, "Source: {}", experiment.source);
    for line in wrap(&experiment.note, 100) {
        let _ = writeln!(text, "{line}");
    }
    if experiment.scaling {
        scaling(&mut text, experiment);
    } else {
        rows(&mut text, &experiment.rows);
    }
    ratios(&mut text, &unshown(experiment));
    for (variant, counters) in experiment.counters.iter() {
        self::counters(&mut text, variant, counters);
    }
    text
}

fn rows(text: &mut String, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    let any_asked = rows.iter().any(|row| row.asked().is_some());
    let mut lines: Vec<Line> = Vec::new();
    let mut metric = None;
    for row in rows {
        if metric != Some((&row.metric, &row.unit)) {
            metric = Some((&row.metric, &row.unit));
            lines.push(heading(row));
        }
        let mut cells = vec![
            row.variant.clone(),
            row.threads.to_string(),
            number(row.median),
            number(row.min),
            number(row.max),
        ];
        if any_asked {
            cells.push(asked(row.asked(), row.median, number));
        }
        lines.push(Line::Cells(cells));
    }
    let columns = ["", "threads", "median", "min", "max", "asked"];
    table(text, &columns[..5 + usize::from(any_asked)], &lines);
}

fn heading(row: &Row) -> Line {
    let better = Better::of(&row.unit).map_or(String::new(), |better| format!(", {}", better.words()));
    Line::Heading(format!("{} [{}{better}]", row.metric, row.unit))
}

/// What is asked of a figure, and whether it is so.
pub fn asked(asked: Option<Asked>, value: f64, show: impl Fn(f64) -> String) -> String {
    let Some(asked) = asked else { return "–".to_owned() };
    let met = if asked.is_met(value) { "met" } else { "missed" };
    match asked {
        Asked::AtLeast(least) => format!("≥ {} {met}", show(least)),
        Asked::AtMost(most) => format!("≤ {} {met}", show(most)),
    }
}

/// A line for each metric and variant, with a column for each number of threads, and one for its ratio to one thread.
fn scaling(text: &mut String, experiment: &Experiment) {
    let mut threads: Vec<usize> = experiment.rows.iter().map(|row| row.threads).collect();
    threads.sort_unstable();
    threads.dedup();
    let any_asked = experiment.rows.iter().any(|row| row.asked().is_some())
        || experiment.ratios.iter().any(|ratio| ratio.asked().is_some());
    let of_rows = |row: &Row| {
        let of = |&&n: &&usize| experiment.scaling_of(&row.metric, &row.variant, n);
        threads.iter().filter(|&&n| n > 1).map(|n| of(&n)).collect::<Vec<Option<&Ratio>>>()
    };
    let any_bound = experiment.rows.iter().flat_map(of_rows).flatten().any(|ratio| ratio.bound.is_some());
    let mut lines: Vec<Line> = Vec::new();
    let mut metric = None;
    for (number_of, row) in experiment.rows.iter().enumerate() {
        if metric != Some((&row.metric, &row.unit)) {
            metric = Some((&row.metric, &row.unit));
            lines.push(heading(row));
        }
        let same = |other: &&Row| {
            (&other.metric, &other.unit, &other.variant) == (&row.metric, &row.unit, &row.variant)
        };
        if experiment.rows[..number_of].iter().any(|other| same(&other)) {
            continue;
        }
        let of = |threads: usize| experiment.rows.iter().filter(same).find(|row| row.threads == threads);
        let mut cells = vec![row.variant.clone()];
        cells.extend(threads.iter().map(|&n| of(n).map_or("–".to_owned(), |row| number(row.median))));
        let ratios = of_rows(row);
        cells.extend(ratios.iter().map(|ratio| ratio.map_or("–".to_owned(), |ratio| times(ratio.value))));
        if any_bound {
            // Of the most threads.
            cells.push(bound(ratios.iter().rev().flatten().next().copied()));
        }
        if any_asked {
            let of_ratio = ratios.iter().flatten().find(|ratio| ratio.asked().is_some());
            cells.push(match of_ratio {
                Some(ratio) => asked(ratio.asked(), ratio.value, times),
                None => asked(row.asked(), row.median, number),
            });
        }
        lines.push(Line::Cells(cells));
    }
    let columns: Vec<String> = std::iter::once(String::new())
        .chain(threads.iter().map(|n| if *n == 1 { "1 thread".to_owned() } else { format!("{n} threads") }))
        .chain(threads.iter().filter(|&&n| n > 1).map(|n| format!("{n} : 1")))
        .chain(any_bound.then(|| "apart".to_owned()))
        .chain(any_asked.then(|| "asked".to_owned()))
        .collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    table(text, &columns, &lines);
}

/// What the machine gives.
fn bound(ratio: Option<&Ratio>) -> String {
    ratio.and_then(|ratio| ratio.bound).map_or("–".to_owned(), times)
}

/// The ratios that no other table shows.
pub fn unshown(experiment: &Experiment) -> Vec<&Ratio> {
    let shown = |ratio: &&Ratio| {
        experiment.scaling
            && experiment
                .rows
                .iter()
                .any(|row| Experiment::scaling_name(&row.metric, &row.variant, row.threads) == ratio.name)
    };
    experiment.ratios.iter().filter(|ratio| !shown(ratio)).collect()
}

fn ratios(text: &mut String, ratios: &[&Ratio]) {
    if ratios.is_empty() {
        return;
    }
    let published = ratios.iter().any(|ratio| ratio.published.is_some());
    let any_asked = ratios.iter().any(|ratio| ratio.asked().is_some());
    let any_bound = ratios.iter().any(|ratio| ratio.bound.is_some());
    let lines: Vec<Line> = ratios
        .iter()
        .map(|r| {
            let mut cells = vec![r.name.clone(), times(r.value)];
            if published {
                cells.push(r.published.map_or("–".to_owned(), times));
            }
            if any_bound {
                cells.push(bound(Some(r)));
            }
            if any_asked {
                cells.push(asked(r.asked(), r.value, times));
            }
            Line::Cells(cells)
        })
        .collect();
    let mut columns = vec!["ratio", "here"];
    columns.extend(published.then_some("published"));
    columns.extend(any_bound.then_some("apart"));
    columns.extend(any_asked.then_some("asked"));
    table(text, &columns, &lines);
}

/// In the manner of `perf stat`: the number, the name, and where faults are counted how many of each a fault.
fn counters(text: &mut String, variant: &str, counters: &Counters) {
    let faults = counters.get("pgfault").copied().unwrap_or(0);
    let width = counters.iter().map(|(_, &value)| thousands(value).len()).max().unwrap_or(0).max(12);
    let names = counters.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let _ = writeln!(text, "\n  Counters of {variant}:");
    for (name, &value) in counters.iter() {
        let _ = write!(text, "  {:>width$}  ", thousands(value));
        if name == "pgfault" || faults == 0 || value == 0 {
            let _ = writeln!(text, "{name}");
        } else {
            let _ = writeln!(text, "{name:<names$}  # {:>8} a fault", share(value as f64 / faults as f64));
        }
    }
}

/// A line of a table.
enum Line {
    Heading(String),
    Cells(Vec<String>),
}

/// Writes a table: the first column to the left, the others, which are numbers, to the right.
fn table(text: &mut String, columns: &[&str], lines: &[Line]) {
    let mut widths: Vec<usize> = columns.iter().map(|column| column.chars().count()).collect();
    for line in lines {
        if let Line::Cells(cells) = line {
            for (width, cell) in widths.iter_mut().zip(cells) {
                *width = (*width).max(cell.chars().count());
            }
        }
    }
    let row = |cells: &[&str]| {
        let mut line = format!("    {:<width$}", cells[0], width = widths[0]);
        for (cell, width) in cells[1..].iter().zip(&widths[1..]) {
            let _ = write!(line, "  {cell:>width$}");
        }
        line
    };
    let head = row(columns);
    let _ = writeln!(text, "\n{head}\n    {}", "─".repeat(head.chars().count() - 4));
    for line in lines {
        let _ = match line {
            Line::Heading(heading) => writeln!(text, "  {heading}"),
            Line::Cells(cells) => {
                writeln!(text, "{}", row(&cells.iter().map(String::as_str).collect::<Vec<_>>()))
            }
        };
    }
}

/// A count with its thousands set apart.
pub fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A measured figure with three to four significant digits before and after the point: `0.083`, `26.4`, `1,234`.
pub fn number(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 99.95 {
        let text = thousands(magnitude.round() as u64);
        return if value < 0.0 { format!("-{text}") } else { text };
    }
    match magnitude {
        _ if magnitude == 0.0 => "0".to_owned(),
        _ if magnitude >= 9.995 => format!("{value:.1}"),
        _ if magnitude >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A ratio: `2.06x`.
pub fn times(value: f64) -> String {
    let digits = if value >= 99.5 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$}x")
}

/// How many for each fault: as a percentage up to one, as a multiple above.
fn share(value: f64) -> String {
    if value <= 1.0 { format!("{:.2} %", value * 100.0) } else { times(value) }
}

/// A size in the largest binary unit that it reaches.
pub fn bytes(value: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut scaled = value as f64;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < units.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    if scaled.fract() < 0.05 || unit == 0 {
        format!("{scaled:.0} {}", units[unit])
    } else {
        format!("{scaled:.1} {}", units[unit])
    }
}

/// Breaks `text` into lines of at most `width` characters, at spaces.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if !line.is_empty() {
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    #[test]
    fn figures_are_readable() {
        for (value, text) in [
            (0.0, "0"),
            (0.0834, "0.083"),
            (1.0, "1.00"),
            (9.999, "10.0"),
            (26.43, "26.4"),
            (99.96, "100"),
            (1234.4, "1,234"),
            (17_481_387.2, "17,481,387"),
            (-3.5, "-3.50"),
            (-1234.0, "-1,234"),
        ] {
            assert_eq!(number(value), text);
        }
        assert_eq!([thousands(0), thousands(999), thousands(1000)], ["0", "999", "1,000"]);
        assert_eq!([times(2.0649), times(10.04), times(146.2)], ["2.06x", "10.0x", "146x"]);
        assert_eq!([bytes(512), bytes(24 << 30), bytes(3 << 19)], ["512 bytes", "24 GiB", "1.5 MiB"]);
        assert_eq!([share(0.981), share(2.5)], ["98.10 %", "2.50x"]);
    }

    #[test]
    fn lines_break_at_spaces() {
        assert_eq!(wrap("one two  three four", 9), ["one two", "three", "four"]);
        assert_eq!(wrap("unbreakable", 3), ["unbreakable"]);
        assert!(wrap(" ", 3).is_empty());
    }

    #[test]
    fn a_table_has_what_the_report_has_and_numbers_line_up() {
        let report = sample();
        let text = experiment(&report.experiments[0]);
        for part in [
            "multi-fault — Page faults of many threads",
            "faults, separate areas [faults/s, more is better]",
            "12,905,113",
            "2.99x",
            "2.06x",
            "1,674,599  speculative_pgfault",
            "98.14 % a fault",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        let ends: Vec<_> = text
            .lines()
            .filter(|line| line.contains("classic ") || line.contains("speculative  "))
            .filter(|line| line.starts_with("    "))
            .map(|line| line.chars().count())
            .collect();
        assert!(
            ends.len() >= 4 && ends.windows(2).take(3).all(|pair| pair[0] == pair[1]),
            "{ends:?} in\n{text}"
        );
        assert!(head(&report).contains("2 × A processor · 8 GiB · Linux 6.18.0"));
    }

    #[test]
    fn a_table_of_scaling_has_a_column_for_each_number_of_threads() {
        let mut experiment = sample().experiments.remove(0);
        experiment.scaling = true;
        let mut one = experiment.rows[1].clone();
        (one.threads, one.median) = (1, 7_000_000.0);
        let name = Experiment::scaling_name(&one.metric, &one.variant, 2);
        experiment.rows.insert(1, one);
        (experiment.ratios[0].name, experiment.ratios[0].value) = (name.clone(), 1.85);
        let text = super::experiment(&experiment);
        let line = text.lines().find(|line| line.contains("12,905,113")).unwrap();
        for part in ["speculative", "7,000,000", "1.85x", "1.97x", "≥ 1.90x missed"] {
            assert!(line.contains(part), "{part} is missing in\n{text}");
        }
        assert!(text.contains("1 thread  2 threads") || text.contains("1 thread   2 threads"), "{text}");
        assert!(!text.contains(&name), "shown once");
        assert!(text.contains("38.1x") && text.contains("≤ 1.10x missed"), "{text}");
    }
}
