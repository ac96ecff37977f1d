//! Errors on request: `inject=file:N` (among others, separated by commas) on the kernel's command line makes every N-th read or write of a regular file fail.

use crate::errno::Errno;
use crate::options;
use core::sync::atomic::{AtomicU64, Ordering};

static EVERY: AtomicU64 = AtomicU64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Reads the command line.
pub fn set_up() {
    for word in options::value("inject").unwrap_or_default().split(',') {
        if let Some(every) = word.strip_prefix("file:").and_then(|number| number.parse().ok()) {
            EVERY.store(every, Ordering::Relaxed);
        }
    }
}

/// A read or a write of a file begins.
///
/// # Errors
/// `EIO`, when it is to fail.
pub fn file() -> Result<(), Errno> {
    let every = EVERY.load(Ordering::Relaxed);
    // Without it, nothing shared is written.
    if every != 0 && CALLS.fetch_add(1, Ordering::Relaxed) % every == every - 1 {
        return Err(Errno::EIO);
    }
    Ok(())
}
