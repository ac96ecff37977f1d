//! How much memory programs have been promised: overcommit.
//!
//! Private memory that may be stored to counts from the moment it is mapped, whether it is ever touched or not
//! ([`VmFlags::ACCOUNT`](crate::vma::VmFlags::ACCOUNT)): it could all be stored to. Shared memory counts once, by its object, whoever
//! maps it: as a whole or page by page ([`Object::anonymous_memory`](crate::object::Object::anonymous_memory)). The mode says what follows from that, as
//! `/proc/sys/vm/overcommit_memory` does on Linux.
//!
//! Each CPU counts in a shard of its own, so that mapping on one writes nothing that another's writes. Only [`Overcommit::Never`] adds the
//! shards up, at each call that asks for more. Two calls at the same moment may then pass the limit by what one of them asks for,
//! as on Linux, whose counter is summed in batches.

use crate::addr::PAGE_SHIFT;
use crate::error::OutOfMemory;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{CpuId, Tally};

/// What happens when programs ask for more memory than there is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Overcommit {
    /// A single request beyond all memory is refused (mode 0, Linux's default).
    Guess,
    /// Nothing is refused (mode 1). The default here: a limit is what a host asks for.
    #[default]
    Always,
    /// No more than so many bytes in all (mode 2). `NORESERVE` is ignored then.
    Never(u64),
}

/// The account of a machine.
pub struct Commit {
    /// Pages that count.
    pages: Tally,
    /// Pages at most for one request: [`NONE`] for any.
    request: AtomicU64,
    /// Pages at most for all; [`NONE`] but in mode 2.
    total: AtomicU64,
    /// Pages of the machine.
    memory: u64,
}

const NONE: u64 = u64::MAX;

impl Commit {
    /// Nothing promised, on a machine of so many pages; [`Overcommit::Always`].
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(memory: u64) -> Result<Self, OutOfMemory> {
        let pages = Tally::try_new()?;
        Ok(Self { pages, request: AtomicU64::new(NONE), total: AtomicU64::new(NONE), memory })
    }

    /// Sets the mode, for requests from now on.
    pub fn set_mode(&self, mode: Overcommit) {
        let (request, total) = match mode {
            Overcommit::Guess => (self.memory, NONE),
            Overcommit::Always => (NONE, NONE),
            Overcommit::Never(bytes) => (NONE, (bytes >> PAGE_SHIFT).min(NONE - 1)),
        };
        self.request.store(request, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// True in mode 2.
    #[inline]
    pub fn is_strict(&self) -> bool {
        self.total.load(Ordering::Relaxed) != NONE
    }

    /// Whether so many pages more may be promised.
    #[inline]
    pub fn allows(&self, pages: u64) -> bool {
        if pages > self.request.load(Ordering::Relaxed) {
            return false;
        }
        let total = self.total.load(Ordering::Relaxed);
        total == NONE || self.pages().saturating_add(pages) <= total
    }

    /// Counts pages that have been promised, or are no longer. By the CPU that acts.
    #[inline]
    pub(crate) fn add(&self, cpu: CpuId, pages: i64) {
        self.pages.add(cpu, pages);
    }

    /// Pages promised; exact while nothing changes.
    pub fn pages(&self) -> u64 {
        self.pages.sum().max(0) as u64
    }
}

describe!([] Commit { pages, request, total });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_refuse_what_they_say() {
        let commit = Commit::try_new(100).unwrap();
        assert!(commit.allows(1 << 40));
        commit.set_mode(Overcommit::Guess);
        assert!(commit.allows(100) && !commit.allows(101));
        commit.add(CpuId(0), 1000);
        assert!(commit.allows(100), "one request at a time");
        commit.set_mode(Overcommit::Always);
        assert!(commit.allows(1 << 40) && !commit.is_strict());
        commit.set_mode(Overcommit::Never(1010 << PAGE_SHIFT));
        assert!(commit.is_strict() && commit.allows(10) && !commit.allows(11));
        commit.add(CpuId(1), -500);
        assert!(commit.allows(510));
        commit.set_mode(Overcommit::Guess);
        assert!(commit.allows(100) && !commit.allows(101));
    }
}
