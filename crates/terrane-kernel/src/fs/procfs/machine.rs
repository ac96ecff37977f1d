//! Texts about the machine.

use super::Text;
use crate::arch;
use crate::fs::current;
use crate::mm;
use core::arch::x86_64::__cpuid;
use core::fmt::{self, Write};
use terrane::frame::FrameFlags;
use terrane::{Frame, PAGE_SIZE};

/// A text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MachineFile {
    CommandLine,
    CpuInfo,
    Devices,
    FileSystems,
    LoadAverage,
    MemInfo,
    Mounts,
    Stat,
    Swaps,
    Uptime,
    Version,
    VmStat,
    NodeMemInfo,
}

impl MachineFile {
    /// Those in `/proc`.
    pub const IN_PROC: &'static [(&'static [u8], MachineFile)] = &[
        (b"cmdline", MachineFile::CommandLine),
        (b"cpuinfo", MachineFile::CpuInfo),
        (b"devices", MachineFile::Devices),
        (b"filesystems", MachineFile::FileSystems),
        (b"loadavg", MachineFile::LoadAverage),
        (b"meminfo", MachineFile::MemInfo),
        (b"mounts", MachineFile::Mounts),
        (b"stat", MachineFile::Stat),
        (b"swaps", MachineFile::Swaps),
        (b"uptime", MachineFile::Uptime),
        (b"version", MachineFile::Version),
        (b"vmstat", MachineFile::VmStat),
    ];
    /// Those elsewhere.
    pub const ELSEWHERE: &'static [(&'static [u8], MachineFile)] =
        &[(b"/sys/devices/system/node/node0/meminfo", MachineFile::NodeMemInfo)];

    /// Writes it.
    pub fn write(self, out: &mut Text) -> fmt::Result {
        match self {
            MachineFile::CommandLine => writeln!(out, "{}", crate::options::words()),
            MachineFile::CpuInfo => (0..arch::cpu_count()).try_for_each(|cpu| cpu_info(out, cpu)),
            MachineFile::Devices => {
                out.write_str("Character devices:\n  1 mem\n  5 /dev/tty\n  5 /dev/console\n")
            }
            MachineFile::FileSystems => out.write_str("nodev\tsysfs\nnodev\ttmpfs\nnodev\tproc\n"),
            MachineFile::LoadAverage => {
                let (running, all) = current::loads();
                writeln!(out, "0.00 0.00 0.00 {running}/{all} {}", current::last_pid())
            }
            MachineFile::MemInfo => mem_info(out, ""),
            MachineFile::NodeMemInfo => mem_info(out, "Node 0 "),
            MachineFile::Mounts => mounts(out),
            MachineFile::Stat => stat(out),
            MachineFile::Swaps => {
                out.write_str("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n")?;
                let (total, used) = mm::machine().swap().usage();
                if total == 0 {
                    return Ok(());
                }
                writeln!(out, "/dev/swap{:31}partition\t{}\t\t{}\t\t-2", "", total * 4, used * 4)
            }
            MachineFile::Uptime => {
                let up = arch::now() / 10_000_000;
                let idle = current::idle_time() / 10_000_000;
                writeln!(out, "{}.{:02} {}.{:02}", up / 100, up % 100, idle / 100, idle % 100)
            }
            MachineFile::Version => {
                out.write_str("Linux version 6.18.0-terrane (terrane) #1 SMP PREEMPT_DYNAMIC\n")
            }
            MachineFile::VmStat => {
                mm::with_cpu(|cpu| terrane::text::write_vmstat(cpu, out)).map_err(|_| fmt::Error)
            }
        }
    }
}

/// What is mounted: the same for all.
pub fn mounts(out: &mut Text) -> fmt::Result {
    out.write_str("rootfs / tmpfs rw 0 0\nproc /proc proc rw 0 0\nsysfs /sys sysfs rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n")
}

/// What frames are in use for. In bytes.
#[derive(Clone, Copy, Default)]
pub struct Memory {
    pub total: u64,
    pub free: u64,
    pub anonymous: u64,
    pub cached: u64,
    pub shared: u64,
    pub tables: u64,
    pub locked: u64,
    pub swap_total: u64,
    pub swap_free: u64,
}

impl Memory {
    /// Looks at all frames. O(frames).
    pub fn count() -> Self {
        let frames = mm::machine().frames();
        let range = frames.range();
        let mut memory =
            Self { total: frames.total() as u64, free: frames.free_frames() as u64, ..Self::default() };
        for number in 0..range.count as u32 {
            let flags = frames.meta(Frame(range.first.0 + number)).flags();
            if flags.contains(FrameFlags::FREE) {
                continue;
            }
            memory.anonymous += u64::from(flags.contains(FrameFlags::ANON));
            memory.cached += u64::from(flags.contains(FrameFlags::CACHE));
            memory.shared += u64::from(flags.contains(FrameFlags::SHMEM));
            memory.tables += u64::from(flags.contains(FrameFlags::TABLE));
            memory.locked += u64::from(flags.contains(FrameFlags::UNEVICTABLE));
        }
        let (total, used) = mm::machine().swap().usage();
        (memory.swap_total, memory.swap_free) = (total as u64, (total - used) as u64);
        for pages in [
            &mut memory.total,
            &mut memory.free,
            &mut memory.anonymous,
            &mut memory.cached,
            &mut memory.shared,
            &mut memory.tables,
            &mut memory.locked,
            &mut memory.swap_total,
            &mut memory.swap_free,
        ] {
            *pages *= PAGE_SIZE;
        }
        memory
    }
}

fn mem_info(out: &mut Text, prefix: &str) -> fmt::Result {
    let memory = Memory::count();
    let committed = mm::machine().commit().pages() * PAGE_SIZE;
    let reclaimable = if memory.swap_total > 0 { memory.swap_free } else { 0 };
    let lines = [
        ("MemTotal", memory.total),
        ("MemFree", memory.free),
        ("MemAvailable", (memory.free + reclaimable.min(memory.anonymous + memory.shared)).min(memory.total)),
        ("Buffers", 0),
        ("Cached", memory.cached),
        ("SwapCached", 0),
        ("Active", memory.anonymous + memory.cached),
        ("Inactive", 0),
        ("Active(anon)", memory.anonymous + memory.shared),
        ("Inactive(anon)", 0),
        ("Active(file)", memory.cached - memory.shared),
        ("Inactive(file)", 0),
        ("Unevictable", memory.locked),
        ("Mlocked", memory.locked),
        ("SwapTotal", memory.swap_total),
        ("SwapFree", memory.swap_free),
        ("Dirty", 0),
        ("Writeback", 0),
        ("AnonPages", memory.anonymous),
        ("Mapped", memory.cached),
        ("Shmem", memory.shared),
        ("KReclaimable", 0),
        ("Slab", 0),
        ("SReclaimable", 0),
        ("SUnreclaim", 0),
        ("KernelStack", 0),
        ("PageTables", memory.tables),
        ("CommitLimit", super::setting::strict_limit()),
        ("Committed_AS", committed),
        ("VmallocTotal", 0),
        ("VmallocUsed", 0),
        ("AnonHugePages", 0),
        ("ShmemHugePages", 0),
    ];
    for (name, bytes) in lines {
        writeln!(out, "{prefix}{:<15} {:>8} kB", Name(name), bytes >> 10)?;
    }
    // Nothing of pools of huge pages: there is none, as on a Linux that is built without.
    Ok(())
}

/// A name with a colon behind it, padded as a whole.
struct Name(&'static str);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)?;
        f.write_char(':')?;
        let width = f.width().unwrap_or(0);
        (self.0.len() + 1..width).try_for_each(|_| f.write_char(' '))
    }
}

fn stat(out: &mut Text) -> fmt::Result {
    let ticks = |ns: u64| ns / 10_000_000;
    let cpus = arch::cpu_count() as u64;
    let (user, system) = current::times();
    let idle = (arch::now() * cpus).saturating_sub(user + system);
    writeln!(out, "cpu  {} 0 {} {} 0 0 0 0 0 0", ticks(user), ticks(system), ticks(idle))?;
    for cpu in 0..cpus {
        let share = |ns: u64| ticks(ns / cpus);
        writeln!(out, "cpu{cpu} {} 0 {} {} 0 0 0 0 0 0", share(user), share(system), share(idle))?;
    }
    let began = (arch::realtime() - arch::now()) / 1_000_000_000;
    let (running, _) = current::loads();
    writeln!(out, "intr 0\nctxt 0\nbtime {began}\nprocesses {}", current::last_pid())?;
    writeln!(out, "procs_running {running}\nprocs_blocked 0\nsoftirq 0 0 0 0 0 0 0 0 0 0 0")
}

/// The names of the processor's abilities, by the leaf's register and bit.
const FEATURES: &[(u32, u32, &str)] = &[
    (3, 0, "fpu"),
    (3, 4, "tsc"),
    (3, 5, "msr"),
    (3, 6, "pae"),
    (3, 8, "cx8"),
    (3, 9, "apic"),
    (3, 13, "pge"),
    (3, 15, "cmov"),
    (3, 16, "pat"),
    (3, 19, "clflush"),
    (3, 23, "mmx"),
    (3, 24, "fxsr"),
    (3, 25, "sse"),
    (3, 26, "sse2"),
    (2, 0, "pni"),
    (2, 1, "pclmulqdq"),
    (2, 9, "ssse3"),
    (2, 12, "fma"),
    (2, 13, "cx16"),
    (2, 17, "pcid"),
    (2, 19, "sse4_1"),
    (2, 20, "sse4_2"),
    (2, 21, "x2apic"),
    (2, 22, "movbe"),
    (2, 23, "popcnt"),
    (2, 25, "aes"),
    (2, 26, "xsave"),
    (2, 28, "avx"),
    (2, 29, "f16c"),
    (2, 30, "rdrand"),
    (2, 31, "hypervisor"),
];

/// Steps of the processor's clock in a second.
fn clock_rate() -> u64 {
    arch::timestamp_at(1_000_000_000) - arch::timestamp_at(0)
}

fn cpu_info(out: &mut Text, cpu: usize) -> fmt::Result {
    let (first, one) = (__cpuid(0), __cpuid(1));
    let family = (one.eax >> 8 & 0xf) + if one.eax >> 8 & 0xf == 0xf { one.eax >> 20 & 0xff } else { 0 };
    let model = one.eax >> 4 & 0xf | one.eax >> 12 & 0xf0;
    let mut vendor = [0; 12];
    for (part, word) in vendor.chunks_mut(4).zip([first.ebx, first.edx, first.ecx]) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    let mut name = [0; 48];
    if __cpuid(0x8000_0000).eax >= 0x8000_0004 {
        for (n, part) in name.chunks_mut(16).enumerate() {
            let leaf = __cpuid(0x8000_0002 + n as u32);
            for (part, word) in part.chunks_mut(4).zip([leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]) {
                part.copy_from_slice(&word.to_le_bytes());
            }
        }
    }
    let vendor = core::str::from_utf8(&vendor).unwrap_or_default();
    let name = core::str::from_utf8(&name).unwrap_or_default().trim_matches(['\0', ' ']);
    writeln!(out, "processor\t: {cpu}\nvendor_id\t: {vendor}\ncpu family\t: {family}")?;
    writeln!(out, "model\t\t: {model}\nmodel name\t: {name}\nstepping\t: {}", one.eax & 0xf)?;
    writeln!(out, "cpu MHz\t\t: {}.000\ncache size\t: 512 KB", clock_rate() / 1_000_000)?;
    writeln!(
        out,
        "physical id\t: 0\nsiblings\t: {0}\ncore id\t\t: {cpu}\ncpu cores\t: {0}",
        arch::cpu_count()
    )?;
    writeln!(
        out,
        "apicid\t\t: {cpu}\nfpu\t\t: yes\nfpu_exception\t: yes\ncpuid level\t: {}\nwp\t\t: yes",
        first.eax
    )?;
    out.write_str("flags\t\t:")?;
    for &(register, bit, feature) in FEATURES {
        let register = if register == 3 { one.edx } else { one.ecx };
        if register >> bit & 1 != 0 {
            write!(out, " {feature}")?;
        }
    }
    writeln!(
        out,
        "\nbugs\t\t:\nbogomips\t: {}.00\nclflush size\t: 64\ncache_alignment\t: 64",
        clock_rate() / 500_000
    )?;
    writeln!(out, "address sizes\t: 40 bits physical, 48 bits virtual\npower management:\n")
}
