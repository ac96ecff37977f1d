//! `process_madvise`: advice on several ranges, of another space as a rule.

use crate::addr::PAGE_SIZE;
use crate::error::Error;
use crate::host::Host;
use crate::machine::Cpu;
use crate::page_table::Format;
use crate::space::AddressSpace;
use crate::vma::Advice;

/// Ranges at most (`UIO_MAXIOV`).
const RANGES_MAX: usize = 1024;
/// Bytes at most; what goes beyond is cut off (`MAX_RW_COUNT`).
const BYTES_MAX: u64 = i32::MAX as u64 & !(PAGE_SIZE - 1);

impl<H: Host> AddressSpace<H> {
    /// Follows the advice with Linux's number `number` for each of `ranges` (address and length, in bytes) in turn, and returns
    /// for how many bytes it was followed: up to the first range that was refused. `from_outside`: the caller does not run in
    /// this space; only `COLD`, `PAGEOUT`, `WILLNEED` and `COLLAPSE` are for others to give. Whether it may is the
    /// host's to decide.
    ///
    /// # Errors
    /// As [`madvise`](Self::madvise) where nothing was done, of the first range; [`Error::Invalid`] for advice that is not for others, more
    /// than 1024 ranges, or a length beyond 2^63; [`Error::BadAddress`] for a range beyond the addresses of programs.
    pub fn process_madvise(
        &self,
        cpu: &Cpu<H>,
        ranges: &[(u64, u64)],
        number: i32,
        from_outside: bool,
    ) -> Result<u64, Error> {
        if ranges.len() > RANGES_MAX || ranges.iter().any(|&(_, len)| len > i64::MAX as u64) {
            return Err(Error::Invalid);
        }
        if ranges.iter().any(|&(addr, len)| addr.saturating_add(len) > H::Format::USER_END) {
            return Err(Error::BadAddress);
        }
        let advice = Advice::from_linux(number);
        let for_others =
            matches!(advice, Some(Advice::Cold | Advice::PageOut | Advice::WillNeed | Advice::Collapse));
        if from_outside && !for_others {
            return Err(Error::Invalid);
        }
        // As in Linux: nothing at all is nothing to look at, and nor is an empty range behind others.
        if ranges.iter().all(|&(_, len)| len == 0) {
            return Ok(0);
        }
        let mut done = 0;
        let looked_at = |&(nth, &(_, len)): &(usize, &(u64, u64))| nth == 0 || len > 0;
        for (_, &(addr, len)) in ranges.iter().enumerate().filter(looked_at) {
            let len = len.min(BYTES_MAX - done);
            match self.madvise(cpu, addr, len, number) {
                Ok(()) => done += len,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }
}
