//! The calls and the faults together, on the small machine for unit tests.

mod accounts;
mod advise;
mod basics;
mod bytes;
mod devices;
mod heap;
mod huge;
mod limits;
mod linux;
mod listing;
mod model;
mod neighbours;
mod placement;
mod policy;
mod races;
mod reclaim;
mod remap;
mod rmap;
mod seal;
mod sharers;
mod userfault;

use crate::addr::PAGE_SIZE;
use crate::error::FaultError;
use crate::host::Memory;
use crate::machine::{Cpu, Machine};
use crate::space::{AddressSpace, SpaceConfig};
use crate::sync::Shared;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::testing::TestHost;
use crate::vma::Access;

pub(super) type Space = AddressSpace<TestHost>;

/// A machine with one CPU, and its counts before anything was done.
pub(super) struct Bench {
    pub(super) machine: Shared<Machine<TestHost>>,
    pub(super) cpu: Cpu<TestHost>,
    free_frames: usize,
}

impl Bench {
    pub(super) fn new(frames: usize) -> Self {
        Self::on(TestHost::new(1, frames), 8)
    }

    pub(super) fn on(host: TestHost, cpus: usize) -> Self {
        let machine = Machine::try_new(host, cpus).unwrap();
        let cpu = Cpu::try_new(&machine).unwrap();
        let free_frames = machine.usage().frames_free;
        Self { machine, cpu, free_frames }
    }

    pub(super) fn space(&self, config: SpaceConfig) -> Space {
        Space::try_new(&self.cpu, config).unwrap()
    }

    /// Loads the word at `addr` as a processor would.
    pub(super) fn load(&self, space: &Space, addr: u64) -> Result<u64, FaultError> {
        load(&self.cpu, space, addr)
    }

    /// Stores `value` at `addr` as a processor would.
    pub(super) fn store(&self, space: &Space, addr: u64, value: u64) -> Result<(), FaultError> {
        store(&self.cpu, space, addr, value)
    }

    /// Everything is back: frames, tables, records.
    pub(super) fn assert_nothing_left(&self) {
        self.cpu.quiesce();
        let usage = self.machine.usage();
        assert_eq!(usage.frames_free, self.free_frames, "frames leaked");
        assert_eq!(usage.vmas, 0, "VMAs leaked");
    }
}

/// Loads the word at `addr` as a processor would.
pub(super) fn load(cpu: &Cpu<TestHost>, space: &Space, addr: u64) -> Result<u64, FaultError> {
    access(cpu, space, addr, Access::Read, |word| word.load(Ordering::SeqCst))
}

/// Stores `value` at `addr` as a processor would.
pub(super) fn store(cpu: &Cpu<TestHost>, space: &Space, addr: u64, value: u64) -> Result<(), FaultError> {
    access(cpu, space, addr, Access::Write, |word| word.store(value, Ordering::SeqCst))
}

/// Calls `act` with the word at `addr` as soon as that translates.
pub(super) fn access<R>(
    cpu: &Cpu<TestHost>,
    space: &Space,
    addr: u64,
    access: Access,
    act: impl Fn(&AtomicU64) -> R,
) -> Result<R, FaultError> {
    let host = cpu.machine().host();
    loop {
        {
            let _under_way = host.access(cpu.id());
            if let Some(found) = space.translate(cpu, addr, access) {
                let page = host.bytes(found.frame);
                // SAFETY: a word of a frame, aligned. On a host with tickets the frame is not used anew before the
                // access has ended; on others one thread does everything.
                return Ok(act(unsafe {
                    &*page.as_ptr().add((addr % PAGE_SIZE) as usize).cast::<AtomicU64>()
                }));
            }
        }
        space.fault(cpu, addr, access)?;
    }
}
