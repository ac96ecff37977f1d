//! What goes wrong, and how the command says so: one line on standard error and an exit status.
//!
//! | status | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | a measurement broke off |
//! | 2 | the request cannot be carried out: arguments, memory, files |
//! | 124, 125 | a guest took too long; its kernel or the emulator broke down |

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

/// Why the command, or one case of a measurement, cannot go on.
#[derive(Debug)]
pub enum Failure {
    /// What was asked for cannot be done here: wrong arguments, too little memory, an unwritable file.
    Request(String),
    /// A measurement broke off.
    Broken(String),
    /// This machine or kernel cannot run this one case; it is left out, with a note in the report.
    Unsupported(String),
    /// A guest did not come to its own end; what there is to say, and the exit status.
    Guest {
        /// What happened.
        message: String,
        /// The exit status.
        status: u8,
    },
    /// Whoever read the output went away; there is nobody left to tell.
    Closed,
}

impl Failure {
    /// A request that cannot be carried out because of an operating system error.
    pub fn request(what: impl Display, error: &io::Error) -> Self {
        Self::Request(format!("{what}: {}", plain(error)))
    }

    /// A measurement that broke off because of an operating system error.
    pub fn broken(what: impl Display, error: impl Into<io::Error>) -> Self {
        Self::Broken(format!("{what}: {}", plain(&error.into())))
    }

    /// The failure of a write to a terminal, pipe or file called `what`.
    pub fn output(what: impl Display, error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::request(format_args!("cannot write to {what}"), error),
        }
    }

    /// Says so on standard error, in one line, and gives the exit status.
    pub fn report(&self) -> ExitCode {
        let (message, status) = match self {
            Self::Request(message) => (message, 2),
            Self::Broken(message) | Self::Unsupported(message) => (message, 1),
            Self::Guest { message, status } => (message, *status),
            // What a pipeline's last reader leaves unread is not an error of ours.
            Self::Closed => return ExitCode::SUCCESS,
        };
        eprintln!("terrane: {}", one_line(message));
        ExitCode::from(status)
    }
}

/// The text of an operating system error without its number.
pub fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.rfind(" (os error ") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}

/// `message` with every run of white space, line ends included, made one space.
pub fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_plain_and_on_one_line() {
        assert_eq!(plain(&io::Error::from_raw_os_error(2)), "No such file or directory");
        assert_eq!(plain(&io::Error::other("full")), "full");
        assert_eq!(one_line("a\n   b\tc \n"), "a b c");
    }
}
