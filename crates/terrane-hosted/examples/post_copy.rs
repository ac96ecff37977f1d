//! Post-copy migration: a guest runs on its new machine before its memory has come.
//!
//! The old machine's memory is a vector of bytes behind a slow link. The new machine maps as much memory, starts the guest's processors at once, and has
//! their faults answered from there, while what nobody has asked for yet comes in the background. Every byte that a processor
//! reads is checked, and at the end all memory is: what the guest has stored, and what it has not touched.
//!
//! ```sh
//! cargo run --release -p terrane-hosted --example post_copy [MiB] [PROCESSORS]
//! ```

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use terrane::addr::{AddrRange, PAGE_SIZE};
use terrane::host::IoError;
use terrane::space::{AddressSpace, MapRequest, SpaceConfig};
use terrane::sync::Shared;
use terrane::vma::Prot;
use terrane_hosted::{Cpu, HostedMachine, MachineConfig, Pager, PagerConfig, Paging};

const WORDS: u64 = PAGE_SIZE / 8;

/// The machine that the guest has left.
struct OldMachine {
    memory: Arc<Vec<u8>>,
    /// How long a request takes, however much it asks for.
    latency: Duration,
    requests: Arc<AtomicU64>,
}

impl Pager for OldMachine {
    fn supply(&self, offset: u64, pages: &mut [u8]) -> Result<(), IoError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        thread::sleep(self.latency);
        let start = usize::try_from(offset).map_err(|_| IoError)?;
        pages.copy_from_slice(self.memory.get(start..start + pages.len()).ok_or(IoError)?);
        Ok(())
    }
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// What a guest's processor `me` stores into its word of a page: it tells the page and the store.
fn stamp(page: u64, me: u64, n: u64) -> u64 {
    (page << 24 | me << 16 | n & 0xffff) ^ 0x5a5a_0000_0000_0000
}

/// A processor of the guest: loads what it has not stored to and compares, stores to the word of each page that is its own, and finds it again.
/// Returns the last store to each page.
fn guest(cpu: &mut Cpu, me: u64, base: u64, before: &[u8], steps: u64) -> Result<Vec<Option<u64>>, String> {
    let pages = before.len() as u64 / PAGE_SIZE;
    let mut random = Random(0x9e37_79b9 + me);
    let mut stored = vec![None; pages as usize];
    for n in 0..steps {
        let page = random.next() % pages;
        let own = base + page * PAGE_SIZE + me * 8;
        if n % 4 == 0 {
            cpu.store_u64(own, stamp(page, me, n)).map_err(|error| error.to_string())?;
            stored[page as usize] = Some(stamp(page, me, n));
        } else if let Some(value) = stored[page as usize] {
            let found = cpu.load_u64(own).map_err(|error| error.to_string())?;
            if found != value {
                return Err(format!("page {page}: {found:#x} where {value:#x} was stored"));
            }
        } else {
            // The second half of each page is stored to by nobody.
            let word = WORDS / 2 + random.next() % (WORDS / 2);
            let found =
                cpu.load_u64(base + page * PAGE_SIZE + word * 8).map_err(|error| error.to_string())?;
            let at = (page * PAGE_SIZE + word * 8) as usize;
            if found.to_ne_bytes() != before[at..at + 8] {
                return Err(format!("page {page}, word {word} is not what it was"));
            }
        }
    }
    Ok(stored)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mib: u64 = arguments.next().map_or(Ok(32), |mib| mib.parse())?;
    let processors: u64 = arguments.next().map_or(Ok(4), |count| count.parse())?;
    if mib == 0 || !(1..=16).contains(&processors) {
        return Err("at least 1 MiB, and 1 to 16 processors".into());
    }
    let bytes = mib << 20;
    let mut random = Random(0x1234_5678_9abc_def1);
    let memory: Vec<u8> = (0..bytes / 8).flat_map(|_| random.next().to_ne_bytes()).collect();
    let memory = Arc::new(memory);

    let machine = HostedMachine::new(MachineConfig {
        memory: bytes + (8 << 20),
        cpus: processors as usize + 3,
        ..MachineConfig::default()
    })?;
    let mut main = machine.cpu()?;
    let space = Shared::try_new(AddressSpace::try_new(main.core(), SpaceConfig::default())?)?;
    let base = space.map(main.core(), MapRequest::anonymous(bytes, Prot::READ | Prot::WRITE))?;

    let requests = Arc::new(AtomicU64::new(0));
    let old = OldMachine {
        memory: Arc::clone(&memory),
        latency: Duration::from_micros(200),
        requests: Arc::clone(&requests),
    };
    let began = Instant::now();
    let range = AddrRange::new(base, base + bytes);
    let paging = Paging::start(&machine, &space, range, old, PagerConfig::default())?;

    // The guest runs at once.
    let steps = 4 * bytes / PAGE_SIZE;
    let stored = thread::scope(|scope| {
        let threads: Vec<_> = (0..processors)
            .map(|me| {
                let (machine, space, memory) = (&machine, &space, &memory);
                scope.spawn(move || {
                    let mut cpu = machine.cpu().map_err(|error| error.to_string())?;
                    cpu.switch_to(space);
                    guest(&mut cpu, me, base, memory, steps)
                })
            })
            .collect();
        let results = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a processor panicked".to_string())?);
        results.collect::<Result<Vec<_>, String>>()
    })?;
    let ran = began.elapsed();
    paging.wait();
    let came = began.elapsed();
    let progress = paging.progress();
    drop(paging);

    // All of it, byte by byte.
    let mut expected = Vec::clone(&memory);
    for (me, pages) in stored.iter().enumerate() {
        for (page, value) in pages.iter().enumerate() {
            if let Some(value) = value {
                let at = page * PAGE_SIZE as usize + me * 8;
                expected[at..at + 8].copy_from_slice(&value.to_ne_bytes());
            }
        }
    }
    main.switch_to(&space);
    let mut page = vec![0; PAGE_SIZE as usize];
    for (n, expected) in expected.chunks_exact(PAGE_SIZE as usize).enumerate() {
        main.read_bytes(base + n as u64 * PAGE_SIZE, &mut page).map_err(|error| error.to_string())?;
        if page != expected {
            return Err(format!("page {n} is not what it should be").into());
        }
    }
    println!(
        "{mib} MiB, {processors} processors: ran {ran:.1?}, all memory there after {came:.1?}; {} pages on demand, {} in the \
         background, {} requests; every byte is right",
        progress.demanded,
        progress.drained,
        requests.load(Ordering::Relaxed),
    );
    Ok(())
}
