//! Reports as pictures: one SVG for each experiment, horizontal bars with whiskers from the smallest to the largest sample.

mod curves;

use super::table::{asked, number, times, unshown, wrap};
use super::{Better, Experiment, Ratio, Report, Role, Row};
use crate::failure::{Failure, one_line};
use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, IntoTextStyle, RGBColor, ShapeStyle, WHITE};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Near black, for titles and figures.
const INK: RGBColor = RGBColor(31, 35, 40);
/// For what explains.
const FAINT: RGBColor = RGBColor(101, 109, 118);
/// For rules and the foot of bars.
const RULE: RGBColor = RGBColor(208, 215, 222);
/// The colour of ratios, darker than the bars so that text stays readable.
const STRONG: RGBColor = RGBColor(9, 105, 105);

/// How text looks.
#[derive(Clone, Copy)]
struct Face {
    size: i32,
    bold: bool,
    colour: RGBColor,
}

const TITLE: Face = Face { size: 24, bold: true, colour: INK };
const HEADING: Face = Face { size: 15, bold: true, colour: INK };
const BODY: Face = Face { size: 13, bold: false, colour: INK };
const ASIDE: Face = Face { colour: FAINT, ..BODY };
const SMALL: Face = Face { size: 12, ..ASIDE };
const RATIO: Face = Face { size: 14, bold: true, colour: STRONG };

const WIDTH: i32 = 960;
const MARGIN: i32 = 32;
/// The height of one bar and of the line it stands on.
const BAR: i32 = 18;
const LINE: i32 = 28;
/// Room for the figure behind a bar.
const FIGURE: i32 = 96;

/// How far whiskers reach beyond the longest bar, at most: one wild sample shall not press all bars flat.
const BEYOND: f64 = 1.3;

/// The widest a label may be before it is cut.
const LABEL: std::ops::RangeInclusive<i32> = 120..=380;

impl Role {
    /// Its colour in every picture.
    fn colour(self) -> RGBColor {
        match self {
            Self::Baseline => RGBColor(160, 168, 178),
            Self::Linux => RGBColor(230, 159, 60),
            Self::Terrane => RGBColor(13, 148, 136),
        }
    }

    /// What the legend calls it.
    fn legend(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Linux => "Linux",
            Self::Terrane => "Terrane",
        }
    }
}

/// A folder for pictures.
pub struct Folder(PathBuf);

impl Folder {
    /// Makes the folder if need be and tries it, before anything is measured.
    ///
    /// # Errors
    /// [`Failure::Request`] if files cannot be made in it.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let refuse = |e: &io::Error| {
            Failure::request(format_args!("cannot write into the folder {}", path.display()), e)
        };
        fs::create_dir_all(path).map_err(|e| refuse(&e))?;
        tempfile::tempfile_in(path).map_err(|e| refuse(&e))?;
        Ok(Self(path.to_owned()))
    }

    /// Draws `experiment` into `name.svg`; returns the path.
    ///
    /// # Errors
    /// [`Failure::Request`] if the file cannot be written.
    pub fn draw(&self, name: &str, report: &Report, experiment: &Experiment) -> Result<PathBuf, Failure> {
        let path = self.0.join(format!("{name}.svg"));
        let image = svg(report, experiment)?;
        fs::File::create(&path)
            .and_then(|mut file| file.write_all(image.as_bytes()))
            .map_err(|e| Failure::request(format_args!("cannot write {}", path.display()), &e))?;
        Ok(path)
    }
}

/// The bars of one metric.
struct Panel<'a> {
    metric: &'a str,
    unit: &'a str,
    rows: Vec<&'a Row>,
}

impl Panel<'_> {
    fn height(&self) -> i32 {
        LINE + self.rows.len() as i32 * LINE + 14
    }
}

/// The rows of `experiment`, those of one metric together.
fn panels(experiment: &Experiment) -> Vec<Panel<'_>> {
    let mut panels: Vec<Panel<'_>> = Vec::new();
    // Where curves are drawn, rates without one are for the tables.
    let drawn = |row: &&Row| {
        !experiment.scaling || !curves::shows(experiment, row) && Better::of(&row.unit) == Some(Better::Less)
    };
    for row in experiment.rows.iter().filter(drawn) {
        match panels.iter_mut().find(|panel| panel.metric == row.metric && panel.unit == row.unit) {
            Some(panel) => panel.rows.push(row),
            None => panels.push(Panel { metric: &row.metric, unit: &row.unit, rows: vec![row] }),
        }
    }
    panels
}

/// Draws `experiment` as an SVG document.
fn svg(report: &Report, experiment: &Experiment) -> Result<String, Failure> {
    let panels = panels(experiment);
    let note = wrap(&experiment.note, 128);
    let listed = unshown(experiment);
    let ratios = if listed.is_empty() { 0 } else { 34 + listed.len() as i32 * 26 };
    let head = 136 + note.len() as i32 * 18;
    let curves = curves::of(experiment);
    let height = head + curves::height(&curves) + panels.iter().map(Panel::height).sum::<i32>() + ratios + 30;
    let mut image = String::new();
    {
        let root = SVGBackend::with_string(&mut image, (WIDTH as u32, height as u32)).into_drawing_area();
        let page = Page { root: &root };
        root.fill(&WHITE).map_err(broken)?;
        let mut y = page.head(report, experiment, &note)?;
        page.curves(&curves, y)?;
        y += curves::height(&curves);
        let label = label_width(panels.iter().flat_map(|panel| panel.rows.iter().copied()));
        let threads = panels.iter().any(|panel| panel.rows.iter().any(|row| row.threads != 1));
        for panel in &panels {
            page.panel(panel, label, threads, y)?;
            y += panel.height();
        }
        if !listed.is_empty() {
            page.ratios(&listed, y)?;
        }
        page.foot(report, height)?;
        root.present().map_err(broken)?;
    }
    Ok(image)
}

fn broken(error: impl std::fmt::Display) -> Failure {
    Failure::Broken(format!("cannot draw: {}", one_line(&error.to_string())))
}

/// The text before a bar.
fn label(row: &Row, threads: bool) -> String {
    match row.threads {
        _ if !threads => row.variant.clone(),
        1 => format!("{} · 1 thread", row.variant),
        n => format!("{} · {n} threads", row.variant),
    }
}

/// The width of the column of labels, in pixels. An SVG is laid out by whoever shows it, with fonts of its own,
/// so this can only be an estimate: a generous one.
fn label_width<'a>(rows: impl Iterator<Item = &'a Row> + Clone) -> i32 {
    let threads = rows.clone().any(|row| row.threads != 1);
    let longest = rows.map(|row| label(row, threads).chars().count()).max().unwrap_or(0);
    (longest as i32 * 15 / 2 + 8).clamp(*LABEL.start(), *LABEL.end())
}

/// A sheet to draw on.
struct Page<'a, 'b> {
    root: &'a DrawingArea<SVGBackend<'b>, Shift>,
}

impl Page<'_, '_> {
    fn text(&self, text: &str, at: (i32, i32), align: HPos, face: Face) -> Result<(), Failure> {
        let weight = if face.bold { FontStyle::Bold } else { FontStyle::Normal };
        let style = ("sans-serif", face.size, weight)
            .into_text_style(self.root)
            .color(&face.colour)
            .pos(Pos::new(align, VPos::Center));
        self.root.draw(&Text::new(text.to_owned(), at, style)).map_err(broken)
    }

    fn rectangle(&self, x: i32, y: i32, width: i32, height: i32, colour: RGBColor) -> Result<(), Failure> {
        self.root.draw(&Rectangle::new([(x, y), (x + width, y + height)], colour.filled())).map_err(broken)
    }

    fn line(&self, from: (i32, i32), to: (i32, i32), style: impl Into<ShapeStyle>) -> Result<(), Failure> {
        self.root.draw(&PathElement::new(vec![from, to], style)).map_err(broken)
    }

    /// Title, source, note and legend; returns where the panels begin.
    fn head(&self, report: &Report, experiment: &Experiment, note: &[String]) -> Result<i32, Failure> {
        let title = format!("{} — {}", experiment.id, experiment.title);
        self.text(&title, (MARGIN, 40), HPos::Left, TITLE)?;
        let machine =
            format!("{} × {}, {}", report.machine.cpus, report.machine.model, report.machine.kernel);
        self.text(&format!("{} · {machine}", experiment.source), (MARGIN, 68), HPos::Left, ASIDE)?;
        let mut y = 92;
        for line in note {
            self.text(line, (MARGIN, y), HPos::Left, BODY)?;
            y += 18;
        }
        y += 10;
        let mut x = MARGIN;
        for role in [Role::Terrane, Role::Baseline, Role::Linux] {
            if experiment.rows.iter().any(|row| row.role == role) {
                self.rectangle(x, y - 6, 12, 12, role.colour())?;
                self.text(role.legend(), (x + 18, y), HPos::Left, BODY)?;
                x += 34 + role.legend().len() as i32 * 8;
            }
        }
        let key = if experiment.scaling {
            "rate against one thread's · dashed line: as many times as threads"
        } else {
            "bar: median · whisker: min to max"
        };
        self.text(key, (WIDTH - MARGIN, y), HPos::Right, SMALL)?;
        Ok(y + 34)
    }

    fn panel(&self, panel: &Panel<'_>, label_width: i32, threads: bool, top: i32) -> Result<(), Failure> {
        self.line((MARGIN, top - 16), (WIDTH - MARGIN, top - 16), RULE)?;
        self.text(panel.metric, (MARGIN, top), HPos::Left, HEADING)?;
        let unit = match Better::of(panel.unit) {
            Some(better) => format!("{}, {}", panel.unit, better.words()),
            None => panel.unit.to_owned(),
        };
        self.text(&unit, (WIDTH - MARGIN, top), HPos::Right, ASIDE)?;
        let left = MARGIN + label_width + 10;
        let room = f64::from(WIDTH - MARGIN - FIGURE - left);
        let longest = panel.rows.iter().map(|row| row.median).fold(0.0, f64::max) * BEYOND;
        let longest = panel.rows.iter().map(|row| row.max).fold(0.0, f64::max).min(longest);
        let scale = if longest > 0.0 { room / longest } else { 0.0 };
        let mut y = top + LINE;
        for row in &panel.rows {
            let place = |value: f64| left + (value.max(0.0) * scale).round() as i32;
            self.text(&cut(&label(row, threads), label_width), (left - 10, y), HPos::Right, BODY)?;
            // A bar too short to see is still drawn one pixel wide: its figure tells the rest.
            self.rectangle(left, y - BAR / 2, (place(row.median) - left).max(1), BAR, row.role.colour())?;
            let (min, max) = (place(row.min), place(row.max.min(longest)));
            if max > min {
                let style = INK.mix(0.65).stroke_width(1);
                self.line((min, y), (max, y), style)?;
                self.line((min, y - 4), (min, y + 4), style)?;
                if row.max <= longest {
                    self.line((max, y - 4), (max, y + 4), style)?;
                } else {
                    // It goes on: an arrow in place of an end.
                    self.line((max - 4, y - 4), (max, y), style)?;
                    self.line((max - 4, y + 4), (max, y), style)?;
                }
            }
            let terrane = row.role == Role::Terrane;
            self.text(
                &number(row.median),
                (max.max(place(row.median)) + 8, y),
                HPos::Left,
                if terrane { Face { bold: true, ..BODY } } else { BODY },
            )?;
            y += LINE;
        }
        let foot = y - LINE + BAR / 2 + 3;
        self.line((left, top + LINE - BAR / 2 - 3), (left, foot), RULE)
    }

    fn ratios(&self, ratios: &[&Ratio], top: i32) -> Result<(), Failure> {
        self.line((MARGIN, top - 16), (WIDTH - MARGIN, top - 16), RULE)?;
        self.text("Ratios", (MARGIN, top), HPos::Left, HEADING)?;
        let any_published = ratios.iter().any(|ratio| ratio.published.is_some());
        let any_asked = ratios.iter().any(|ratio| ratio.asked().is_some());
        let published = WIDTH - MARGIN - if any_asked { 150 } else { 0 };
        let here = published - if any_published { 110 } else { 0 };
        self.text("here", (here, top), HPos::Right, ASIDE)?;
        if any_asked {
            self.text("asked", (WIDTH - MARGIN, top), HPos::Right, ASIDE)?;
        }
        if any_published {
            self.text("published", (published, top), HPos::Right, ASIDE)?;
        }
        let mut y = top + 28;
        for ratio in ratios {
            self.line((MARGIN, y - 13), (WIDTH - MARGIN, y - 13), RULE.mix(0.5))?;
            self.text(&ratio.name, (MARGIN, y), HPos::Left, BODY)?;
            self.text(&times(ratio.value), (here, y), HPos::Right, RATIO)?;
            if let Some(figure) = ratio.published {
                self.text(&times(figure), (published, y), HPos::Right, ASIDE)?;
            }
            if let Some(what) = ratio.asked() {
                let words = asked(Some(what), ratio.value, times);
                self.text(&words, (WIDTH - MARGIN, y), HPos::Right, ASIDE)?;
            }
            y += 26;
        }
        Ok(())
    }

    fn foot(&self, report: &Report, height: i32) -> Result<(), Failure> {
        let made = format!("{} · Terrane {}", report.command, report.terrane);
        self.text(&cut(&made, WIDTH - 2 * MARGIN), (MARGIN, height - 22), HPos::Left, SMALL)
    }
}

/// `text`, cut with an ellipsis if it would be wider than `width` pixels.
fn cut(text: &str, width: i32) -> String {
    let room = (width * 2 / 15).max(1) as usize;
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    #[test]
    fn a_picture_shows_every_figure_and_escapes_names() {
        let report = sample();
        let image = svg(&report, &report.experiments[0]).unwrap();
        assert!(image.starts_with("<svg") && image.trim_end().ends_with("</svg>"));
        for part in [
            "12,905,113",
            "26.4",
            "2.99x",
            "2.06x",
            "speculative · 2 threads",
            "RwLock&lt;BTreeMap&gt; &amp; co",
        ] {
            assert!(image.contains(part), "{part} is missing");
        }
        assert_eq!(image.matches("<rect").count(), 1 + 3 + 6, "background, legend, bars");
    }

    #[test]
    fn zeros_and_long_names_are_drawn() {
        let mut report = sample();
        for row in &mut report.experiments[0].rows {
            (row.median, row.min, row.max) = (0.0, 0.0, 0.0);
            row.variant = "very long ".repeat(20);
        }
        let image = svg(&report, &report.experiments[0]).unwrap();
        assert!(image.contains('…') && !image.contains("NaN"));
    }

    #[test]
    fn a_folder_that_is_a_file_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(Folder::open(file.path()), Err(Failure::Request(_))));
        let folder = tempfile::tempdir().unwrap();
        let nested = folder.path().join("a/b");
        let report = sample();
        let path =
            Folder::open(&nested).unwrap().draw("multi-fault", &report, &report.experiments[0]).unwrap();
        assert_eq!(path, nested.join("multi-fault.svg"));
        assert!(path.exists());
    }
}
