//! What a run of a program says: what must agree everywhere, and its figures.

/// A figure that a program states: a line `NAME VALUE UNIT` on standard error.
#[derive(Clone, PartialEq, Debug)]
pub struct Figure {
    /// What was measured.
    pub name: String,
    /// How much.
    pub value: f64,
    /// Of what.
    pub unit: String,
}

/// The figures among the lines of `text`.
pub fn figures(text: &str) -> Vec<Figure> {
    text.lines().filter_map(figure).collect()
}

fn figure(line: &str) -> Option<Figure> {
    let mut words = line.split_whitespace();
    let (name, value, unit) = (words.next()?, words.next()?, words.next()?);
    let value: f64 = value.parse().ok()?;
    let plain = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
    let unit = if unit == "us" { "µs" } else { unit };
    (words.next().is_none() && plain && value.is_finite()).then(|| Figure {
        name: name.to_owned(),
        value,
        unit: unit.to_owned(),
    })
}

/// What a run left, as far as others must leave the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Left {
    /// Standard output.
    pub output: Vec<u8>,
    /// The exit status; 128 and the signal's number for one that was killed.
    pub status: u8,
}

/// How `ours` differs from `theirs`, in a line or two; `None` if it does not.
pub fn difference(theirs: &Left, ours: &Left) -> Option<String> {
    if theirs.status != ours.status {
        return Some(format!("exit status {}, not {}", ours.status, theirs.status));
    }
    if theirs.output == ours.output {
        return None;
    }
    let (theirs, ours) = (String::from_utf8_lossy(&theirs.output), String::from_utf8_lossy(&ours.output));
    let (mut theirs, mut ours) = (theirs.lines(), ours.lines());
    for number in 1.. {
        match (theirs.next(), ours.next()) {
            (None, None) => break,
            (one, other) if one == other => {}
            (one, other) => {
                let show = |line: Option<&str>| line.map_or("nothing".to_owned(), |line| format!("‘{line}’"));
                return Some(format!("line {number} of the output is {}, not {}", show(other), show(one)));
            }
        }
    }
    Some("the ends of lines differ".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_among_other_lines() {
        let text = "hello\nfaults 1234.5 faults/s\nfault 12 us\nError: 3 x\nwrong 1\na 2 b c\nnot nan ns\n";
        let expected = [("faults", 1234.5, "faults/s"), ("fault", 12.0, "µs")];
        let expected =
            expected.map(|(name, value, unit)| Figure { name: name.into(), value, unit: unit.into() });
        assert_eq!(figures(text), expected);
    }

    #[test]
    fn the_first_difference_is_told() {
        let left = |output: &str, status| Left { output: output.into(), status };
        assert_eq!(difference(&left("a\n", 0), &left("a\n", 0)), None);
        let told = |one: &Left, other: &Left| difference(one, other).unwrap();
        assert_eq!(told(&left("a", 0), &left("a", 139)), "exit status 139, not 0");
        assert_eq!(told(&left("a\nb\n", 0), &left("a\nc\n", 0)), "line 2 of the output is ‘c’, not ‘b’");
        assert_eq!(told(&left("a\nb\n", 0), &left("a\n", 0)), "line 2 of the output is nothing, not ‘b’");
        assert_eq!(told(&left("a\n", 0), &left("a", 0)), "the ends of lines differ");
    }
}
