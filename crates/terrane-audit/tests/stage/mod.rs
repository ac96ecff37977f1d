//! Two processors that do the same in areas of their own, recorded.
#![allow(dead_code, unused_imports, reason = "each test program uses the part it needs")]

use std::sync::{Barrier, Mutex};
use std::thread;
use terrane::names::Names;
pub use terrane::space::{AddressSpace, MapRequest, SpaceConfig};
pub use terrane::sync::Shared;
pub use terrane::vma::{Advice, MapFlags, Prot};
pub use terrane::{FaultError, PAGE_SIZE};
pub use terrane_audit::{Exception, Recording, Sharing, check, record};
pub use terrane_hosted::{Cpu, HostedMachine, MachineConfig, Space};

pub const PAGE: u64 = PAGE_SIZE;
pub const RW: Prot = Prot::READ.union(Prot::WRITE);
/// What one leaf table maps.
pub const TABLE: u64 = 512 * PAGE;
/// The area of one processor in one round: tables whose upper entries fill a cache line.
pub const AREA: u64 = 8 * TABLE;
/// Rounds: the first two one processor after the other, the third with both at once.
pub const ROUNDS: u64 = 3;
/// Where the tests map.
pub const BASE: u64 = 0x10_0000_0000;
/// All areas of both processors.
pub const LENGTH: u64 = 2 * (ROUNDS + 1) * AREA;

/// A machine, a space, and two processors that run it.
pub struct Stage {
    pub machine: HostedMachine,
    pub space: Shared<Space>,
    pub cpus: [Cpu; 2],
    /// Names that a test knows besides.
    pub names: Names,
    /// Whether it matters who only reads.
    pub sharing: Sharing,
}

/// The area of processor `k` in `round`; the last one is for warming up.
pub fn area(k: usize, round: u64) -> u64 {
    BASE + (k as u64 * (ROUNDS + 1) + round) * AREA
}

impl Stage {
    pub fn new(space: SpaceConfig) -> Self {
        // 256 MiB: caches of a thousand frames.
        let config = MachineConfig { memory: 256 << 20, cpus: 3, ..MachineConfig::default() };
        Self::on(HostedMachine::new(config).unwrap(), space)
    }

    pub fn on(machine: HostedMachine, config: SpaceConfig) -> Self {
        let first = machine.cpu().unwrap();
        let space = Shared::try_new(Space::try_new(first.core(), config).unwrap()).unwrap();
        let mut cpus = [first, machine.cpu().unwrap()];
        for cpu in &mut cpus {
            cpu.switch_to(&space);
        }
        Self { machine, space, cpus, names: Names::new(), sharing: Sharing::Read }
    }

    pub fn all_names(&self) -> Names {
        all_names(&self.machine, &self.space, &self.names)
    }

    /// Fills the caches of both processors: frames are taken and given back, mapped and unmapped, in an area apart.
    pub fn warm_up(&mut self) {
        let Self { cpus, space, .. } = self;
        for _ in 0..2 {
            for (k, cpu) in cpus.iter_mut().enumerate() {
                let at = BASE + (1 << 36) + k as u64 * AREA;
                space.map(cpu.core(), MapRequest::anonymous(AREA, RW).fixed(at)).unwrap();
                for page in 0..1000 {
                    cpu.store_u64(at + page * PAGE, 1).unwrap();
                }
                space.unmap(cpu.core(), at, AREA).unwrap();
            }
        }
        self.cpus[0].core().quiesce();
    }

    /// Lets both processors `prepare` and then `act` (recorded) in their areas, one after the other and at once, and
    /// checks that they write no line in common but those of `exceptions`. `act` does `operations` operations. How often
    /// a line may be shared counts only where they act one after the other: a thread that is stopped while pinned makes
    /// the other one's retired objects pile up, and go the longer ways.
    pub fn audit(
        &mut self,
        operations: u64,
        exceptions: &[Exception],
        prepare: impl Fn(&mut Cpu, &Space, u64) + Sync,
        act: impl Fn(&mut Cpu, &Space, u64) + Sync,
    ) -> Result<(), String> {
        self.warm_up();
        let before = |cpu: &mut Cpu, space: &Space, k| {
            (0..=ROUNDS).for_each(|round| prepare(cpu, space, area(k, round)));
            // What is done once in the life of a space, a processor or a VMA.
            act(cpu, space, area(k, ROUNDS));
        };
        self.rounds(operations, exceptions, before, &act)
    }

    /// The same without preparation, in areas that may have been used.
    pub fn again(
        &mut self,
        operations: u64,
        exceptions: &[Exception],
        act: impl Fn(&mut Cpu, &Space, u64) + Sync,
    ) -> Result<(), String> {
        self.rounds(operations, exceptions, |_, _, _| (), &act)
    }

    /// Each processor has one thread for all rounds, because memory allocators know threads.
    fn rounds(
        &mut self,
        operations: u64,
        exceptions: &[Exception],
        before: impl Fn(&mut Cpu, &Space, usize) + Sync,
        act: &(impl Fn(&mut Cpu, &Space, u64) + Sync),
    ) -> Result<(), String> {
        let Self { machine, space, cpus, names, sharing } = self;
        let all_names = || all_names(machine, space, names);
        let names = Mutex::new(Vec::new());
        let meet = Barrier::new(2);
        let play = |k: usize, cpu: &mut Cpu| {
            // One after the other, or at once; between two barriers.
            let turn = |act: &mut dyn FnMut(), at_once: bool| {
                for n in 0..2 {
                    meet.wait();
                    if at_once && n == 0 || !at_once && n == k {
                        act();
                    }
                }
                meet.wait();
            };
            turn(&mut || before(cpu, space, k), false);
            let mut recordings = Vec::new();
            for round in 0..ROUNDS {
                if k == 0 {
                    names.lock().unwrap().push(all_names());
                }
                let mut go = || {
                    let who = format!("CPU {}", cpu.id().0);
                    recordings
                        .push(record(who, *sharing == Sharing::Read, || act(cpu, space, area(k, round))).0);
                };
                turn(&mut go, round + 1 == ROUNDS);
            }
            recordings
        };
        let [a, b] = cpus;
        let (of_a, of_b) = thread::scope(|scope| {
            let other = scope.spawn(|| play(1, b));
            (scope.spawn(|| play(0, a)).join().unwrap(), other.join().unwrap())
        });
        let mut names = names.into_inner().unwrap();
        names.push(all_names());
        let mut results = String::new();
        for (round, recordings) in of_a.into_iter().zip(of_b).enumerate() {
            let mut known = names[round].clone();
            known.extend(names[round + 1].clone());
            let operations = (round as u64 + 1 < ROUNDS).then_some(operations);
            if let Err(shared) = check(&<[_; 2]>::from(recordings), &known, *sharing, operations, exceptions)
            {
                results += &format!("in round {round}:\n{shared}");
            }
        }
        if results.is_empty() { Ok(()) } else { Err(results) }
    }
}

fn all_names(machine: &HostedMachine, space: &Space, known: &Names) -> Names {
    let mut names = Names::new();
    machine.describe(&mut names);
    names.extend(known.clone());
    let spare = machine.cpu().unwrap();
    names.under("space", |names| space.describe(&spare.core().pin(), names));
    names
}
