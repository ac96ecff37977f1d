//! Faults that a program resolves itself, in the manner of Linux's `userfaultfd`.
//!
//! | module | what |
//! |---|---|
//! | `queue` | the protocol of waiting and waking |
//! | `context` | a handler's context, and how a fault finds it by its number |
//! | `events` | what calls tell a handler: that pages are forgotten, that a range is unmapped |
//! | `fill` | what a handler puts into empty entries: bytes, zeros, pages of the object, poison |
//! | `protect` | the handler's write-protection |
//! | `moves` | moving pages from elsewhere in the space |
//!
//! The calls are [`UserFaults`](crate::space::UserFaults)'s.
//!
//! # What a fault does
//!
//! A VMA says in its flags, which a fault reads anyway, in which modes it is registered and the number of the context. A fault
//! that meets an empty entry there (or an entry that the handler has protected, or a page of shared memory that is in memory but not mapped)
//! ends its attempt with `Stop::User`, and so holds nothing: no pin, no entry, no range. It then
//!
//! 1. finds the context, and puts itself on the context's queue: an event for whoever reads;
//! 2. looks again whether there is still something to wait for (`must_wait`);
//! 3. waits until woken, or takes itself off the queue;
//! 4. starts over. Whatever it meets then is decided anew: if the page is missing still, there is a new event.
//!
//! # Why no wake-up is lost
//!
//! Dekker's pattern, made by the lock of the queue. The fault queues itself (under the lock), then looks at the entry and the VMA. Who
//! resolves it changes the entry or the VMA, then looks through the queue (under the lock). If the resolver held the lock
//! first, its change happened before the fault's look, which sees it: the fault does not wait. If the fault held it first, the
//! resolver finds and wakes it. The same holds for taking the registration away, and for the end of a context: both change the VMAs first
//! and wake after.
//!
//! # Who may break it
//!
//! Whoever resolves faults and wakes before the entries are published, or takes a registration away and does not wake. A handler that never
//! answers: its faults wait for as long as the context lives, as in Linux.
//!
//! # What it costs others
//!
//! A fault elsewhere tests one bit of the flags that it has read for its access anyway, when it meets an empty entry; a store to a page
//! that is mapped read-only tests one bit of the entry. Nothing is written for either.
//!
//! Source: `fs/userfaultfd.c` for what is delivered and when; the protocol of entries is ours.

pub(crate) mod context;
pub(crate) mod events;
pub(crate) mod fill;
pub(crate) mod moves;
pub(crate) mod protect;
pub mod queue;

pub use context::Contexts;
pub use queue::{FaultKind, UserEvent, UserFault};

use super::{Attempt, Stop};
use crate::error::FaultError;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::object::Page;
use crate::page_table::{EMPTY, Level, PAYLOAD_USER_WP, Pte, PteFlags, Raw, Walk};
use crate::vma::{Access, VmFlags};

/// What a fault wants from a handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Want {
    kind: FaultKind,
    access: Access,
    /// The number of the context.
    number: u16,
}

impl Want {
    /// Ends the attempt for it.
    #[cold]
    pub(super) fn stop<H: Host>(attempt: &Attempt<'_, H>, kind: FaultKind, access: Access) -> Stop<H> {
        Stop::User(Want { kind, access, number: attempt.seen.flags.user_context() })
    }
}

/// True when `raw`, of an empty entry or one that is swapped out, remembers a write-protection that counts.
#[cold]
pub(super) fn is_protected<H: Host>(attempt: &Attempt<'_, H>, raw: Raw) -> bool {
    let marked = match Pte::decode::<H::Format>(raw) {
        Pte::UserWp => true,
        Pte::Swap(payload) => payload & PAYLOAD_USER_WP != 0,
        _ => false,
    };
    marked && attempt.seen.flags.contains(VmFlags::UFFD_WP)
}

/// Waits for the handler to resolve the fault at `addr`; may return early. Not while pinned, holding nothing.
///
/// # Errors
/// [`FaultError::Unresolved`] when the handler wants no events.
#[cold]
pub(super) fn wait<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, addr: u64, want: Want) -> Result<(), FaultError> {
    let host = mm.machine.host();
    let Some(context) = mm.users.find(want.number) else {
        // It has just ended, and with it the registration that the attempt saw.
        host.relax(cpu.id(), 0);
        return Ok(());
    };
    if want.kind == FaultKind::WriteProtected && context.features.contains(context::UserFeatures::WP_ASYNC) {
        // As if the handler had answered at once.
        protect::lift(mm, cpu, addr, want.number);
        return Ok(());
    }
    if context.features.contains(context::UserFeatures::SIGBUS) {
        return if must_wait(mm, cpu, addr, want) { Err(FaultError::Unresolved) } else { Ok(()) };
    }
    let write = want.access == Access::Write;
    let fault = UserFault { addr, kind: want.kind, write, cpu: cpu.id() };
    if context.queue.enter(host, cpu.id(), UserEvent::Fault(fault)) {
        if mutant!("user_fault_waits_blindly", must_wait(mm, cpu, addr, want), true) {
            context.queue.wait(host, cpu.id());
        } else {
            context.queue.leave(cpu.id());
        }
    }
    Ok(())
}

/// True when the fault is as it was: what [`wait`] looks at once it is on the queue. In doubt false, for that only means
/// another attempt.
fn must_wait<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, addr: u64, want: Want) -> bool {
    let pin = cpu.pin();
    let ram = mm.ram(&pin);
    let Some(vma) = mm.index.find(&pin, addr) else { return false };
    let Some(seen) = vma.read().filter(|seen| seen.range.contains(addr)) else { return false };
    let mode = match want.kind {
        FaultKind::Missing => VmFlags::UFFD_MISSING,
        FaultKind::WriteProtected => VmFlags::UFFD_WP,
        FaultKind::Minor => VmFlags::UFFD_MINOR,
    };
    if !seen.flags.contains(mode)
        || seen.flags.user_context() != want.number
        || !seen.flags.allows(want.access)
    {
        return false;
    }
    let Some(Walk { raw, level, .. }) = mm.page_table.walk(&ram, addr) else { return false };
    let pte = if level == Level::PAGE {
        Pte::decode::<H::Format>(raw)
    } else {
        Pte::decode_block::<H::Format>(raw)
    };
    let page = || vma.object().map(|object| object.page(&pin, seen.index_of(addr)));
    match (want.kind, pte) {
        (FaultKind::Missing, Pte::Empty | Pte::UserWp) => matches!(page(), None | Some(Page::Absent)),
        (FaultKind::Minor, Pte::Empty | Pte::UserWp) => matches!(page(), Some(Page::Ready(_))),
        (FaultKind::WriteProtected, Pte::UserWp) => true,
        (FaultKind::WriteProtected, Pte::Page { flags, .. }) => flags.contains(PteFlags::USER_WP),
        _ => false,
    }
}

/// True when nothing at all is remembered for an entry.
fn is_clean(raw: Raw) -> bool {
    raw == EMPTY
}
