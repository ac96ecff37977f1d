//! The cost of clearing a page: what no fault on fresh memory can do without, measured to be taken off.

use crate::measure::timing::{black_box, per_op};
use std::time::Duration;

/// A page.
#[repr(align(4096))]
#[derive(Clone)]
struct Page([u8; 4096]);

/// Nanoseconds to clear a page, going around in `pages` of them: one page is always hot in the nearest cache, two
/// megabytes of them come from the next.
pub fn clear(pages: usize) -> impl FnMut(Duration) -> f64 {
    let mut memory = vec![Page([1; 4096]); pages.max(1)];
    let mut next = 0;
    move |time| {
        per_op(time, |n| {
            for _ in 0..n {
                black_box(&mut memory[next]).0.fill(0);
                next = if next + 1 == memory.len() { 0 } else { next + 1 };
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_some_time() {
        assert!(clear(4)(Duration::from_millis(1)) > 1.0);
    }
}
