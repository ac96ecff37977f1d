//! Sets of processors: which of them run a space.

use crate::LANES;
use crossbeam_utils::CachePadded;
use terrane::sync::CpuId;
use terrane::sync::atomic::{AtomicU64, Ordering, fence};

const WORDS: usize = LANES / 64;

/// A set of processor numbers, by value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mask([u64; WORDS]);

impl Mask {
    pub const EMPTY: Mask = Mask([0; WORDS]);

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    #[inline]
    pub fn insert(&mut self, index: usize) {
        self.0[index / 64] |= 1 << (index % 64);
    }

    /// Takes `index` out; true when it was inside.
    #[inline]
    pub fn remove(&mut self, index: usize) -> bool {
        let (word, bit) = (&mut self.0[index / 64], 1 << (index % 64));
        let inside = *word & bit != 0;
        *word &= !bit;
        inside
    }

    /// The members at the time of the call, ascending.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = usize> + use<> {
        self.0.into_iter().enumerate().flat_map(|(index, mut word)| {
            core::iter::from_fn(move || {
                if word == 0 {
                    return None;
                }
                let bit = word.trailing_zeros() as usize;
                word &= word - 1;
                Some(index * 64 + bit)
            })
        })
    }
}

/// The processors that run a space, and so may hold translations of it: what the hosted machine keeps with each
/// space.
///
/// Written when a processor begins or ceases to run the space, read by each shoot-down.
#[derive(Default, Debug)]
pub struct CpuSet {
    words: CachePadded<[AtomicU64; WORDS]>,
}

impl CpuSet {
    /// True when `cpu` runs the space at this moment.
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.words
            .get(cpu.index() / 64)
            .is_some_and(|word| word.load(Ordering::Acquire) >> (cpu.0 % 64) & 1 != 0)
    }

    /// The set at this moment. Acquire: the accesses of a processor that has left happen before.
    #[inline]
    pub(crate) fn load(&self) -> Mask {
        Mask(core::array::from_fn(|word| self.words[word].load(Ordering::Acquire)))
    }

    /// Enters `cpu`, before its first walk of the space's page table.
    ///
    /// A shoot-down changes the table, fences, and reads the set; a processor enters the set, fences, and reads
    /// the table: either the shoot-down sees the processor or the processor sees the change.
    pub(crate) fn insert(&self, cpu: CpuId) {
        let (word, bit) = (&self.words[cpu.index() / 64], 1 << (cpu.0 % 64));
        // Only its owner changes this bit.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    /// Takes `cpu` out, after it has flushed its TLB.
    pub(crate) fn remove(&self, cpu: CpuId) {
        // Release: see `load`.
        self.words[cpu.index() / 64].fetch_and(!(1 << (cpu.0 % 64)), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_come_and_go() {
        let set = CpuSet::default();
        for cpu in [0, 63, 64, 255] {
            set.insert(CpuId(cpu));
        }
        set.remove(CpuId(63));
        assert!(set.contains(CpuId(64)) && !set.contains(CpuId(63)) && !set.contains(CpuId(9999)));
        let mut mask = set.load();
        assert_eq!(mask.iter().collect::<Vec<_>>(), [0, 64, 255]);
        assert!(mask.remove(0) && !mask.remove(0) && mask.remove(64) && mask.remove(255));
        assert!(mask.is_empty());
    }
}
