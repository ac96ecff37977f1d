//! What calls tell a handler: that pages are forgotten, that a range has been unmapped or moved, that the space has been forked.
//!
//! A handler that fetches pages from elsewhere must know when the program gives them back, or it would put old bytes where zeros
//! belong. As in Linux, such a call *announces* itself, which waits until copies under way have ended and has further ones
//! refused (`EAGAIN`); puts its event on the queue; and waits until it has been read. From then on the handler knows.
//!
//! Forgetting tells before it forgets: what a copy put in place until then is forgotten with the rest. Unmapping is told when it is done.
//!
//! So is moving, and forking: the registration goes with what is moved, and a child's ranges get a context of their own,
//! which waits in the parent's until somebody asks for it.
//!
//! Nothing is held while a call waits: neither a range nor a pin. Spaces whose handlers want none of this pay one load.

use super::UserEvent;
use super::context::{Context, UserFeatures};
use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::sync::Shared;
use alloc::vec::Vec;

impl<H: Host> Context<H> {
    /// Says that a call will tell something, or [retract](super::queue::Queue::retract) that: waits for copies under way, and further ones are
    /// refused. Nothing held, not pinned.
    pub(crate) fn announce(&self) {
        let _filling = self.filling.write();
        self.queue.announce();
    }

    /// Tells what was announced, and waits until it has been read. False when there is no handler any more.
    pub(crate) fn tell(&self, cpu: &Cpu<H>, event: UserEvent) -> bool {
        let host = cpu.machine().host();
        let told = self.queue.enter(host, cpu.id(), event);
        if told {
            self.queue.wait(host, cpu.id());
        } else {
            self.queue.retract();
        }
        told
    }
}

/// The next mapping in `range` from `at` on whose context asks for `feature`: the context, and the part in the range.
fn next_told<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    mut at: u64,
    feature: UserFeatures,
) -> Option<(Shared<Context<H>>, AddrRange)> {
    while at < range.end {
        let seen = {
            let _steady = mm.share(cpu, AddrRange::new(at, range.end));
            let pin = cpu.pin();
            mm.next_vma(&pin, at, range.end).map(|(_, seen)| seen)
        }?;
        let number = seen.flags.user_context();
        if number != 0
            && let Some(context) = mm.users.find(number).filter(|context| context.features.contains(feature))
        {
            return Some((context, seen.range.intersection(AddrRange::new(at, range.end))));
        }
        at = seen.range.end;
    }
    None
}

/// Tells handlers that the pages of `range` are about to be forgotten, and waits until they know. Nothing held, not pinned.
pub(crate) fn removing<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) {
    if !mm.users.tells() {
        return;
    }
    let mut at = range.start;
    while let Some((context, part)) = next_told(mm, cpu, range, at, UserFeatures::EVENT_REMOVE) {
        context.announce();
        context.tell(cpu, UserEvent::Remove(part));
        at = part.end;
    }
}

/// Handlers that are to be told of an unmap; those that are not told are as before when it is dropped.
pub(crate) struct Unmapping<H: Host> {
    contexts: Vec<Shared<Context<H>>>,
    range: AddrRange,
}

impl<H: Host> Unmapping<H> {
    /// Announces that `range` will be unmapped. Nothing held, not pinned. One load, if no handler wants to know.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    #[inline]
    pub(crate) fn announce(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) -> Result<Self, OutOfMemory> {
        if mm.users.tells() {
            Self::announce_to_all(mm, cpu, range, UserFeatures::EVENT_UNMAP)
        } else {
            Ok(Self { contexts: Vec::new(), range })
        }
    }

    #[cold]
    fn announce_to_all(
        mm: &Mm<H>,
        cpu: &Cpu<H>,
        range: AddrRange,
        feature: UserFeatures,
    ) -> Result<Self, OutOfMemory> {
        let mut told = Self { contexts: Vec::new(), range };
        let mut at = range.start;
        while let Some((context, part)) = next_told(mm, cpu, range, at, feature) {
            if !told.contexts.iter().any(|other| Shared::ptr_eq(other, &context)) {
                told.contexts.try_reserve(1).map_err(|_| OutOfMemory)?;
                context.announce();
                told.contexts.push(context);
            }
            at = part.end;
        }
        Ok(told)
    }

    /// The range has been unmapped: tells, and waits until they know. Nothing held, not pinned.
    pub(crate) fn done(mut self, cpu: &Cpu<H>) {
        while let Some(context) = self.contexts.pop() {
            context.tell(cpu, UserEvent::Unmap(self.range));
        }
    }
}

/// Handlers that are to be told of a move; those that are not told are as before when it is dropped.
pub(crate) struct Remapping<H: Host> {
    /// What is unmapped to make room.
    target: Unmapping<H>,
    /// What is cut off, or left behind.
    source: Unmapping<H>,
    /// Whose range it is.
    moved: Unmapping<H>,
}

/// What a move has come to.
#[derive(Default)]
pub(crate) struct Moved {
    /// What has been unmapped at the old place: what was cut off, and what was left behind.
    pub(crate) gone: [Option<AddrRange>; 2],
    /// From where to where, and how much.
    pub(crate) moved: Option<(u64, u64, u64)>,
}

impl<H: Host> Remapping<H> {
    /// Announces that what is mapped in `source` may be moved or cut off, and what is in `target` unmapped. Nothing held, not pinned. `None`
    /// if no handler wants to know.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    #[inline]
    pub(crate) fn announce(
        mm: &Mm<H>,
        cpu: &Cpu<H>,
        source: AddrRange,
        target: AddrRange,
    ) -> Result<Option<Self>, OutOfMemory> {
        if !mm.users.tells() {
            return Ok(None);
        }
        let first = AddrRange::new(source.start, (source.start + 1).min(source.end));
        Ok(Some(Self {
            target: Unmapping::announce_to_all(mm, cpu, target, UserFeatures::EVENT_UNMAP)?,
            source: Unmapping::announce_to_all(mm, cpu, source, UserFeatures::EVENT_UNMAP)?,
            moved: Unmapping::announce_to_all(mm, cpu, first, UserFeatures::EVENT_REMAP)?,
        }))
    }

    /// It is done: tells, and waits until they know. Nothing held, not pinned.
    pub(crate) fn done(mut self, cpu: &Cpu<H>, what: &Moved) {
        self.target.done(cpu);
        if let Some((from, to, len)) = what.moved
            && let Some(context) = self.moved.contexts.pop()
        {
            context.tell(cpu, UserEvent::Remap { from, to, len });
        }
        let count = what.gone.iter().flatten().count();
        while count > 0
            && let Some(context) = self.source.contexts.pop()
        {
            // Announced once.
            (1..count).for_each(|_| context.queue.announce());
            for &range in what.gone.iter().flatten() {
                context.tell(cpu, UserEvent::Unmap(range));
            }
        }
    }
}

impl<H: Host> Drop for Unmapping<H> {
    fn drop(&mut self) {
        self.contexts.iter().for_each(|context| context.queue.retract());
    }
}
