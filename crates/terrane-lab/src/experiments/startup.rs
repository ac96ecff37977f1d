//! Requirement B6: the start of a program with many threads, as in the application launches of source B.
//!
//! One thread starts the next: it maps a stack for it, with a guard page, and goes on with its own start, while the new
//! thread does the same. Each touches its stack, sets up an arena (128 MiB reserved, trimmed to 64 MiB that are
//! aligned, a part made accessible, as a C library's allocator does) and touches it as it grows, runs code of the
//! program's libraries, which are mapped and relocated by the first thread, and every fourth thread loads a library of
//! its own. So layout changes of some threads meet the faults of others all the time.

use super::hosted::{
    Crew, LOCKINGS, READ_WRITE, broken, check_threads, map, name, role, running, speculative_share, unmap,
    unmap_all, write_pages,
};
use super::program::Image;
use crate::failure::Failure;
use crate::measure::plan::Runner;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report;
use parking_lot::Mutex;
use std::sync::Arc;
use std::thread::{Builder, Scope, scope};
use std::time::Instant;
use terrane::PAGE_SIZE;
use terrane::space::{Locking, MapRequest, SpaceConfig};
use terrane::sync::Shared;
use terrane::vma::{MapFlags, Prot};
use terrane_hosted::{Cpu, Space};

/// `terrane experiments startup`.
pub static EXPERIMENT: Experiment = Experiment {
    id: "startup",
    title: "the start of a program with many threads",
    source: "source B, speculative page faults v11, 2018 (application launch)",
    about: "Threads start one another, one after the other. Each maps a stack for the next, touches its own, sets up an \
            allocator's arena and touches it, runs code of shared libraries; every fourth loads and relocates one more. \
            Time until all have done so.",
    seconds: 4.0,
    runs: 21,
    memory: |threads| (192 << 20) + threads.unwrap_or(THREADS) as u64 * (2 << 20),
    run,
};

/// Threads of the program.
const THREADS: usize = 100;
/// A stack, without its guard page.
const STACK: u64 = 8 << 20;
/// An arena: what is kept of twice as much. Part of it is made accessible at a time.
const ARENA: u64 = 64 << 20;
const PART: u64 = 132 << 10;

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let threads = context.threads.unwrap_or(THREADS);
    check_threads(threads, 1)?;
    let mut plan = Plan::new();
    let [classic, speculative] = LOCKINGS.map(|locking| {
        let metric = "until all threads are up";
        let case =
            Case::new(role(locking), name(locking), threads, metric, "ms", move || set_up(threads, locking));
        plan.case(match locking {
            Locking::Classic => case,
            Locking::Speculative => case.and("faults handled speculatively", "%"),
        })
    });
    let mut results = plan.run(context)?;
    let name = "time, speculative / classic (published: 0.94, to 0.77)";
    results.ratio(name, 1.0, speculative, classic, Some(0.94));
    Ok(results.report(context))
}

/// The program, and one start of it.
struct Program {
    crew: Arc<Crew>,
    /// Loaded by the first thread.
    libraries: Vec<Image>,
    /// Loaded by later threads, in turn.
    plugins: Vec<Image>,
    locking: Locking,
}

struct Start<'a> {
    program: &'a Program,
    space: Shared<Space>,
    /// Where the libraries are.
    bases: Vec<u64>,
    failure: Mutex<Option<Failure>>,
}

fn set_up(threads: usize, locking: Locking) -> Result<Runner<'static>, Failure> {
    let crew = Crew::shared((96 << 20) + threads as u64 * (1 << 20), threads)?;
    let images = |first: u64, pages: &[u64]| -> Result<Vec<Image>, Failure> {
        (first..).zip(pages).map(|(number, &pages)| Image::new(&crew, number, pages)).collect()
    };
    let libraries = images(0, &[1024, 512, 512, 256, 256, 128, 128, 64])?;
    let plugins = images(100, &[256, 128, 128, 64])?;
    let program = Program { crew, libraries, plugins, locking };
    Ok(Box::new(move |time| {
        let mut sample = program.crew.counted(|| {
            let (start, mut count) = (Instant::now(), 0u32);
            loop {
                program.start(threads)?;
                count += 1;
                let elapsed = start.elapsed();
                if elapsed >= time {
                    return Ok(vec![elapsed.as_secs_f64() * 1e3 / f64::from(count)]);
                }
            }
        })?;
        if locking == Locking::Speculative {
            let share = speculative_share(&sample);
            sample.values.push(share);
        }
        Ok(sample)
    }))
}

impl Program {
    /// Starts the program with `threads` threads, until all are up, and ends it.
    fn start(&self, threads: usize) -> Result<(), Failure> {
        let space = self.crew.space(SpaceConfig::with_locking(self.locking))?;
        let (bases, stack) = {
            let cpu = &mut *self.crew.cpu(0);
            cpu.switch_to(&space);
            let bases = self.libraries.iter().map(|image| image.load(cpu)).collect::<Result<_, _>>()?;
            (bases, make_stack(cpu)?)
        };
        let start = Start { program: self, space, bases, failure: Mutex::new(None) };
        scope(|scope| start.thread(scope, 0, threads, stack));
        for index in 0..threads {
            self.crew.cpu(index).switch_off();
        }
        let Start { space, failure, .. } = start;
        failure.into_inner().map_or(Ok(()), Err)?;
        unmap_all(&self.crew.cpu(0), &space)
    }
}

impl Start<'_> {
    /// The life of thread `index`, whose stack is at `stack`. Whoever fails starts no other.
    fn thread<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        index: usize,
        threads: usize,
        stack: u64,
    ) {
        if let Err(failure) = self.come_up(scope, index, threads, stack) {
            self.failure.lock().get_or_insert(failure);
        }
    }

    fn come_up<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        index: usize,
        threads: usize,
        stack: u64,
    ) -> Result<(), Failure> {
        let cpu = &mut *self.program.crew.cpu(index);
        cpu.switch_to(&self.space);
        if index + 1 < threads {
            let stack = make_stack(cpu)?;
            Builder::new()
                .stack_size(256 << 10)
                .spawn_scoped(scope, move || self.thread(scope, index + 1, threads, stack))
                .map_err(|e| Failure::broken("cannot start a thread", e))?;
        }
        // From the top downwards.
        write_pages(cpu, stack + STACK - 6 * PAGE_SIZE, 6)?;
        let arena = make_arena(cpu)?;
        for part in 0..3 {
            let at = arena + part * PART;
            running(cpu)?.protect(cpu.core(), at, PART, READ_WRITE).map_err(broken("cannot protect"))?;
            write_pages(cpu, at, PART / PAGE_SIZE)?;
        }
        for (image, &base) in self.program.libraries.iter().zip(&self.bases) {
            image.run(cpu, base, 8)?;
        }
        if index % 4 == 3 {
            let plugin = &self.program.plugins[index / 4 % self.program.plugins.len()];
            let base = plugin.load(cpu)?;
            plugin.run(cpu, base, 8)?;
        }
        Ok(())
    }
}

/// Maps a stack; returns its lowest usable address.
fn make_stack(cpu: &Cpu) -> Result<u64, Failure> {
    let request = MapRequest::anonymous(STACK + PAGE_SIZE, Prot::empty());
    let guard = map(cpu, request.with(MapFlags::STACK | MapFlags::NORESERVE))?;
    let stack = guard + PAGE_SIZE;
    running(cpu)?.protect(cpu.core(), stack, STACK, READ_WRITE).map_err(broken("cannot protect"))?;
    Ok(stack)
}

/// Reserves an arena, aligned to its size.
fn make_arena(cpu: &Cpu) -> Result<u64, Failure> {
    let got = map(cpu, MapRequest::anonymous(2 * ARENA, Prot::empty()).with(MapFlags::NORESERVE))?;
    let arena = got.next_multiple_of(ARENA);
    if arena > got {
        unmap(cpu, got, arena - got)?;
    }
    let (end, rest) = (arena + ARENA, got + ARENA - arena);
    if rest > 0 {
        unmap(cpu, end, rest)?;
    }
    Ok(arena)
}
