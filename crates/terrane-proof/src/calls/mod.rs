//! The calls of address spaces and their faults under shuttle: the whole library, on a machine of a few frames.
//!
//! Each model ends by looking at everything: what every page holds, what is mapped, and that every frame and record is
//! back.

mod blocks;
mod changes;
mod faults;
mod files;
mod forks;
mod index;
mod moves;
mod ranges;
mod reclaim;
mod sharers;
mod steps;
mod storers;
mod swapoff;
mod users;

use crate::host::{Disk, Model, ModelFormat};
use crate::schedules::{Effort, USUAL};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;
use terrane::machine::{Cpu, Machine};
use terrane::page_table::Pte;
use terrane::space::{AddressSpace, MapRequest, SpaceConfig};
use terrane::sync::Shared;
use terrane::vma::Prot;
use terrane::{FaultError, Frame, PAGE_SIZE};

type Space = AddressSpace<Model>;
/// A copy of a space.
type Forked = ManuallyDrop<Space>;

/// For models of which a schedule takes long.
const FEW: Effort = Effort { schedules: 150, ..USUAL };

const RW: Prot = Prot::READ.union(Prot::WRITE);
const FRAMES: usize = 96;
/// Where memory is not short but pages of few frames are looked at.
const SMALL: usize = 32;
/// Where models map, in a table of its own: the first address of an aligned 2 MiB.
const BASE: u64 = 1 << 30;

/// Address of page `n` of those that models map.
const fn page(n: u64) -> u64 {
    BASE + n * PAGE_SIZE
}

/// A processor that a failed model leaves alone: giving it back would wait for threads that run no more.
struct Me(ManuallyDrop<Cpu<Model>>);

impl Deref for Me {
    type Target = Cpu<Model>;
    fn deref(&self) -> &Cpu<Model> {
        &self.0
    }
}

impl Drop for Me {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: once, at the end.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

/// One space on one machine, and the processor of the thread that made it.
struct World {
    machine: Shared<Machine<Model>>,
    free_frames: usize,
    space: Arc<ManuallyDrop<Space>>,
}

impl World {
    /// A machine whose translations are remembered and whose tickets pass late.
    fn new() -> (Self, Me) {
        Self::of(FRAMES)
    }

    fn of(frames: usize) -> (Self, Me) {
        Self::with(frames, SpaceConfig::default())
    }

    fn with(frames: usize, config: SpaceConfig) -> (Self, Me) {
        let machine = Machine::try_new(Model::new(frames, false), 4).unwrap();
        let free_frames = machine.usage().frames_free;
        let cpu = Cpu::try_new(&machine).unwrap();
        let space = Space::try_new(&cpu, config).unwrap();
        let world = Self { machine, free_frames, space: Arc::new(ManuallyDrop::new(space)) };
        (world, Me(ManuallyDrop::new(cpu)))
    }

    /// One that swaps to a device, too.
    fn swapping() -> (Self, Me, Disk) {
        let (world, cpu) = Self::of(SMALL);
        let disk = Disk::new(4);
        world.machine.swap_on(Box::new(disk.clone())).unwrap();
        (world, cpu, disk)
    }

    /// Runs `act` on a thread with a processor of its own.
    fn spawn<R: Send + 'static>(
        &self,
        act: impl FnOnce(&Me, &Space) -> R + Send + 'static,
    ) -> shuttle::thread::JoinHandle<R> {
        let (machine, space) = (self.machine.clone(), Arc::clone(&self.space));
        shuttle::thread::spawn(move || {
            let cpu = Me(ManuallyDrop::new(Cpu::try_new(&machine).unwrap()));
            let result = act(&cpu, &space);
            drop(cpu);
            drop(space);
            result
        })
    }

    /// Ends the space, and looks whether everything has come back.
    fn end(self, cpu: Me) {
        let space = Arc::into_inner(self.space).expect("the other threads have ended");
        let space = ManuallyDrop::into_inner(space);
        let list = space.mappings(&cpu).unwrap();
        assert!(list.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start), "mappings overlap");
        assert_eq!(space.map_count(), list.len());
        let rss = space.mm().rss();
        assert_eq!(rss.resident(), space.resident_pages(&cpu), "resident pages are not as many as counted");
        space.destroy(&cpu);
        cpu.quiesce();
        let usage = self.machine.usage();
        assert_eq!(usage.frames_free, self.free_frames, "frames leaked");
        assert_eq!(usage.vmas, 0, "VMAs leaked");
        assert_eq!(self.machine.swap().usage().1, 0, "swap slots leaked");
        drop(cpu);
        assert_eq!(self.machine.usage().frames_free, self.free_frames);
    }
}

/// Maps pages `from..to` readable and writable.
fn map(cpu: &Me, space: &Space, from: u64, to: u64) {
    let request = MapRequest::anonymous((to - from) * PAGE_SIZE, RW).fixed(page(from));
    assert_eq!(space.map(cpu, request), Ok(page(from)));
}

fn unmap(cpu: &Me, space: &Space, from: u64, to: u64) {
    assert_eq!(space.unmap(cpu, page(from), (to - from) * PAGE_SIZE), Ok(()));
}

/// What is mapped, as page numbers. Neighbours that differ in nothing are one, even if the space keeps them apart: as
/// in Linux, each may have an anon_vma of its own.
fn mapped(cpu: &Me, space: &Space) -> Vec<(u64, u64, Prot)> {
    let number = |addr: u64| (addr - BASE) / PAGE_SIZE;
    let mut list: Vec<(u64, u64, Prot)> = Vec::new();
    for one in space.mappings(cpu).unwrap() {
        let (from, to) = (number(one.range.start), number(one.range.end));
        match list.last_mut() {
            Some((_, end, prot)) if *end == from && *prot == one.prot => *end = to,
            _ => list.push((from, to, one.prot)),
        }
    }
    list
}

fn load(cpu: &Me, space: &Space, n: u64) -> Result<u64, FaultError> {
    Model::load(cpu, space, page(n))
}

fn store(cpu: &Me, space: &Space, n: u64, value: u64) -> Result<(), FaultError> {
    Model::store(cpu, space, page(n), value)
}

/// The frame that the entry of page `n` names, if it names one.
fn frame_of(cpu: &Me, space: &Space, n: u64) -> Option<Frame> {
    let pin = cpu.pin();
    let ram = space.mm().ram(&pin);
    space.mm().page_table.lookup(&ram, page(n))?.decode::<ModelFormat>().frame()
}

/// Whether page `n` is in memory and mapped, when who owns its entry has let go of it.
fn is_resident(cpu: &Me, space: &Space, n: u64) -> bool {
    let pin = cpu.pin();
    let ram = space.mm().ram(&pin);
    let slot = space.mm().page_table.lookup(&ram, page(n));
    slot.is_some_and(|slot| {
        slot.wait_not_busy(&ram);
        slot.decode::<ModelFormat>().frame().is_some()
    })
}

/// Lets reclaim look at page `n` so often that one that nobody uses goes.
fn reclaim(cpu: &Me, space: &Space, n: u64) {
    for _ in 0..2 {
        if let Some(frame) = frame_of(cpu, space, n) {
            terrane::proof::reclaim(cpu, frame);
        }
    }
}

/// Moves page `n` to another frame.
fn migrate(cpu: &Me, space: &Space, n: u64) -> bool {
    let Some(frame) = frame_of(cpu, space, n) else { return false };
    let to = {
        let pin = cpu.pin();
        space.mm().ram(&pin).allocate().unwrap()
    };
    let moved = terrane::reclaim::migrate(cpu, frame, to);
    if !moved {
        let pin = cpu.pin();
        space.mm().ram(&pin).free(to);
    }
    moved
}

/// A space whose page 0 holds 1, and a device to swap to.
fn one_page() -> (World, Me, Disk) {
    let (world, cpu, disk) = World::swapping();
    map(&cpu, &world.space, 0, 2);
    store(&cpu, &world.space, 0, 1).unwrap();
    (world, cpu, disk)
}

fn second_word(cpu: &Me, space: &Space) -> u64 {
    Model::load(cpu, space, page(0) + 8).unwrap()
}

/// A copy of the space that a failed model leaves alone.
fn fork(cpu: &Me, space: &Space) -> Forked {
    ManuallyDrop::new(space.fork(cpu).unwrap())
}

/// Ends a copy.
fn end_fork(cpu: &Me, child: Forked) {
    ManuallyDrop::into_inner(child).destroy(cpu);
}

/// Whether a page of the space is present. An entry that a late fault has taken, and will give back, is not.
fn is_present(cpu: &Me, space: &Space, n: u64) -> bool {
    let pin = cpu.pin();
    let ram = space.mm().ram(&pin);
    let slot = space.mm().page_table.lookup(&ram, page(n));
    slot.is_some_and(|slot| matches!(slot.decode::<ModelFormat>(), Pte::Page { .. } | Pte::NoAccess { .. }))
}
