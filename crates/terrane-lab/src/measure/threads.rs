//! Threads that start together, stay on their processors, and disturb each other on purpose.

use super::timing::settles;
use crate::failure::Failure;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The processors that this process may use, in ascending order; never empty.
pub fn processors() -> &'static [usize] {
    static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
    ALLOWED.get_or_init(|| {
        let allowed: Vec<usize> = rustix::thread::sched_getaffinity(None)
            .map(|set| (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
            .unwrap_or_default();
        if allowed.is_empty() { vec![0] } else { allowed }
    })
}

/// By how many processors the threads have moved on, of how many.
static TURNED: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(1)];

/// While it is there, threads have moved on.
pub struct Turned(());

/// Moves the threads that are pinned from now on along by `by` processors: the first `of` take turns, the others stay.
///
/// There is one such turn in a process: who measures two things at a time would spoil both anyway.
pub fn turn(by: usize, of: usize) -> Turned {
    TURNED[1].store(of.max(1), Ordering::Relaxed);
    TURNED[0].store(by, Ordering::Relaxed);
    Turned(())
}

/// What [`turn`] was last called with.
pub fn turned() -> (usize, usize) {
    (TURNED[0].load(Ordering::Relaxed), TURNED[1].load(Ordering::Relaxed))
}

impl Drop for Turned {
    fn drop(&mut self) {
        TURNED[0].store(0, Ordering::Relaxed);
    }
}

/// The processor of thread `index`, which is less than there are processors.
pub fn processor_of(index: usize) -> usize {
    let ((by, of), allowed) = (turned(), processors());
    let of = of.min(allowed.len());
    allowed[if index < of { (index + by) % of } else { index }]
}

/// Keeps the calling thread, number `index` of `total`, on a processor of its own ([`turn`] says which).
///
/// Does nothing if there are more threads than processors: the scheduler then does better than a fixed seat.
/// A kernel that refuses is no reason to stop; the figures are merely less steady.
pub fn pin(index: usize, total: usize) {
    if total <= processors().len() {
        let mut set = rustix::thread::CpuSet::new();
        set.set(processor_of(index));
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
}

/// A barrier that spins before it yields, so that threads leave it within a microsecond of each other.
///
/// The standard barrier sleeps; a thread then wakes tens of microseconds after the first, which is long beside
/// the work between two barriers here.
pub struct Gate {
    members: usize,
    waiting: AtomicUsize,
    passed: AtomicUsize,
}

impl Gate {
    /// A gate that opens when `members` threads wait at it.
    pub fn new(members: usize) -> Self {
        Self { members, waiting: AtomicUsize::new(0), passed: AtomicUsize::new(0) }
    }

    /// Waits for all members. May be used again at once.
    pub fn wait(&self) {
        // Read before arriving: the last to arrive opens the gate only after every member has read it.
        let turn = self.passed.load(Ordering::Acquire);
        if self.waiting.fetch_add(1, Ordering::AcqRel) + 1 == self.members {
            self.waiting.store(0, Ordering::Relaxed);
            self.passed.store(turn.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut spins = 0u32;
        while self.passed.load(Ordering::Acquire) == turn {
            spins += 1;
            if spins < 2000 { std::hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

/// Runs `work` on `threads` threads, each pinned, that start together after every `prepare` is done.
/// `seats` is how many threads there are in all, those of other calls included.
///
/// # Errors
/// The first failure of `prepare` (then no `work` runs) or of `work`.
pub fn together<P, T: Send>(
    threads: usize,
    seats: usize,
    prepare: impl Fn(usize) -> Result<P, Failure> + Sync,
    work: impl Fn(usize, P) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    let (gate, failed) = (Gate::new(threads), AtomicBool::new(false));
    let body = |index: usize| -> Option<Result<T, Failure>> {
        pin(index, seats);
        let prepared = prepare(index);
        if prepared.is_err() {
            failed.store(true, Ordering::Relaxed);
        }
        gate.wait();
        match prepared {
            Ok(_) if failed.load(Ordering::Relaxed) => None,
            Ok(prepared) => Some(work(index, prepared)),
            Err(failure) => Some(Err(failure)),
        }
    };
    thread::scope(|scope| {
        let body = &body;
        let handles: Vec<_> = (0..threads).map(|index| scope.spawn(move || body(index))).collect();
        handles
            .into_iter()
            .filter_map(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Sets a flag when it goes.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What a disturbing thread got done.
pub struct Churned {
    /// Nanoseconds for each of its rounds.
    pub ns: f64,
}

/// Runs `work` on this thread while another, on seat `seat` of `seats`, repeats `churn` without pause.
///
/// # Errors
/// Those of `work` or of `churn`.
pub fn beside<T>(
    seat: usize,
    seats: usize,
    mut churn: impl FnMut() -> Result<(), Failure> + Send,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<(T, Churned), Failure> {
    let (started, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let churner = scope.spawn(|| {
            pin(seat, seats);
            let first = churn();
            started.store(true, Ordering::Release);
            first?;
            let (start, mut rounds) = (Instant::now(), 0u64);
            while !stop.load(Ordering::Relaxed) {
                churn()?;
                rounds += 1;
            }
            Ok(Churned { ns: start.elapsed().as_nanos() as f64 / rounds.max(1) as f64 })
        });
        while !started.load(Ordering::Acquire) {
            thread::yield_now();
        }
        // Set on every way out, a panic of `work` included: the scope waits for the churner.
        let guard = Stop(&stop);
        let result = work();
        drop(guard);
        let churned = churner.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((result?, churned))
    })
}

/// What threads did in rounds.
pub struct Rounds {
    /// For each thread, the sum of what its rounds returned.
    pub sums: Vec<Duration>,
    /// How many rounds there were.
    pub count: u64,
    /// From the start of the first round to the end of the last.
    pub wall: Duration,
}

impl Rounds {
    /// Nanoseconds that a thread spent on each of `things` in a round, over all threads.
    pub fn each(&self, things: usize) -> f64 {
        let sum: f64 = self.sums.iter().map(|sum| sum.as_nanos() as f64).sum();
        sum / self.sums.len() as f64 / (self.count as f64 * things as f64)
    }
}

/// Repeats `round` on every one of `threads` pinned threads, all starting each round together, until `time` is
/// over. Rounds that end within the first eighth of it do not count: the caches of processors fill meanwhile.
///
/// # Errors
/// The first failure of a round; all threads stop after that round.
pub fn in_rounds(
    threads: usize,
    seats: usize,
    time: Duration,
    round: impl Fn(usize) -> Result<Duration, Failure> + Sync,
) -> Result<Rounds, Failure> {
    let (gate, stop, settling) = (Gate::new(threads), AtomicBool::new(false), AtomicBool::new(false));
    let done = together(
        threads,
        seats,
        |_| Ok(()),
        |index, ()| {
            let (start, mut sum, mut count) = (Instant::now(), Duration::ZERO, 0u64);
            let mut counted_from = Duration::ZERO;
            let mut outcome = Ok(());
            loop {
                gate.wait();
                match round(index) {
                    Ok(took) => sum += took,
                    Err(failure) => outcome = Err(failure),
                }
                count += 1;
                if index == 0 {
                    settling.store(settles(start.elapsed(), time), Ordering::Relaxed);
                }
                if outcome.is_err() || (index == 0 && start.elapsed() >= time) {
                    stop.store(true, Ordering::Relaxed);
                }
                // All see the same answer: nobody stores between this gate and the next round.
                gate.wait();
                if stop.load(Ordering::Relaxed) {
                    return outcome.map(|()| (sum, count, start.elapsed() - counted_from));
                }
                if settling.load(Ordering::Relaxed) {
                    (sum, count, counted_from) = (Duration::ZERO, 0, start.elapsed());
                }
            }
        },
    )?;
    let (count, wall) = done.first().map_or((0, Duration::ZERO), |&(_, count, wall)| (count, wall));
    Ok(Rounds { sums: done.into_iter().map(|(sum, ..)| sum).collect(), count, wall })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn the_gate_lets_nobody_through_early() {
        let (gate, arrived) = (Gate::new(3), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 1..=200u64 {
                        arrived.fetch_add(1, Ordering::SeqCst);
                        gate.wait();
                        assert!(arrived.load(Ordering::SeqCst) >= 3 * round);
                        gate.wait();
                    }
                });
            }
        });
    }

    #[test]
    fn a_failed_preparation_stops_everybody() {
        let worked = AtomicU64::new(0);
        let result = together(
            3,
            3,
            |index| if index == 1 { Err(Failure::Broken("no".into())) } else { Ok(()) },
            |_, ()| {
                worked.fetch_add(1, Ordering::Relaxed);
                Ok(())
            },
        );
        assert!(matches!(result, Err(Failure::Broken(_))));
        assert_eq!(worked.into_inner(), 0);
    }

    #[test]
    fn rounds_are_the_same_for_all() {
        let counts = [AtomicU64::new(0), AtomicU64::new(0)];
        let rounds = in_rounds(2, 2, Duration::from_millis(2), |index| {
            counts[index].fetch_add(1, Ordering::Relaxed);
            Ok(Duration::from_nanos(3))
        })
        .unwrap();
        assert!(rounds.count > 0 && rounds.wall >= Duration::from_millis(1));
        let [first, second] = counts.map(AtomicU64::into_inner);
        assert!(first == second && first >= rounds.count);
        assert_eq!(rounds.sums, vec![Duration::from_nanos(3 * rounds.count); 2]);
        assert_eq!(rounds.each(3), 1.0);
    }

    #[test]
    fn a_churner_runs_beside_the_work_and_stops() {
        let ((), churned) = beside(0, 9, || Ok(()), || Ok(())).unwrap();
        assert!(churned.ns.is_finite());
        assert!(matches!(beside(0, 9, || Err(Failure::Closed), || Ok(())), Err(Failure::Closed)));
    }
}
