//! Terrane as the benchmarks use it: a machine in user space with one address space, and a processor for each thread.

use crate::baseline::linux;
use crate::failure::Failure;
use crate::measure::threads::{processors as processors_here, together};
use crate::measure::timing::{black_box, per_op};
use crate::measure::{Context, Sample};
use crate::report::{Counters, Role};
use std::fmt::Display;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use terrane::PAGE_SIZE;
use terrane::addr::Frame;
use terrane::object::Object;
use terrane::space::{Locking, MapRequest, SpaceConfig};
use terrane::sync::Shared;
use terrane::vma::{Access, Advice, Prot};
use terrane_hosted::{Cpu, HostFile, Hosted, HostedMachine, MachineConfig, Space};

/// What a variant is called and how its faults are locked: Terrane as it is meant to be used, and its baseline.
pub const LOCKINGS: [(Role, &str, Locking); 2] = [
    (Role::Terrane, "Terrane", Locking::Speculative),
    (Role::Baseline, "Terrane, classic lock", Locking::Classic),
];

/// Readable and writable.
pub const READ_WRITE: Prot = Prot::READ.union(Prot::WRITE);

/// Why a call of Terrane's broke a measurement off.
pub fn broken(what: &'static str) -> impl Fn(&dyn Display) -> Failure {
    move |error| Failure::Broken(format!("cannot {what}: {error}"))
}

/// A processor and the lock that hands it to its thread, in cache lines of their own: what one thread does with
/// its seat is not to show in another's figures.
#[repr(align(128))]
pub struct Seat(Mutex<Cpu>);

/// A machine, a space of it, and processors.
pub struct Rig {
    /// The machine.
    pub machine: HostedMachine,
    /// The space.
    pub space: Shared<Space>,
    /// A processor for each thread; the lock is only ever taken by that thread.
    cpus: Vec<Seat>,
}

impl Rig {
    /// A machine of `memory` bytes with `cpus` processors that run nothing, and an empty space.
    pub fn new(memory: u64, cpus: usize, config: SpaceConfig) -> Result<Self, Failure> {
        let machine = machine(memory, cpus)?;
        let cpus = processors(&machine, cpus)?;
        touch(&machine, &lock(&cpus[0]));
        let space = {
            let cpu = lock(&cpus[0]);
            let space = Space::try_new(cpu.core(), config).map_err(|e| broken("make a space")(&e))?;
            Shared::try_new(space).map_err(|e| broken("make a space")(&e))?
        };
        Ok(Self { machine, space, cpus })
    }

    /// The processor of thread `index`.
    pub fn cpu(&self, index: usize) -> MutexGuard<'_, Cpu> {
        lock(&self.cpus[index])
    }

    /// Maps, on the first processor.
    pub fn map(&self, request: MapRequest<Hosted>) -> Result<u64, Failure> {
        self.space.map(self.cpu(0).core(), request).map_err(|e| broken("map memory")(&e))
    }

    /// Gives advice, on processor `cpu`.
    pub fn advise(&self, cpu: &Cpu, start: u64, length: u64, advice: Advice) -> Result<(), Failure> {
        self.space.advise(cpu.core(), start, length, advice).map_err(|e| broken("advise")(&e))
    }

    /// Protects a page, on processor `cpu`.
    #[inline]
    pub fn protect(&self, cpu: &Cpu, start: u64, prot: Prot) -> Result<(), Failure> {
        self.space.protect(cpu.core(), start, PAGE_SIZE, prot).map_err(|e| broken("protect memory")(&e))
    }

    /// Unmaps, on processor `cpu`.
    pub fn unmap(&self, cpu: &Cpu, start: u64, length: u64) -> Result<(), Failure> {
        self.space.unmap(cpu.core(), start, length).map_err(|e| broken("unmap memory")(&e))
    }

    /// Maps a page that nobody touches and unmaps it, on processor `cpu`. Its protection is that of no other mapping
    /// here, so that it is a mapping of its own, as in [`linux`]'s case.
    #[inline]
    pub fn churn(&self, cpu: &Cpu) -> Result<(), Failure> {
        self.space
            .map(cpu.core(), MapRequest::anonymous(PAGE_SIZE, Prot::WRITE))
            .and_then(|address| self.space.unmap(cpu.core(), address, PAGE_SIZE))
            .map_err(|e| broken("map and unmap a page")(&e))
    }

    /// Repeats `call` on a pinned thread of its own, with processor 0; nanoseconds for each, and what was counted.
    pub fn repeat(
        &self,
        time: Duration,
        call: impl Fn(&Cpu) -> Result<(), Failure> + Sync,
    ) -> Result<Sample, Failure> {
        self.counted(|| {
            let times = together(
                1,
                1,
                |_| Ok(self.cpu(0)),
                |_, cpu| {
                    let mut result = Ok(());
                    let ns = per_op(time, |n| {
                        for _ in 0..n {
                            if let Err(failure) = call(&cpu) {
                                result = Err(failure);
                            }
                        }
                    });
                    result.map(|()| ns)
                },
            )?;
            Ok(vec![times[0]])
        })
    }

    /// A sample of what `measure` returns, with what the machine counted meanwhile (whatever was not zero).
    pub fn counted(&self, measure: impl FnOnce() -> Result<Vec<f64>, Failure>) -> Result<Sample, Failure> {
        let stats = self.machine.machine().stats();
        let before = stats.snapshot();
        let values = measure()?;
        let mut counters = Counters::default();
        for (name, value) in stats.snapshot().since(&before).iter().filter(|&(_, value)| value != 0) {
            *counters.entry(name) = value;
        }
        Ok(Sample { values, counters })
    }

    /// A cached file of `length` bytes with something in every page, read into the machine's page cache.
    pub fn cached_file(&self, length: u64) -> Result<Shared<Object<Hosted>>, Failure> {
        let file = linux::cached_file()?;
        let file = HostFile::new(file).map_err(|e| broken("open a file")(&e))?;
        let object = Object::file(self.machine.machine(), file).map_err(|e| broken("open a file")(&e))?;
        let cpu = self.cpu(0);
        for page in 0..length / PAGE_SIZE {
            object.read_in(cpu.core(), page, true).map_err(|e| broken("read a file")(&e))?;
        }
        Ok(object)
    }
}

/// A machine of `memory` bytes for `cpus` processors at a time.
pub fn machine(memory: u64, cpus: usize) -> Result<HostedMachine, Failure> {
    let config = MachineConfig { memory, cpus, ..MachineConfig::default() };
    HostedMachine::new(config).map_err(|e| broken("make a machine")(&e))
}

/// The memory that a machine touches before anything is timed, at most, in bytes: as much as any measurement here
/// takes and gives back.
const TOUCHED: u64 = 24 << 20;

/// Touches the first frames once, so that no measurement pays for the kernel's faults on the memory behind them.
fn touch(machine: &HostedMachine, cpu: &Cpu) {
    let pin = cpu.core().pin();
    let ram = machine.machine().ram(&pin);
    let most = (TOUCHED / PAGE_SIZE) as usize;
    let frames: Vec<Frame> = std::iter::from_fn(|| ram.allocate_zeroed()).take(most).collect();
    frames.into_iter().rev().for_each(|frame| ram.free(frame));
}

/// Does `work` on a pinned thread of its own, with processor 0.
pub fn alone(
    rig: &Rig,
    work: impl Fn(&mut Cpu) -> Result<Vec<f64>, Failure> + Sync,
) -> Result<Vec<f64>, Failure> {
    let values = together(1, 1, |_| Ok(rig.cpu(0)), |_, mut cpu| work(&mut cpu))?;
    Ok(values.into_iter().next().unwrap_or_default())
}

/// Resolves a fault on every page of `length` bytes at `start`, by calls.
pub fn fault_pages(space: &Space, cpu: &Cpu, start: u64, length: u64, access: Access) -> Result<(), Failure> {
    for page in 0..length / PAGE_SIZE {
        space
            .fault(cpu.core(), start + page * PAGE_SIZE, access)
            .map_err(|e| broken("resolve a fault")(&e))?;
    }
    Ok(())
}

/// Stores a byte into every page of `length` bytes at `start`.
pub fn store_pages(cpu: &mut Cpu, start: u64, length: u64) -> Result<(), Failure> {
    for page in 0..length / PAGE_SIZE {
        cpu.store_u8(start + page * PAGE_SIZE, 1).map_err(|e| broken("store")(&e))?;
    }
    Ok(())
}

/// Loads a byte of every page of `length` bytes at `start`.
pub fn load_pages(cpu: &mut Cpu, start: u64, length: u64) -> Result<(), Failure> {
    for page in 0..length / PAGE_SIZE {
        black_box(cpu.load_u8(start + page * PAGE_SIZE).map_err(|e| broken("load")(&e))?);
    }
    Ok(())
}

/// So many processors of `machine`, to be shared out among threads.
pub fn processors(machine: &HostedMachine, count: usize) -> Result<Vec<Seat>, Failure> {
    (0..count)
        .map(|_| machine.cpu().map(|cpu| Seat(Mutex::new(cpu))).map_err(|e| broken("have a processor")(&e)))
        .collect()
}

/// A processor that no other thread uses.
pub fn lock(seat: &Seat) -> MutexGuard<'_, Cpu> {
    seat.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `bytes` for each thread come to, with the default number of threads if none is asked for.
pub fn for_each_thread(threads: Option<usize>, bytes: u64) -> u64 {
    threads.unwrap_or_else(|| processors_here().len().max(2)) as u64 * bytes
}

/// The number of threads for measurements of threads together.
///
/// # Errors
/// [`Failure::Request`] for more than a machine has processors for, beside one that disturbs them.
pub fn threads(context: &Context<'_>) -> Result<usize, Failure> {
    let (threads, most) = (context.threads(), terrane_hosted::MAX_CPUS - 1);
    if threads > most {
        return Err(Failure::Request(format!(
            "a machine in user space takes {most} threads at most, not {threads}"
        )));
    }
    Ok(threads)
}
