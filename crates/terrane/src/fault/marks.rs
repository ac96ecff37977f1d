//! The marks of an entry (accessed, dirty), taken away: by advice, and by whoever ages pages.
//!
//! # What an entry without the mark of having been accessed means
//!
//! A processor sets the mark when it first uses the entry, so an entry that never had it has left no translation behind, and a
//! copy-on-write may skip its shoot-down. An entry from which the mark was *taken* proves nothing. So whoever takes it first
//! sets [`FrameFlags::AGED`] on the frame, while it owns the entry; the copying fault reads the frame's flags after it has taken
//! the entry, and shoots down. The frame keeps the flag until it is freed.
//!
//! # What an entry without the mark of having been stored to means
//!
//! For a page that may be forgotten ([`FrameFlags::LAZYFREE`]): that it was not stored to since. This is true once the
//! translation has been shot down behind the taking of the mark, for a processor that remembers that it has set the mark does
//! not set it again. Stores before that are as good as stores before the advice.
//!
//! # Who may break it
//!
//! Whoever takes the mark of having been accessed from an entry in another way than by `age_entry` and `age_block`; whoever
//! forgets a page for which [`may_vanish`] does not hold while its only entry is out of use (taken, or a migration entry behind its
//! shoot-down).

use crate::addr::Frame;
use crate::frame::{FrameFlags, FrameMeta, Ram};
use crate::host::Host;
use crate::mm::BlockFrames;
use crate::page_table::{EMPTY, Format, Pte, PteFlags, Slot};

/// Which marks to take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Marks {
    /// That the page was accessed.
    Accessed,
    /// That it was accessed and stored to; the page may be forgotten from now on. Of private pages with one mapping only.
    AndDirty,
}

impl Marks {
    fn of_entry(self) -> PteFlags {
        match self {
            Marks::Accessed => PteFlags::ACCESSED,
            Marks::AndDirty => PteFlags::ACCESSED.union(PteFlags::DIRTY),
        }
    }

    fn of_frame(self) -> FrameFlags {
        match self {
            Marks::Accessed => FrameFlags::AGED,
            Marks::AndDirty => FrameFlags::AGED.union(FrameFlags::LAZYFREE),
        }
    }

    /// True when the marks may be taken from an entry of this page. For the owner of the entry.
    fn fit(self, meta: &FrameMeta) -> bool {
        // The page of zeros and device memory, which no one holds, are no use to anybody and stay as they are.
        let kind = meta.flags();
        match self {
            Marks::Accessed => kind.intersects(FrameFlags::ANON | FrameFlags::CACHE),
            Marks::AndDirty => kind.contains(FrameFlags::ANON) && meta.references() == 1,
        }
    }
}

/// True when a private page may be forgotten instead of being written to swap: its program has said so, and has not stored
/// to it since (`MADV_FREE`), or its mapping says so (`MAP_DROPPABLE`). `entry` is what its only entry said before that was taken
/// out of use. A page that is shared is not forgotten, though it may be when the others have gone.
pub fn may_vanish(meta: &FrameMeta, entry: PteFlags) -> bool {
    let flags = meta.flags();
    let stored = mutant!("vanish_though_stored", entry.contains(PteFlags::DIRTY), false);
    let clean = flags.contains(FrameFlags::LAZYFREE) && !stored;
    flags.contains(FrameFlags::ANON)
        && mutant!("vanish_though_shared", meta.references() == 1, true)
        && (flags.contains(FrameFlags::DROPPABLE) || clean)
}

/// Takes marks from an entry of a leaf table, if it is a page they may be taken from. Returns true when a processor may hold a
/// translation that must be shot down.
pub(crate) fn age_entry<H: Host>(ram: &Ram<'_, H>, slot: &Slot, marks: Marks) -> bool {
    let mut rounds = 0;
    loop {
        let raw = slot.wait_not_busy(ram);
        let (frame, flags) = match Pte::decode::<H::Format>(raw) {
            Pte::Page { frame, flags } | Pte::NoAccess { frame, flags } => (frame, flags),
            _ => return false,
        };
        if !ram.frames.contains(frame) {
            return false;
        }
        // Owned: the frame is not freed and used anew while its flags are set.
        let Some(taken) = slot.take(raw) else {
            ram.relax(rounds);
            rounds = rounds.saturating_add(1);
            continue;
        };
        if !take_from_frame(ram.frames.meta(frame), marks) {
            return false;
        }
        let less = flags - marks.of_entry();
        taken.publish(match Pte::decode::<H::Format>(raw) {
            Pte::Page { .. } => H::Format::with_flags(raw, less),
            _ => Pte::NoAccess { frame, flags: less }.encode::<H::Format>(),
        });
        return less != flags;
    }
}

fn take_from_frame(meta: &FrameMeta, marks: Marks) -> bool {
    if !marks.fit(meta) {
        return false;
    }
    // Looked at first: it is set for good.
    if mutant!("aged_untold", !meta.flags().contains(marks.of_frame()), false) {
        meta.set_flags(marks.of_frame());
    }
    true
}

/// The same for a block. `None`, and nothing done, when it has become a table this moment.
pub(crate) fn age_block<H: Host>(ram: &Ram<'_, H>, slot: &Slot, marks: Marks) -> Option<bool> {
    let mut rounds = 0;
    loop {
        let raw = slot.wait_not_busy(ram);
        if raw == EMPTY {
            return Some(false);
        }
        let (frame, flags): (Frame, PteFlags) = Pte::block::<H::Format>(raw)?;
        let Some(taken) = slot.take(raw) else {
            ram.relax(rounds);
            rounds = rounds.saturating_add(1);
            continue;
        };
        let frames = BlockFrames(frame);
        if marks == Marks::AndDirty && !frames.have_one_owner(ram) {
            return Some(false);
        }
        frames.iter().for_each(|frame| {
            take_from_frame(ram.frames.meta(frame), marks);
        });
        let less = flags - marks.of_entry();
        taken.publish(Pte::Block { frame, flags: less }.encode::<H::Format>());
        return Some(less != flags);
    }
}
