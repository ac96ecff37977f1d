//! What the tests share.
#![allow(dead_code, unused_imports, reason = "each test program uses the part it needs")]

pub use terrane::space::{Locking, MapRequest, SpaceConfig};
pub use terrane::sync::Shared;
pub use terrane::vma::{Access, Advice, MapFlags, Prot};
pub use terrane::{Error, FaultError, PAGE_SIZE};
pub use terrane_hosted::{
    AtomicError, Cpu, Hosted, HostedError, HostedMachine, Interrupted, MachineConfig, Space,
};

pub const RW: Prot = Prot::READ.union(Prot::WRITE);

/// A machine with `mib` MiB and room for `cpus` processors.
pub fn machine(mib: u64, cpus: usize) -> HostedMachine {
    HostedMachine::new(MachineConfig { memory: mib << 20, cpus, ..MachineConfig::default() }).unwrap()
}

/// A machine like any other, one without `membarrier`, and one whose threads are interrupted all the time.
pub fn all_machines(mib: u64, cpus: usize) -> [HostedMachine; 3] {
    [(true, false), (false, false), (true, true)].map(|(membarrier, shaken)| {
        let config =
            MachineConfig { memory: mib << 20, cpus, membarrier, shaken, ..MachineConfig::default() };
        HostedMachine::new(config).unwrap()
    })
}

/// Machines of all kinds, with the locking to use on them.
pub fn variants(mib: u64, cpus: usize) -> impl Iterator<Item = (HostedMachine, Locking)> {
    let [plain, fenced, shaken] = all_machines(mib, cpus);
    [
        (plain.clone(), Locking::Speculative),
        (plain, Locking::Classic),
        (fenced, Locking::Speculative),
        (shaken, Locking::Speculative),
    ]
    .into_iter()
}

/// An empty space, not yet running anywhere.
pub fn space(cpu: &Cpu, locking: Locking) -> Shared<Space> {
    Shared::try_new(Space::try_new(cpu.core(), SpaceConfig::with_locking(locking)).unwrap()).unwrap()
}

/// A processor that runs a new space with speculative faults.
pub fn cpu_with_space(machine: &HostedMachine) -> (Cpu, Shared<Space>) {
    cpu_with(machine, Locking::Speculative)
}

/// A processor that runs a new space.
pub fn cpu_with(machine: &HostedMachine, locking: Locking) -> (Cpu, Shared<Space>) {
    let mut cpu = machine.cpu().unwrap();
    let space = space(&cpu, locking);
    cpu.switch_to(&space);
    (cpu, space)
}

/// Maps private memory of `pages` pages anywhere.
pub fn map(cpu: &Cpu, pages: u64, prot: Prot) -> u64 {
    cpu.space().unwrap().map(cpu.core(), MapRequest::anonymous(pages * PAGE_SIZE, prot)).unwrap()
}

/// A reproducible stream of numbers (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 16) % limit
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(8) {
            part.copy_from_slice(&self.next().to_ne_bytes()[..part.len()]);
        }
    }
}
