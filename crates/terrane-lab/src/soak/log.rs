//! What a thread did last: for the report of a failure.

use std::collections::VecDeque;
use std::fmt;

/// How many operations are remembered.
const KEPT: usize = 40;

/// One operation.
#[derive(Clone, Copy)]
pub struct Note {
    /// What was done.
    pub what: &'static str,
    /// The space: 0 for the one that all threads share, beyond it those forked from it, from 100 on those of the families.
    pub space: usize,
    /// Where, in bytes.
    pub start: u64,
    /// How many bytes.
    pub len: u64,
    /// What else there is to say: a protection, a kind of advice.
    pub how: &'static str,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, space, start, len, how } = self;
        write!(
            f,
            "{what} {how}{}[{start:#x}, {:#x}) in space {space}",
            if how.is_empty() { "" } else { " " },
            start + len
        )
    }
}

/// The last operations of a thread.
#[derive(Default)]
pub struct Log {
    notes: VecDeque<Note>,
    /// Operations so far.
    pub operations: u64,
}

impl Log {
    /// Another operation begins.
    pub fn note(&mut self, note: Note) {
        if self.notes.len() == KEPT {
            self.notes.pop_front();
        }
        self.notes.push_back(note);
        self.operations += 1;
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.operations - self.notes.len() as u64;
        for (note, number) in self.notes.iter().zip(first + 1..) {
            writeln!(f, "  {number:>9}  {note}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_operations_are_kept_with_their_numbers() {
        let mut log = Log::default();
        for start in 0..100 {
            log.note(Note { what: "store", space: 0, start, len: 8, how: "" });
        }
        let text = log.to_string();
        assert_eq!(text.lines().count(), KEPT);
        assert!(text.starts_with("         61  store [0x3c, 0x44) in space 0\n"), "{text}");
        assert!(text.ends_with("        100  store [0x63, 0x6b) in space 0\n"), "{text}");
    }
}
