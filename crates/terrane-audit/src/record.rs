//! Recording what a thread writes.
//!
//! A failed compare-and-swap counts as a write: it takes the line for itself all the same. What is not an atomic of the
//! library is recorded where the library says so ([`note_write`](terrane::sync::atomic::note_write)); the bytes of pages,
//! which programs write, and what a memory allocator does inside are not recorded.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::Location;
use terrane::sync::atomic::{Access, Op, install};

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// A place in the source that writes, and how.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Site {
    /// The file, from the root of the workspace.
    pub file: &'static str,
    /// The line in it.
    pub line: u32,
    /// "stores", "changes" (read-modify-write) or "writes" (not atomic).
    pub verb: &'static str,
}

/// What one thread wrote: for each address the places that wrote it, and how often.
#[derive(Clone, Default, Debug)]
pub struct Recording {
    /// Who, in reports.
    pub who: String,
    writes: BTreeMap<usize, BTreeMap<Site, u64>>,
}

thread_local! {
    static CURRENT: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

fn hook(access: &Access) {
    if !access.writes() {
        return;
    }
    CURRENT.with_borrow_mut(|current| {
        let Some(current) = current else { return };
        // Each line of a longer write.
        let mut at = access.addr;
        let end = access.addr + access.size.max(1);
        while at < end {
            current.add(at, access.op, access.site);
            at = (at | (LINE - 1)) + 1;
        }
    });
}

/// Runs `act` and returns what this thread wrote meanwhile, with what `act` returned.
pub fn record<R>(who: impl Into<String>, act: impl FnOnce() -> R) -> (Recording, R) {
    CURRENT.replace(Some(Recording { who: who.into(), ..Recording::default() }));
    let before = install(Some(hook));
    let result = act();
    install(before);
    (CURRENT.take().unwrap_or_default(), result)
}

impl Recording {
    fn add(&mut self, addr: usize, op: Op, site: &'static Location<'static>) {
        let verb = match op {
            Op::Rmw => "changes",
            Op::Note => "writes",
            _ => "stores",
        };
        let site = Site { file: site.file(), line: site.line(), verb };
        *self.writes.entry(addr).or_default().entry(site).or_default() += 1;
    }

    /// True when nothing was written.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// Adds what `other` wrote.
    pub fn merge(&mut self, other: Recording) {
        for (addr, sites) in other.writes {
            for (site, count) in sites {
                *self.writes.entry(addr).or_default().entry(site).or_default() += count;
            }
        }
    }

    /// The lines written, as addresses, each once, ascending.
    pub fn lines(&self) -> impl Iterator<Item = usize> + '_ {
        let mut last = None;
        self.writes
            .keys()
            .map(|addr| addr & !(LINE - 1))
            .filter(move |line| last.replace(*line) != Some(*line))
    }

    /// The addresses written in a line, with the places and how often.
    pub fn writes_in(&self, line: usize) -> impl Iterator<Item = (usize, Site, u64)> + '_ {
        let sites = self.writes.range(line..line + LINE);
        sites.flat_map(|(addr, sites)| sites.iter().map(|(site, count)| (*addr, *site, *count)))
    }
}
