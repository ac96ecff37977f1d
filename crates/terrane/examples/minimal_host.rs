//! A complete host in some hundred lines: memory from the heap, one processor, no TLB, files in memory.
//!
//! Run it with `cargo run -p terrane --example minimal_host`. A host for a kernel has the same parts: frames from the
//! memory map, a shoot-down by inter-processor interrupt, waiting through its scheduler.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use terrane::host::{File, FrameRange, Host, IoError, Memory, Observe, ShootDown, Ticket, Tlb, Wait};
use terrane::machine::{Cpu, Machine};
use terrane::object::Object;
use terrane::page_table::X86_64;
use terrane::space::{AddressSpace, MapRequest, SpaceConfig};
use terrane::stats::Event;
use terrane::sync::CpuId;
use terrane::sync::atomic::{AtomicU32, Ordering};
use terrane::vma::{Access, Prot};
use terrane::{AddrRange, Frame, PAGE_SIZE};

/// The host: some pages of heap memory, numbered from 1.
struct Minimal {
    base: NonNull<u8>,
    frames: usize,
}

// SAFETY: the memory belongs to the host alone; who may touch which frame is for Terrane to say.
unsafe impl Send for Minimal {}
// SAFETY: as above.
unsafe impl Sync for Minimal {}

impl Minimal {
    fn new(frames: usize) -> Self {
        // SAFETY: the layout has a size.
        let base =
            NonNull::new(unsafe { alloc_zeroed(Self::layout(frames)) }).expect("memory for the machine");
        Self { base, frames }
    }

    fn layout(frames: usize) -> Layout {
        Layout::from_size_align(frames * PAGE_SIZE as usize, PAGE_SIZE as usize).expect("a sensible size")
    }
}

impl Drop for Minimal {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), Self::layout(self.frames)) };
    }
}

// SAFETY: each frame is a page of `base` of its own, for as long as the host lives.
unsafe impl Memory for Minimal {
    fn frames(&self) -> FrameRange {
        FrameRange { first: Frame(1), count: self.frames }
    }

    fn bytes(&self, frame: Frame) -> NonNull<u8> {
        // SAFETY: Terrane asks for frames of `frames()` only.
        unsafe { self.base.add((frame.0 as usize - 1) * PAGE_SIZE as usize) }
    }
}

// SAFETY: nothing caches translations: `access` below walks the page table for every access, and there is one processor.
unsafe impl Tlb for Minimal {
    type Space = ();

    fn shoot_down(&self, _: CpuId, _: &(), _: AddrRange) -> ShootDown {
        ShootDown::PASSED
    }
    fn has_passed(&self, _: CpuId, _: Ticket) -> bool {
        true
    }
    fn settle(&self, _: CpuId, _: Ticket) {}
}

impl Wait for Minimal {
    fn wait(&self, _: CpuId, word: &AtomicU32, value: u32) {
        while word.load(Ordering::Acquire) == value {
            std::thread::yield_now();
        }
    }
    fn wake_all(&self, _: &AtomicU32) {}
}

impl Observe for Minimal {
    fn event(&self, cpu: CpuId, event: Event) {
        println!("    [cpu {}] {} at {:#x}", cpu.0, event.kind.name(), event.address);
    }
}

/// A file in memory.
#[derive(Clone)]
struct Bytes(Arc<Mutex<Vec<u8>>>);

impl File for Bytes {
    fn len(&self) -> u64 {
        self.0.lock().expect("unpoisoned").len() as u64
    }
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, IoError> {
        let bytes = self.0.lock().map_err(|_| IoError)?;
        let rest = bytes.get(offset as usize..).unwrap_or(&[]);
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        let mut file = self.0.lock().map_err(|_| IoError)?;
        file.get_mut(offset as usize..offset as usize + bytes.len()).ok_or(IoError)?.copy_from_slice(bytes);
        Ok(())
    }
    fn is_writable(&self) -> bool {
        true
    }
}

impl Host for Minimal {
    type Format = X86_64;
    type File = Bytes;
    type RwLock = parking_lot::RawRwLock;
    type Mutex = parking_lot::RawMutex;
}

/// What the processor does for a load or store of one byte: walk, fault if need be, touch.
fn access(space: &AddressSpace<Minimal>, cpu: &Cpu<Minimal>, addr: u64, store: Option<u8>) -> Option<u8> {
    let kind = if store.is_some() { Access::Write } else { Access::Read };
    let found = loop {
        match space.translate(cpu, addr, kind) {
            Some(found) => break found,
            None => {
                if let Err(error) = space.fault(cpu, addr, kind) {
                    println!("    signal {} at {addr:#x}: {error}", error.signal());
                    return None;
                }
            }
        }
    };
    let byte = cpu.machine().host().bytes(found.frame).as_ptr().wrapping_add((addr % PAGE_SIZE) as usize);
    // SAFETY: inside a frame that is mapped, and this is the only processor.
    unsafe {
        if let Some(value) = store {
            byte.write(value);
        }
        Some(byte.read())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let machine = Machine::try_new(Minimal::new(256), 1)?;
    let cpu = Cpu::try_new(&machine)?;
    let space = AddressSpace::try_new(&cpu, SpaceConfig::default())?;

    println!("map two pages of memory and touch one");
    let memory = space.map(&cpu, MapRequest::anonymous(2 * PAGE_SIZE, Prot::READ | Prot::WRITE))?;
    assert_eq!(access(&space, &cpu, memory, Some(42)), Some(42));

    println!("fork, and store in the child: a copy");
    let child = space.fork(&cpu)?;
    assert_eq!(access(&child, &cpu, memory, Some(7)), Some(7));
    assert_eq!(access(&space, &cpu, memory, None), Some(42));

    println!("map a file, store to it, write it back");
    let file = Bytes(Arc::new(Mutex::new(b"hello, address space".to_vec())));
    let object = Object::file(&machine, file.clone())?;
    let text = space.map(&cpu, MapRequest::object(&object, 0, 20, Prot::READ | Prot::WRITE, true))?;
    assert_eq!(access(&space, &cpu, text, Some(b'H')), Some(b'H'));
    space.sync(&cpu, text, 20)?;
    assert!(file.0.lock().expect("unpoisoned").starts_with(b"Hello"));

    println!("protect, and store all the same");
    space.protect(&cpu, memory, PAGE_SIZE, Prot::READ)?;
    assert_eq!(access(&space, &cpu, memory, Some(1)), None);

    println!("the mappings:");
    for mapping in space.mappings(&cpu)? {
        println!("    {mapping}");
    }
    println!("the counters that moved:");
    for (name, value) in machine.stats().snapshot().iter().filter(|(_, value)| *value > 0) {
        println!("    {name} {value}");
    }
    Ok(())
}
