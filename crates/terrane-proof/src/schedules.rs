//! Runs a model under shuttle: many schedules of its threads, chosen at random and by PCT (which finds a bug that takes
//! `d` switches with a probability that can be stated), each operation on an atomic being a point to switch at.
//! Everything is sequentially consistent: loom looks at the orderings.
//!
//! Each schedule follows from a fixed seed. `TERRANE_PROOF_SCHEDULES=10` multiplies their number by ten, with the same
//! ones first; `SHUTTLE_RANDOM_SEED` takes another seed.

use crate::graves;
use crate::quiet::{fails_with, is_quiet};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use terrane::sync::atomic::{Access, Op, install};

/// How much of a model is run.
#[derive(Clone, Copy)]
pub struct Effort {
    /// Schedules of each kind.
    pub schedules: usize,
    /// Steps at most in one: a model that takes more hangs.
    pub steps: usize,
}

/// As much as most models need.
pub const USUAL: Effort = Effort { schedules: 300, steps: 400_000 };

/// Switches that PCT makes beyond those of threads that wait.
const DEPTH: usize = 4;

/// Runs `model` under many schedules.
///
/// # Panics
/// When it fails in one.
pub fn check(effort: Effort, model: fn()) {
    let factor = std::env::var("TERRANE_PROOF_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let schedules = effort.schedules * factor;
    run(effort, RandomScheduler::new_from_seed(1, schedules), model);
    run(effort, PctScheduler::new_from_seed(2, DEPTH, schedules), model);
}

/// Checks that `model` fails when the library has the mutation `name`.
///
/// # Panics
/// When it does not.
pub fn check_caught(name: &'static str, effort: Effort, model: fn()) {
    let more = Effort { schedules: effort.schedules * 4, ..effort };
    let failed = fails_with(name, move || check(more, model));
    assert!(failed, "the model does not notice the mutation {name}");
}

fn run(effort: Effort, scheduler: impl shuttle::scheduler::Scheduler + 'static, model: fn()) {
    let mut config = Config::new();
    config.stack_size = 0x40000;
    config.max_steps = MaxSteps::FailAfter(effort.steps);
    config.failure_persistence = FailurePersistence::None;
    config.silence_warnings = true;
    config.ungraceful_shutdown_config.immediately_return_on_panic = true;
    let result = catch_unwind(AssertUnwindSafe(|| {
        Runner::new(scheduler, config).run(move || {
            graves::open();
            install(Some(step));
            model();
            install(None);
            graves::close();
        });
    }));
    if let Err(failure) = result {
        install(None);
        graves::close();
        let last = LAST.take();
        if !is_quiet() {
            for (thread, access) in last.iter().rev() {
                eprintln!("thread {thread}: {:?} {:#x} at {}", access.op, access.addr, access.site);
            }
        }
        resume_unwind(failure);
    }
}

thread_local! {
    /// Using it is the point at which shuttle switches.
    static STEP: &'static shuttle::sync::atomic::AtomicBool =
        Box::leak(Box::new(shuttle::sync::atomic::AtomicBool::new(false)));
}

const TRACED: usize = 60;

thread_local! {
    /// The last steps, to be shown when the model fails.
    static LAST: RefCell<VecDeque<(u64, Access)>> = const { RefCell::new(VecDeque::new()) };
}

/// Remembers a step, if its failure would be shown.
fn trace(access: &Access) {
    if !is_quiet() {
        LAST.with_borrow_mut(|last| {
            last.truncate(TRACED - 1);
            last.push_front((usize::from(shuttle::current::me()) as u64, *access));
        });
    }
}

fn step(access: &Access) {
    if std::thread::panicking() {
        // Its way out may need a lock whose holder runs no more. To switch now ends the execution.
        return STEP.with(|step| _ = step.load(std::sync::atomic::Ordering::SeqCst));
    }
    graves::look(access);
    trace(access);
    match access.op {
        Op::Spin => shuttle::thread::yield_now(),
        Op::Fence | Op::Note => {}
        Op::Load | Op::Store | Op::Rmw => {
            STEP.with(|step| step.load(std::sync::atomic::Ordering::SeqCst));
        }
    }
}
