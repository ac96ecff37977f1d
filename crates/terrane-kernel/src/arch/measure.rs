//! What a page fault costs that does nothing, on one processor and on all: the bound of what any kernel can show on this machine.
//!
//! `measure=traps` on the command line takes these figures before the first program runs. Each processor reads from an address that is not mapped;
//! the gate of page faults leads to three instructions that skip the load, so that what is left is the machine's part: the look at the tables, the exception, and
//! the `iretq`. Then the same with more and more of a real fault in it:
//!
//! | figure | besides |
//! |---|---|
//! | `empty` | nothing |
//! | `own_lock` | a lock for reading, taken and given back, that no other processor uses |
//! | `one_lock` | the same lock for all processors: what the classic way of locking adds to a fault |
//! | `zeroed_own_lock`, `zeroed_one_lock` | the same, and a page is zeroed, as a first touch does |
//!
//! So `one_lock / own_lock` is the most that leaving out the lock can gain where there is nothing else in a fault, and the second pair the most that it
//! can gain at a first touch. The figures are the least of some rounds, of the slowest processor in each.

use super::{clock, cpu_count, percpu, relax, trap};
use crate::sync::RawRwLock;
use crate::{options, report};
use alloc::boxed::Box;
use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use lock_api::RawRwLock as _;

/// Faults of a processor in a round. Few, so that in some rounds nothing else takes the processors away from the emulator.
const FAULTS: u64 = 400;
const ROUNDS: usize = 150;

global_asm!(
    r#"
    .pushsection .text.entry, "ax", @progbits
    .balign 16
    .global empty_page_fault
empty_page_fault:
    add rsp, 8
    add qword ptr [rsp], 2      # the load
    iretq
    .popsection
"#
);

unsafe extern "C" {
    fn empty_page_fault();
}

#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    /// None, its own, everyone's.
    lock: Option<bool>,
    zeroes: bool,
}

const KINDS: [Kind; 5] = [
    Kind { name: "empty", lock: None, zeroes: false },
    Kind { name: "own_lock", lock: Some(false), zeroes: false },
    Kind { name: "one_lock", lock: Some(true), zeroes: false },
    Kind { name: "zeroed_own_lock", lock: Some(false), zeroes: true },
    Kind { name: "zeroed_one_lock", lock: Some(true), zeroes: true },
];

/// A lock in cache lines of its own.
#[repr(align(128))]
struct Apart(RawRwLock);

static ONE_LOCK: Apart = Apart(RawRwLock::INIT);
/// The part that runs, from 1 on; `OVER` ends it.
static PART: AtomicUsize = AtomicUsize::new(0);
const OVER: usize = usize::MAX;
/// Processors that have come to the part, and that are through.
static ARRIVED: AtomicUsize = AtomicUsize::new(0);
static THROUGH: AtomicUsize = AtomicUsize::new(0);
/// The longest time of the part.
static SLOWEST: AtomicU64 = AtomicU64::new(0);

/// True when the command line asks for it.
fn is_wanted() -> bool {
    options::value("measure") == Some("traps")
}

/// A page of a processor's own.
#[repr(align(4096))]
struct Page([u8; 4096]);

/// One processor's share of a part: takes its time.
fn run(kind: Kind, page: &mut Page, own: &Apart) {
    let lock = kind.lock.map(|shared| if shared { &ONE_LOCK.0 } else { &own.0 });
    let began = clock::now();
    for _ in 0..FAULTS {
        if let Some(lock) = lock {
            lock.lock_shared();
        }
        // SAFETY: the load faults, and the gate of this measurement skips it; it is two bytes long.
        unsafe { asm!(".byte 0x8b, 0x00", inout("rax") 0u64 => _, options(preserves_flags)) };
        if kind.zeroes {
            page.0.fill(0);
            core::hint::black_box(&mut page.0);
        }
        if let Some(lock) = lock {
            // SAFETY: taken above.
            unsafe { lock.unlock_shared() };
        }
    }
    SLOWEST.fetch_max(clock::now() - began, Ordering::Relaxed);
}

/// For the other processors, before they idle: does their shares until all is measured.
pub fn take_part() {
    if !is_wanted() {
        return;
    }
    let (mut page, own) = (Box::new(Page([0; 4096])), Apart(RawRwLock::INIT));
    let mut last = 0;
    loop {
        let part = PART.load(Ordering::Acquire);
        if part == OVER {
            return;
        }
        if part == last {
            relax();
            continue;
        }
        last = part;
        // Odd parts are of the first processor alone.
        if part.is_multiple_of(2) {
            meet();
            run(KINDS[(part / 2 - 1) % KINDS.len()], &mut page, &own);
            THROUGH.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Waits until all processors have come here.
fn meet() {
    ARRIVED.fetch_add(1, Ordering::AcqRel);
    while ARRIVED.load(Ordering::Acquire) < cpu_count() {
        relax();
    }
}

/// On the first processor, with interrupts off: takes the figures if the command line asks for them, and reports them as `@stat`.
pub fn measure() {
    if !is_wanted() {
        return;
    }
    debug_assert_eq!(percpu::this().index, 0);
    let before = trap::exchange_page_fault_gate(empty_page_fault as *const () as u64);
    let (mut page, own) = (Box::new(Page([0; 4096])), Apart(RawRwLock::INIT));
    let mut least = [[u64::MAX; 2]; KINDS.len()];
    for _ in 0..ROUNDS {
        for (kind, least) in KINDS.into_iter().zip(&mut least) {
            for (least, all) in least.iter_mut().zip([false, true]) {
                SLOWEST.store(0, Ordering::Relaxed);
                ARRIVED.store(0, Ordering::Relaxed);
                THROUGH.store(0, Ordering::Relaxed);
                PART.fetch_add(1, Ordering::Release);
                if all {
                    meet();
                }
                run(kind, &mut page, &own);
                while all && THROUGH.load(Ordering::Acquire) + 1 < cpu_count() {
                    relax();
                }
                *least = SLOWEST.load(Ordering::Relaxed).min(*least);
            }
        }
    }
    PART.store(OVER, Ordering::Release);
    trap::exchange_page_fault_gate(before);
    for (kind, least) in KINDS.iter().zip(least) {
        for (least, cpus) in least.into_iter().zip([1, cpu_count()]) {
            report!("@stat trap_{}_cpus_{cpus}_ns {}", kind.name, least / FAULTS);
        }
    }
}
