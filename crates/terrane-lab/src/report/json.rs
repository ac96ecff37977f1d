//! Reports as JSON, to a file or to standard output.

use crate::failure::Failure;
use serde::Serialize;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Where a report goes.
pub enum Sink {
    /// Standard output.
    Stdout,
    /// A file, open for writing since before the measurement, so that hours of work never end in "cannot write".
    File {
        /// The open file; what it held before stays until the report is written.
        file: File,
        /// Its path.
        path: PathBuf,
        /// True if it is there only because we made it, and nothing is in it yet.
        ours: bool,
    },
}

impl Sink {
    /// Opens the file that the user named; `-` is standard output.
    ///
    /// # Errors
    /// [`Failure::Request`] if it cannot be written.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        if path == Path::new("-") {
            return Ok(Self::Stdout);
        }
        let existed = path.exists();
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|e| Failure::request(format_args!("cannot write to {}", path.display()), &e))?;
        Ok(Self::File { file, path: path.to_owned(), ours: !existed })
    }

    /// True if standard output is taken by the report.
    pub fn is_stdout(&self) -> bool {
        matches!(self, Self::Stdout)
    }

    /// Writes the report.
    ///
    /// # Errors
    /// [`Failure::Request`] if that fails, [`Failure::Closed`] if the reader of a pipe went away.
    pub fn write(&mut self, report: &impl Serialize) -> Result<(), Failure> {
        let mut text = serde_json::to_string_pretty(report).map_err(|e| Failure::Broken(e.to_string()))?;
        text.push('\n');
        match self {
            Self::Stdout => io::stdout()
                .write_all(text.as_bytes())
                .and_then(|()| io::stdout().flush())
                .map_err(|e| Failure::output("standard output", &e)),
            Self::File { file, path, ours } => {
                write_file(file, text.as_bytes()).map_err(|e| Failure::output(path.display(), &e))?;
                *ours = false;
                Ok(())
            }
        }
    }
}

/// Replaces what `file` holds, if it is a file that can be cut; a pipe or a device is merely written to.
fn write_file(file: &mut File, text: &[u8]) -> io::Result<()> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
        file.seek(SeekFrom::Start(0))?;
    }
    file.write_all(text)
}

impl Drop for Sink {
    /// Takes away the empty file of a measurement that failed.
    fn drop(&mut self) {
        if let Self::File { path, ours: true, .. } = self {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Report, Role, sample};

    #[test]
    fn a_report_survives_the_way_there_and_back() {
        let mut report = sample();
        let text = serde_json::to_string(&report).unwrap();
        // The colour is for pictures only; it is not part of the report.
        report.experiments[0].rows.iter_mut().for_each(|row| row.role = Role::default());
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
        let (first, second) = (text.find("\"pgfault\""), text.find("\"spf_vma_changed\""));
        assert!(first.is_some() && first < second, "counters keep their order: {text}");
    }

    #[test]
    fn a_longer_file_is_replaced_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
        Sink::open(&path).unwrap().write(&sample()).unwrap();
        assert!(serde_json::from_str::<Report>(&fs::read_to_string(&path).unwrap()).is_ok());
    }

    #[test]
    fn a_measurement_that_fails_leaves_files_as_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        fs::write(&old, "kept").unwrap();
        drop((Sink::open(&old).unwrap(), Sink::open(&new).unwrap()));
        assert_eq!(fs::read_to_string(&old).unwrap(), "kept");
        assert!(!new.exists());
    }

    #[test]
    fn an_unwritable_file_is_refused_before_the_measurement() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Sink::open(folder.path()), Err(Failure::Request(_))));
        assert!(matches!(Sink::open(&folder.path().join("no/such/folder")), Err(Failure::Request(_))));
    }
}
