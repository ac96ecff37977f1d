//! The progress bar: on standard error, and only if that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// Shows how far the measurement of one experiment is. Gone when dropped.
///
/// It draws only when it is told to: a bar that moves by itself would have a thread beside those that are measured.
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar for `title`, number `number` of `of`; it draws nothing unless standard error is a terminal.
    pub fn new(title: &str, number: usize, of: usize) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{prefix} {bar:24} {pos}/{len} {wide_msg}") {
            bar.set_style(style.progress_chars("━╸ "));
        }
        bar.set_prefix(format!("[{number}/{of}] {title}"));
        Self(bar)
    }

    /// A bar that never draws.
    #[cfg(test)]
    pub fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    /// Says how many steps there are.
    pub fn steps(&self, steps: usize) {
        self.0.set_length(steps as u64);
    }

    /// Names the step that begins.
    pub fn begin(&self, step: String) {
        self.0.set_message(step);
    }

    /// How many steps are done.
    pub fn position(&self) -> usize {
        self.0.position() as usize
    }

    /// Ends a step.
    pub fn advance(&self, steps: usize) {
        self.0.inc(steps as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
