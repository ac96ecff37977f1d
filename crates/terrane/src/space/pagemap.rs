//! What is behind each page of a range: for `/proc/PID/pagemap`.

use super::AddressSpace;
use crate::addr::{AddrRange, Frame, PAGE_SHIFT, PAGE_SIZE, TABLE_ENTRIES, is_page_aligned};
use crate::error::Error;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::rss::PageKind;
use crate::page_table::{Level, PAYLOAD_USER_WP, Pte, PteFlags, Slot};
use core::ops::ControlFlow;

/// A page of a program's memory, as the page table has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageState {
    /// The frame that is mapped, also where nobody may touch it.
    pub frame: Option<Frame>,
    /// The page is in swap.
    pub swapped: bool,
    /// Of an object, or shared memory: not private.
    pub shared: bool,
    /// Nobody else maps a private page.
    pub exclusive: bool,
    /// A handler of user faults has protected it against stores.
    pub protected: bool,
    /// A guard.
    pub guard: bool,
}

impl<H: Host> AddressSpace<H> {
    /// Looks at `pages.len()` pages from `addr` on; those where nothing is mapped are [`PageState::default`]. Each is as it is at some moment of
    /// the call. O(pages); not while pinned.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned address, or addresses beyond the space.
    pub fn pagemap(&self, cpu: &Cpu<H>, addr: u64, pages: &mut [PageState]) -> Result<(), Error> {
        let end = addr.checked_add((pages.len() as u64) << PAGE_SHIFT);
        if !is_page_aligned(addr) || end.is_none_or(|end| end > self.config().range.end) {
            return Err(Error::Invalid);
        }
        pages.fill(PageState::default());
        let mut at = addr;
        for chunk in pages.chunks_mut(TABLE_ENTRIES) {
            let part = AddrRange::new(at, at + ((chunk.len() as u64) << PAGE_SHIFT));
            self.look(cpu, part, chunk);
            at = part.end;
        }
        Ok(())
    }

    fn look(&self, cpu: &Cpu<H>, part: AddrRange, pages: &mut [PageState]) {
        let mm = self.mm();
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        let of_frame = |frame: Frame, flags: PteFlags| {
            let private = PageKind::of(&ram, frame) == Some(PageKind::Anon);
            PageState {
                frame: Some(frame),
                shared: !private && frame != mm.machine.zero_frame(),
                exclusive: private && ram.frames.meta(frame).references() == 1,
                protected: flags.contains(PteFlags::USER_WP),
                ..PageState::default()
            }
        };
        let _ = mm.page_table.for_each_run(&ram, part, |run| {
            if run.level == Level::BLOCK {
                let block = AddrRange::new(run.addr, run.addr + run.level.span()).intersection(part);
                let raw = run.slots.first().map(|slot| slot.wait_not_busy(&ram));
                if let Some((first, flags)) = raw.and_then(Pte::block::<H::Format>) {
                    for n in 0..block.pages() {
                        let addr = block.start + n * PAGE_SIZE;
                        let frame = Frame(first.0 + ((addr - run.addr) >> PAGE_SHIFT) as u32);
                        pages[((addr - part.start) >> PAGE_SHIFT) as usize] = of_frame(frame, flags);
                    }
                }
                return ControlFlow::Continue(());
            }
            Slot::for_each_used(run.slots, |index, slot| {
                let state = match Pte::decode::<H::Format>(slot.wait_not_busy(&ram)) {
                    Pte::Page { frame, flags } | Pte::NoAccess { frame, flags } => of_frame(frame, flags),
                    Pte::Swap(payload) => PageState {
                        swapped: true,
                        protected: payload & PAYLOAD_USER_WP != 0,
                        ..PageState::default()
                    },
                    Pte::Migration(_) => PageState { swapped: true, ..PageState::default() },
                    Pte::UserWp => PageState { protected: true, ..PageState::default() },
                    Pte::Guard => PageState { guard: true, ..PageState::default() },
                    _ => PageState::default(),
                };
                pages[((run.address_of(index) - part.start) >> PAGE_SHIFT) as usize] = state;
                ControlFlow::Continue(())
            })
        });
    }
}
