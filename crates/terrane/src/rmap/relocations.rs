//! Private pages that are not mapped at their own number: what `mremap` leaves behind.
//!
//! # What it guarantees
//!
//! A private page is named by an anon_vma and a page number, and a walk looks for it at that number in every space of the tree
//! ([`anon_vma`](super::anon_vma)). A move takes a page to another address. For each private page that a space maps, and that no
//! move is just carrying:
//!
//! > its number is the number of the address where the space maps it, or the space has a relocation that leads from the one to the
//! > other.
//!
//! So a walk looks in each space at the page's number, and where the relocations of that space lead from there; a space that
//! has none costs it one load.
//!
//! # How a move keeps that
//!
//! 1. Before its first change it [adds](Relocations::begin) what may be needed: from the numbers of the old addresses to the new
//!    ones, and for every relocation that leads to the old addresses, one that leads on to the new. A relocation too many is
//!    harmless: the walk finds another page there, or none. So adding them is all that can fail.
//! 2. It carries entries, a table's worth at a time, under the lock of the anon_vma tree. A page that only this space maps
//!    (its references are 1, and stay it, because forks are kept away) gets the *number of its new address*. A page that others map
//!    too keeps its number, and its relocation is marked as in use.
//! 3. It [drops](Relocations::end) those that no page needed. So memory that was never shared by a fork, which is nearly all that is
//!    ever moved, leaves no relocation behind.
//!
//! The walk reads the page's number *under the lock of the tree*, since a move may have changed it until then. It meets each page before
//! the move of its table's worth or after it; before, the number is the old one, or the old relocation is still there; after, the new
//! number, or the new relocation is.
//!
//! For a page in swap or under migration nobody can say what number it has. Its relocations are kept.
//!
//! # Fork
//!
//! A child maps its pages where the parent does, under the same numbers, so it gets a copy of the parent's list before the first of
//! its nodes joins a tree.
//!
//! # Why the list stays short
//!
//! A relocation that is kept was in use by a shared page when its move ended. Unmapping a range [forgets](Relocations::forget) what
//! leads there, and a move does so for the addresses it leaves. So there are at most as many as pages that are mapped, and as a rule one
//! for each mapping that was moved after a fork. When there is no memory to cut one in two, it stays whole, which is harmless.
//!
//! # Who may break it
//!
//! Whoever puts a private page at another address than it was, or at a number of its own choice, without these steps. A
//! page that is read back from swap and that only one space maps may get the number of its address; one that several spaces share
//! must get the number back that it had, since only that leads to all of them. Lock order: the list comes after the lock of a tree, and while it is held
//! nothing is waited for but an entry that is taken.

use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::sync::atomic::{AtomicUsize, Ordering};
use alloc::vec::Vec;
use core::ops::Range;

/// Pages with these numbers may be mapped so many pages above.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Relocation {
    numbers: Range<u64>,
    by: i64,
    /// The move that has added it and is not over; 0 for none.
    mover: u64,
    /// Of a move under way: the numbers of pages that need it, from the first to behind the last.
    used: Range<u64>,
}

impl Relocation {
    /// The page numbers of the addresses that it leads to.
    fn target(&self) -> Range<u64> {
        shift(&self.numbers, self.by)
    }

    /// Marks it as in use by a page with this number.
    fn mark(&mut self, number: u64) {
        self.used = match self.used.is_empty() {
            true => number..number + 1,
            false => self.used.start.min(number)..self.used.end.max(number + 1),
        };
    }
}

fn shift(pages: &Range<u64>, by: i64) -> Range<u64> {
    pages.start.wrapping_add_signed(by)..pages.end.wrapping_add_signed(by)
}

fn common(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    a.start.max(b.start)..a.end.min(b.end)
}

fn pages_of(range: AddrRange) -> Range<u64> {
    range.start >> PAGE_SHIFT..range.end >> PAGE_SHIFT
}

/// The relocations of one space.
pub struct Relocations<H: Host> {
    /// How many there are, for those who only want to know whether there are any.
    count: AtomicUsize,
    list: lock_api::Mutex<H::Mutex, List>,
}

struct List {
    entries: Vec<Relocation>,
    movers: u64,
}

/// A move under way. Of the space whose [`Relocations`] gave it.
#[derive(Debug)]
#[must_use = "the relocations of a move that does not end are never dropped"]
pub struct Moving(u64);

impl<H: Host> Relocations<H> {
    /// None.
    pub fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            list: lock_api::Mutex::new(List { entries: Vec::new(), movers: 0 }),
        }
    }

    /// How many there are.
    #[inline]
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// True when all private pages are where their numbers say. For walks: under the lock of the tree whose pages matter.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn change<R>(&self, act: impl FnOnce(&mut List) -> R) -> R {
        let mut list = self.list.lock();
        let result = act(&mut list);
        self.count.store(list.entries.len(), Ordering::Relaxed);
        result
    }

    /// Begins a move of `from`, whose addresses the caller holds, to the addresses from `to` on. Not while pinned.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing has changed.
    pub fn begin(&self, from: AddrRange, to: u64) -> Result<Moving, OutOfMemory> {
        let old = pages_of(from);
        let by = (to >> PAGE_SHIFT).wrapping_sub(old.start) as i64;
        self.change(|list| {
            let leads_here = |entry: &Relocation| !common(&entry.target(), &old).is_empty();
            let more = 1 + list.entries.iter().filter(|entry| leads_here(entry)).count();
            list.entries.try_reserve(more).map_err(|_| OutOfMemory)?;
            list.movers += 1;
            let mover = list.movers;
            for index in 0..list.entries.len() {
                let entry = &list.entries[index];
                let target = common(&entry.target(), &old);
                let (numbers, all) = (shift(&target, entry.by.wrapping_neg()), entry.by.wrapping_add(by));
                // What goes home needs none.
                if !target.is_empty() && all != 0 {
                    list.entries.push(Relocation { numbers, by: all, mover, used: 0..0 });
                }
            }
            if by != 0 {
                list.entries.push(Relocation { numbers: old.clone(), by, mover, used: 0..0 });
            }
            Ok(Moving(mover))
        })
    }

    /// Says that the move carries a page that others map too, with this number, to `addr`. Under the lock of the tree.
    pub fn carry(&self, moving: &Moving, number: u64, addr: u64) {
        let by = (addr >> PAGE_SHIFT).wrapping_sub(number) as i64;
        self.change(|list| {
            let mine = |entry: &&mut Relocation| {
                entry.mover == moving.0 && entry.by == by && entry.numbers.contains(&number)
            };
            match list.entries.iter_mut().find(mine) {
                Some(entry) => mutant!("relocation_unmarked", entry.mark(number), ()),
                None => debug_assert!(by == 0, "a page that no walk could find"),
            }
        });
    }

    /// Says that the move carries to `addr` what will be a page again, with a number that cannot be told. Under the lock of the tree.
    pub fn carry_unknown(&self, moving: &Moving, addr: u64) {
        let page = addr >> PAGE_SHIFT;
        self.change(|list| {
            for entry in list.entries.iter_mut().filter(|entry| entry.mover == moving.0) {
                let number = page.wrapping_add_signed(entry.by.wrapping_neg());
                if entry.numbers.contains(&number) {
                    entry.mark(number);
                }
            }
        });
    }

    /// Ends a move: what no page needs is dropped. What leads to the old addresses is [forgotten](Self::forget) by who unmaps them.
    pub fn end(&self, moving: Moving) {
        self.change(|list| {
            list.entries.retain_mut(|entry| {
                if entry.mover != moving.0 {
                    return true;
                }
                entry.mover = 0;
                entry.numbers = core::mem::replace(&mut entry.used, 0..0);
                !entry.numbers.is_empty()
            });
            if list.entries.is_empty() {
                // As a rule for good.
                list.entries = Vec::new();
            }
        });
    }

    /// Forgets what leads into `range`, whose pages are gone. By who holds the range. Not while pinned.
    #[inline]
    pub fn forget(&self, range: AddrRange) {
        if !self.is_empty() {
            self.forget_some(range);
        }
    }

    #[cold]
    fn forget_some(&self, range: AddrRange) {
        let gone = pages_of(range);
        self.change(|list| {
            let mut index = 0;
            while index < list.entries.len() {
                let Relocation { numbers, by, mover, .. } = list.entries[index].clone();
                let target = common(&shift(&numbers, by), &gone);
                // Those of a move under way lead to its own addresses, which nobody else unmaps.
                if target.is_empty() || mover != 0 {
                    index += 1;
                    continue;
                }
                let out = shift(&target, by.wrapping_neg());
                let (low, high) = (numbers.start..out.start, out.end..numbers.end);
                match (low.is_empty(), high.is_empty()) {
                    (true, true) => {
                        list.entries.swap_remove(index);
                        continue;
                    }
                    (false, true) => list.entries[index].numbers = low,
                    (true, false) => list.entries[index].numbers = high,
                    (false, false) => {
                        if list.entries.try_reserve(1).is_ok() {
                            list.entries[index].numbers = low;
                            list.entries.push(Relocation { numbers: high, by, mover, used: 0..0 });
                        }
                    }
                }
                index += 1;
            }
        });
    }

    /// Gets those of `parent`, a space that is forked and holds still, before a page of it is shared. Not while pinned.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn copy_from(&self, parent: &Self) -> Result<(), OutOfMemory> {
        if parent.is_empty() {
            return Ok(());
        }
        let theirs = parent.list.lock();
        self.change(|list| {
            list.entries.try_reserve_exact(theirs.entries.len()).map_err(|_| OutOfMemory)?;
            mutant!("relocation_not_inherited", list.entries.extend(theirs.entries.iter().cloned()), ());
            Ok(())
        })
    }

    /// Calls `visit` with each address but its own where a page with this number may be, each once. Under the lock of the
    /// tree that the page belongs to; `visit` may wait for entries that are taken, and for nothing else. Not while pinned.
    #[inline]
    pub fn for_each_place(&self, number: u64, mut visit: impl FnMut(u64)) {
        if self.is_empty() {
            return;
        }
        let list = self.list.lock();
        for (index, entry) in list.entries.iter().enumerate() {
            let seen = |before: &Relocation| before.by == entry.by && before.numbers.contains(&number);
            if entry.numbers.contains(&number) && !list.entries[..index].iter().any(seen) {
                visit(number.wrapping_add_signed(entry.by) << PAGE_SHIFT);
            }
        }
    }
}

impl<H: Host> Default for Relocations<H> {
    fn default() -> Self {
        Self::new()
    }
}

describe!([H: Host] Relocations<H> { count, list });

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestHost;
    use alloc::collections::BTreeMap;
    use alloc::vec;

    fn places(list: &Relocations<TestHost>, number: u64) -> Vec<u64> {
        let mut found = vec![number];
        list.for_each_place(number, |addr| found.push(addr >> PAGE_SHIFT));
        found
    }

    fn bytes(pages: Range<u64>) -> AddrRange {
        AddrRange::new(pages.start << PAGE_SHIFT, pages.end << PAGE_SHIFT)
    }

    /// Moves shared pages about in a plain map of address to number, and checks that each can be found where it is.
    #[test]
    fn every_page_is_found_after_any_moves() {
        for seed in 0..40u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut random = |below: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % below
            };
            let list = Relocations::<TestHost>::new();
            let mut pages: BTreeMap<u64, u64> = BTreeMap::new();
            for _ in 0..200 {
                let (from, len) = (random(64), 1 + random(8));
                let (old, to) = (from..from + len, random(64) + 100 * random(2));
                match random(8) {
                    0 => {
                        pages.extend(old.map(|page| (page, page)));
                    }
                    1 => {
                        pages.retain(|page, _| !old.contains(page));
                        list.forget(bytes(old));
                    }
                    _ if to + len > from && to < from + len => {}
                    _ => {
                        let moving = list.begin(bytes(old.clone()), to << PAGE_SHIFT).unwrap();
                        // What lay there is unmapped.
                        pages.retain(|page, _| !(to..to + len).contains(page));
                        list.forget(bytes(to..to + len));
                        for page in old.clone() {
                            let Some(number) = pages.remove(&page) else { continue };
                            let new = page - from + to;
                            let (addr, shared) = (new << PAGE_SHIFT, random(3) > 0);
                            if shared {
                                list.carry(&moving, number, addr);
                            }
                            pages.insert(new, if shared { number } else { new });
                        }
                        list.forget(bytes(old));
                        list.end(moving);
                    }
                }
                for (&page, &number) in &pages {
                    let found = places(&list, number);
                    let times = found.iter().filter(|&&place| place == page).count();
                    assert_eq!(times, 1, "seed {seed}: {number} at {page}: {:?}", list.list.lock().entries);
                }
                assert!(list.len() <= pages.len().max(1) * 2, "{} for {} pages", list.len(), pages.len());
            }
            list.forget(bytes(0..1000));
            assert!(list.is_empty());
        }
    }

    #[test]
    fn what_was_never_shared_leaves_nothing_behind() {
        let list = Relocations::<TestHost>::new();
        let moving = list.begin(bytes(10..20), 100 << PAGE_SHIFT).unwrap();
        assert_eq!(places(&list, 12), [12, 102]);
        list.end(moving);
        assert!(list.is_empty() && places(&list, 12) == [12]);
    }

    #[test]
    fn what_cannot_be_told_is_kept_and_a_child_has_it_too() {
        let list = Relocations::<TestHost>::new();
        let moving = list.begin(bytes(10..20), 100 << PAGE_SHIFT).unwrap();
        list.carry_unknown(&moving, 103 << PAGE_SHIFT);
        list.end(moving);
        assert_eq!((places(&list, 13), places(&list, 14)), (vec![13, 103], vec![14]));
        let child = Relocations::<TestHost>::new();
        child.copy_from(&list).unwrap();
        let back = list.begin(bytes(100..110), 10 << PAGE_SHIFT).unwrap();
        list.carry(&back, 13, 13 << PAGE_SHIFT);
        list.forget(bytes(100..110));
        list.end(back);
        assert!(list.is_empty() && places(&child, 13) == [13, 103]);
    }
}
