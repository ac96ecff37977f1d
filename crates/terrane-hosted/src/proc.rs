//! The texts of `/proc` for a hosted space, as strings.

use crate::{Cpu, Space};
use terrane::text::{TextError, write_maps, write_smaps, write_smaps_rollup, write_status, write_vmstat};

/// A text that tools read; see [`terrane::text`] for what is in each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ProcFile {
    /// `/proc/pid/maps`.
    Maps,
    /// `/proc/pid/smaps`.
    Smaps,
    /// `/proc/pid/smaps_rollup`.
    SmapsRollup,
    /// The lines of `/proc/pid/status` that are about memory.
    Status,
    /// `/proc/vmstat`, for the machine.
    VmStat,
}

impl ProcFile {
    /// All of them.
    pub const ALL: [ProcFile; 5] =
        [ProcFile::Maps, ProcFile::Smaps, ProcFile::SmapsRollup, ProcFile::Status, ProcFile::VmStat];
}

impl Cpu {
    /// What `/proc` would say of `space` now. Keeps no fault waiting, on whatever processor.
    ///
    /// # Errors
    /// [`TextError`], when there is no memory for the listing.
    pub fn proc_text(&self, space: &Space, file: ProcFile) -> Result<String, TextError> {
        let (cpu, mut text) = (self.core(), String::new());
        match file {
            ProcFile::Maps => write_maps(space, cpu, &mut text),
            ProcFile::Smaps => write_smaps(space, cpu, &mut text),
            ProcFile::SmapsRollup => write_smaps_rollup(space, cpu, &mut text),
            ProcFile::Status => write_status(space, cpu, &mut text),
            ProcFile::VmStat => write_vmstat(cpu, &mut text),
        }?;
        Ok(text)
    }
}
