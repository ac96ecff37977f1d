//! Kernel stacks.
//!
//! A stack that overflows must not go on into somebody else's memory. So the stacks of threads have addresses of their own, apart
//! from the direct map: slots of [`SLOT`] bytes, of which the lowest page is never mapped. A push into it is a page fault that
//! finds no stack either, hence a double fault, which has a stack of its own and ends the machine with a backtrace.
//!
//! A slot that has once got memory keeps it, and goes from thread to thread; the table of the slots only grows, and is part of all spaces, by one entry of
//! their root tables. So no translation ever changes, no processor has one to forget, and a new thread needs no memory for its stack as a
//! rule. There are as many stacks as there were threads at one time, and no more than take half of the kernel's heap.

use crate::mm::{direct, heap_bytes, physical};
use crate::sync::SpinLock;
use core::alloc::Layout;
use core::ptr;
use terrane::{OutOfMemory, PAGE_SIZE};

/// Bytes of a thread's kernel stack. What has been used at most is reported with `stat=1`; code that is not optimised takes more.
const SIZE: usize = if cfg!(debug_assertions) { 124 << 10 } else { 28 << 10 };
/// Bytes of addresses for one, with the page that is not mapped.
const SLOT: usize = SIZE + PAGE_SIZE as usize;
/// Where the slots begin: the addresses of one entry of the root table.
const BASE: u64 = 0xffff_c000_0000_0000;
const ROOT_ENTRY: usize = (BASE >> 39 & 511) as usize;
/// In a table: present, writable.
const TABLE: u64 = 3;
/// In the last table: present, writable, the same in all spaces, not code.
const PAGE: u64 = 1 << 63 | 0x103;
/// What an unused word of a stack holds, where somebody wants to know how much of it was used.
const UNUSED: u64 = 0x7465_7272_616e_6521;

/// Memory for a stack without a guard, aligned to a page; where it begins.
pub fn allocate(size: usize) -> Result<*mut u8, OutOfMemory> {
    let layout = Layout::from_size_align(size, 4096).map_err(|_| OutOfMemory)?;
    // SAFETY: the layout has a size.
    let base = unsafe { alloc::alloc::alloc(layout) };
    if base.is_null() { Err(OutOfMemory) } else { Ok(base) }
}

/// A table without entries; where it is in physical memory.
fn new_table() -> Result<u64, OutOfMemory> {
    let table = allocate(PAGE_SIZE as usize)?;
    // SAFETY: just allocated.
    unsafe { table.write_bytes(0, PAGE_SIZE as usize) };
    Ok(physical(table))
}

struct Slots {
    /// Slots that have memory: the first ones.
    made: usize,
    /// Of those, the first that nobody uses, and one more; 0: none. It holds the next such number at its start.
    free: usize,
    /// Stacks are filled with [`UNUSED`] before they are used.
    fill: bool,
}

static SLOTS: SpinLock<Slots> = SpinLock::new(Slots { made: 0, free: 0, fill: false });

/// Prepares the table of the slots. On the first processor, before there is a space. `fill`: to tell later how much was used.
///
/// # Errors
/// When there is no memory.
pub fn set_up(fill: bool) -> Result<(), OutOfMemory> {
    let table = new_table()? | TABLE;
    // SAFETY: the kernel's root table, which has no such entry yet.
    unsafe { direct(super::kernel_root()).cast::<u64>().add(ROOT_ENTRY).write_volatile(table) };
    SLOTS.lock().fill = fill;
    Ok(())
}

/// Where slot `number` begins.
fn slot(number: usize) -> u64 {
    BASE + (number * SLOT) as u64
}

/// Maps the page at `addr`, which is not mapped, to `frame`. Under the lock.
fn map(addr: u64, frame: u64) -> Result<(), OutOfMemory> {
    let mut table = super::kernel_root();
    for level in [39, 30, 21] {
        // SAFETY: a table of the kernel's; only the holder of the lock changes those of the slots.
        let entry = unsafe { direct(table).cast::<u64>().add((addr >> level & 511) as usize) };
        // SAFETY: as above.
        unsafe {
            if entry.read() == 0 {
                entry.write_volatile(new_table()? | TABLE);
            }
            table = entry.read() & 0xf_ffff_ffff_f000;
        }
    }
    // SAFETY: as above. What was not mapped has no translation anywhere that would have to be forgotten.
    unsafe { direct(table).cast::<u64>().add((addr >> 12 & 511) as usize).write_volatile(frame | PAGE) };
    Ok(())
}

impl Slots {
    fn take(&mut self) -> Result<u64, OutOfMemory> {
        if self.free != 0 {
            let bottom = slot(self.free - 1) + PAGE_SIZE;
            // SAFETY: a stack that nobody uses; `put_back` wrote it.
            self.free = unsafe { (bottom as *const u64).read() } as usize;
            // SAFETY: as above: the word is an unused one again.
            unsafe { (bottom as *mut u64).write(UNUSED) };
            return Ok(bottom);
        }
        if (self.made + 1) * SIZE > heap_bytes() / 2 {
            return Err(OutOfMemory);
        }
        let bottom = slot(self.made) + PAGE_SIZE;
        let memory = allocate(SIZE)?;
        for page in (0..SIZE).step_by(PAGE_SIZE as usize) {
            if let Err(error) = map(bottom + page as u64, physical(memory) + page as u64) {
                // Only a table may have been missing, and a slot does not lie in two: nothing is mapped yet.
                // SAFETY: allocated above with this layout.
                unsafe { alloc::alloc::dealloc(memory, Layout::from_size_align_unchecked(SIZE, 4096)) };
                return Err(error);
            }
        }
        self.made += 1;
        if self.fill {
            for word in 0..SIZE / 8 {
                // SAFETY: the stack's own memory, mapped above.
                unsafe { (bottom as *mut u64).add(word).write(UNUSED) };
            }
        }
        Ok(bottom)
    }

    fn put_back(&mut self, bottom: u64) {
        // SAFETY: the stack's lowest word: nobody uses the stack any more.
        unsafe { (bottom as *mut u64).write(self.free as u64) };
        self.free = ((bottom - BASE) as usize / SLOT) + 1;
    }
}

// A slot's pages have one last table.
const _: () = assert!((2 << 20) % SLOT == 0);

/// The stack on which the kernel runs for one thread.
pub struct KernelStack(u64);

impl KernelStack {
    /// A new one.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn try_new() -> Result<Self, OutOfMemory> {
        SLOTS.lock().take().map(Self)
    }

    /// The address behind its last byte, aligned to 16: where it begins to be used.
    #[inline]
    pub fn top(&self) -> u64 {
        self.0 + SIZE as u64
    }

    /// Where a program's registers are kept while the kernel runs for it: at the top.
    #[inline]
    pub fn user_frame(&self) -> *mut super::TrapFrame {
        (self.top() - size_of::<super::TrapFrame>() as u64) as *mut super::TrapFrame
    }
}

impl Drop for KernelStack {
    fn drop(&mut self) {
        SLOTS.lock().put_back(self.0);
    }
}

/// True when `addr` is in the page below a stack: the stack has overflowed.
pub fn is_guard(addr: u64) -> bool {
    addr >> 39 == BASE >> 39 && (addr - BASE) as usize % SLOT < PAGE_SIZE as usize
}

/// How many stacks there are, and how many bytes of one have been used at most; if they were [filled](set_up).
pub fn most_used() -> (usize, usize) {
    let slots = SLOTS.lock();
    let most = (0..slots.made).map(|number| {
        let bottom = (slot(number) + PAGE_SIZE) as *const u64;
        // The first word may be the list's.
        // SAFETY: a stack's own memory; that it may change meanwhile does no harm to a figure.
        let unused =
            (1..SIZE / 8).take_while(|&word| unsafe { ptr::read_volatile(bottom.add(word)) } == UNUSED);
        SIZE - 8 - unused.count() * 8
    });
    (slots.made, if slots.fill { most.max().unwrap_or(0) } else { 0 })
}
