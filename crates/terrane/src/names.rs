//! Names for addresses, for the cache-line audit: which field of which structure lies where.
//!
//! Only built with `--cfg terrane_watch` (see `docs/audit.md`). A structure that is written by more than one CPU, or
//! that belongs to one of them, says what it is made of by [`Describe`]: the macro `describe!` does that from a list of
//! fields. [`Names`] collects the answers, and says for an address the innermost field around it, by a path such as
//! `frames.cpus[3].cache.top`.

use crate::sync::atomic::{
    AtomicBool, AtomicI64, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize,
};
use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;
use core::ops::Range;
use crossbeam_utils::CachePadded;

/// Names of what lies where.
#[derive(Clone, Default)]
pub struct Names {
    /// The path to what is being described.
    path: Vec<String>,
    parts: Vec<Part>,
}

/// Things of one kind beside each other; most often one.
#[derive(Clone)]
struct Part {
    range: Range<usize>,
    name: String,
    /// Bytes from one thing to the next, and what each of them is called and made of.
    stride: usize,
    item: fn(usize) -> String,
    fields: &'static [(usize, &'static str)],
}

impl Names {
    /// No names.
    pub fn new() -> Self {
        Self::default()
    }

    /// Describes `what` as `name` of what is being described.
    pub fn field(&mut self, name: impl fmt::Display, what: &(impl Describe + ?Sized)) {
        self.under(name, |names| what.describe(names));
    }

    /// Runs `describe` with `name` at the end of the path.
    pub fn under(&mut self, name: impl fmt::Display, describe: impl FnOnce(&mut Self)) {
        self.path.push(name.to_string());
        describe(self);
        self.path.pop();
    }

    /// The bytes of `what` are what the path says.
    pub fn leaf<T: ?Sized>(&mut self, what: &T) {
        let start = core::ptr::from_ref(what).addr();
        self.bytes(start..start + size_of_val(what));
    }

    /// These bytes are what the path says.
    pub fn bytes(&mut self, range: Range<usize>) {
        self.array(range, usize::MAX, |_| String::new(), &[]);
    }

    /// Things of `stride` bytes, each called by its number and made of fields, given by where they start.
    pub fn array(
        &mut self,
        range: Range<usize>,
        stride: usize,
        item: fn(usize) -> String,
        fields: &'static [(usize, &'static str)],
    ) {
        let name = self.path.join(".").replace(".[", "[");
        if !range.is_empty() {
            self.parts.push(Part { range, name, stride, item, fields });
        }
    }

    /// Adds what `later` knows; where both know an address equally well, the later one is right.
    pub fn extend(&mut self, later: Names) {
        self.parts.extend(later.parts);
    }

    /// The innermost name of an address.
    pub fn of(&self, addr: usize) -> Option<String> {
        // The last of the smallest: `min_by_key` gives the first, so from the end.
        let around = self.parts.iter().rev().filter(|part| part.range.contains(&addr));
        let part = around.min_by_key(|part| part.range.len().min(part.stride))?;
        let (item, within) =
            ((addr - part.range.start) / part.stride, (addr - part.range.start) % part.stride);
        let field = part.fields.iter().rev().find(|(start, _)| *start <= within).map_or("", |(_, name)| name);
        Some([part.name.as_str(), &(part.item)(item), field].concat())
    }

    /// All that has a name: where it is, and the name (of an array, without its items).
    pub fn iter(&self) -> impl Iterator<Item = (Range<usize>, &str)> {
        self.parts.iter().map(|part| (part.range.clone(), part.name.as_str()))
    }
}

/// What can say where its fields are.
pub trait Describe {
    /// Adds the names of its fields.
    fn describe(&self, names: &mut Names);
}

macro_rules! leaves {
    ($([$($g:tt)*] $type:ty),* $(,)?) => { $(
        impl$($g)* Describe for $type {
            fn describe(&self, names: &mut Names) {
                names.leaf(self);
            }
        }
    )* };
}

leaves! {
    [] AtomicBool, [] AtomicI64, [] AtomicU8, [] AtomicU16, [] AtomicU32, [] AtomicU64, [] AtomicUsize,
    [<T>] AtomicPtr<T>, [<T>] Cell<T>, [<R, T>] lock_api::Mutex<R, T>, [<R, T>] lock_api::RwLock<R, T>,
}

impl<T: Describe> Describe for CachePadded<T> {
    fn describe(&self, names: &mut Names) {
        names.leaf(self);
        (**self).describe(names);
    }
}

impl<T: Describe> Describe for [T] {
    fn describe(&self, names: &mut Names) {
        for (index, item) in self.iter().enumerate() {
            names.field(format_args!("[{index}]"), item);
        }
    }
}

impl<T: Describe, const N: usize> Describe for [T; N] {
    fn describe(&self, names: &mut Names) {
        self.as_slice().describe(names);
    }
}

impl<T: Describe> Describe for Option<T> {
    fn describe(&self, names: &mut Names) {
        if let Some(item) = self {
            item.describe(names);
        }
    }
}

impl<T: Describe + ?Sized> Describe for Box<T> {
    fn describe(&self, names: &mut Names) {
        (**self).describe(names);
    }
}

/// Says what a structure is made of: `describe!([generics] Type { fields })`.
macro_rules! describe {
    ([$($g:tt)*] $type:ty { $($field:ident),* $(,)? }) => {
        #[cfg(terrane_watch)]
        impl<$($g)*> crate::names::Describe for $type {
            fn describe(&self, names: &mut crate::names::Names) {
                names.leaf(self);
                $(names.field(stringify!($field), &self.$field);)*
            }
        }
    };
}
