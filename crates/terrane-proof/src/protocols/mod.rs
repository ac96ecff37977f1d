//! The small protocols under loom, with all that the memory model allows.
//!
//! Each model shares what it needs through [`Rig`], or makes it itself. Memory that is not atomic, the bytes of a page
//! or an object that may be freed, is loom's `UnsafeCell`: an access that is not ordered against a write fails the
//! model.

mod anons;
mod entries;
mod epochs;
mod leaving;
mod queues;
mod ranges;
mod slots;
mod words;

use crate::host::Model;
use loom::cell::UnsafeCell;
use std::sync::Arc;
use terrane::frame::{Frames, Ram};
use terrane::host::Memory;
use terrane::stats::Stats;
use terrane::sync::{CpuId, Epoch, Participant, Pin};
use terrane::{Frame, PAGE_SIZE};

const CPUS: usize = 3;
const FRAMES: usize = 24;

/// A machine below page tables, and what is in its pages.
struct Rig {
    host: Model,
    epoch: Epoch,
    frames: Frames,
    stats: Stats,
    bytes: Vec<UnsafeCell<u64>>,
}

// SAFETY: loom checks who uses the cells.
unsafe impl Sync for Rig {}
// SAFETY: as above.
unsafe impl Send for Rig {}

impl Rig {
    fn new() -> Arc<Self> {
        let host = Model::new(FRAMES, true);
        let rig = Self {
            epoch: Epoch::try_new(CPUS).unwrap(),
            frames: Frames::try_new(host.frames(), CPUS).unwrap(),
            stats: Stats::try_new(CPUS).unwrap(),
            bytes: (0..=FRAMES).map(|_| UnsafeCell::new(0)).collect(),
            host,
        };
        for _ in 0..CPUS {
            // Each processor does everything once, before there are threads: see `sync::atomic`.
            let me = rig.epoch.register().unwrap();
            let pin = me.pin();
            let frame = rig.frames.allocate(&pin).unwrap();
            rig.frames.free(&pin, frame);
            assert_eq!(rig.frames.settle(&pin, &|_, _| true), 0);
            let _ = rig.frames.deferred(me.id());
        }
        rig.epoch.now();
        Arc::new(rig)
    }

    /// The processor of one thread.
    fn cpu(&self, id: u32) -> Participant<'_> {
        // SAFETY: registered by `new`; each thread of a model takes an id of its own.
        unsafe { self.epoch.participant(CpuId(id)) }
    }

    fn ram<'a>(&'a self, pin: &'a Pin<'a>) -> Ram<'a, Model> {
        Ram { host: &self.host, frames: &self.frames, stats: &self.stats, pin }
    }

    /// Writes the bytes of a frame.
    fn write(&self, frame: Frame, value: u64) {
        // SAFETY: loom sees to it that nobody else does anything with them.
        self.bytes[frame.0 as usize].with_mut(|bytes| unsafe { *bytes = value });
    }

    /// Reads the bytes of a frame.
    fn read(&self, frame: Frame) -> u64 {
        // SAFETY: loom sees to it that nobody writes them.
        self.bytes[frame.0 as usize].with(|bytes| unsafe { *bytes })
    }
}

/// Address of page `n`.
const fn page(n: u64) -> u64 {
    n * PAGE_SIZE
}
