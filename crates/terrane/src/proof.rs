//! Doors for the models (`docs/proof.md`): steps of the library that are nobody else's to take. Only built for them.

use crate::addr::Frame;
use crate::host::Host;
use crate::machine::Cpu;
use crate::object::Object;
use crate::reclaim::{self, Verdict, Why};
use crate::sync::Pin;

/// Looks at one frame as reclaim does that is short of memory; true when its page is gone. Not while pinned.
pub fn reclaim<H: Host>(cpu: &Cpu<H>, frame: Frame) -> bool {
    reclaim::look(cpu, frame, Why::Direct) == Verdict::Freed
}

/// Step one of taking page `index` out of an object; see [`object`](crate::object).
pub fn begin_leaving<H: Host>(object: &Object<H>, pin: &Pin<'_>, index: u64, frame: Frame) -> bool {
    object.begin_leaving(pin, index, frame)
}
