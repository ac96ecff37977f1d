//! Nodes: memory that is nearer to some processors than to others (NUMA).
//!
//! A machine says once which of its frames, and which of its CPUs, belong to which node. From then on a CPU's cache is filled from its
//! own node first, and [`Frames::allocate_on`] takes frames of given nodes. Such an allocation passes the caches by and takes the lock of the
//! pool: who says where memory is to be pays for it, 50 ns a page and a line that all who say so write.

use super::frames::Frames;
use crate::addr::Frame;
use crate::error::{Error, OutOfMemory};
use crate::host::FrameRange;
use crate::sync::{CpuId, Pin};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// Nodes that a machine has at most.
pub const MAX_NODES: usize = 32;

/// A set of nodes: bit `n` stands for node `n`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct NodeMask(pub u32);

impl NodeMask {
    /// The nodes, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MAX_NODES).filter(move |node| self.0 & 1 << node != 0)
    }

    /// True when `node` is one of them.
    pub fn contains(self, node: usize) -> bool {
        node < MAX_NODES && self.0 & 1 << node != 0
    }

    /// How many there are.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// True when there is none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number `n` of them, counted round and round; `None` when there is none.
    pub fn nth_round(self, n: u64) -> Option<usize> {
        if self.is_empty() { None } else { self.iter().nth((n % self.len() as u64) as usize) }
    }
}

/// One node: which frames are near to which processors.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// Its memory: frames of the machine, and of no other node.
    pub frames: FrameRange,
    /// Its processors. Those that are in no node are in the first.
    pub cpus: &'a [CpuId],
}

/// The nodes of a machine.
pub(super) struct Nodes {
    frames: Vec<FrameRange>,
    /// By CPU.
    of_cpu: Box<[u8]>,
}

impl Nodes {
    /// # Errors
    /// [`Error::Invalid`] for no node or too many, for frames that are not the machine's or in two nodes; [`Error::NoMemory`].
    pub(super) fn try_new(nodes: &[Node<'_>], all: FrameRange, cpus: usize) -> Result<Self, Error> {
        if !(1..=MAX_NODES).contains(&nodes.len()) {
            return Err(Error::Invalid);
        }
        let end = |range: FrameRange| u64::from(range.first.0) + range.count as u64;
        let inside = |range: FrameRange| range.first.0 >= all.first.0 && end(range) <= end(all);
        let apart =
            |a: FrameRange, b: FrameRange| end(a) <= u64::from(b.first.0) || end(b) <= u64::from(a.first.0);
        let mut frames = Vec::new();
        frames.try_reserve_exact(nodes.len()).map_err(|_| OutOfMemory)?;
        let mut of_cpu = Vec::new();
        of_cpu.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        of_cpu.resize(cpus, 0);
        for (number, node) in nodes.iter().enumerate() {
            if !inside(node.frames) || !frames.iter().all(|&other| apart(other, node.frames)) {
                return Err(Error::Invalid);
            }
            frames.push(node.frames);
            for cpu in node.cpus {
                if let Some(of) = of_cpu.get_mut(cpu.index()) {
                    *of = number as u8;
                }
            }
        }
        Ok(Self { frames, of_cpu: of_cpu.into_boxed_slice() })
    }

    pub(super) fn range(&self, node: usize) -> Option<FrameRange> {
        self.frames.get(node).copied()
    }

    pub(super) fn of_cpu(&self, cpu: CpuId) -> usize {
        self.of_cpu.get(cpu.index()).map_or(0, |&node| node.into())
    }
}

impl Frames {
    /// Says which nodes there are. Once.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no node or more than [`MAX_NODES`], or for frames that are not the machine's, or in two nodes;
    /// [`Error::Exists`] when it has been said; [`Error::NoMemory`].
    pub fn set_nodes(&self, nodes: &[Node<'_>]) -> Result<(), Error> {
        self.nodes.set(Nodes::try_new(nodes, self.range(), self.cpu_count())?)
    }

    /// The nodes there are; node 0 alone when nobody has said otherwise.
    pub fn nodes(&self) -> NodeMask {
        let count = self.nodes.get().map_or(1, |nodes| nodes.frames.len());
        NodeMask(u32::MAX >> (MAX_NODES - count))
    }

    /// The node of a frame. A frame that is in none counts as the first's.
    pub fn node_of(&self, frame: Frame) -> usize {
        let inside = |range: &FrameRange| (frame.0.wrapping_sub(range.first.0) as usize) < range.count;
        self.nodes.get().and_then(|nodes| nodes.frames.iter().position(inside)).unwrap_or(0)
    }

    /// The frames of a node; `None` when there is no such node.
    pub fn range_of(&self, node: usize) -> Option<FrameRange> {
        match self.nodes.get() {
            Some(nodes) => nodes.range(node),
            None => (node == 0).then(|| self.range()),
        }
    }

    /// The node of a CPU.
    pub fn node_of_cpu(&self, cpu: CpuId) -> usize {
        self.nodes.get().map_or(0, |nodes| nodes.of_cpu(cpu))
    }

    /// As [`allocate`](Self::allocate), with a frame of `node`: `None` when it has no free one, even after the caches have been drained.
    /// O(blocks of the node).
    pub fn allocate_on(&self, pin: &Pin<'_>, node: usize) -> Option<Frame> {
        let Some(nodes) = self.nodes.get() else {
            return if node == 0 { self.allocate(pin) } else { None };
        };
        let range = nodes.range(node)?;
        let mut one = [0u32];
        if self.take_within(range, &mut one) == 0 {
            if self.free_frames() == 0 {
                return None;
            }
            self.drain_all(pin);
            if self.take_within(range, &mut one) == 0 {
                return None;
            }
        }
        let frame = Frame(one[0]);
        self.meta(frame).begin_life();
        Some(frame)
    }
}
