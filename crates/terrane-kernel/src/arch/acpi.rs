//! What the firmware's tables say of processors and interrupt controllers.
//!
//! Source: ACPI Specification 6.5, sections 5.2.5 to 5.2.8 and 5.2.12; IA-PC HPET Specification 1.0a, section 3.2.4.

use super::percpu::MAX_CPUS;
use crate::mm::direct;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

static PROCESSORS: [AtomicU32; MAX_CPUS] = [const { AtomicU32::new(0) }; MAX_CPUS];
static PROCESSOR_COUNT: AtomicUsize = AtomicUsize::new(0);
static IO_APIC: AtomicU64 = AtomicU64::new(0);
static IO_APIC_FIRST: AtomicU32 = AtomicU32::new(0);
static HPET: AtomicU64 = AtomicU64::new(0);

/// The numbers of the processors' local APICs.
pub fn processors() -> impl Iterator<Item = u32> {
    (0..PROCESSOR_COUNT.load(Ordering::Relaxed)).map(|index| PROCESSORS[index].load(Ordering::Relaxed))
}

/// Where the I/O APIC is, and the number of its first interrupt.
pub fn io_apic() -> Option<(u64, u32)> {
    let base = IO_APIC.load(Ordering::Relaxed);
    (base != 0).then(|| (base, IO_APIC_FIRST.load(Ordering::Relaxed)))
}

/// Where the HPET is.
pub fn hpet() -> Option<u64> {
    let base = HPET.load(Ordering::Relaxed);
    (base != 0).then_some(base)
}

/// Bytes of the firmware's, anywhere below 4 GiB.
fn bytes(at: u64, len: usize) -> &'static [u8] {
    if at == 0 || at.saturating_add(len as u64) > 4 << 30 {
        return &[];
    }
    // SAFETY: the first 4 GiB are mapped. Tables are read before anything is allocated where they may be.
    unsafe { core::slice::from_raw_parts(direct(at), len) }
}

fn u32_at(table: &[u8], at: usize) -> u32 {
    table.get(at..at + 4).map_or(0, |part| u32::from_le_bytes([part[0], part[1], part[2], part[3]]))
}

fn u64_at(table: &[u8], at: usize) -> u64 {
    u64::from(u32_at(table, at)) | u64::from(u32_at(table, at + 4)) << 32
}

/// A table with its header.
fn table(at: u64) -> &'static [u8] {
    let len = u32_at(bytes(at, 36), 4) as usize;
    bytes(at, len.clamp(36, 1 << 20))
}

/// Reads the tables, from the root pointer at `rsdp` on. Without one, there is this processor.
pub fn read(rsdp: u64) {
    let root = bytes(rsdp, 36);
    let list = if root.get(15).is_some_and(|&revision| revision >= 2) && u64_at(root, 24) != 0 {
        (table(u64_at(root, 24)), 8)
    } else {
        (table(u32_at(root, 16).into()), 4)
    };
    for entry in list.0.get(36..).unwrap_or(&[]).chunks_exact(list.1) {
        let table = table(if list.1 == 8 { u64_at(entry, 0) } else { u32_at(entry, 0).into() });
        match table.get(..4) {
            Some(b"APIC") => read_processors(table),
            Some(b"HPET") => HPET.store(u64_at(table, 44), Ordering::Relaxed),
            _ => {}
        }
    }
}

fn read_processors(table: &[u8]) {
    let mut count = 0;
    let mut add = |id: u32, flags: u32| {
        if flags & 1 != 0 && count < MAX_CPUS {
            PROCESSORS[count].store(id, Ordering::Relaxed);
            count += 1;
        }
    };
    let mut rest = table.get(44..).unwrap_or(&[]);
    while let [kind, len, ..] = *rest {
        let Some(entry) = rest.get(..usize::from(len)).filter(|entry| entry.len() >= 8) else { break };
        match kind {
            0 => add(entry[3].into(), u32_at(entry, 4)),
            9 => add(u32_at(entry, 4), u32_at(entry, 8)),
            1 => {
                IO_APIC.store(u32_at(entry, 4).into(), Ordering::Relaxed);
                IO_APIC_FIRST.store(u32_at(entry, 8), Ordering::Relaxed);
            }
            _ => {}
        }
        rest = &rest[usize::from(len)..];
    }
    PROCESSOR_COUNT.store(count, Ordering::Relaxed);
}
