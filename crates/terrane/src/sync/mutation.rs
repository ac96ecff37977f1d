//! Switches that break the library on purpose, one at a time: a model that cannot fail proves nothing.
//!
//! `mutant!("name", right, wrong)` stands in the real code where a protocol depends on an ordering or a check. Tests
//! [`select`] a name and expect their model to fail. Only built for the models.

use core::cell::Cell;

extern crate std;

std::thread_local! {
    static SELECTED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Chooses the mutation that is in force on this thread (all threads of a model run on one), or none.
pub fn select(name: Option<&'static str>) {
    SELECTED.set(name);
}

/// Gives the other threads of a model time; a random schedule hardly ever does. Loom tries all schedules.
#[cfg(terrane_watch)]
pub fn linger() {
    static STEPS: crate::sync::atomic::AtomicU32 = crate::sync::atomic::AtomicU32::new(0);
    for _ in 0..60 {
        STEPS.load(core::sync::atomic::Ordering::Relaxed);
    }
}

/// True while `name` is chosen.
#[must_use]
pub fn is(name: &str) -> bool {
    SELECTED.try_with(Cell::get).ok().flatten() == Some(name)
}
