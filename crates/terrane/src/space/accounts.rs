//! What a space may have, and what it has: limits (`RLIMIT_AS`, `RLIMIT_DATA`) and the memory it has been promised.
//!
//! Every step that adds pages to a mapping or takes some away counts them by the mapping's attributes ([`Mm::account`]), in shards of the
//! CPU that acts; a change of attributes counts them over ([`Mm::recount`]). So at rest the counts are those of the mappings there are.
//! Calls that ask for more look first. In a space with limits one call at a time does both ([`Mm::limits`]); in the account of
//! the machine see [`commit`](crate::commit).

use super::{AddressSpace, SpaceConfig};
use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::error::Error;
use crate::host::Host;
use crate::mm::Mm;
use crate::sync::CpuId;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::vma::{Prot, VmFlags, Vma};

/// A limit of a space that may be changed while it is in use (`RLIMIT_…`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// Bytes mapped (`RLIMIT_AS`); [`SpaceConfig::address_limit`] at first.
    Address,
    /// Bytes of private memory that may be stored to (`RLIMIT_DATA`); [`SpaceConfig::data_limit`] at first.
    Data,
    /// Bytes to which a stack may grow (`RLIMIT_STACK`); [`SpaceConfig::stack_limit`] at first.
    Stack,
    /// Bytes locked in memory (`RLIMIT_MEMLOCK`); [`SpaceConfig::memlock_limit`] at first.
    Locked,
}

/// The limits of a space, in bytes; [`NONE`] for none. Read by every call that maps, written hardly ever.
pub(super) struct Limits([AtomicU64; 4]);

const NONE: u64 = u64::MAX;

impl Limits {
    pub(super) fn new(config: &SpaceConfig) -> Self {
        let SpaceConfig { address_limit, data_limit, stack_limit, memlock_limit, .. } = *config;
        Self(
            [address_limit, data_limit, stack_limit, memlock_limit]
                .map(|limit| AtomicU64::new(limit.unwrap_or(NONE))),
        )
    }

    #[inline]
    fn get(&self, limit: Limit) -> Option<u64> {
        Some(self.0[limit as usize].load(Ordering::Relaxed)).filter(|&limit| limit != NONE)
    }
}

/// True for what `RLIMIT_DATA` counts: private memory, or copies of a file's, that may be stored to.
#[inline]
fn is_data(flags: VmFlags) -> bool {
    flags & (VmFlags::WRITE | VmFlags::SHARED | VmFlags::GROWSDOWN) == VmFlags::WRITE
}

/// True when a new mapping with these attributes counts against the memory that programs may ask for.
pub(super) fn is_accountable(flags: VmFlags) -> bool {
    flags & (VmFlags::WRITE | VmFlags::SHARED | VmFlags::NORESERVE) == VmFlags::WRITE
}

/// The attributes of `vma` when `prot` is to hold. As in Linux, private memory counts from when it may be stored to, and on until it
/// is unmapped, but for memory without a page that may not be stored to any more.
#[inline]
pub(super) fn protected<H: Host>(vma: &Vma<H>, old: VmFlags, prot: Prot) -> VmFlags {
    let mut flags = old.with_prot(prot);
    if flags.contains(VmFlags::WRITE) {
        let counted = VmFlags::ACCOUNT | VmFlags::WRITE | VmFlags::SHARED | VmFlags::NORESERVE;
        if !old.intersects(counted) {
            flags |= VmFlags::ACCOUNT;
        }
    } else if vma.object().is_none() && vma.anon_vma().is_none() && old.prot() != prot {
        flags.remove(VmFlags::ACCOUNT);
    }
    flags
}

impl<H: Host> Mm<H> {
    /// Counts `pages` pages of a mapping with `flags` that have come, or gone. By the CPU that acts.
    #[inline]
    pub(crate) fn account(&self, cpu: CpuId, flags: VmFlags, pages: i64) {
        self.count_locked(cpu, flags, pages);
        self.count_kinds(cpu, flags, pages);
    }

    /// Counts `pages` pages over whose attributes change, but for being locked: who changes that counts it.
    #[inline]
    pub(crate) fn recount(&self, cpu: CpuId, old: VmFlags, new: VmFlags, pages: i64) {
        if is_data(old) != is_data(new) || (old ^ new).contains(VmFlags::ACCOUNT) {
            self.count_kinds(cpu, old, -pages);
            self.count_kinds(cpu, new, pages);
        }
    }

    #[inline]
    fn count_kinds(&self, cpu: CpuId, flags: VmFlags, pages: i64) {
        if is_data(flags) {
            self.data.add(cpu, pages);
        }
        if flags.contains(VmFlags::ACCOUNT) {
            self.machine.commit().add(cpu, pages);
        }
    }
}

impl<H: Host> AddressSpace<H> {
    /// A limit; `None` for none.
    #[inline]
    pub fn limit(&self, limit: Limit) -> Option<u64> {
        self.limits.get(limit)
    }

    /// Sets a limit for calls from now on; what is there already stays. Those under way may have looked before.
    pub fn set_limit(&self, limit: Limit, bytes: Option<u64>) {
        self.limits.0[limit as usize].store(bytes.unwrap_or(NONE), Ordering::Relaxed);
    }

    /// How it was configured, with the limits of now: for a child.
    pub(super) fn config_now(&self) -> SpaceConfig {
        SpaceConfig {
            address_limit: self.limit(Limit::Address),
            data_limit: self.limit(Limit::Data),
            stack_limit: self.limit(Limit::Stack),
            memlock_limit: self.limit(Limit::Locked),
            ..*self.config()
        }
    }

    /// Whether `more` pages with these attributes may come. The caller keeps others from changing how much there is.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(super) fn check_space(&self, flags: VmFlags, more: u64) -> Result<(), Error> {
        let over = |have: i64, limit: Option<u64>| {
            limit.is_some_and(|limit| (have.max(0) as u64).saturating_add(more) > limit >> PAGE_SHIFT)
        };
        let fails = over(self.mm().mapped.sum(), self.limit(Limit::Address))
            || is_data(flags) && over(self.mm().data.sum(), self.limit(Limit::Data));
        if fails { Err(Error::NoMemory) } else { Ok(()) }
    }

    /// Whether a mapping with these attributes may have `more` pages, as far as the machine's account goes.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    #[inline]
    pub(super) fn check_commit(&self, flags: VmFlags, more: u64) -> Result<(), Error> {
        let refused = flags.contains(VmFlags::ACCOUNT) && !self.mm().machine.commit().allows(more);
        if refused { Err(Error::NoMemory) } else { Ok(()) }
    }

    /// Bytes of private mappings that may be stored to: what `RLIMIT_DATA` limits, and `VmData` shows.
    pub fn data_bytes(&self) -> u64 {
        (self.mm().data.sum().max(0) as u64) << PAGE_SHIFT
    }
}

/// What a change of protection comes to, in the accounts.
#[derive(Default)]
pub(super) struct Growth {
    /// Pages that become data.
    data: u64,
    /// Pages that count from now on.
    commit: u64,
}

impl Growth {
    /// Adds the part `part` of a mapping.
    pub(super) fn add(&mut self, old: VmFlags, new: VmFlags, part: AddrRange) {
        if is_data(new) && !is_data(old) {
            self.data += part.pages();
        }
        if new.contains(VmFlags::ACCOUNT) && !old.contains(VmFlags::ACCOUNT) {
            self.commit += part.pages();
        }
    }

    /// # Errors
    /// [`Error::NoMemory`].
    pub(super) fn check<H: Host>(&self, space: &AddressSpace<H>) -> Result<(), Error> {
        if self.data > 0
            && let Some(limit) = space.limit(Limit::Data)
        {
            let have = space.mm().data.sum().max(0) as u64;
            if have.saturating_add(self.data) > limit >> PAGE_SHIFT {
                return Err(Error::NoMemory);
            }
        }
        space.check_commit(VmFlags::ACCOUNT, self.commit)
    }
}
