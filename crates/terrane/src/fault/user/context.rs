//! A handler's context, and how a fault finds it.
//!
//! A context belongs to one space. VMAs name it by a number, which is not given out anew before no VMA has it. The space keeps a list of its
//! contexts, under a lock that faults for a handler take, and nobody else does.
//!
//! The handler may outlive the space. Each of its calls holds [`Context::home`] for reading, so that the space cannot
//! go meanwhile; a space that ends takes itself out of its contexts first.

use super::queue::Queue;
use crate::error::{Error, OutOfMemory};
use crate::host::Host;
use crate::mm::Mm;
use crate::sync::Shared;
use crate::sync::atomic::{AtomicBool, Ordering};
use alloc::vec::Vec;

bitflags::bitflags! {
    /// What a handler asks for when its context is made (`UFFD_FEATURE_…`, with Linux's values).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct UserFeatures: u64 {
        /// Write-protecting private memory covers pages that are not there yet, too. (For shared memory it always does.)
        const WP_UNPOPULATED = 1 << 13;
        /// Faults are bus errors instead of events.
        const SIGBUS = 1 << 7;
        /// A store to a page that is write-protected takes the protection away, and tells nobody; memory of any kind can be
        /// registered in just the mode `WP`. Implies `WP_UNPOPULATED`. Who wants to know what has been written asks
        /// [`AddressSpace::written`](crate::space::AddressSpace::written).
        const WP_ASYNC = 1 << 15;
        /// A fork is told ([`UserEvent::Fork`](super::UserEvent::Fork)): the child's ranges have a handler of their own.
        const EVENT_FORK = 1 << 1;
        /// A move is told ([`UserEvent::Remap`](super::UserEvent::Remap)), and what is moved stays registered.
        const EVENT_REMAP = 1 << 2;
        /// [`UserEvent::Remove`](super::UserEvent::Remove) is told.
        const EVENT_REMOVE = 1 << 3;
        /// [`UserEvent::Unmap`](super::UserEvent::Unmap) is told.
        const EVENT_UNMAP = 1 << 6;
    }
}

/// Features for which calls other than faults have something to tell.
const TELLS: UserFeatures = UserFeatures::EVENT_FORK
    .union(UserFeatures::EVENT_REMAP)
    .union(UserFeatures::EVENT_REMOVE)
    .union(UserFeatures::EVENT_UNMAP);

/// Protection covers what is not there yet.
const UNPOPULATED: UserFeatures = UserFeatures::WP_UNPOPULATED.union(UserFeatures::WP_ASYNC);

/// A handler's context.
pub(crate) struct Context<H: Host> {
    /// Its number in the flags of VMAs; not 0.
    pub(crate) number: u16,
    pub(crate) features: UserFeatures,
    pub(crate) queue: Queue<H>,
    /// Held for reading by calls that fill entries, for writing while another call says that it will change what is mapped.
    pub(crate) filling: lock_api::RwLock<H::RwLock, ()>,
    /// The space; `None` once it has ended.
    pub(crate) home: lock_api::RwLock<H::RwLock, Option<Shared<Mm<H>>>>,
    /// Contexts of children that nobody has fetched yet.
    forked: lock_api::Mutex<H::Mutex, Forked<H>>,
    /// The limit of mappings of its space.
    pub(crate) map_limit: Option<usize>,
}

/// Contexts of children that nobody has fetched yet.
pub(crate) struct Forked<H: Host> {
    /// How many there have been.
    count: u64,
    /// By the number that the event says.
    waiting: Vec<(u64, Shared<Context<H>>)>,
}

impl<H: Host> Context<H> {
    /// Keeps the context of a child for who reads the event with the number that is returned.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn keep_forked(&self, child: Shared<Context<H>>) -> Result<u64, OutOfMemory> {
        let mut forked = self.forked.lock();
        forked.waiting.try_reserve(1).map_err(|_| OutOfMemory)?;
        forked.count += 1;
        let number = forked.count;
        forked.waiting.push((number, child));
        Ok(number)
    }

    /// Takes the context of a child: that with this number, or any.
    pub(crate) fn take_forked(&self, number: Option<u64>) -> Option<Shared<Context<H>>> {
        let mut forked = self.forked.lock();
        let place = match number {
            Some(number) => forked.waiting.iter().position(|(other, _)| *other == number)?,
            None => forked.waiting.len().checked_sub(1)?,
        };
        Some(forked.waiting.swap_remove(place).1)
    }

    /// A context of a child, which stays where it is.
    pub(crate) fn peek_forked(&self, number: u64) -> Option<Shared<Context<H>>> {
        let forked = self.forked.lock();
        forked.waiting.iter().find(|(other, _)| *other == number).map(|(_, child)| child.clone())
    }
}

/// The contexts of a space.
pub struct Contexts<H: Host> {
    list: lock_api::Mutex<H::Mutex, Vec<Shared<Context<H>>>>,
    /// Some handler has asked for events other than faults. Written once in a space's life.
    tells: AtomicBool,
}

impl<H: Host> Contexts<H> {
    pub(crate) fn new() -> Self {
        Self { list: lock_api::Mutex::new(Vec::new()), tells: AtomicBool::new(false) }
    }

    /// Makes a context of `mm`, whose list this is.
    ///
    /// # Errors
    /// [`Error::NoMemory`], also when all numbers are taken.
    pub(crate) fn add(
        &self,
        mm: &Shared<Mm<H>>,
        features: UserFeatures,
        map_limit: Option<usize>,
    ) -> Result<Shared<Context<H>>, Error> {
        let mut features = features;
        features.set(UserFeatures::WP_UNPOPULATED, features.intersects(UNPOPULATED));
        let queue = Queue::try_new(mm.machine.epoch().capacity())?;
        let mut list = self.list.lock();
        list.try_reserve(1).map_err(|_| OutOfMemory)?;
        // Ascending, so the first that is not where it would be without gaps shows a gap.
        let place = list.iter().zip(1u16..).take_while(|(context, number)| context.number == *number).count();
        let number = u16::try_from(place + 1).map_err(|_| Error::NoMemory)?;
        let home = lock_api::RwLock::new(Some(mm.clone()));
        let filling = lock_api::RwLock::new(());
        let forked = lock_api::Mutex::new(Forked { count: 0, waiting: Vec::new() });
        let context = Shared::try_new(Context { number, features, queue, filling, home, forked, map_limit })?;
        list.insert(place, context.clone());
        if features.intersects(TELLS) {
            self.tells.store(true, Ordering::Release);
        }
        Ok(context)
    }

    /// False when certainly no handler wants to know of anything but faults.
    #[inline]
    pub(crate) fn tells(&self) -> bool {
        self.tells.load(Ordering::Acquire)
    }

    /// Calls `visit` for each context that asks for `feature`.
    pub(crate) fn for_each(&self, feature: UserFeatures, mut visit: impl FnMut(&Shared<Context<H>>)) {
        self.list.lock().iter().filter(|context| context.features.contains(feature)).for_each(&mut visit);
    }

    /// The context with this number.
    pub(crate) fn find(&self, number: u16) -> Option<Shared<Context<H>>> {
        let list = self.list.lock();
        let place = list.binary_search_by_key(&number, |context| context.number).ok()?;
        Some(list[place].clone())
    }

    /// Gives the number back: no VMA has it any more.
    pub(crate) fn remove(&self, number: u16) {
        let gone = {
            let mut list = self.list.lock();
            let place = list.binary_search_by_key(&number, |context| context.number);
            place.ok().map(|place| list.remove(place))
        };
        drop(gone);
    }

    /// Ends all of them, because the space ends: waits for their calls, and wakes their readers. Nobody faults any more.
    pub(crate) fn end(&self, host: &H) {
        loop {
            let Some(context) = self.list.lock().pop() else { return };
            let home = context.home.write().take();
            context.queue.close(host);
            drop(home);
        }
    }
}

#[cfg(terrane_watch)]
impl<H: Host> crate::names::Describe for Contexts<H> {
    fn describe(&self, names: &mut crate::names::Names) {
        names.field("list", &self.list);
    }
}
