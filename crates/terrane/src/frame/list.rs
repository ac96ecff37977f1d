//! A list of frames that needs no memory of its own: the link is in the frames' metadata.

use super::BLOCK_FRAMES;
use super::frames::Frames;
use super::meta::FrameFlags;
use crate::addr::Frame;

/// "No frame", as a link: a machine's last frame number is below it.
pub(super) const NO_FRAME: u32 = u32::MAX;

/// Frames in the order in which they were pushed.
///
/// A frame on a list belongs to the list: its `index` is the link. Dropping a list that is not empty loses its
/// frames: [`defer`](Frames::defer) it or pop them.
///
/// First in, first out, because the frames of a range are pushed in the order in which they were used: freed in
/// this order, the last used ends on top of the CPU's cache, and is the first to be allocated.
#[derive(Debug)]
#[must_use = "frames on a list that is dropped are lost"]
pub struct FrameList {
    head: u32,
    tail: u32,
    len: usize,
}

impl FrameList {
    /// A list without frames.
    #[inline]
    pub const fn new() -> Self {
        Self { head: NO_FRAME, tail: NO_FRAME, len: 0 }
    }

    /// How many frames are on it, those of blocks counted one by one.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when no frame is on it.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts `frame`, which the caller gives up, at the end. O(1).
    #[inline]
    pub fn push(&mut self, frames: &Frames, frame: Frame) {
        // Written by who frees a range: the metadata before is the one it touched a moment ago.
        if self.len == 0 {
            self.head = frame.0;
        } else {
            frames.meta(Frame(self.tail)).set_index(frame.0.into());
        }
        self.tail = frame.0;
        self.len += 1;
    }

    /// Puts the block that starts with `first`, all of whose frames the caller gives up, at the end. It stays together:
    /// its first frame is on the list and speaks for the others. O(1).
    #[inline]
    pub fn push_block(&mut self, frames: &Frames, first: Frame) {
        frames.meta(first).set_flags(FrameFlags::BLOCK);
        self.push(frames, first);
        self.len += BLOCK_FRAMES - 1;
    }

    /// Takes the first frame off; its `index` is 0, the rest of its metadata as it was pushed: with
    /// [`FrameFlags::BLOCK`] it speaks for a block. O(1).
    #[inline]
    pub fn pop(&mut self, frames: &Frames) -> Option<Frame> {
        if self.len == 0 {
            return None;
        }
        let first = Frame(self.head);
        let meta = frames.meta(first);
        self.len -= frames.counts_for(first);
        if self.len == 0 {
            (self.head, self.tail) = (NO_FRAME, NO_FRAME);
        } else {
            self.head = meta.index() as u32;
        }
        meta.set_index(0);
        Some(first)
    }

    /// Moves all of `other` behind the frames of this list. O(1).
    pub fn append(&mut self, frames: &Frames, other: FrameList) {
        if other.len == 0 {
            return;
        }
        if self.len == 0 {
            *self = other;
            return;
        }
        frames.meta(Frame(self.tail)).set_index(other.head.into());
        self.tail = other.tail;
        self.len += other.len;
    }

    /// First frame, last frame and length, of a list that is not empty.
    pub(super) fn into_parts(self) -> Option<(Frame, Frame, usize)> {
        (self.len != 0).then_some((Frame(self.head), Frame(self.tail), self.len))
    }
}

impl Default for FrameList {
    fn default() -> Self {
        Self::new()
    }
}
