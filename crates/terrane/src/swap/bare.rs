//! Slots without pages, for the models of their orderings (`docs/proof.md`).

use super::slots::{Locked, Slots};
use crate::error::OutOfMemory;
use crate::sync::CpuId;

/// The slots of one device.
pub struct BareSlots(Slots);

impl BareSlots {
    /// `count` free slots, for CPUs with numbers below `cpus`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(count: usize, cpus: usize) -> Result<Self, OutOfMemory> {
        Slots::try_new(0, count, cpus).map(Self)
    }

    /// Takes a free slot, with one helper; `None` when there is none.
    pub fn allocate(&self, cpu: CpuId) -> Option<u64> {
        self.0.allocate(cpu)
    }

    /// One entry more.
    pub fn add_entry(&self, number: u64, cpu: CpuId) {
        self.change(number, cpu, |slot| assert!(slot.add_entry()));
    }

    /// Its entries.
    pub fn entries(&self, number: u64, cpu: CpuId) -> Option<u32> {
        self.0.count(number, cpu)
    }

    /// One helper less, the caller.
    pub fn remove_helper(&self, number: u64, cpu: CpuId) {
        self.change(number, cpu, |slot| slot.remove_helper());
    }

    fn change(&self, number: u64, cpu: CpuId, act: impl FnOnce(&Locked<'_>)) {
        act(&self.0.lock(number, cpu).expect("a slot that the caller counts on"));
    }
}
