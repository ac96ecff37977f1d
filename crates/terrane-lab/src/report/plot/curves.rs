//! How rates grow with threads: for each metric a field with a line for each variant, and its figures beside.

use super::{ASIDE, BODY, Face, HEADING, INK, MARGIN, Page, RULE, SMALL, WIDTH, cut};
use crate::failure::Failure;
use crate::report::table::{asked, times};
use crate::report::{Asked, Experiment, Role, Row};
use plotters::style::Color;
use plotters::style::text_anchor::HPos;

/// The curves of one metric.
pub struct Curves<'a> {
    metric: &'a str,
    lines: Vec<Line<'a>>,
}

/// The curve of one variant.
struct Line<'a> {
    variant: &'a str,
    role: Role,
    /// The number of variants of the same role before it: how it is drawn.
    number: usize,
    /// Threads, and their rate against one thread's.
    points: Vec<(usize, f64)>,
    asked: Option<(Asked, f64)>,
}

/// The field's size, and that of all that belongs to it.
const FIELD: (i32, i32) = (130, 130);
const PANEL: (i32, i32) = ((WIDTH - 2 * MARGIN) / 2, 196);

/// Whether `row` is part of a curve.
pub fn shows(experiment: &Experiment, row: &Row) -> bool {
    let several = |other: &Row| {
        other.metric == row.metric
            && experiment.scaling_of(&other.metric, &other.variant, other.threads).is_some()
    };
    experiment.scaling && experiment.rows.iter().any(several)
}

/// The curves of an experiment; none unless it is about scaling.
pub fn of(experiment: &Experiment) -> Vec<Curves<'_>> {
    let mut all: Vec<Curves<'_>> = Vec::new();
    for row in experiment.rows.iter().filter(|row| shows(experiment, row)) {
        let at = all.iter().position(|curves| curves.metric == row.metric).unwrap_or_else(|| {
            all.push(Curves { metric: &row.metric, lines: Vec::new() });
            all.len() - 1
        });
        let lines = &mut all[at].lines;
        let at = lines.iter().position(|line| line.variant == row.variant).unwrap_or_else(|| {
            let number = lines.iter().filter(|line| line.role == row.role).count();
            let points = Vec::new();
            lines.push(Line { variant: &row.variant, role: row.role, number, points, asked: None });
            lines.len() - 1
        });
        let ratio = experiment.scaling_of(&row.metric, &row.variant, row.threads);
        if let Some(ratio) = ratio.filter(|ratio| ratio.asked().is_some()) {
            lines[at].asked = ratio.asked().map(|asked| (asked, ratio.value));
        }
        let value = if row.threads == 1 { Some(1.0) } else { ratio.map(|ratio| ratio.value) };
        lines[at].points.extend(value.map(|value| (row.threads, value)));
    }
    all
}

/// How high they are, drawn two in a row.
pub fn height(curves: &[Curves<'_>]) -> i32 {
    (curves.len() as i32 + 1) / 2 * PANEL.1
}

impl Page<'_, '_> {
    /// Draws them.
    pub fn curves(&self, curves: &[Curves<'_>], top: i32) -> Result<(), Failure> {
        for (number, curves) in curves.iter().enumerate() {
            let (column, row) = (number as i32 % 2, number as i32 / 2);
            self.one(curves, (MARGIN + column * PANEL.0, top + row * PANEL.1))?;
        }
        Ok(())
    }

    fn one(&self, curves: &Curves<'_>, (left, top): (i32, i32)) -> Result<(), Failure> {
        self.line((left, top - 16), (left + PANEL.0 - 24, top - 16), RULE)?;
        self.text(&cut(curves.metric, PANEL.0 - 24), (left, top), HPos::Left, HEADING)?;
        let mut threads: Vec<usize> =
            curves.lines.iter().flat_map(|line| line.points.iter().map(|point| point.0)).collect();
        threads.sort_unstable();
        threads.dedup();
        let most = threads.last().copied().unwrap_or(1).max(2);
        let values = curves.lines.iter().flat_map(|line| line.points.iter().map(|point| point.1));
        let ceiling = values.fold(most as f64, f64::max).min(1.5 * most as f64);
        let (x0, y0) = (left + 22, top + 22 + FIELD.1);
        // Doublings lie the same distance apart.
        let x = |threads: usize| {
            x0 + ((threads as f64).log2() / (most as f64).log2() * f64::from(FIELD.0)) as i32
        };
        let y = |value: f64| y0 - (value.clamp(0.0, ceiling) / ceiling * f64::from(FIELD.1)) as i32;
        self.line((x0, y0), (x0 + FIELD.0, y0), RULE)?;
        self.line((x0, y0), (x0, y0 - FIELD.1), RULE)?;
        for &n in &threads {
            self.text(&n.to_string(), (x(n), y0 + 12), HPos::Center, SMALL)?;
            self.text(&n.to_string(), (x0 - 6, y(n as f64)), HPos::Right, SMALL)?;
            self.line((x0, y(n as f64)), (x0 + FIELD.0, y(n as f64)), RULE.mix(0.5))?;
        }
        let ideal: Vec<(i32, i32)> = (0..=FIELD.0)
            .map(|dx| {
                let n = (most as f64).powf(f64::from(dx) / f64::from(FIELD.0));
                (x0 + dx, y(n))
            })
            .collect();
        self.dashed(&ideal, INK.mix(0.35), 1, 4, 4)?;
        for line in curves.lines.iter().rev() {
            let mut points: Vec<(i32, i32)> =
                line.points.iter().map(|&(n, value)| (x(n), y(value))).collect();
            points.sort_unstable();
            let colour = line.role.colour();
            let (dash, gap) = line.dashes();
            for pair in points.windows(2) {
                self.dashed(&between(pair[0], pair[1]), colour, 2, dash, gap)?;
            }
            for &(x, y) in &points {
                self.rectangle(x - 3, y - 3, 6, 6, colour)?;
            }
        }
        self.legend(curves, (x0 + FIELD.0 + 20, top + 26), left + PANEL.0 - 24)
    }

    fn legend(&self, curves: &Curves<'_>, (left, top): (i32, i32), right: i32) -> Result<(), Failure> {
        let mut at = top;
        for line in &curves.lines {
            let (dash, gap) = line.dashes();
            self.dashed(&between((left, at), (left + 20, at)), line.role.colour(), 3, dash, gap)?;
            let bold = line.role == Role::Terrane;
            let last = line.points.iter().max_by_key(|point| point.0).filter(|point| point.0 > 1);
            self.text(&cut(line.variant, right - left - 48), (left + 26, at), HPos::Left, SMALL)?;
            if let Some(&(_, value)) = last {
                self.text(&times(value), (right, at), HPos::Right, Face { bold, ..BODY })?;
            }
            at += 18;
            if let Some((what, value)) = line.asked {
                self.text(&asked(Some(what), value, times), (right, at), HPos::Right, ASIDE)?;
                at += 18;
            }
        }
        Ok(())
    }

    /// A line through `points`, which lie a pixel apart.
    fn dashed(
        &self,
        points: &[(i32, i32)],
        colour: impl Color,
        width: u32,
        dash: usize,
        gap: usize,
    ) -> Result<(), Failure> {
        for part in points.chunks(dash + gap) {
            let part = &part[..part.len().min(dash)];
            if let (Some(&from), Some(&to)) = (part.first(), part.last()) {
                self.line(from, to, colour.stroke_width(width))?;
            }
        }
        Ok(())
    }
}

impl Line<'_> {
    /// The lengths of its dashes, and of the gaps between them.
    fn dashes(&self) -> (usize, usize) {
        match self.number {
            0 => (1000, 0),
            1 => (7, 4),
            _ => (2, 4),
        }
    }
}

/// The points from one to another.
fn between((x0, y0): (i32, i32), (x1, y1): (i32, i32)) -> Vec<(i32, i32)> {
    let steps = (x1 - x0).abs().max((y1 - y0).abs()).max(1);
    (0..=steps).map(|n| (x0 + (x1 - x0) * n / steps, y0 + (y1 - y0) * n / steps)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Ratio;

    #[test]
    fn rows_with_ratios_become_curves() {
        let mut experiment = crate::report::sample().experiments.remove(0);
        experiment.scaling = true;
        let metric = experiment.rows[0].metric.clone();
        for threads in [1, 4] {
            let mut row = experiment.rows[1].clone();
            row.threads = threads;
            experiment.rows.push(row);
        }
        let name = |threads| Experiment::scaling_name(&metric, "speculative", threads);
        experiment.ratios = [(2, 1.9), (4, 3.5)]
            .map(|(threads, value)| Ratio {
                name: name(threads),
                value,
                at_least: (threads == 2).then_some(1.8),
                ..Ratio::default()
            })
            .to_vec();
        let curves = of(&experiment);
        assert_eq!(curves.len(), 1, "the other metrics have no ratios");
        let line = curves[0].lines.iter().find(|line| line.variant == "speculative").unwrap();
        let mut points = line.points.clone();
        points.sort_by_key(|point| point.0);
        assert_eq!(points, [(1, 1.0), (2, 1.9), (4, 3.5)]);
        assert_eq!(line.asked, Some((Asked::AtLeast(1.8), 1.9)));
        experiment.scaling = false;
        assert!(of(&experiment).is_empty());
    }

    #[test]
    fn lines_go_from_one_point_to_the_other() {
        assert_eq!(between((0, 0), (3, -3)), [(0, 0), (1, -1), (2, -2), (3, -3)]);
        assert_eq!(between((5, 5), (5, 5)), [(5, 5), (5, 5)]);
    }
}
