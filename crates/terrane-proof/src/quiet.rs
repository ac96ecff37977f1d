//! Failures that are expected are not printed.

use std::cell::Cell;
use std::sync::Once;
use terrane::sync::mutation;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// True while a failure is expected.
#[cfg(terrane_watch)]
pub fn is_quiet() -> bool {
    QUIET.get()
}

/// Runs `model` with the mutation `name` in the library; true when it failed. On a thread of its own: one that has failed
/// in the midst of the library is fit for nothing else.
pub fn fails_with(name: &'static str, model: impl FnOnce() + Send + 'static) -> bool {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
    let thread = std::thread::spawn(move || {
        QUIET.set(true);
        mutation::select(Some(name));
        model();
    });
    thread.join().is_err()
}
