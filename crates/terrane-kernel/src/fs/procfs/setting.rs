//! Values that programs read, and some that they set: `/proc/sys` and parts of `/sys`.

use super::Text;
use super::machine::Memory;
use crate::arch;
use crate::errno::Errno;
use crate::mm;
use crate::syscall::memory::MAP_COUNT_MAX;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU64, Ordering};
use terrane::commit::Overcommit;

macro_rules! settings {
    ($($name:ident $path:literal;)*) => {
        /// A value.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Setting { $($name,)* }

        impl Setting {
            /// All, with their paths.
            pub const ALL: &'static [(&'static [u8], Setting)] = &[$(($path, Setting::$name),)*];
        }
    };
}

settings! {
    OvercommitMemory b"/proc/sys/vm/overcommit_memory";
    OvercommitRatio b"/proc/sys/vm/overcommit_ratio";
    DropCaches b"/proc/sys/vm/drop_caches";
    CompactMemory b"/proc/sys/vm/compact_memory";
    MaxMapCount b"/proc/sys/vm/max_map_count";
    HugePages b"/proc/sys/vm/nr_hugepages";
    OvercommitHugePages b"/proc/sys/vm/nr_overcommit_hugepages";
    MinimumAddress b"/proc/sys/vm/mmap_min_addr";
    Swappiness b"/proc/sys/vm/swappiness";
    UserFaults b"/proc/sys/vm/unprivileged_userfaultfd";
    PanicOnOom b"/proc/sys/vm/panic_on_oom";
    HugePagePolicy b"/sys/kernel/mm/transparent_hugepage/enabled";
    HugePageSize b"/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";
    HugePageDefrag b"/sys/kernel/mm/transparent_hugepage/defrag";
    HugePageShmem b"/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    ZeroPage b"/sys/kernel/mm/transparent_hugepage/use_zero_page";
    PidMax b"/proc/sys/kernel/pid_max";
    ThreadsMax b"/proc/sys/kernel/threads-max";
    Randomize b"/proc/sys/kernel/randomize_va_space";
    OsType b"/proc/sys/kernel/ostype";
    OsRelease b"/proc/sys/kernel/osrelease";
    HostName b"/proc/sys/kernel/hostname";
    CorePattern b"/proc/sys/kernel/core_pattern";
    ShmMax b"/proc/sys/kernel/shmmax";
    FileMax b"/proc/sys/fs/file-max";
    OpenMax b"/proc/sys/fs/nr_open";
    PipeMax b"/proc/sys/fs/pipe-max-size";
    CpusOnline b"/sys/devices/system/cpu/online";
    CpusPossible b"/sys/devices/system/cpu/possible";
    CpusPresent b"/sys/devices/system/cpu/present";
    NodesOnline b"/sys/devices/system/node/online";
    NodesPossible b"/sys/devices/system/node/possible";
    NodesWithMemory b"/sys/devices/system/node/has_memory";
    NodeCpus b"/sys/devices/system/node/node0/cpulist";
}

/// Values that are what was set; all but the mode of overcommit have no effect, for they concern what is not there.
static KEPT: [AtomicU64; 4] = [AtomicU64::new(50), AtomicU64::new(60), AtomicU64::new(0), AtomicU64::new(2)];

impl Setting {
    fn kept(self) -> Option<&'static AtomicU64> {
        let place = match self {
            Setting::OvercommitRatio => 0,
            Setting::Swappiness => 1,
            Setting::OvercommitMemory => 2,
            Setting::Randomize => 3,
            _ => return None,
        };
        Some(&KEPT[place])
    }

    /// True when programs may set it.
    pub fn is_writable(self) -> bool {
        self.kept().is_some()
            || matches!(
                self,
                Setting::DropCaches
                    | Setting::CompactMemory
                    | Setting::MaxMapCount
                    | Setting::HugePages
                    | Setting::OvercommitHugePages
                    | Setting::HugePagePolicy
                    | Setting::HugePageDefrag
            )
    }

    /// The length that `stat` gives: a page in `/sys`.
    pub fn len(self) -> u64 {
        let (path, _) = Self::ALL[self as usize];
        if path.starts_with(b"/sys") { 4096 } else { 0 }
    }

    /// Writes the value and a line's end.
    pub fn write(self, out: &mut Text) -> fmt::Result {
        if let Some(kept) = self.kept() {
            return writeln!(out, "{}", kept.load(Ordering::Relaxed));
        }
        let pages = mm::machine().frames().total() as u64;
        let last_cpu = arch::cpu_count() - 1;
        match self {
            Setting::MaxMapCount => writeln!(out, "{}", MAP_COUNT_MAX.load(Ordering::Relaxed)),
            Setting::MinimumAddress => writeln!(out, "{}", mm::space_config().range.start),
            Setting::HugePagePolicy => out.write_str(match mm::space_config().huge_pages {
                terrane::space::HugePages::Always => "[always] madvise never\n",
                terrane::space::HugePages::Madvise => "always [madvise] never\n",
                _ => "always madvise [never]\n",
            }),
            Setting::HugePageSize => writeln!(out, "{}", 2 << 20),
            Setting::HugePageDefrag => out.write_str("always defer defer+madvise [madvise] never\n"),
            Setting::HugePageShmem => out.write_str("always within_size advise [never] deny force\n"),
            Setting::ZeroPage | Setting::UserFaults => out.write_str("1\n"),
            Setting::PidMax => out.write_str("32768\n"),
            Setting::ThreadsMax => out.write_str("32767\n"),
            Setting::OsType => out.write_str("Linux\n"),
            Setting::OsRelease => out.write_str("6.18.0\n"),
            Setting::HostName => out.write_str("terrane\n"),
            Setting::CorePattern => out.write_str("core\n"),
            Setting::ShmMax => out.write_str("18446744073692774399\n"),
            Setting::FileMax => writeln!(out, "{}", pages),
            Setting::OpenMax => out.write_str("1048576\n"),
            Setting::PipeMax => out.write_str("1048576\n"),
            Setting::CpusOnline | Setting::CpusPossible | Setting::CpusPresent | Setting::NodeCpus => {
                if last_cpu == 0 {
                    out.write_str("0\n")
                } else {
                    writeln!(out, "0-{last_cpu}")
                }
            }
            _ => out.write_str("0\n"),
        }
    }

    /// Sets it.
    ///
    /// # Errors
    /// `EINVAL`, `EPERM` for what cannot be set.
    pub fn store(self, bytes: &[u8]) -> Result<(), Errno> {
        let text = core::str::from_utf8(bytes).map_err(|_| Errno::EINVAL)?.trim();
        let value = || text.parse::<u64>().map_err(|_| Errno::EINVAL);
        if let Some(kept) = self.kept() {
            let value = value()?;
            if self == Setting::OvercommitMemory {
                let mode = match value {
                    0 => Overcommit::Guess,
                    1 => Overcommit::Always,
                    2 => Overcommit::Never(strict_limit()),
                    _ => return Err(Errno::EINVAL),
                };
                mm::machine().commit().set_mode(mode);
            }
            kept.store(value, Ordering::Relaxed);
            return Ok(());
        }
        match self {
            // Files have no other copy than their pages: there is nothing to drop. Freed memory is settled.
            Setting::DropCaches | Setting::CompactMemory => {
                value()?;
                mm::with_cpu(|cpu| cpu.quiesce());
                Ok(())
            }
            Setting::MaxMapCount => {
                let value = value()?;
                if value > i32::MAX as u64 {
                    return Err(Errno::EINVAL);
                }
                MAP_COUNT_MAX.store(value, Ordering::Relaxed);
                Ok(())
            }
            // There is no pool: it stays at zero, as where Linux has no memory for one.
            Setting::HugePages | Setting::OvercommitHugePages => value().map(drop),
            Setting::HugePagePolicy | Setting::HugePageDefrag => {
                let mut now = Text::default();
                self.write(&mut now).map_err(|_| Errno::ENOMEM)?;
                let now = core::str::from_utf8(&now.bytes).unwrap_or_default();
                // What is in force may be asked for; it is the command line's to set.
                let in_force = now.split(['[', ']']).nth(1);
                if in_force == Some(text) { Ok(()) } else { Err(Errno::EINVAL) }
            }
            _ => Err(Errno::EPERM),
        }
    }
}

/// What may be promised in all in mode 2, in bytes: swap, and a part of memory.
pub fn strict_limit() -> u64 {
    let memory = Memory::count();
    let ratio = KEPT[0].load(Ordering::Relaxed);
    memory.swap_total + memory.total / 100 * ratio.min(1 << 20)
}
