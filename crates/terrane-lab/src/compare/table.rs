//! A comparison as text: a line for each figure, a column for each who ran the program.

use crate::report::table::{number, times, wrap};
use crate::report::{Experiment, Role, Row};
use std::fmt::Write as _;

/// The table, with how many times as good Terrane's kernel is in brackets behind the figures of the others.
pub fn text(experiment: &Experiment) -> String {
    let mut text = format!("{}\n", experiment.title);
    for line in wrap(&experiment.note, 100) {
        let _ = writeln!(text, "{line}");
    }
    let mut variants: Vec<&str> = Vec::new();
    let mut metrics: Vec<(&str, &str)> = Vec::new();
    for row in &experiment.rows {
        if !variants.contains(&row.variant.as_str()) {
            variants.push(&row.variant);
        }
        if !metrics.contains(&(&row.metric, &row.unit)) {
            metrics.push((&row.metric, &row.unit));
        }
    }
    let mut lines = vec![vec![String::new()]];
    lines[0].extend(variants.iter().map(|&variant| variant.to_owned()));
    for &(metric, unit) in &metrics {
        let mut cells = vec![format!("{metric} [{unit}]")];
        for &variant in &variants {
            let is_it = |row: &&Row| row.metric == metric && row.unit == unit && row.variant == variant;
            cells.push(match experiment.rows.iter().find(is_it) {
                Some(row) => cell(experiment, row),
                None => "–".to_owned(),
            });
        }
        lines.push(cells);
    }
    let widths: Vec<usize> = (0..=variants.len())
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    text.push('\n');
    for line in &lines {
        let mut shown = String::new();
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 => write!(shown, "  {cell:<width$}"),
                _ => write!(shown, "   {cell:>width$}"),
            };
        }
        let _ = writeln!(text, "{}", shown.trim_end());
    }
    if !experiment.ratios.is_empty() {
        text.push_str(
            "\n  In brackets: how many times as good Terrane, speculative is; medians of the runs.\n",
        );
    }
    text
}

fn cell(experiment: &Experiment, row: &Row) -> String {
    let behind = format!("against {}", row.variant);
    let ratio = experiment.ratios.iter().find(|ratio| {
        ratio
            .name
            .split_once(": ")
            .is_some_and(|(metric, who)| metric == row.metric && who.ends_with(&behind))
    });
    match ratio {
        Some(ratio) if row.role != Role::Terrane => {
            format!("{} ({})", number(row.median), times(ratio.value))
        }
        _ => number(row.median),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Ordered, Ratio};

    #[test]
    fn a_line_for_each_figure() {
        let row = |variant: &str, metric: &str, median, role| Row {
            variant: variant.into(),
            threads: 2,
            metric: metric.into(),
            unit: "µs".into(),
            median,
            min: median,
            max: median,
            at_most: None,
            role,
        };
        let experiment = Experiment {
            id: "p".into(),
            title: "p -t 2".into(),
            source: String::new(),
            note: "2 processors".into(),
            rows: vec![
                row("Linux 6.12", "pair", 30.0, Role::Linux),
                row("Terrane", "pair", 10.0, Role::Terrane),
                row("Terrane", "more", 5.0, Role::Terrane),
            ],
            ratios: vec![Ratio {
                name: "pair: Terrane against Linux 6.12".into(),
                value: 3.0,
                ..Ratio::default()
            }],
            counters: Ordered::default(),
            scaling: false,
        };
        let text = text(&experiment);
        let lines: Vec<_> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines[3], "Linux 6.12 Terrane", "{text}");
        assert_eq!(lines[4], "pair [µs] 30.0 (3.00x) 10.0", "{text}");
        assert_eq!(lines[5], "more [µs] – 5.00", "{text}");
    }
}
