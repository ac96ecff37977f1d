//! Which neighbouring VMAs are one mapping, as in Linux.
//!
//! Two VMAs merge when the second begins where the first ends, shows the object where the first stops showing it,
//! has the same attributes (but for [sticky](VmFlags::STICKY) ones, which the merged VMA has if one of the two had them), and their private pages can be found through one anon_vma: one of the two has none
//! yet, and the other's has no fork above it, or both have the same.

use crate::addr::PAGE_SHIFT;
use crate::host::Host;
use crate::object::Object;
use crate::sync::Shared;
use crate::vma::{VmFlags, Vma};

/// What decides whether a mapping that is about to be made continues a VMA.
pub struct Candidate<'a, H: Host> {
    /// Its attributes.
    pub flags: VmFlags,
    /// What it shows.
    pub object: Option<&'a Shared<Object<H>>>,
    /// Its first page of the object.
    pub pgoff: u64,
    /// Its length in pages.
    pub pages: u64,
}

fn same_object<H: Host>(a: Option<&Shared<Object<H>>>, b: Option<&Shared<Object<H>>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => Shared::ptr_eq(a, b),
        _ => false,
    }
}

fn pages<H: Host>(vma: &Vma<H>) -> u64 {
    (vma.end() - vma.start()) >> PAGE_SHIFT
}

/// True when `high` begins where `low` ends and shows the object where `low` stops, whatever the attributes.
fn continues<H: Host>(low: &Vma<H>, high: &Vma<H>) -> bool {
    low.end() == high.start()
        && low.start() < low.end()
        && same_object(low.object(), high.object())
        && low.pgoff().wrapping_add(pages(low)) == high.pgoff()
}

/// True when only the protection of the two may differ.
pub fn alike_but_for_prot<H: Host>(low: &Vma<H>, high: &Vma<H>) -> bool {
    let differ = (low.flags() ^ high.flags()).difference(VmFlags::PROT.union(VmFlags::STICKY));
    continues(low, high) && differ.is_empty()
}

/// True when the private pages of the two can be found through one anon_vma.
fn anon_fits<H: Host>(low: &Vma<H>, high: &Vma<H>) -> bool {
    match (low.anon_vma(), high.anon_vma()) {
        (None, None) => true,
        (Some(only), None) | (None, Some(only)) => only.is_root(),
        (Some(a), Some(b)) => core::ptr::eq(a, b) && low.kin() == high.kin(),
    }
}

/// True when the two can become one VMA. Under the locks of their leaves, with both `anon` pointers frozen if they are to
/// stay as they are.
pub fn can_merge<H: Host>(low: &Vma<H>, high: &Vma<H>) -> bool {
    low.flags().merges_with(high.flags()) && continues(low, high) && anon_fits(low, high)
}

/// The same where `low` has just grown up to `high`. As in Linux it takes in what was never stored to, whatever forks lie above it.
pub fn can_take_in<H: Host>(low: &Vma<H>, high: &Vma<H>) -> bool {
    let fits = high.anon_vma().is_none() || anon_fits(low, high);
    low.flags().merges_with(high.flags()) && continues(low, high) && fits
}

impl<H: Host> Candidate<'_, H> {
    fn alike(&self, vma: &Vma<H>) -> bool {
        vma.flags().merges_with(self.flags)
            && same_object(vma.object(), self.object)
            && vma.anon_vma().is_none_or(|anon| anon.is_root())
    }

    /// True when the mapping, placed where `low` ends, continues it.
    pub fn extends_up(&self, low: &Vma<H>) -> bool {
        self.alike(low) && low.pgoff().wrapping_add(pages(low)) == self.pgoff
    }

    /// True when the mapping, placed to end where `high` starts, is continued by it.
    pub fn extends_down(&self, high: &Vma<H>) -> bool {
        self.alike(high) && self.pgoff.wrapping_add(self.pages) == high.pgoff()
    }
}
