//! Moving pages to other frames: for compaction, and where memory is nearer to some processors than to others.

use super::{anon, file};
use crate::addr::Frame;
use crate::frame::FrameFlags;
use crate::host::Host;
use crate::machine::Cpu;
use crate::stats::Counter;

/// Moves the page in `frame`, private or of an object, used or not, locked in memory or not, to the frame `to`, which the caller
/// has from the allocator. Every byte stays what it is, stores under way included; faults on the page wait for a moment, others not. The
/// old frame is free afterwards, or soon. False when the page stays where it is: the frame holds none that could be found, somebody else is at
/// work on it, or part of a huge page; then `to` is still the caller's. Blocks on locks of the reverse mapping; not while pinned.
pub fn migrate<H: Host>(cpu: &Cpu<H>, frame: Frame, to: Frame) -> bool {
    let flags = cpu.machine().frames().meta(frame).flags();
    let moved = if flags.contains(FrameFlags::ANON) {
        anon::migrate(cpu, frame, to)
    } else if flags.contains(FrameFlags::CACHE) {
        file::migrate(cpu, frame, to)
    } else {
        false
    };
    let pin = cpu.pin();
    let counter = if moved { Counter::PgMigrate } else { Counter::PgMigrateFail };
    cpu.machine().stats().count(&pin, counter);
    moved
}
