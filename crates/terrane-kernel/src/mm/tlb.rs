//! Translations that processors keep, and making them forget.
//!
//! # The protocol
//!
//! A space knows the processors that run it (`running`), and counts its shoot-downs (`generation`). Two pairs of a store and
//! a load, each with a full fence between them (sequentially consistent read-modify-writes), so that one side at least sees the other:
//!
//! | who changes the table | who begins to run the space |
//! |---|---|
//! | changes entries | enters `running` |
//! | counts `generation` up | reads `generation` |
//! | reads `running`, asks those in it | loads the table, and forgets what it kept unless it is of that generation |
//!
//! A processor that is asked drops the range and says so; who asks waits for all answers. So a shoot-down has passed when it returns,
//! and tickets are always [`Ticket::PASSED`](terrane::host::Ticket::PASSED). While it waits it answers others, as does everyone who spins
//! ([`arch::relax`](crate::arch::relax)): interrupts may be off there. There is one request a processor, in its own data, for it waits until it
//! is answered, and is not preempted.
//!
//! A processor that leaves a space takes itself out of `running` after it has loaded another table. With tags (PCID) it keeps the
//! translations, for some spaces, and remembers of which generation they are: the one it read when it began to run the space, and one
//! more for each shoot-down that it did in turn. One that it did out of turn, or did not see at all because it had left, leaves the number behind, and the
//! next time it forgets everything of that space. So a processor that runs something else is never asked.
//!
//! Processors that are idle run no space.

use super::Space;
use crate::arch::{cpu, interrupt, interrupts, percpu, vector};
use core::cell::Cell;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use terrane::host::ShootDown;
use terrane::{AddrRange, PAGE_SIZE};

/// More pages than this are forgotten by forgetting everything.
const PAGES: u64 = 32;
/// Looks at the answers before a processor sleeps until they have come: some 20 us.
const ROUNDS: u32 = 2000;
/// Spaces of which a processor keeps translations.
const TAGS: usize = 6;
/// In `CR3`: keep the translations of this tag.
const KEEP: u64 = 1 << 63;

/// What the kernel keeps with each space.
pub struct Running {
    /// Its number, never used again.
    number: u64,
    /// The processors that run it.
    running: AtomicU64,
    /// Its shoot-downs.
    generation: AtomicU64,
}

static NUMBERS: AtomicU64 = AtomicU64::new(1);

impl Default for Running {
    fn default() -> Self {
        Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            running: AtomicU64::new(0),
            generation: AtomicU64::new(1),
        }
    }
}

impl Running {
    /// True when no processor runs the space.
    pub fn is_nowhere(&self) -> bool {
        self.running.load(Ordering::Acquire) == 0
    }
}

/// Translations under one tag.
#[derive(Clone, Copy)]
struct Tagged {
    space: u64,
    generation: u64,
}

/// A processor's translations: what it runs, what it is asked to forget, and what it asks of others.
pub struct CpuTlb {
    /// The space that runs here; null: none.
    active: Cell<*const Space>,
    /// Its number; 0: none.
    number: Cell<u64>,
    /// Its tag, an index of `tags`.
    tag: Cell<usize>,
    tags: [Cell<Tagged>; TAGS],
    next_tag: Cell<usize>,
    /// Processors that ask, one bit each.
    asked_by: AtomicU64,
    /// What this one asks: the space, the range, the generation, and how many have not answered.
    request: [AtomicU64; 4],
    unanswered: AtomicU64,
    /// It sleeps until they have.
    sleeps: AtomicBool,
    /// Counters, for who asks.
    flushed_all: Cell<u64>,
    flushed_one: Cell<u64>,
    received: Cell<u64>,
}

impl CpuTlb {
    /// Of a processor that runs no space.
    pub const fn new() -> Self {
        Self {
            active: Cell::new(ptr::null()),
            number: Cell::new(0),
            tag: Cell::new(0),
            tags: [const { Cell::new(Tagged { space: 0, generation: 0 }) }; TAGS],
            next_tag: Cell::new(0),
            asked_by: AtomicU64::new(0),
            request: [const { AtomicU64::new(0) }; 4],
            unanswered: AtomicU64::new(0),
            sleeps: AtomicBool::new(false),
            flushed_all: Cell::new(0),
            flushed_one: Cell::new(0),
            received: Cell::new(0),
        }
    }

    /// The space that runs here.
    #[inline]
    pub fn active(&self) -> *const Space {
        self.active.get()
    }

    /// Shoot-downs received, everything forgotten, one page forgotten: since the last call. Interrupts are off.
    pub fn take_counts(&self) -> [u64; 3] {
        [self.received.take(), self.flushed_all.take(), self.flushed_one.take()]
    }

    /// Drops the translations of `range` in the space that runs here, in its shoot-down number `generation`. Interrupts are off.
    fn forget(&self, range: AddrRange, generation: u64) {
        if (range.end - range.start) / PAGE_SIZE <= PAGES {
            for page in (range.start..range.end).step_by(PAGE_SIZE as usize) {
                cpu::drop_translation(page);
                self.flushed_one.set(self.flushed_one.get() + 1);
            }
        } else {
            // SAFETY: the same table, without the mark that keeps translations.
            unsafe { cpu::write_cr3(cpu::read_cr3()) };
            self.flushed_all.set(self.flushed_all.get() + 1);
        }
        let tagged = &self.tags[self.tag.get()];
        let mut now = tagged.get();
        if now.generation + 1 == generation {
            now.generation = generation;
            tagged.set(now);
        }
    }

    /// True when somebody waits for this processor.
    #[inline]
    pub fn is_asked(&self) -> bool {
        self.asked_by.load(Ordering::Relaxed) != 0
    }
}

/// Makes the processors that run the space forget `range`; returns when they have.
pub fn shoot_down(space: &Running, range: AddrRange) -> ShootDown {
    let generation = space.generation.fetch_add(1, Ordering::SeqCst) + 1;
    let running = space.running.load(Ordering::SeqCst);
    let this = percpu::this();
    let me = 1 << this.index;
    let mine = &this.memory.tlb;
    if running & me != 0 {
        interrupts::without(|| mine.forget(range, generation));
    }
    let others = running & !me;
    if others == 0 {
        return ShootDown::PASSED;
    }
    let asked = others.count_ones();
    for (word, value) in mine.request.iter().zip([space.number, range.start, range.end, generation]) {
        word.store(value, Ordering::Relaxed);
    }
    mine.unanswered.store(asked.into(), Ordering::Relaxed);
    let mut rest = others;
    while rest != 0 {
        let other = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        if let Some(data) = percpu::of(other) {
            // Release: with the request. One that is asked already has its interrupt under way.
            if data.memory.tlb.asked_by.fetch_or(me, Ordering::Release) == 0 {
                interrupt(other, vector::SHOOT_DOWN);
            }
        }
    }
    await_answers(mine);
    ShootDown { asked: asked as usize, ..ShootDown::PASSED }
}

/// Waits until all have answered. Not for ever spinning: where the processors are threads of an emulator, the one that is to
/// answer may be waiting for the very processor that this one spins on.
fn await_answers(mine: &CpuTlb) {
    for _ in 0..ROUNDS {
        // Acquire: with the answers.
        if mine.unanswered.load(Ordering::Acquire) == 0 {
            return;
        }
        crate::arch::relax();
    }
    let may_sleep = interrupts::are_enabled();
    while mine.unanswered.load(Ordering::Acquire) != 0 {
        crate::arch::relax();
        if may_sleep {
            interrupts::disable();
            // Whoever gives the last answer sees the mark, or this look sees the answer; the interrupt that follows the mark ends the
            // sleep, as a request of another's does.
            mine.sleeps.store(true, Ordering::SeqCst);
            if mine.unanswered.load(Ordering::SeqCst) != 0 && !mine.is_asked() {
                interrupts::wait_for_one();
            }
            mine.sleeps.store(false, Ordering::Relaxed);
            interrupts::enable();
        }
    }
}

/// Answers those who ask this processor. Interrupts may be on or off.
#[cold]
pub fn answer() {
    interrupts::without(|| {
        let mine = &percpu::this().memory.tlb;
        let mut askers = mine.asked_by.swap(0, Ordering::Acquire);
        while askers != 0 {
            let asker = askers.trailing_zeros() as usize;
            askers &= askers - 1;
            let Some(data) = percpu::of(asker) else { continue };
            let theirs = &data.memory.tlb;
            let [space, start, end, generation] =
                [0, 1, 2, 3].map(|word: usize| theirs.request[word].load(Ordering::Relaxed));
            // Otherwise this processor has left the space, and what it kept is of an older generation.
            if space == mine.number.get() {
                mine.forget(AddrRange { start, end }, generation);
            }
            mine.received.set(mine.received.get() + 1);
            if theirs.unanswered.fetch_sub(1, Ordering::SeqCst) == 1 && theirs.sleeps.load(Ordering::SeqCst) {
                interrupt(asker, vector::RESCHEDULE);
            }
        }
    });
}

/// Runs `space` on this processor from now on; with `None`, the kernel alone.
pub fn activate(space: Option<&Space>) {
    let this = percpu::this();
    let mine = &this.memory.tlb;
    let new = space.map_or(ptr::null(), ptr::from_ref);
    if mine.active.get() == new {
        return;
    }
    let me = 1u64 << this.index;
    // So that `answer` never sees one half.
    interrupts::without(|| {
        let old = mine.active.get();
        if let Some(space) = space {
            let state = space.host_state();
            state.running.fetch_or(me, Ordering::SeqCst);
            let generation = state.generation.load(Ordering::SeqCst);
            let root = space.root_table().address();
            let value = if cpu::has(cpu::Feature::Pcid) {
                let (tag, keep) = mine.tag_for(state.number, generation);
                mine.tag.set(tag);
                root | (tag as u64 + 1) | if keep { KEEP } else { 0 }
            } else {
                root
            };
            // SAFETY: the space has the kernel in its upper half, and does not end while it runs here (`Space::drop`).
            unsafe { cpu::write_cr3(value) };
            mine.number.set(state.number);
        } else {
            // SAFETY: the kernel's own table stays.
            unsafe { cpu::write_cr3(crate::arch::kernel_root()) };
            mine.number.set(0);
        }
        mine.active.set(new);
        if !old.is_null() {
            // SAFETY: it has not ended: this processor was running it until now. Release: after the last use of its tables.
            unsafe { (*old).host_state() }.running.fetch_and(!me, Ordering::Release);
        }
    });
}

impl CpuTlb {
    /// A tag for a space, and whether what is kept under it is of `generation`.
    fn tag_for(&self, space: u64, generation: u64) -> (usize, bool) {
        let found = self.tags.iter().position(|tag| tag.get().space == space);
        let keep = found.is_some_and(|tag| self.tags[tag].get().generation == generation);
        let tag = found.unwrap_or_else(|| {
            let next = self.next_tag.get();
            self.next_tag.set((next + 1) % TAGS);
            next
        });
        self.tags[tag].set(Tagged { space, generation });
        (tag, keep)
    }
}
