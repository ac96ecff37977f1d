//! What `fork` does about handlers of user faults.
//!
//! The ranges of a handler that asks for it ([`UserFeatures::EVENT_FORK`]) are registered in the child too, with a context of the child's own.
//! The parent's handler fetches it by the number that it reads; until then the child's faults wait. The fork announces itself as other calls
//! do ([`events`](crate::fault::user::events)), before it holds anything, so no copy is under way in the parent while
//! its pages are shared; and it waits, when it is done, until the event has been read.
//!
//! The child's context is kept in the parent's from the start, because nothing may fail when the child is there. Who ends the parent's handler
//! meanwhile ends that one too, and waits for the fork to do so, which holds all of the child's addresses.

use super::{UserEvent, UserFeatures, end_context};
use crate::error::OutOfMemory;
use crate::fault::user::context::Context;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::sync::Shared;
use crate::vma::VmFlags;
use alloc::vec::Vec;

/// The handlers that are to be told of a fork, and the child's contexts. Those that have not been told are as before when it is dropped.
pub(in crate::space) struct Forks<'a, H: Host> {
    cpu: &'a Cpu<H>,
    pairs: Vec<Pair<H>>,
}

struct Pair<H: Host> {
    parent: Shared<Context<H>>,
    /// The number of the event, and the number of the child's context in the child's VMAs.
    child: Option<(u64, u16)>,
    /// A range of the child has it.
    used: bool,
}

impl<'a, H: Host> Forks<'a, H> {
    /// Announces a fork of `mm`. Nothing held, not pinned. One load, if no handler wants to know.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(in crate::space) fn announce(cpu: &'a Cpu<H>, mm: &Mm<H>) -> Result<Self, OutOfMemory> {
        let mut forks = Self { cpu, pairs: Vec::new() };
        if !mm.users.tells() {
            return Ok(forks);
        }
        let mut contexts = Vec::new();
        let mut result = Ok(());
        mm.users.for_each(UserFeatures::EVENT_FORK, |context| {
            result = result.and(contexts.try_reserve(1).map_err(|_| OutOfMemory));
            if result.is_ok() {
                contexts.push(context.clone());
            }
        });
        result?;
        forks.pairs.try_reserve(contexts.len()).map_err(|_| OutOfMemory)?;
        for parent in contexts {
            parent.announce();
            forks.pairs.push(Pair { parent, child: None, used: false });
        }
        Ok(forks)
    }

    /// False when there are handlers by now that have not been told. With the parent's addresses held, after which no further one
    /// has a range.
    pub(in crate::space) fn are_all(&self, mm: &Mm<H>) -> bool {
        let mut all = true;
        if mm.users.tells() {
            mm.users.for_each(UserFeatures::EVENT_FORK, |context| {
                all &= self.pairs.iter().any(|pair| Shared::ptr_eq(&pair.parent, context));
            });
        }
        all
    }

    /// Makes the child's contexts.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(in crate::space) fn make(
        &mut self,
        child: &Shared<Mm<H>>,
        map_limit: Option<usize>,
    ) -> Result<(), OutOfMemory> {
        for pair in &mut self.pairs {
            let made = child.users.add(child, pair.parent.features, map_limit).map_err(|_| OutOfMemory)?;
            let place = made.number;
            match pair.parent.keep_forked(made.clone()) {
                Ok(number) => pair.child = Some((number, place)),
                Err(error) => {
                    end_context(made, &child.machine);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// What the child has of a mapping with these attributes: whose faults they are there.
    pub(in crate::space) fn flags(&mut self, flags: VmFlags) -> VmFlags {
        let number = flags.user_context();
        let own = self.pairs.iter_mut().find(|pair| number != 0 && pair.parent.number == number);
        match own.and_then(|pair| Some((pair.child?, pair))) {
            Some(((_, place), pair)) => {
                pair.used = true;
                flags.with_user_context(place, flags)
            }
            None => flags.difference(VmFlags::UFFD),
        }
    }

    /// The child is there: tells, and waits until they know. Nothing held, not pinned.
    pub(in crate::space) fn done(mut self) {
        while let Some(mut pair) = self.pairs.pop() {
            let Some((number, _)) = pair.child.filter(|_| pair.used) else {
                self.give_up(&mut pair);
                continue;
            };
            if !pair.parent.tell(self.cpu, UserEvent::Fork(number)) {
                // Nobody is there to fetch it.
                end_child(&pair, self.cpu);
            }
        }
    }

    fn give_up(&self, pair: &mut Pair<H>) {
        end_child(pair, self.cpu);
        pair.parent.queue.retract();
    }
}

fn end_child<H: Host>(pair: &Pair<H>, cpu: &Cpu<H>) {
    if let Some((number, _)) = pair.child
        && let Some(context) = pair.parent.take_forked(Some(number))
    {
        end_context(context, cpu.machine());
    }
}

impl<H: Host> Drop for Forks<'_, H> {
    fn drop(&mut self) {
        while let Some(mut pair) = self.pairs.pop() {
            self.give_up(&mut pair);
        }
    }
}
