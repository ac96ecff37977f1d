//! The memory policies of shared memory: they belong to the object, by ranges of its pages, as in Linux. Whoever maps it makes its pages by them, also
//! in mappings that come later; nobody takes them away but who sets others.
//!
//! # How
//!
//! A fixed table, made when the first policy comes. A fault reads it under a counter and writes nothing; an object without policies costs it a load of a pointer that
//! never changes. Who sets one holds a lock for some nanoseconds.

use super::Object;
use crate::error::Error;
use crate::host::Host;
use crate::mm::policy::Policy;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::seq::SeqCount;
use crate::sync::spin::SpinLock;
use core::array;
use core::ops::Range;

/// Ranges with policies that an object can have.
const PLACES: usize = 32;

/// First page, behind the last, policy.
type Entry = (u64, u64, u64);

/// The table.
pub(super) struct RangePolicies {
    writer: SpinLock<()>,
    seq: SeqCount,
    count: AtomicUsize,
    /// Ascending.
    entries: [[AtomicU64; 3]; PLACES],
}

impl RangePolicies {
    fn new() -> Self {
        Self {
            writer: SpinLock::new(()),
            seq: SeqCount::new(),
            count: AtomicUsize::new(0),
            entries: array::from_fn(|_| array::from_fn(|_| AtomicU64::new(0))),
        }
    }

    fn iter(&self) -> impl Iterator<Item = Entry> {
        let count = self.count.load(Ordering::Relaxed).min(PLACES);
        self.entries[..count].iter().map(|entry| {
            let [start, end, word] = entry.each_ref().map(|word| word.load(Ordering::Relaxed));
            (start, end, word)
        })
    }

    fn of(&self, page: u64) -> Option<Policy> {
        loop {
            if let Some(seq) = self.seq.read() {
                let found = self.iter().find(|&(start, end, _)| (start..end).contains(&page));
                if self.seq.unchanged(seq) {
                    return found.map(|(_, _, word)| Policy::of_word(word));
                }
            }
            crate::sync::atomic::spin_loop();
        }
    }

    /// Sets or, with [`Policy::DEFAULT`], removes.
    fn set(&self, pages: Range<u64>, policy: Policy) -> Result<(), Error> {
        let _one_at_a_time = self.writer.lock();
        // At most one more on each side, and the new one.
        let mut list = [(0, 0, 0); PLACES + 2];
        let mut count = 0_usize;
        let mut add = |entry: Entry| {
            let joins = |last: &Entry| last.1 == entry.0 && last.2 == entry.2;
            match count.checked_sub(1).map(|last| &mut list[last]).filter(|last| joins(last)) {
                Some(last) => last.1 = entry.1,
                None if entry.0 < entry.1 && entry.2 != 0 => {
                    list[count] = entry;
                    count += 1;
                }
                None => {}
            }
        };
        self.iter()
            .filter(|old| old.0 < pages.start)
            .for_each(|old| add((old.0, old.1.min(pages.start), old.2)));
        add((pages.start, pages.end, policy.word()));
        self.iter().filter(|old| old.1 > pages.end).for_each(|old| add((old.0.max(pages.end), old.1, old.2)));
        if count > PLACES {
            return Err(Error::NoMemory);
        }
        self.seq.write_begin();
        for (place, (start, end, word)) in self.entries.iter().zip(&list[..count]) {
            for (to, value) in place.iter().zip([start, end, word]) {
                to.store(*value, Ordering::Relaxed);
            }
        }
        self.count.store(count, Ordering::Relaxed);
        self.seq.write_end();
        Ok(())
    }
}

impl<H: Host> Object<H> {
    /// True for memory that is shared by those who map it: its pages are made by policies of its own.
    pub(crate) fn has_policies(&self) -> bool {
        !self.is_file() && !self.is_device()
    }

    /// The policy that has been set for page `index`; `None`: that of the space that touches it first.
    #[inline]
    pub(crate) fn policy_of(&self, index: u64) -> Option<Policy> {
        self.policies.get()?.of(index)
    }

    /// Sets the policy of `pages`. O(32).
    ///
    /// # Errors
    /// [`Error::NoMemory`], also for more than 32 ranges with different policies; nothing has changed then.
    pub(crate) fn set_policy(&self, pages: Range<u64>, policy: Policy) -> Result<(), Error> {
        let policies = loop {
            match self.policies.get() {
                Some(policies) => break policies,
                None if policy == Policy::DEFAULT => return Ok(()),
                None => match self.policies.set(RangePolicies::new()) {
                    Ok(()) | Err(Error::Exists) => {}
                    Err(error) => return Err(error),
                },
            }
        };
        policies.set(pages, policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::NodeMask;
    use crate::mm::policy::PolicyMode;
    use alloc::vec;
    use alloc::vec::Vec;

    fn bind(nodes: u32) -> Policy {
        Policy { mode: PolicyMode::Bind, nodes: NodeMask(nodes) }
    }

    #[test]
    fn ranges_are_what_was_set_last() {
        let policies = RangePolicies::new();
        let mut model = vec![Policy::DEFAULT; 200];
        let mut random = 1u64;
        let mut full = 0;
        for _ in 0..3000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (start, len, nodes) =
                ((random >> 40) % 190, (random >> 50) % 6 + 1, (random >> 60) as u32 % 4);
            let policy = if nodes == 0 { Policy::DEFAULT } else { bind(nodes) };
            match policies.set(start..start + len, policy) {
                Ok(()) => model[start as usize..(start + len) as usize].fill(policy),
                Err(error) => {
                    assert_eq!(error, Error::NoMemory);
                    full += 1;
                    // Room again.
                    policies.set(0..100, Policy::DEFAULT).unwrap();
                    model[..100].fill(Policy::DEFAULT);
                }
            }
            let list: Vec<_> = policies.iter().collect();
            assert!(list.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            assert!(list.windows(2).all(|pair| pair[0].1 < pair[1].0 || pair[0].2 != pair[1].2));
            for (page, &policy) in model.iter().enumerate() {
                assert_eq!(policies.of(page as u64).unwrap_or_default(), policy);
            }
        }
        assert!(full > 0);
    }
}
