//! `core`'s atomics with a hook before every operation.
//!
//! The types are transparent wrappers, so layouts (and with them the cache lines) are those of the plain build. A
//! hook belongs to the thread that [`install`]s it, which lets tests run beside each other; threads without one pay
//! a look at a thread-local variable.
//!
//! A compare-and-swap that fails is told as [`Op::Rmw`] like one that succeeds: on x86-64 and most other processors
//! it takes the line for writing all the same, so for an audit it is a write.

use super::Ordering;
use core::cell::Cell;
use core::fmt;
use core::panic::Location;

extern crate std;

/// What a thread is about to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Reads an atomic.
    Load,
    /// Writes an atomic.
    Store,
    /// Reads and writes an atomic, or tries to.
    Rmw,
    /// Writes something that is not atomic; see [`note_write`].
    Note,
    /// Passes a fence. No address.
    Fence,
    /// Waits for another thread. No address.
    Spin,
}

/// One operation that is about to happen.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// What it does.
    pub op: Op,
    /// The address it does it to, or 0.
    pub addr: usize,
    /// Bytes from there on.
    pub size: usize,
    /// Where in the source.
    pub site: &'static Location<'static>,
}

impl Access {
    /// True when the operation takes the cache line for writing.
    pub fn writes(&self) -> bool {
        matches!(self.op, Op::Store | Op::Rmw | Op::Note)
    }
}

/// Is called before each operation of its thread. It must not use the atomics of this module itself.
pub type Hook = fn(&Access);

std::thread_local! {
    static HOOK: Cell<Option<Hook>> = const { Cell::new(None) };
}

/// Makes `hook` this thread's hook, or removes it, and returns the one before.
pub fn install(hook: Option<Hook>) -> Option<Hook> {
    HOOK.replace(hook)
}

#[inline]
fn tell(op: Op, addr: usize, size: usize, site: &'static Location<'static>) {
    // A thread that is ending may have lost its variables already: nobody listens any more.
    if let Ok(Some(hook)) = HOOK.try_with(Cell::get) {
        hook(&Access { op, addr, size, site });
    }
}

/// Tells the watcher that this thread writes `count` values from `first` on by plain stores: state that is not
/// atomic because it has one user at a time. The pointer is not followed.
#[inline]
#[track_caller]
pub fn note_write<T>(first: *const T, count: usize) {
    tell(Op::Note, first.addr(), count * size_of::<T>(), Location::caller());
}

/// See [`core::sync::atomic::fence`].
#[inline]
#[track_caller]
pub fn fence(order: Ordering) {
    tell(Op::Fence, 0, 0, Location::caller());
    core::sync::atomic::fence(order);
}

/// See [`core::hint::spin_loop`].
#[inline]
#[track_caller]
pub fn spin_loop() {
    tell(Op::Spin, 0, 0, Location::caller());
    core::hint::spin_loop();
}

/// What all types have. `[$g]` are the generic parameters.
macro_rules! common {
    ([$($g:tt)*] $name:ident, $value:ty) => {
        impl$($g)* $name$($g)* {
            /// As `core`'s.
            #[inline]
            pub const fn new(value: $value) -> Self {
                Self(core::sync::atomic::$name::new(value))
            }

            /// As `core`'s.
            ///
            /// # Safety
            /// As `core`'s.
            #[inline]
            pub const unsafe fn from_ptr<'a>(ptr: *mut $value) -> &'a Self {
                // SAFETY: a transparent wrapper of `core`'s, which has the layout of the value; the rest is the
                // caller's promise.
                unsafe { &*ptr.cast::<Self>() }
            }

            #[inline]
            fn tell(&self, op: Op, site: &'static Location<'static>) {
                tell(op, core::ptr::from_ref(self).addr(), size_of::<Self>(), site);
            }

            /// As `core`'s. Not told: who has it by `&mut` shares it with nobody.
            #[inline]
            pub fn get_mut(&mut self) -> &mut $value {
                self.0.get_mut()
            }

            /// As `core`'s.
            #[inline]
            pub fn into_inner(self) -> $value {
                self.0.into_inner()
            }

            /// As `core`'s. What is done through the pointer is not told.
            #[inline]
            pub const fn as_ptr(&self) -> *mut $value {
                self.0.as_ptr()
            }

            /// As `core`'s.
            #[inline]
            #[track_caller]
            pub fn load(&self, order: Ordering) -> $value {
                self.tell(Op::Load, Location::caller());
                self.0.load(order)
            }

            /// As `core`'s.
            #[inline]
            #[track_caller]
            pub fn store(&self, value: $value, order: Ordering) {
                self.tell(Op::Store, Location::caller());
                self.0.store(value, order);
            }

            /// As `core`'s.
            #[inline]
            #[track_caller]
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                self.tell(Op::Rmw, Location::caller());
                self.0.swap(value, order)
            }

            /// As `core`'s.
            ///
            /// # Errors
            /// As `core`'s.
            #[inline]
            #[track_caller]
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.tell(Op::Rmw, Location::caller());
                self.0.compare_exchange(current, new, success, failure)
            }

            /// As `core`'s.
            ///
            /// # Errors
            /// As `core`'s.
            #[inline]
            #[track_caller]
            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.tell(Op::Rmw, Location::caller());
                self.0.compare_exchange_weak(current, new, success, failure)
            }

            /// As `core`'s.
            ///
            /// # Errors
            /// As `core`'s.
            #[inline]
            #[track_caller]
            pub fn fetch_update(
                &self,
                set: Ordering,
                fetch: Ordering,
                mut update: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                let mut now = self.load(fetch);
                while let Some(next) = update(now) {
                    match self.compare_exchange_weak(now, next, set, fetch) {
                        Ok(before) => return Ok(before),
                        Err(other) => now = other,
                    }
                }
                Err(now)
            }
        }

        impl$($g)* fmt::Debug for $name$($g)* {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

macro_rules! fetch {
    ($name:ident $value:ty: $($op:ident)*) => {
        impl $name {
            $(
                /// As `core`'s.
                #[inline]
                #[track_caller]
                pub fn $op(&self, value: $value, order: Ordering) -> $value {
                    self.tell(Op::Rmw, Location::caller());
                    self.0.$op(value, order)
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
        /// As `core`'s, and told.
        #[repr(transparent)]
        pub struct $name(core::sync::atomic::$name);
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

/// As `core`'s, and told.
#[repr(transparent)]
pub struct AtomicBool(core::sync::atomic::AtomicBool);
common!([] AtomicBool, bool);
fetch!(AtomicBool bool: fetch_and fetch_or fetch_xor);

/// As `core`'s, and told.
#[repr(transparent)]
pub struct AtomicPtr<T>(core::sync::atomic::AtomicPtr<T>);
common!([<T>] AtomicPtr, *mut T);

impl<T> Default for AtomicPtr<T> {
    fn default() -> Self {
        Self::new(core::ptr::null_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    std::thread_local! {
        static SEEN: Cell<Vec<Access>> = const { Cell::new(Vec::new()) };
    }

    fn record(access: &Access) {
        let mut seen = SEEN.take();
        seen.push(*access);
        SEEN.set(seen);
    }

    #[test]
    fn every_operation_is_told_with_its_place() {
        let word = AtomicU32::new(1);
        assert!(install(Some(record)).is_none());
        word.store(2, Ordering::Relaxed);
        assert!(word.compare_exchange(1, 3, Ordering::AcqRel, Ordering::Relaxed).is_err());
        assert_eq!(word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| Some(word + 1)), Ok(2));
        note_write(&0u16, 3);
        fence(Ordering::SeqCst);
        spin_loop();
        assert!(install(None).is_some());
        assert_eq!(word.load(Ordering::Relaxed), 3);
        let seen = SEEN.take();
        let ops: Vec<Op> = seen.iter().map(|access| access.op).collect();
        assert_eq!(ops, [Op::Store, Op::Rmw, Op::Load, Op::Rmw, Op::Note, Op::Fence, Op::Spin]);
        assert_eq!((seen[0].addr, seen[0].size), (word.as_ptr().addr(), 4));
        assert_eq!((seen[4].size, seen[1].writes(), seen[2].writes()), (6, true, false));
        assert!(seen.iter().all(|access| access.site.file() == file!()));
    }
}
