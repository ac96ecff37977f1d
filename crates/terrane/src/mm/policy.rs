//! Where the private memory of a space comes from, on a machine with [nodes](crate::frame::nodes).
//!
//! A space has a policy, and a range may have one of its own. Those of ranges are kept in a table of the space, and a VMA names its place in the
//! table in five bits of its attributes ([`NUMBER`]): so merging compares policies for free, a fault reads the number with the rest, and a space
//! has at most 31 different ones. Places are not given back while the space lives: they say what they say for good.
//!
//! A policy is for pages that are made from now on: first touches and copies. Those of shared memory are the object's, by ranges of its pages
//! (`object::policy`): who sets one through any mapping sets it for all, and where none has been set the policy of the space counts that touches a page
//! first. Its pages take turns by their numbers in the object. Pages that are read, from swap or a file, come from where the CPU is.
//!
//! # Huge pages
//!
//! A block of 2 MiB comes from one node. Memory that is interleaved is so by blocks then, by the block's number, as in Linux; what remains in
//! small pages is by pages. Where the policy wants a block and there is none, there are small pages in its place, which go by the same policy: no
//! block is worth being on the wrong node. But for memory that is advised to have huge pages ([`HUGEPAGE`](VmFlags::HUGEPAGE)) and merely
//! prefers a node, a block elsewhere will do, as in Linux. The collapser takes its blocks in the same way, wherever the pages were.

use super::{BLOCK_SIZE, Mm};
use crate::addr::{Frame, PAGE_SHIFT};
use crate::error::Error;
use crate::frame::{NodeMask, Ram};
use crate::host::Host;
use crate::object::Object;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::vma::{Snapshot, VmFlags, Vma};

/// The bits of a VMA's attributes that number its policy; 0: the space's.
pub const NUMBER: VmFlags = VmFlags::from_bits_retain(31 << SHIFT);
const SHIFT: u32 = 43;
const PLACES: usize = 32;

/// How a policy chooses among its nodes (`MPOL_…`, with Linux's numbers).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(u8)]
pub enum PolicyMode {
    /// As the space does; for the space: where the CPU is.
    #[default]
    Default = 0,
    /// The first of the nodes if it has memory, else any.
    Preferred = 1,
    /// These nodes only.
    Bind = 2,
    /// Page after page from the nodes in turn, by the page's number; any when that has none.
    Interleave = 3,
}

/// Where memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct Policy {
    /// How it is chosen.
    pub mode: PolicyMode,
    /// Among which nodes; none for [`PolicyMode::Default`].
    pub nodes: NodeMask,
}

impl Policy {
    /// Where the CPU is.
    pub const DEFAULT: Policy = Policy { mode: PolicyMode::Default, nodes: NodeMask(0) };

    pub(crate) fn word(self) -> u64 {
        (self.mode as u64) << 32 | u64::from(self.nodes.0)
    }

    #[cold]
    pub(crate) fn of_word(word: u64) -> Self {
        let mode = match word >> 32 {
            1 => PolicyMode::Preferred,
            2 => PolicyMode::Bind,
            3 => PolicyMode::Interleave,
            _ => return Self::DEFAULT,
        };
        Self { mode, nodes: NodeMask(word as u32) }
    }

    /// Checks it against the nodes that there are.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a mode that needs nodes without any, for nodes with the default, for nodes that do not exist.
    pub fn check(self, there: NodeMask) -> Result<(), Error> {
        let fits = (self.mode == PolicyMode::Default) == self.nodes.is_empty();
        if fits && self.nodes.0 & !there.0 == 0 { Ok(()) } else { Err(Error::Invalid) }
    }

    /// True when page number `page`, or all of the block of this number, may be on `node`.
    pub fn allows(self, node: usize, page: u64) -> bool {
        match self.mode {
            PolicyMode::Default => true,
            PolicyMode::Preferred => self.nodes.iter().next() == Some(node),
            PolicyMode::Bind => self.nodes.contains(node),
            PolicyMode::Interleave => self.nodes.nth_round(page) == Some(node),
        }
    }

    /// The first frame of a block for memory with these attributes, where its number is `block`; `None` when there is none where the
    /// policy wants it.
    fn allocate_block<H: Host>(self, ram: &Ram<'_, H>, flags: VmFlags, block: u64) -> Option<Frame> {
        let on = |node: Option<usize>| node.and_then(|node| ram.allocate_block_on(node));
        match self.mode {
            PolicyMode::Default => ram.allocate_block(),
            PolicyMode::Bind => self.nodes.iter().find_map(|node| on(Some(node))),
            PolicyMode::Interleave => on(self.nodes.nth_round(block)),
            PolicyMode::Preferred if flags.contains(VmFlags::HUGEPAGE) => {
                on(self.nodes.nth_round(0)).or_else(|| ram.allocate_block())
            }
            PolicyMode::Preferred => on(self.nodes.nth_round(0)),
        }
    }

    /// A frame for page number `page`; its contents are unspecified. `None` when there is none where the policy wants it.
    pub(crate) fn allocate<H: Host>(self, ram: &Ram<'_, H>, page: u64) -> Option<Frame> {
        match self.mode {
            PolicyMode::Default => ram.allocate(),
            PolicyMode::Bind => self.nodes.iter().find_map(|node| ram.allocate_on(node)),
            PolicyMode::Preferred | PolicyMode::Interleave => {
                let turn = if self.mode == PolicyMode::Interleave { page } else { 0 };
                self.nodes.nth_round(turn).and_then(|node| ram.allocate_on(node)).or_else(|| ram.allocate())
            }
        }
    }
}

/// The policies of a space: its own, and those of its ranges by number.
pub(crate) struct Policies([AtomicU64; PLACES]);

impl Policies {
    pub(super) fn new() -> Self {
        Self([const { AtomicU64::new(0) }; PLACES])
    }

    /// The policy that a VMA with these attributes has.
    #[inline]
    pub(crate) fn of(&self, flags: VmFlags) -> Policy {
        self.but_default(flags).unwrap_or(Policy::DEFAULT)
    }

    /// The same; `None` for the default, which nearly all have: then nothing is made of the word.
    #[inline]
    fn but_default(&self, flags: VmFlags) -> Option<Policy> {
        let word = self.0[number_of(flags)].load(Ordering::Relaxed);
        (word != 0).then(|| Policy::of_word(word))
    }

    /// The policy of the space.
    pub(crate) fn own(&self) -> Policy {
        self.of(VmFlags::empty())
    }

    /// Sets the policy of the space.
    pub(crate) fn set_own(&self, policy: Policy) {
        self.0[0].store(policy.word(), Ordering::Relaxed);
    }

    /// The attributes that name `policy`, which gets a place if it has none.
    ///
    /// # Errors
    /// [`Error::NoMemory`] when there are 31 others.
    pub(crate) fn number(&self, policy: Policy) -> Result<VmFlags, Error> {
        let word = policy.word();
        if word == 0 {
            return Ok(VmFlags::empty());
        }
        for (number, place) in self.0.iter().enumerate().skip(1) {
            let mut there = place.load(Ordering::Acquire);
            if there == 0 {
                let taken = place.compare_exchange(0, word, Ordering::AcqRel, Ordering::Acquire);
                there = taken.err().unwrap_or(word);
            }
            if there == word {
                return Ok(VmFlags::from_bits_retain((number as u64) << SHIFT));
            }
        }
        Err(Error::NoMemory)
    }

    /// Makes them those of `parent`, for a fork.
    pub(crate) fn copy_from(&self, parent: &Self) {
        for (mine, theirs) in self.0.iter().zip(&parent.0) {
            mine.store(theirs.load(Ordering::Acquire), Ordering::Release);
        }
    }
}

#[inline]
fn number_of(flags: VmFlags) -> usize {
    ((flags.bits() >> SHIFT) & 31) as usize
}

impl<H: Host> Mm<H> {
    /// A frame for the page at `addr` of a VMA with these attributes.
    #[inline]
    pub(crate) fn allocate_page(&self, ram: &Ram<'_, H>, flags: VmFlags, addr: u64) -> Option<Frame> {
        match self.policies.but_default(flags) {
            None => ram.allocate(),
            Some(policy) => policy.allocate(ram, addr >> PAGE_SHIFT),
        }
    }

    /// A frame of zeros for page `index` of `object`, which is shared memory.
    pub(crate) fn allocate_page_of(&self, ram: &Ram<'_, H>, object: &Object<H>, index: u64) -> Option<Frame> {
        match object.policy_of(index).or_else(|| self.policies.but_default(VmFlags::empty())) {
            None => ram.allocate_zeroed(),
            Some(policy) => policy.allocate(ram, index).inspect(|&frame| ram.zero(frame)),
        }
    }

    /// The policy by which the page at `addr` of this mapping is made.
    pub(crate) fn policy_at(&self, vma: &Vma<H>, seen: &Snapshot, addr: u64) -> Policy {
        match vma.object().filter(|object| object.has_policies()) {
            Some(object) => object.policy_of(seen.index_of(addr)).unwrap_or_else(|| self.policies.own()),
            None => self.policies.of(seen.flags),
        }
    }

    /// The first frame of a block for the 2 MiB at `addr` of a VMA with these attributes.
    pub(crate) fn allocate_block(&self, ram: &Ram<'_, H>, flags: VmFlags, addr: u64) -> Option<Frame> {
        self.policies.of(flags).allocate_block(ram, flags, addr / BLOCK_SIZE)
    }

    /// The only nodes from which the memory at `addr` of this mapping may come.
    pub(crate) fn bound_to(&self, vma: &Vma<H>, addr: u64) -> Option<NodeMask> {
        let policy = self.policy_at(vma, &vma.snapshot(), addr);
        (policy.mode == PolicyMode::Bind).then_some(policy.nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_get_numbers_and_keep_them() {
        let policies = Policies::new();
        let bind = |nodes| Policy { mode: PolicyMode::Bind, nodes: NodeMask(nodes) };
        assert_eq!(policies.number(Policy::DEFAULT), Ok(VmFlags::empty()));
        for n in 1..32 {
            let flags = policies.number(bind(n)).unwrap();
            assert!(NUMBER.contains(flags) && !flags.is_empty());
            assert_eq!(policies.number(bind(n)), Ok(flags));
            assert_eq!(policies.of(flags | VmFlags::READ), bind(n));
        }
        assert_eq!(policies.number(bind(99)), Err(Error::NoMemory));
        policies.set_own(bind(2));
        let copy = Policies::new();
        copy.copy_from(&policies);
        assert_eq!((copy.own(), copy.of(policies.number(bind(7)).unwrap())), (bind(2), bind(7)));
    }
}
