//! Failures that are expected are not printed.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use terrane::sync::mutation;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `model` with the mutation `name` in the library; true when it failed.
pub fn fails_with(name: &'static str, model: impl FnOnce()) -> bool {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
    QUIET.set(true);
    mutation::select(Some(name));
    let result = catch_unwind(AssertUnwindSafe(model));
    mutation::select(None);
    QUIET.set(false);
    result.is_err()
}
