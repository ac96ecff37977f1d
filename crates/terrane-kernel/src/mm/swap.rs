//! A swap device made of memory: a region that is set aside at the start. So that swapping can be tried without a disk.

use super::layout::{Piece, direct};
use core::sync::atomic::{AtomicU64, Ordering};
use terrane::PAGE_SIZE;
use terrane::host::IoError;
use terrane::swap::SwapDevice;

/// The region. With `inject=swap:N` on the command line every n-th transfer fails.
pub struct Region {
    piece: Piece,
    fails: u64,
    transfers: AtomicU64,
}

impl Region {
    /// A device in `piece`, which nobody else uses.
    pub fn new(piece: Piece) -> Self {
        let fails = crate::options::values("inject")
            .find_map(|word| word.strip_prefix("swap:")?.parse().ok())
            .unwrap_or(0);
        Self { piece, fails, transfers: AtomicU64::new(0) }
    }

    fn at(&self, slot: u32) -> Result<*mut u8, IoError> {
        let transfer = self.transfers.fetch_add(1, Ordering::Relaxed) + 1;
        if slot >= self.slots() || (self.fails != 0 && transfer.is_multiple_of(self.fails)) {
            return Err(IoError);
        }
        Ok(direct(self.piece.start + u64::from(slot) * PAGE_SIZE))
    }
}

impl SwapDevice for Region {
    fn slots(&self) -> u32 {
        (self.piece.len() / PAGE_SIZE) as u32
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), IoError> {
        let from = self.at(slot)?;
        // SAFETY: a page of the region, which Terrane does not write meanwhile.
        unsafe { from.copy_to_nonoverlapping(page.as_mut_ptr(), page.len().min(PAGE_SIZE as usize)) };
        Ok(())
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), IoError> {
        let to = self.at(slot)?;
        // SAFETY: a page of the region, which Terrane does not use otherwise meanwhile.
        unsafe { to.copy_from_nonoverlapping(page.as_ptr(), page.len().min(PAGE_SIZE as usize)) };
        Ok(())
    }
}
