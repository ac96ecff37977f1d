//! Terrane's machine in user space, as the experiments use it.
//!
//! The variants that are compared run, in turn, on **one** machine and its processors, each in spaces of its own. With a
//! machine each, it mattered more where a machine's memory happened to lie than which variant ran on it: a comparison of a
//! variant with itself gave ratios from 0.6 to 1.8.

use crate::failure::Failure;
use crate::measure::Sample;
use crate::report::{Counters, Role};
use parking_lot::{Mutex, MutexGuard};
use std::cell::RefCell;
use std::fmt::Display;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use terrane::space::{Locking, MapRequest, SpaceConfig};
use terrane::stats::Counter;
use terrane::sync::Shared;
use terrane::vma::Prot;
use terrane::{FaultError, PAGE_SIZE};
use terrane_hosted::{Cpu, Hosted, HostedError, HostedMachine, MAX_CPUS, MachineConfig, Space};

/// The lockings that are compared, the baseline first.
pub const LOCKINGS: [Locking; 2] = [Locking::Classic, Locking::Speculative];

/// Readable and writable.
pub const READ_WRITE: Prot = Prot::READ.union(Prot::WRITE);

/// What rows call a locking.
pub fn name(locking: Locking) -> &'static str {
    match locking {
        Locking::Classic => "classic",
        Locking::Speculative => "speculative",
    }
}

/// What a locking stands for.
pub fn role(locking: Locking) -> Role {
    match locking {
        Locking::Classic => Role::Baseline,
        Locking::Speculative => Role::Terrane,
    }
}

/// Tells a failure of Terrane's while doing `what`.
pub fn broken<E: Display>(what: &str) -> impl Fn(E) -> Failure {
    move |error| Failure::Broken(format!("{what}: {error}"))
}

/// Fails if `threads`, and `others` beside them, are more processors than a hosted machine has.
///
/// # Errors
/// [`Failure::Request`].
pub fn check_threads(threads: usize, others: usize) -> Result<(), Failure> {
    let most = MAX_CPUS - others;
    if threads <= most {
        return Ok(());
    }
    Err(Failure::Request(format!(
        "{threads} threads are too many: a machine of Terrane's has room for {most} here"
    )))
}

/// A machine with a processor for each of its threads.
pub struct Crew {
    machine: HostedMachine,
    cpus: Vec<Mutex<Cpu>>,
}

impl Crew {
    /// A machine with room for two variants of `memory` bytes each, and `cpus` processors, for threads 0 to `cpus` - 1:
    /// the one that another variant has asked for in the same words, while it has it, or a new one. All of the memory has
    /// been used once: what it costs to get it from the system is no part of any experiment.
    ///
    /// Samples are taken one after the other, and begin with [`run`](Self::run).
    ///
    /// # Errors
    /// [`Failure::Request`] if the system does not have that.
    pub fn shared(memory: u64, cpus: usize) -> Result<Arc<Self>, Failure> {
        thread_local! {
            static LAST: RefCell<(u64, usize, Weak<Crew>)> = const { RefCell::new((0, 0, Weak::new())) };
        }
        LAST.with_borrow_mut(|last| {
            if (last.0, last.1) == (memory, cpus)
                && let Some(crew) = last.2.upgrade()
            {
                return Ok(crew);
            }
            let crew = Arc::new(Self::used(2 * memory, cpus)?);
            *last = (memory, cpus, Arc::downgrade(&crew));
            Ok(crew)
        })
    }

    /// A machine of `memory` bytes, all of which has been used once.
    ///
    /// # Errors
    /// [`Failure::Request`] if the system does not have that.
    pub fn used(memory: u64, cpus: usize) -> Result<Self, Failure> {
        let crew = Self::fresh(memory, cpus)?;
        crew.use_memory()?;
        Ok(crew)
    }

    /// Makes all processors run `space`.
    pub fn run(&self, space: &Shared<Space>) {
        (0..self.cpus.len()).for_each(|index| self.cpu(index).switch_to(space));
    }

    /// The same with memory that was never used, for an experiment that fills it anyway.
    ///
    /// # Errors
    /// [`Failure::Request`] if the system does not have that.
    pub fn fresh(memory: u64, cpus: usize) -> Result<Self, Failure> {
        let refuse = |error: HostedError| Failure::Request(format!("cannot build a machine: {error}"));
        // One more: whoever sets up is a processor too.
        let config = MachineConfig { memory, cpus: cpus + 1, ..MachineConfig::default() };
        let machine = HostedMachine::new(config).map_err(refuse)?;
        let cpus = (0..cpus).map(|_| Ok(Mutex::new(machine.cpu().map_err(refuse)?)));
        let cpus = cpus.collect::<Result<_, Failure>>()?;
        Ok(Self { machine, cpus })
    }

    /// Uses every frame but those that page tables need.
    fn use_memory(&self) -> Result<(), Failure> {
        let space = self.space(SpaceConfig::default())?;
        let cpu = &mut *self.cpu(0);
        cpu.switch_to(&space);
        let free = self.machine.machine().usage().frames_free as u64;
        let pages = free - free / 256 - 64;
        let all = map(cpu, MapRequest::anonymous(pages * PAGE_SIZE, READ_WRITE))?;
        write_pages(cpu, all, pages)?;
        cpu.switch_off();
        unmap_all(cpu, &space)
    }

    /// The machine.
    pub fn machine(&self) -> &HostedMachine {
        &self.machine
    }

    /// The processor of thread `index`. To be locked once for much work; nobody else asks for it meanwhile.
    pub fn cpu(&self, index: usize) -> MutexGuard<'_, Cpu> {
        self.cpus[index].lock()
    }

    /// A space.
    ///
    /// # Errors
    /// [`Failure::Broken`].
    pub fn space(&self, config: SpaceConfig) -> Result<Shared<Space>, Failure> {
        shared(Space::try_new(self.cpu(0).core(), config).map_err(broken("cannot make a space"))?)
    }

    /// Runs `sample` and adds what the machine counted meanwhile: the counts of source B, which are always shown, and
    /// of the others those that moved.
    ///
    /// # Errors
    /// Those of `sample`.
    pub fn counted(&self, sample: impl FnOnce() -> Result<Vec<f64>, Failure>) -> Result<Sample, Failure> {
        self.counted_with(|| Ok((sample()?, ()))).map(|(sample, ())| sample)
    }

    /// The same for work that returns something besides.
    ///
    /// # Errors
    /// Those of `sample`.
    pub fn counted_with<T>(
        &self,
        sample: impl FnOnce() -> Result<(Vec<f64>, T), Failure>,
    ) -> Result<(Sample, T), Failure> {
        let before = self.machine.machine().stats().snapshot();
        let (values, more) = sample()?;
        let counted = self.machine.machine().stats().snapshot().since(&before);
        let mut counters = Counters::default();
        for &counter in Counter::ALL {
            let count = counted.get(counter);
            if count > 0 || ALWAYS.contains(&counter) {
                *counters.entry(counter.name()) = count;
            }
        }
        Ok((Sample { values, counters }, more))
    }
}

/// The counters of source B.
const ALWAYS: [Counter; 7] = [
    Counter::PgFault,
    Counter::SpeculativePgFault,
    Counter::SpfVmaChanged,
    Counter::SpfVmaNoanon,
    Counter::SpfVmaNotsup,
    Counter::SpfVmaAccess,
    Counter::SpfPmdChanged,
];

/// The percentage of its faults that `sample` handled speculatively; 100 if there were none.
pub fn speculative_share(sample: &Sample) -> f64 {
    let count = |counter: Counter| sample.counters.get(counter.name()).copied().unwrap_or(0) as f64;
    match count(Counter::PgFault) {
        0.0 => 100.0,
        faults => 100.0 * count(Counter::SpeculativePgFault) / faults,
    }
}

/// `space`, to be run by processors.
///
/// # Errors
/// [`Failure::Broken`].
pub fn shared(space: Space) -> Result<Shared<Space>, Failure> {
    Shared::try_new(space).map_err(broken("cannot keep a space"))
}

/// Maps `request` in the space that `cpu` runs.
///
/// # Errors
/// [`Failure::Broken`].
pub fn map(cpu: &Cpu, request: MapRequest<Hosted>) -> Result<u64, Failure> {
    running(cpu)?.map(cpu.core(), request).map_err(broken("cannot map"))
}

/// Unmaps in the space that `cpu` runs.
///
/// # Errors
/// [`Failure::Broken`].
pub fn unmap(cpu: &Cpu, addr: u64, len: u64) -> Result<(), Failure> {
    running(cpu)?.unmap(cpu.core(), addr, len).map_err(broken("cannot unmap"))
}

/// Unmaps everything in `space`, on a processor that does not run it any more: what the end of a process does. (The end
/// of the space would do it too, but on the machine's one housekeeper.)
///
/// # Errors
/// [`Failure::Broken`].
pub fn unmap_all(cpu: &Cpu, space: &Space) -> Result<(), Failure> {
    let range = space.config().range;
    space.unmap(cpu.core(), range.start, range.len()).map_err(broken("cannot end a space"))
}

/// Repeats `access` while it ends in want of memory: frames that were given up come back when threads that the system
/// has taken off their processors run again, and until then others can use up the rest. A kernel waits there too.
///
/// # Errors
/// [`Failure::Broken`] for any other error, and when memory stays away for ten seconds.
#[inline]
pub fn patiently<T>(what: &str, mut access: impl FnMut() -> Result<T, FaultError>) -> Result<T, Failure> {
    match access() {
        Err(FaultError::OutOfMemory) => wait_for_memory(access),
        result => result,
    }
    .map_err(broken(what))
}

#[cold]
fn wait_for_memory<T>(mut access: impl FnMut() -> Result<T, FaultError>) -> Result<T, FaultError> {
    let start = Instant::now();
    loop {
        thread::yield_now();
        match access() {
            Err(FaultError::OutOfMemory) if start.elapsed() < PATIENCE => {}
            result => return result,
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(10);

/// The space that `cpu` runs.
///
/// # Errors
/// [`Failure::Broken`] if it runs none.
pub fn running(cpu: &Cpu) -> Result<&Shared<Space>, Failure> {
    cpu.space().ok_or_else(|| Failure::Broken("a processor runs no space".into()))
}

/// Stores to every page of `pages` from `addr` on.
///
/// # Errors
/// [`Failure::Broken`].
#[inline]
pub fn write_pages(cpu: &mut Cpu, addr: u64, pages: u64) -> Result<(), Failure> {
    (0..pages).try_for_each(|page| patiently("cannot store", || cpu.store_u8(addr + page * PAGE_SIZE, 1)))
}

/// Loads from every page of `pages` from `addr` on.
///
/// # Errors
/// [`Failure::Broken`].
#[inline]
pub fn read_pages(cpu: &mut Cpu, addr: u64, pages: u64) -> Result<(), Failure> {
    for page in 0..pages {
        std::hint::black_box(cpu.load_u8(addr + page * PAGE_SIZE).map_err(broken("cannot load"))?);
    }
    Ok(())
}
