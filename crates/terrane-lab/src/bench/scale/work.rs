//! What the threads do.

use super::{Machines, Variant};
use crate::baseline::linux::{self, AREA, CALLS, FORKED, POPULATED, TOUCHED};
use crate::experiments::hosted::{Crew, READ_WRITE, broken};
use crate::failure::Failure;
use crate::measure::plan::Runner;
use crate::measure::random::Random;
use crate::measure::rate::{Done, rates};
use crate::measure::threads::beside;
use crate::measure::timing::{black_box, timed};
use std::sync::Arc;
use std::time::Duration;
use terrane::PAGE_SIZE;
use terrane::addr::Frame;
use terrane::space::MapRequest;
use terrane::sync::Shared;
use terrane::vma::{Access, Advice, Prot};
use terrane_hosted::{Cpu, Hosted, Space};

/// What a thread repeats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// First touches, in parts of one mapping or in mappings of their own.
    Fault { own: bool },
    /// Mapping and unmapping a page, which is stored to in between if `touched`.
    Map { touched: bool },
    /// Forbidding stores to a page and allowing them again; stored to in between if `touched`.
    Protect { touched: bool },
    /// Filling in pages by one call.
    Populate,
    /// Copying a space, its own or one for all threads, and ending the copy.
    Fork { own: bool },
    /// Finding the mapping of an address.
    Find,
}

/// Other mappings of a page around each thread's area, where the number of mappings matters.
const OTHERS: u64 = 256;
/// Where the areas begin.
const BASE: u64 = 1 << 32;
/// From one own area to the next.
const APART: u64 = 128 << 30;
/// Lookups between two looks at the clock.
const LOOKUPS: u64 = 256;

impl Work {
    /// All of it.
    pub const ALL: [Self; 10] = [
        Self::Fault { own: false },
        Self::Fault { own: true },
        Self::Map { touched: false },
        Self::Map { touched: true },
        Self::Protect { touched: false },
        Self::Protect { touched: true },
        Self::Populate,
        Self::Fork { own: true },
        Self::Fork { own: false },
        Self::Find,
    ];

    /// Who does it.
    pub fn variants(self) -> &'static [Variant] {
        use Variant::{Apart, Classic, Linux, LinuxPlaces, PerCpu, Terrane};
        match self {
            Self::Map { .. } => &[Terrane, PerCpu, LinuxPlaces, Classic, Apart, Linux],
            Self::Fork { own: true } => &[Terrane, Classic, Apart],
            Self::Fork { own: false } => &[Terrane, Classic, Linux],
            Self::Find => &[Terrane, Apart],
            _ => &[Terrane, Classic, Apart, Linux],
        }
    }

    /// The same by the kernel's calls.
    pub fn of_linux(self) -> Option<linux::Work> {
        Some(match self {
            Self::Fault { own } => linux::Work::Fault { own },
            Self::Map { touched } => linux::Work::Map { touched },
            Self::Protect { touched } => linux::Work::Protect { touched },
            Self::Populate => linux::Work::Populate,
            Self::Fork { own: false } => linux::Work::Fork,
            Self::Fork { own: true } | Self::Find => return None,
        })
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Fault { own: false } => "faults, one VMA",
            Self::Fault { own: true } => "faults, separate VMAs",
            Self::Map { touched: false } => "map + unmap a page, own areas",
            Self::Map { touched: true } => "map + store + unmap a page, own areas",
            Self::Protect { touched: false } => "protect a page, own areas",
            Self::Protect { touched: true } => "store + protect a page, own areas",
            Self::Populate => "populate, own areas",
            Self::Fork { own: true } => "fork + end, own spaces",
            Self::Fork { own: false } => "fork + end, one space",
            Self::Find => "find",
        }
    }

    /// What is counted.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Fault { .. } => "faults/s",
            Self::Map { .. } => "pairs/s",
            Self::Protect { .. } => "calls/s",
            Self::Populate => "pages/s",
            Self::Fork { .. } => "forks/s",
            Self::Find => "lookups/s",
        }
    }

    /// Whether pages are cleared one by one.
    pub fn is_fault(self) -> bool {
        matches!(self, Self::Fault { .. })
    }

    /// What two threads shall get done at least, against one.
    pub fn asked(self) -> Option<f64> {
        match self {
            Self::Fault { .. } => Some(1.9),
            Self::Map { .. } | Self::Protect { .. } => Some(1.8),
            Self::Find => Some(1.95),
            Self::Populate | Self::Fork { .. } => None,
        }
    }

    /// Whether processors run the space, and so may have translations.
    fn runs(self) -> bool {
        matches!(self, Self::Map { touched: true } | Self::Protect { touched: true } | Self::Fork { .. })
    }
}

/// Where a thread works.
struct Seat {
    crew: Arc<Crew>,
    /// Its processor in the crew.
    cpu: usize,
    space: Shared<Space>,
    /// The beginning of its area.
    start: u64,
}

impl Seat {
    fn cpu(&self) -> impl std::ops::DerefMut<Target = Cpu> + '_ {
        self.crew.cpu(self.cpu)
    }

    fn map(&self, request: MapRequest<Hosted>) -> Result<u64, Failure> {
        self.space.map(self.cpu().core(), request).map_err(broken("cannot map"))
    }
}

/// The threads' places, and one more for who maps and unmaps beside them.
struct Seats {
    seats: Vec<Seat>,
    work: Work,
    variant: Variant,
    threads: usize,
    churn: bool,
}

/// Sets the work up; each sample is a rate of all threads (and for faults, the time above clearing a page).
pub fn set_up(
    machines: &Machines,
    work: Work,
    variant: Variant,
    threads: usize,
    churn: bool,
) -> Result<Runner<'static>, Failure> {
    let seats = Seats::new(machines, work, variant, threads, churn)?;
    Ok(Box::new(move |time| {
        seats.enter();
        let sample = seats.seats[0].crew.counted(|| {
            let total = threads + usize::from(churn);
            let all = || {
                rates(
                    threads,
                    total,
                    time,
                    |index| Ok((seats.seats[index].cpu(), State::new(index))),
                    |index, (cpu, state)| seats.step(index, cpu, state),
                )
            };
            let all = if churn {
                let seat = &seats.seats[threads];
                let placed = seats.variant == Variant::PerCpu;
                let map_unmap = || {
                    let cpu = seat.cpu();
                    let request = MapRequest::anonymous(PAGE_SIZE, Prot::WRITE);
                    // Far from everybody's area, unless the space places it by processor.
                    let request = if placed { request } else { request.fixed(BASE / 2) };
                    map_unmap(&seat.space, &cpu, request)
                };
                beside(threads, total, map_unmap, all)?.0
            } else {
                all()?
            };
            let mut values = vec![all.rate()];
            values.extend((work.is_fault() && !churn).then(|| all.above_other()));
            Ok(values)
        });
        seats.leave();
        sample
    }))
}

/// What a thread has for itself.
struct State {
    random: Random,
    frames: Vec<Frame>,
}

impl State {
    fn new(index: usize) -> Self {
        Self { random: Random::new(index as u64), frames: Vec::with_capacity((TOUCHED / PAGE_SIZE) as usize) }
    }
}

fn map_unmap(space: &Space, cpu: &Cpu, request: MapRequest<Hosted>) -> Result<(), Failure> {
    let start = space.map(cpu.core(), request).map_err(broken("cannot map"))?;
    space.unmap(cpu.core(), start, PAGE_SIZE).map_err(broken("cannot unmap"))
}

impl Seats {
    fn new(
        machines: &Machines,
        work: Work,
        variant: Variant,
        threads: usize,
        churn: bool,
    ) -> Result<Self, Failure> {
        let config = variant.config();
        let own_spaces = variant == Variant::Apart || work == (Work::Fork { own: true });
        let mut seats: Vec<Seat> = Vec::new();
        // One thread works among as many mappings as several do. (In an index of twice the size a lookup goes through a level
        // more, and took nearly twice as long: with half of the mappings for one thread, two found 1.1 times as many as one.)
        let among = matches!(work, Work::Map { .. } | Work::Protect { .. } | Work::Find);
        let areas = if among { threads.max(machines.threads) } else { threads };
        for index in 0..=areas {
            let (crew, cpu) = match variant {
                Variant::Apart => (machines.apart[index].clone(), 0),
                _ => (machines.all.clone(), index),
            };
            let space = match seats.first() {
                Some(seat) if !own_spaces => seat.space.clone(),
                // Who maps and unmaps does so in the space of a thread.
                Some(seat) if index == threads && variant != Variant::Apart => seat.space.clone(),
                _ => crew.space(config)?,
            };
            let start = BASE
                + index as u64
                    * match work {
                        Work::Fault { own: false } => AREA,
                        // With a hole behind.
                        Work::Fault { own: true } => 2 * AREA,
                        _ => APART,
                    };
            seats.push(Seat { crew, cpu, space, start });
        }
        let seats = Self { seats, work, variant, threads, churn };
        for index in 0..areas {
            seats.map_area(index)?;
        }
        Ok(seats)
    }

    /// Makes what thread `index` works on.
    fn map_area(&self, index: usize) -> Result<(), Failure> {
        let seat = &self.seats[index];
        let first = index == 0 || !Shared::ptr_eq(&self.seats[0].space, &seat.space);
        match self.work {
            Work::Fault { own: false } if first => {
                let all = (self.threads + 1) as u64 * AREA;
                seat.map(MapRequest::anonymous(all, READ_WRITE).fixed(BASE))?;
            }
            Work::Fault { own: false } => {}
            Work::Fault { own: true } => {
                seat.map(MapRequest::anonymous(AREA, READ_WRITE).fixed(seat.start))?;
            }
            Work::Populate => {
                seat.map(MapRequest::anonymous(POPULATED, READ_WRITE).fixed(seat.start))?;
            }
            Work::Map { .. } | Work::Protect { .. } | Work::Find => {
                for other in 0..OTHERS {
                    // Neighbours differ, so that they do not merge, and none is like the page that comes and goes; those
                    // at fixed addresses have a page between them.
                    let prot = if other % 2 == 0 { Prot::READ } else { Prot::empty() };
                    let request = MapRequest::anonymous(PAGE_SIZE, prot);
                    seat.map(match self.placed() {
                        true => request,
                        false => request.fixed(seat.start + 2 * other * PAGE_SIZE),
                    })?;
                }
                if matches!(self.work, Work::Protect { .. }) {
                    seat.map(MapRequest::anonymous(PAGE_SIZE, READ_WRITE).fixed(seat.middle()))?;
                }
            }
            Work::Fork { .. } if first => {
                let start = seat.map(MapRequest::anonymous(FORKED, READ_WRITE).fixed(BASE))?;
                let mut cpu = seat.cpu();
                cpu.switch_to(&seat.space);
                for page in 0..FORKED / PAGE_SIZE {
                    cpu.store_u8(start + page * PAGE_SIZE, 1).map_err(broken("cannot store"))?;
                }
                cpu.switch_off();
            }
            Work::Fork { .. } => {}
        }
        Ok(())
    }

    /// Whether the space places what is mapped.
    fn placed(&self) -> bool {
        matches!(self.variant, Variant::PerCpu | Variant::LinuxPlaces)
    }

    /// The processors of those who take part run the space, if the work needs that; no other does.
    fn enter(&self) {
        for seat in &self.seats[..self.threads + usize::from(self.churn)] {
            if self.work.runs() {
                seat.cpu().switch_to(&seat.space);
            } else {
                seat.cpu().switch_off();
            }
        }
    }

    fn leave(&self) {
        self.seats.iter().for_each(|seat| seat.cpu().switch_off());
    }

    fn step(&self, index: usize, cpu: &mut Cpu, state: &mut State) -> Result<Done, Failure> {
        let seat = &self.seats[index];
        let space = &*seat.space;
        match self.work {
            Work::Fault { .. } => {
                let pages = TOUCHED / PAGE_SIZE;
                let (took, result) = timed(|| {
                    (0..pages).try_for_each(|page| {
                        space.fault(cpu.core(), seat.start + page * PAGE_SIZE, Access::Write).map(|_| ())
                    })
                });
                result.map_err(broken("cannot resolve a fault"))?;
                give_back(space, cpu, seat.start, TOUCHED)?;
                // Also beside another thread, where nobody asks: the caches are to be as they are without.
                let other = clear_frames(cpu, &mut state.frames, pages as usize)?;
                Ok(Done { other, ..Done::new(pages, took) })
            }
            Work::Map { touched } => {
                let request = || {
                    let request = MapRequest::anonymous(PAGE_SIZE, READ_WRITE);
                    if self.placed() { request } else { request.fixed(seat.middle()) }
                };
                let pair = |cpu: &mut Cpu| {
                    let start = space.map(cpu.core(), request()).map_err(broken("cannot map"))?;
                    if touched {
                        cpu.store_u8(start, 1).map_err(broken("cannot store"))?;
                    }
                    space.unmap(cpu.core(), start, PAGE_SIZE).map_err(broken("cannot unmap"))
                };
                let (took, result) = timed(|| (0..CALLS).try_for_each(|_| pair(cpu)));
                result.map(|()| Done::new(CALLS, took))
            }
            Work::Protect { touched } => {
                let at = seat.middle();
                let protect = |cpu: &Cpu, prot| {
                    space.protect(cpu.core(), at, PAGE_SIZE, prot).map_err(broken("cannot protect"))
                };
                let pair = |cpu: &mut Cpu| {
                    if touched {
                        cpu.store_u8(at, 1).map_err(broken("cannot store"))?;
                    }
                    protect(cpu, Prot::READ)?;
                    protect(cpu, READ_WRITE)
                };
                let (took, result) = timed(|| (0..CALLS).try_for_each(|_| pair(cpu)));
                result.map(|()| Done::new(2 * CALLS, took))
            }
            Work::Populate => {
                let (took, result) =
                    timed(|| space.advise(cpu.core(), seat.start, POPULATED, Advice::PopulateWrite));
                result.map_err(broken("cannot populate"))?;
                give_back(space, cpu, seat.start, POPULATED)?;
                Ok(Done::new(POPULATED / PAGE_SIZE, took))
            }
            Work::Fork { .. } => {
                let (took, result) = timed(|| space.fork(cpu.core()).map(|child| child.destroy(cpu.core())));
                result.map_err(broken("cannot fork"))?;
                Ok(Done::new(1, took))
            }
            Work::Find => {
                let (took, ()) = timed(|| {
                    for _ in 0..LOOKUPS {
                        // 32 bits of it times the number of mappings: a product beats a division.
                        let other = ((state.random.next() >> 32) * OTHERS) >> 32;
                        let at = seat.start + 2 * other * PAGE_SIZE;
                        let pin = cpu.core().pin();
                        black_box(space.mm().index.find(&pin, at).map(|vma| vma.end()));
                    }
                });
                Ok(Done::new(LOOKUPS, took))
            }
        }
    }
}

impl Seat {
    /// In the middle of its area, where other mappings leave a page free.
    fn middle(&self) -> u64 {
        self.start + (OTHERS + 1) * PAGE_SIZE
    }
}

fn give_back(space: &Space, cpu: &Cpu, start: u64, length: u64) -> Result<(), Failure> {
    space.advise(cpu.core(), start, length, Advice::DontNeed).map_err(broken("cannot give pages back"))
}

/// Clears as many frames, taken and given back as faults and the giving back of their pages do it; the time of clearing alone.
fn clear_frames(cpu: &Cpu, frames: &mut Vec<Frame>, count: usize) -> Result<Duration, Failure> {
    let pin = cpu.core().pin();
    let ram = cpu.core().machine().ram(&pin);
    frames.clear();
    frames.extend(std::iter::from_fn(|| ram.allocate()).take(count));
    let (took, ()) = timed(|| frames.iter().for_each(|&frame| ram.zero(frame)));
    frames.iter().rev().for_each(|&frame| ram.free(frame));
    if frames.len() < count { Err(Failure::Broken("too few frames".to_owned())) } else { Ok(took) }
}
