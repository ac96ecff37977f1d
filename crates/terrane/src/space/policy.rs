//! Where memory comes from, by range and by space (`mbind`, `set_mempolicy`, `get_mempolicy`).

use super::change::Change;
use super::{AddressSpace, page_range};
use crate::addr::{AddrRange, Frame, PAGE_SHIFT, PAGE_SIZE};
use crate::error::Error;
use crate::frame::FrameFlags;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::BLOCK_SIZE;
use crate::mm::policy::NUMBER;
pub use crate::mm::policy::{Policy, PolicyMode};
use crate::page_table::{Level, Pte, Slot};
use crate::reclaim::migrate;
use crate::vma::VmFlags;
use core::ops::ControlFlow;

bitflags::bitflags! {
    /// What [`set_policy`](AddressSpace::set_policy) does about pages that are there (`MPOL_MF_…`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct PolicyFlags: u32 {
        /// Fail if some are not where the policy wants them (and, with `MOVE`, could not be moved).
        const STRICT = 1;
        /// Move those that are the space's alone.
        const MOVE = 2;
        /// Move those that are shared, too.
        const MOVE_ALL = 4;
    }
}

impl<H: Host> AddressSpace<H> {
    /// `mbind`: pages of `len` bytes at `addr`, private or of shared memory, are made by `policy` from now on; those of shared memory in all of its
    /// mappings. O(VMAs), with flags O(pages).
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned address, a range that wraps, a policy that names nodes that are not there or none where
    /// it needs some; [`Error::BadAddress`] for a hole; [`Error::NoMemory`], also for more than 31 different policies, or 32 ranges of
    /// shared memory: nothing has changed but perhaps the policies of shared memory. [`Error::Io`] with `STRICT` when a page is elsewhere; without `MOVE` nothing has changed then.
    pub fn set_policy(
        &self,
        cpu: &Cpu<H>,
        addr: u64,
        len: u64,
        policy: Policy,
        flags: PolicyFlags,
    ) -> Result<(), Error> {
        let range = page_range(addr, len)?;
        policy.check(cpu.machine().frames().nodes())?;
        if range.is_empty() {
            return Ok(());
        }
        let moves = flags.intersects(PolicyFlags::MOVE | PolicyFlags::MOVE_ALL);
        if flags.contains(PolicyFlags::STRICT) && !moves && self.count_misplaced(cpu, range, policy) > 0 {
            return Err(Error::Io);
        }
        let number = self.mm().policies.number(policy)?;
        self.set_policy_number(cpu, range, number, policy)?;
        if moves {
            let left = self.move_misplaced(cpu, range, policy, flags.contains(PolicyFlags::MOVE_ALL));
            if left > 0 && flags.contains(PolicyFlags::STRICT) {
                return Err(Error::Io);
            }
        }
        Ok(())
    }

    /// `set_mempolicy`, for the whole space: private pages that no range's policy is about.
    ///
    /// # Errors
    /// [`Error::Invalid`] as for [`set_policy`](Self::set_policy).
    pub fn set_own_policy(&self, cpu: &Cpu<H>, policy: Policy) -> Result<(), Error> {
        policy.check(cpu.machine().frames().nodes())?;
        self.mm().policies.set_own(policy);
        Ok(())
    }

    /// `get_mempolicy`: the policy of the space.
    pub fn own_policy(&self) -> Policy {
        self.mm().policies.own()
    }

    /// `get_mempolicy` with `MPOL_F_ADDR`: the policy of the mapping at `addr`.
    ///
    /// # Errors
    /// [`Error::BadAddress`] when nothing is mapped there.
    pub fn policy_at(&self, cpu: &Cpu<H>, addr: u64) -> Result<Policy, Error> {
        let page = AddrRange::new(addr, addr.saturating_add(1));
        let _steady = self.mm().share(cpu, page);
        let pin = cpu.pin();
        let (vma, seen) = self.mm().vma_at(&pin, addr).ok_or(Error::BadAddress)?;
        Ok(self.mm().policy_at(vma, &seen, addr))
    }

    /// `get_mempolicy` with `MPOL_F_NODE` and `MPOL_F_ADDR`, `move_pages` without nodes: the node of the page at `addr`; `None` when none is
    /// mapped.
    pub fn node_at(&self, cpu: &Cpu<H>, addr: u64) -> Option<usize> {
        let mut node = None;
        let start = addr & !(PAGE_SIZE - 1);
        self.for_each_page(cpu, AddrRange::new(start, start.saturating_add(PAGE_SIZE)), |_, frame, _| {
            node = Some(cpu.machine().frames().node_of(frame));
        });
        node
    }

    fn set_policy_number(
        &self,
        cpu: &Cpu<H>,
        range: AddrRange,
        number: VmFlags,
        policy: Policy,
    ) -> Result<(), Error> {
        let new = |flags: VmFlags| flags.difference(NUMBER).union(number);
        let mut change = Change::begin(self.mm(), cpu, range);
        if self.has_limits() {
            change.hold_limits();
        }
        let mut changes = false;
        let splits = {
            let pin = cpu.pin();
            let mut reached = range.start;
            change.for_each(&pin, range, |_, seen| {
                if seen.range.start > reached {
                    return ControlFlow::Break(());
                }
                reached = seen.range.end;
                changes |= new(seen.flags) != seen.flags;
                ControlFlow::Continue(())
            });
            if reached < range.end {
                // The one call for which a hole is a bad address.
                return Err(Error::BadAddress);
            }
            change.splits(&pin, range)
        };
        if changes {
            if self.config().map_limit.is_some_and(|limit| self.mm().index.len() + splits > limit) {
                return Err(Error::NoMemory);
            }
            change.plan_splits()?;
            change.plan(&cpu.pin(), splits)?;
            // As in Linux, nothing is set again by a mapping whose policy it is.
            let mut result = Ok(());
            change.for_each(&cpu.pin(), range, |vma, seen| {
                let object = vma.object().filter(|object| object.has_policies());
                if let Some(object) = object.filter(|_| new(seen.flags) != seen.flags) {
                    let part = seen.range.intersection(range);
                    let first = seen.index_of(part.start);
                    result = object.set_policy(first..first + part.pages(), policy);
                }
                if result.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            result?;
            change.alter(range, |_, flags| new(flags));
            change.cut_blocks();
        }
        drop(change);
        cpu.tidy();
        Ok(())
    }

    /// Calls `visit` with address and frame of each page of `range` that is mapped, but for what is not the machine's to
    /// move, and with what its policy counts by: the number of the page, or of the block of which it is one.
    fn for_each_page(&self, cpu: &Cpu<H>, range: AddrRange, mut visit: impl FnMut(u64, Frame, u64)) {
        let mm = self.mm();
        let movable = FrameFlags::ANON | FrameFlags::CACHE;
        mm.for_each_part(cpu, range, |ram, part| {
            let _ = mm.page_table.for_each_run(ram, part, |run| {
                if run.level == Level::PAGE {
                    let _ = Slot::for_each_used(run.slots, |index, slot| {
                        let frame = Pte::decode::<H::Format>(slot.load()).frame();
                        let frame = frame.filter(|&frame| ram.frames.contains(frame));
                        if let Some(frame) =
                            frame.filter(|&frame| ram.meta(frame).flags().intersects(movable))
                        {
                            let addr = run.address_of(index);
                            let meta = ram.meta(frame);
                            let shared = meta.flags().contains(FrameFlags::SHMEM);
                            visit(addr, frame, if shared { meta.index() } else { addr >> PAGE_SHIFT });
                        }
                        ControlFlow::Continue(())
                    });
                } else if let Some((first, _)) =
                    run.slots.first().and_then(|slot| Pte::block::<H::Format>(slot.load()))
                {
                    let pages = part.len() >> PAGE_SHIFT;
                    let offset = part.start.saturating_sub(run.addr) >> PAGE_SHIFT;
                    for n in 0..pages {
                        let addr = part.start + (n << PAGE_SHIFT);
                        visit(addr, Frame(first.0 + (offset + n) as u32), addr / BLOCK_SIZE);
                    }
                }
                ControlFlow::Continue(())
            });
        });
    }

    fn count_misplaced(&self, cpu: &Cpu<H>, range: AddrRange, policy: Policy) -> usize {
        let mut count = 0;
        self.for_each_page(cpu, range, |_, frame, turn| {
            count += usize::from(!policy.allows(cpu.machine().frames().node_of(frame), turn));
        });
        count
    }

    /// Divides the block that maps `addr`, if one does and there is a table for that: its pages move one by one, each to where it is wanted.
    fn divide_around(&self, cpu: &Cpu<H>, addr: u64) {
        let mm = self.mm();
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        let walk = mm.page_table.walk(&ram, addr);
        if walk.is_some_and(|walk| Pte::block::<H::Format>(walk.raw).is_some() && walk.level == Level::BLOCK)
        {
            let mut table = ram.allocate();
            let _ = mm.divide_block(&ram, addr, &mut table);
            if let Some(unused) = table {
                ram.free(unused);
            }
        }
    }

    /// Moves the pages of `range` that are elsewhere than `policy` wants them; returns how many are then.
    fn move_misplaced(&self, cpu: &Cpu<H>, range: AddrRange, policy: Policy, all: bool) -> usize {
        /// Frames that are collected before they are moved: on the stack.
        const BATCH: usize = 64;
        let machine = cpu.machine();
        let mut at = range.start;
        while at < range.end {
            let mut batch = [(0, Frame(0), 0); BATCH];
            let mut count = 0;
            let mut next = range.end;
            self.for_each_page(cpu, AddrRange::new(at, range.end), |addr, frame, turn| {
                if policy.allows(machine.frames().node_of(frame), turn) {
                    return;
                }
                match batch.get_mut(count) {
                    Some(place) => *place = (addr, frame, turn),
                    None => next = next.min(addr),
                }
                count += 1;
            });
            for &(addr, frame, turn) in &batch[..count.min(BATCH)] {
                let to = {
                    let pin = cpu.pin();
                    let ram = machine.ram(&pin);
                    // As in Linux: one space's policy does not move what others share, unless asked.
                    let meta = ram.meta(frame);
                    let shared = meta.flags().contains(FrameFlags::ANON) && meta.references() > 1;
                    if shared && !all { None } else { policy.allocate(&ram, turn) }
                };
                let Some(to) = to else { continue };
                self.divide_around(cpu, addr);
                if !migrate(cpu, frame, to) {
                    let pin = cpu.pin();
                    machine.ram(&pin).free(to);
                }
            }
            at = next;
        }
        cpu.tidy();
        self.count_misplaced(cpu, range, policy)
    }
}
