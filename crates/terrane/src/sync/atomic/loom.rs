//! loom's atomics, made when they are first used.
//!
//! loom's own cannot be made in constants, have no fixed layout and are not valid when all bytes are zero, so half of
//! the library would not compile. These hold their first value until a thread of the model uses them, and become
//! loom's then. loom takes that moment for the moment they were made, and stops when another thread uses them
//! without having synchronised with it: a model touches what it shares before it starts its threads.
//!
//! # `SeqCst`
//!
//! loom knows full fences, and treats an operation that is `SeqCst` as acquire and release only, which would condemn
//! every Dekker pattern that uses them. The language puts such an operation into the one total order together with the
//! fences, but does not order it against *relaxed* neighbours in its own thread. Two approximations are on offer, each a
//! little too strong, in opposite places ([`set_seq_cst`]): the operation has a full fence before it ([`SeqCst::Before`]),
//! or behind it ([`SeqCst::Behind`]). Two neighbours that are both `SeqCst` are ordered by both. A relaxed neighbour
//! behind the operation (or before it) is ordered by one of them only, so a protocol that leans on what the language
//! does not promise fails in one of the two. Models run under both; and those that
//! pass messages only run with neither ([`SeqCst::Nowhere`]).

//!
//! # Loads are steps too
//!
//! loom explores the two orders of two operations only where it thinks they depend on each other, and of the operations
//! on a word it compares a store with the *latest* other one only. A thread that loads a word and then stores to it thus
//! hides every load that another thread made before: the order in which that load comes behind the store is never
//! looked at (loom 0.7.2; a reader beside a writer of a sequence counter is enough). So each operation here first
//! stores to a second word that nobody reads ([`Lazy::step`]): all operations on a word, and all full
//! fences, depend on each other then. A store that nobody reads orders nothing.

use super::Ordering;
use alloc::boxed::Box;
use core::cell::{Cell, UnsafeCell};
use core::fmt;
use loom::sync::atomic as model;

extern crate std;

/// Where the full fence that stands for the order of a `SeqCst` operation is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SeqCst {
    /// Nowhere: acquire and release only. For models in which no Dekker pattern takes part, so that the fences of the
    /// others cover nothing up.
    Nowhere,
    /// Before the operation.
    Before,
    /// Behind the operation.
    Behind,
}

std::thread_local! {
    static SEQ_CST: Cell<SeqCst> = const { Cell::new(SeqCst::Before) };
}

/// How the models of this thread treat `SeqCst` operations from now on; see the module.
pub fn set_seq_cst(fence: SeqCst) {
    SEQ_CST.set(fence);
}

#[inline]
fn ordered<R>(order: Ordering, act: impl FnOnce() -> R) -> R {
    let full = if order == Ordering::SeqCst { SEQ_CST.get() } else { SeqCst::Nowhere };
    if full == SeqCst::Before {
        fence(Ordering::SeqCst);
    }
    let result = act();
    if full == SeqCst::Behind {
        fence(Ordering::SeqCst);
    }
    result
}

loom::lazy_static! {
    /// Stored to before each full fence, so that loom looks at both orders of two of them.
    static ref FENCES: model::AtomicUsize = model::AtomicUsize::new(0);
}

/// See [`core::sync::atomic::fence`].
#[track_caller]
pub fn fence(order: Ordering) {
    if order == Ordering::SeqCst {
        FENCES.store(0, Ordering::Relaxed);
    }
    model::fence(order);
}

/// Lets the other threads of the model run.
#[track_caller]
pub fn spin_loop() {
    loom::thread::yield_now();
}

/// Nothing: for `--cfg terrane_watch`.
#[inline(always)]
pub fn note_write<T>(_first: *const T, _count: usize) {}

/// A value that becomes an atomic `A` of loom's when it is first used. Zero bytes are a valid one if they are a
/// valid `T`.
struct Lazy<T, A> {
    first: UnsafeCell<T>,
    live: UnsafeCell<Option<Box<Live<A>>>>,
}

struct Live<A> {
    atomic: A,
    /// See "Loads are steps too".
    steps: model::AtomicUsize,
}

// SAFETY: all threads of a model run on one thread of the machine, in turns that change inside loom's operations
// only; no reference to the cells is held over one.
unsafe impl<T, A> Sync for Lazy<T, A> {}
// SAFETY: as above.
unsafe impl<T, A> Send for Lazy<T, A> {}

impl<T: Copy, A> Lazy<T, A> {
    const fn new(first: T) -> Self {
        Self { first: UnsafeCell::new(first), live: UnsafeCell::new(None) }
    }

    #[track_caller]
    fn get(&self, make: impl FnOnce(T) -> A) -> &A {
        // SAFETY: see `Sync`. Once made, the box stays until `take`, which has the value exclusively.
        let live = unsafe { &mut *self.live.get() };
        let live = live.get_or_insert_with(|| {
            // SAFETY: as above; nobody writes `first` but `take`.
            let first = unsafe { *self.first.get() };
            Box::new(Live { atomic: make(first), steps: model::AtomicUsize::new(0) })
        });
        Self::step(live)
    }

    /// Makes what follows depend on all other operations on this word.
    #[track_caller]
    fn step(live: &Live<A>) -> &A {
        live.steps.store(0, Ordering::Relaxed);
        &live.atomic
    }

    /// The value, not an atomic any more; `read` reads the atomic.
    fn take(&mut self, read: impl FnOnce(&mut A) -> T) -> &mut T {
        if let Some(mut live) = self.live.get_mut().take() {
            *self.first.get_mut() = read(&mut live.atomic);
        }
        self.first.get_mut()
    }
}

macro_rules! common {
    ([$($g:tt)*] $name:ident, $value:ty) => {
        /// As `core`'s, in a model.
        #[repr(transparent)]
        pub struct $name$($g)*(Lazy<$value, model::$name$($g)*>);

        impl$($g)* $name$($g)* {
            /// As `core`'s.
            #[inline]
            pub const fn new(value: $value) -> Self {
                Self(Lazy::new(value))
            }

            #[track_caller]
            fn live(&self) -> &model::$name$($g)* {
                self.0.get(model::$name::new)
            }

            /// As `core`'s.
            pub fn get_mut(&mut self) -> &mut $value {
                // SAFETY: `&mut`: nobody else uses it.
                self.0.take(|live| unsafe { live.unsync_load() })
            }

            /// As `core`'s, as long as nobody has used the value as an atomic.
            pub fn as_ptr(&self) -> *mut $value {
                // SAFETY: see `Sync`; only looked at.
                debug_assert!(unsafe { (*self.0.live.get()).is_none() }, "an atomic of a model has no address");
                self.0.first.get()
            }

            /// Not in a model: the bytes of a page are no atomics of loom's.
            ///
            /// # Safety
            /// It panics.
            pub unsafe fn from_ptr<'a>(_: *mut $value) -> &'a Self {
                panic!("plain memory is no atomic of loom's")
            }

            /// As `core`'s.
            pub fn into_inner(mut self) -> $value {
                *self.get_mut()
            }

            /// As `core`'s.
            #[track_caller]
            pub fn load(&self, order: Ordering) -> $value {
                ordered(order, || self.live().load(order))
            }

            /// As `core`'s.
            #[track_caller]
            pub fn store(&self, value: $value, order: Ordering) {
                ordered(order, || self.live().store(value, order));
            }

            /// As `core`'s.
            #[track_caller]
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                ordered(order, || self.live().swap(value, order))
            }

            /// As `core`'s.
            ///
            /// # Errors
            /// As `core`'s.
            #[track_caller]
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                ordered(success, || self.live().compare_exchange(current, new, success, failure))
            }

            /// As `core`'s.
            ///
            /// # Errors
            /// As `core`'s.
            #[track_caller]
            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                // Without the failures for no reason: each would double the states.
                self.compare_exchange(current, new, success, failure)
            }

            /// As `core`'s.
            ///
            /// # Errors
            /// As `core`'s.
            #[track_caller]
            pub fn fetch_update(
                &self,
                set: Ordering,
                fetch: Ordering,
                mut update: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                let mut now = self.load(fetch);
                while let Some(next) = update(now) {
                    match self.compare_exchange(now, next, set, fetch) {
                        Ok(before) => return Ok(before),
                        Err(other) => now = other,
                    }
                }
                Err(now)
            }
        }

        impl$($g)* fmt::Debug for $name$($g)* {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                // Not its value: a look at it would be a step of the model.
                f.write_str(stringify!($name))
            }
        }
    };
}

macro_rules! fetch {
    ($name:ident $value:ty: $($op:ident)*) => {
        impl $name {
            $(
                /// As `core`'s.
                #[track_caller]
                pub fn $op(&self, value: $value, order: Ordering) -> $value {
                    ordered(order, || self.live().$op(value, order))
                }
            )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(Default::default())
            }
        }

        impl From<$value> for $name {
            fn from(value: $value) -> Self {
                Self::new(value)
            }
        }
    };
}

macro_rules! integers {
    ($($name:ident $value:ident)*) => { $(
        common!([] $name, $value);
        fetch!($name $value: fetch_add fetch_sub fetch_and fetch_or fetch_xor fetch_max fetch_min);
    )* };
}

integers! {
    AtomicI64 i64
    AtomicU8 u8
    AtomicU16 u16
    AtomicU32 u32
    AtomicU64 u64
    AtomicUsize usize
}

common!([] AtomicBool, bool);
fetch!(AtomicBool bool: fetch_and fetch_or fetch_xor);
common!([<T>] AtomicPtr, *mut T);

impl<T> Default for AtomicPtr<T> {
    fn default() -> Self {
        Self::new(core::ptr::null_mut())
    }
}
