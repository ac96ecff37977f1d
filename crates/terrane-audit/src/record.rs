//! Recording what a thread writes, and what it reads.
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
    /// "reads", "stores", "changes" (read-modify-write) or "writes" (not atomic).
    pub verb: &'static str,
}

impl Site {
    /// False for a place that only reads.
    pub fn writes(&self) -> bool {
        self.verb != READS
    }
}

const READS: &str = "reads";

/// What one thread did: for each address the places that wrote or read it, and how often.
#[derive(Clone, Default, Debug)]
pub struct Recording {
    /// Who, in reports.
    pub who: String,
    /// Whether reads are recorded.
    reads: bool,
    sites: BTreeMap<usize, BTreeMap<Site, u64>>,
}

thread_local! {
    static CURRENT: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

fn hook(access: &Access) {
    if matches!(access.op, Op::Fence | Op::Spin) {
        return;
    }
    CURRENT.with_borrow_mut(|current| {
        let Some(current) = current else { return };
        if !access.writes() && !current.reads {
            return;
        }
        // Each line of a longer one.
        let mut at = access.addr;
        let end = access.addr + access.size.max(1);
        while at < end {
            current.add(at, access.op, access.site);
            at = (at | (LINE - 1)) + 1;
        }
    });
}

/// Runs `act` and returns what this thread wrote meanwhile, and read if that is asked for, with what `act` returned.
pub fn record<R>(who: impl Into<String>, reads: bool, act: impl FnOnce() -> R) -> (Recording, R) {
    CURRENT.replace(Some(Recording { who: who.into(), reads, ..Recording::default() }));
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
            Op::Store => "stores",
            _ => READS,
        };
        let site = Site { file: site.file(), line: site.line(), verb };
        *self.sites.entry(addr).or_default().entry(site).or_default() += 1;
    }

    /// True when nothing was written.
    pub fn is_empty(&self) -> bool {
        !self.sites.values().flat_map(BTreeMap::keys).any(Site::writes)
    }

    /// The lines that were written (true) or only read (false), by address.
    pub fn lines(&self) -> BTreeMap<usize, bool> {
        let mut lines = BTreeMap::new();
        for (addr, sites) in &self.sites {
            *lines.entry(addr & !(LINE - 1)).or_default() |= sites.keys().any(Site::writes);
        }
        lines
    }

    /// What was done to the addresses in a line, with the places and how often.
    pub fn in_line(&self, line: usize) -> impl Iterator<Item = (usize, Site, u64)> + '_ {
        let sites = self.sites.range(line..line + LINE);
        sites.flat_map(|(addr, sites)| sites.iter().map(|(site, count)| (*addr, *site, *count)))
    }
}
