//! Runs a model under loom: all interleavings up to a number of preemptions, with all values that the memory model
//! lets a load return.

use crate::quiet::fails_with;
use terrane::sync::atomic::{Ordering, SeqCst, fence, set_seq_cst};

/// What `SeqCst` operations are in a model.
#[derive(Clone, Copy)]
pub enum Orders {
    /// Part of a Dekker pattern: the model runs with each of the two approximations.
    Total,
    /// Acquire and release: messages only.
    Messages,
}

/// `preemptions`, or what `TERRANE_PROOF_PREEMPTIONS` says, if that is less.
fn at_most(preemptions: usize) -> usize {
    let most = std::env::var("TERRANE_PROOF_PREEMPTIONS").ok().and_then(|n| n.parse().ok());
    preemptions.min(most.unwrap_or(usize::MAX))
}

/// Checks `model` with at most `preemptions` preemptions, or `TERRANE_PROOF_PREEMPTIONS`, if that is less.
///
/// # Panics
/// When the model fails.
pub fn check(orders: Orders, preemptions: usize, model: fn()) {
    explore(orders, at_most(preemptions), model);
}

fn explore(orders: Orders, preemptions: usize, model: fn()) {
    let fences: &[SeqCst] = match orders {
        Orders::Total => &[SeqCst::Before, SeqCst::Behind],
        Orders::Messages => &[SeqCst::Nowhere],
    };
    for &place in fences {
        set_seq_cst(place);
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.max_branches = 20_000;
        builder.check(move || {
            // Before there are threads: the fences' own word.
            fence(Ordering::SeqCst);
            model();
        });
    }
}

/// Checks that `model` fails when the library has the mutation `name`: with one preemption, else with two, and so on up to as
/// many as [`check`] is content with. A mutation that takes more than `TERRANE_PROOF_PREEMPTIONS` is not noticed then, which
/// proves nothing either way: the test says so, and passes.
///
/// # Panics
/// When it does not fail, with all that the model allows.
pub fn check_caught(name: &'static str, orders: Orders, preemptions: usize, model: fn()) {
    let most = at_most(preemptions);
    let caught = (1..=most).any(|few| fails_with(name, move || explore(orders, few, model)));
    if !caught && most < preemptions {
        eprintln!("{name}: not noticed with {most} preemptions; the model is meant for {preemptions}");
        return;
    }
    assert!(caught, "the model does not notice the mutation {name}");
}
