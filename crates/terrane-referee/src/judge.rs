//! Carrying a script out on both sides, and comparing after each operation.

use crate::deliberate;
use crate::kernel::{Kernel, KernelError};
use crate::machine::{FILED, Terrane};
use crate::operation::{Op, Outcome};
use crate::script::{PROCESSES, Script, Setup, line};
use crate::view::{Area, Counts, Shows, canonical};
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// How the two sides differ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The number of the operation after which they do.
    pub at: usize,
    /// What is not the same.
    pub what: What,
    /// What each side says, in lines.
    pub told: String,
}

/// What differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum What {
    /// Result, errno, signal or bytes.
    Outcome,
    /// The listing of the window.
    Listing,
    /// Which pages of their own processes have.
    Present,
    /// The attributes of mappings.
    Flags,
    /// What `smaps` counts.
    Counts,
    /// Frames that are not given back in the end.
    Frames,
    /// Terrane panicked.
    Panic,
}

/// Why a script could not be judged, or what came of it.
#[derive(Debug)]
pub enum Stop {
    /// The two sides differ.
    Difference(Box<Difference>),
    /// The kernel cannot be asked.
    Kernel(KernelError),
    /// Terrane cannot be asked.
    Terrane(String),
}

impl From<KernelError> for Stop {
    fn from(error: KernelError) -> Self {
        Stop::Kernel(error)
    }
}

impl From<String> for Stop {
    fn from(error: String) -> Self {
        Stop::Terrane(error)
    }
}

/// The two sides.
pub struct Judge {
    /// The kernel.
    pub kernel: Kernel,
    /// Terrane.
    pub terrane: Terrane,
    setup: Setup,
    living: [bool; PROCESSES],
    acting: usize,
    /// Whether anything may be dropped at any time (`MADV_FREE`, `MAP_DROPPABLE`): what paging it out does cannot be foretold.
    has_freed: bool,
    /// Whether pages of files may have been paged out.
    has_paged_out: bool,
    /// Whether pages may be in swap on one side only.
    is_loose: bool,
    /// Whether Terrane has panicked.
    has_panicked: bool,
    /// Operations so far in this script.
    at: usize,
    /// The window of the process that acts, as the kernel listed it last.
    areas: Vec<Area>,
}

/// How often the attributes of mappings are compared, and the other processes.
const NOW_AND_THEN: usize = 32;

impl Judge {
    /// A judge with these sides.
    pub fn new(kernel: Kernel, terrane: Terrane) -> Self {
        Self {
            kernel,
            terrane,
            setup: Setup::of_pages(64),
            living: [false; PROCESSES],
            acting: 0,
            has_freed: false,
            has_paged_out: false,
            is_loose: false,
            has_panicked: false,
            at: 0,
            areas: Vec::new(),
        }
    }

    /// Begins a script.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn begin(&mut self, setup: &Setup) -> Result<(), Stop> {
        self.setup = *setup;
        (self.acting, self.at) = (0, 0);
        (self.has_freed, self.has_paged_out, self.is_loose) = (false, false, false);
        self.living = [false; PROCESSES];
        self.living[0] = true;
        self.areas.clear();
        let memlock = self.kernel.begin(setup)?;
        if core::mem::take(&mut self.has_panicked) {
            let new = self.terrane.another()?;
            // Its destructors would stumble over what is half done.
            core::mem::forget(core::mem::replace(&mut self.terrane, new));
        }
        Ok(self.terrane.begin(setup, memlock)?)
    }

    /// The mappings of the process that acts.
    pub fn areas(&self) -> &[Area] {
        &self.areas
    }

    /// Whether another process can be forked, and how many there are.
    pub fn processes(&self) -> usize {
        self.living.iter().filter(|&&lives| lives).count()
    }

    /// Carries `op` out on both sides and compares. Returns what came of it, the same on both.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn step(&mut self, op: &Op) -> Result<Outcome, Stop> {
        let at = self.at;
        self.at += 1;
        if self.excludes(op)? {
            return Ok(Outcome::Nothing);
        }
        let outcome = match *op {
            Op::Fork {} => {
                let Some(child) = self.living.iter().position(|lives| !lives) else {
                    return Ok(Outcome::Nothing);
                };
                self.kernel.fork(self.acting, child)?;
                self.terrane.fork(self.acting, child)?;
                self.living[child] = true;
                self.compare_process(at, child)?;
                Outcome::value(child as u64)
            }
            Op::Switch { process } => {
                let next = usize::try_from(process).unwrap_or(PROCESSES);
                if !self.living.get(next).copied().unwrap_or(false) {
                    return Ok(Outcome::Nothing);
                }
                self.acting = next;
                Outcome::value(0)
            }
            Op::Exit {} => {
                if self.processes() < 2 {
                    return Ok(Outcome::Nothing);
                }
                self.kernel.exit(self.acting)?;
                self.terrane.exit(self.acting);
                self.living[self.acting] = false;
                self.acting = self.living.iter().position(|&lives| lives).unwrap_or(0);
                Outcome::value(0)
            }
            _ => self.call(at, op)?,
        };
        self.areas = self.compare_listing(at, self.acting)?;
        self.compare_present(at, self.acting)?;
        if self.at.is_multiple_of(NOW_AND_THEN) {
            self.compare_all(at)?;
        }
        Ok(outcome)
    }

    /// Whether neither side is to carry `op` out, because of what the script has done so far. Notes what it does.
    fn excludes(&mut self, op: &Op) -> Result<bool, Stop> {
        match *op {
            Op::Map { flags, .. } => self.has_freed |= flags & 0xf == libc::MAP_DROPPABLE as u64,
            Op::Advise { advice, .. } | Op::ProcessAdvise { advice, .. } => {
                self.has_freed |= advice == libc::MADV_FREE as u64;
                if advice == libc::MADV_PAGEOUT as u64 {
                    self.is_loose |= self.kernel.has_swap();
                    self.has_paged_out |= !self.has_freed;
                    return Ok(self.has_freed);
                }
            }
            _ => {}
        }
        let (kernel, acting) = (&mut self.kernel, self.acting);
        Ok(deliberate::excludes_now(op, || kernel.details(acting))?)
    }

    /// The outcome as far as it can be compared.
    fn comparable(&self, op: &Op, outcome: Outcome) -> Outcome {
        let (Op::Resident { addr, .. }, Outcome::Value(value, mut resident)) = (op, outcome.clone()) else {
            return outcome;
        };
        for (at, page) in (*addr..).step_by(4096).zip(&mut resident) {
            let shown =
                self.areas.iter().find(|area| (area.start..area.end).contains(&at)).map(|area| area.shows);
            // Pages of the real file are read ahead; and clean pages of files may have been paged out on one side.
            let is_open = match shown {
                Some(Shows::File(FILED)) => true,
                Some(Shows::Memory) | None => false,
                Some(_) => self.has_paged_out,
            };
            if self.is_loose || is_open {
                *page = 0;
            }
        }
        Outcome::Value(value, resident)
    }

    fn call(&mut self, at: usize, op: &Op) -> Result<Outcome, Stop> {
        let kernel = self.kernel.act(self.acting, op)?;
        let kernel = self.comparable(op, kernel);
        // A panic is as wrong as an answer can be; what it leaves behind is not looked at again.
        let terrane = catch_unwind(AssertUnwindSafe(|| self.terrane.act(self.acting, op)));
        let terrane = terrane.map_err(|panic| {
            self.has_panicked = true;
            let message = panic.downcast_ref::<&str>().copied().map(str::to_owned);
            let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            different(at, What::Panic, format!("Terrane panicked: {message}\n"))
        })??;
        let terrane = self.comparable(op, terrane);
        if kernel == terrane || deliberate::allows(op, &kernel, &terrane).is_some() {
            return Ok(kernel);
        }
        let mut told = String::new();
        for (side, outcome) in [("Linux:  ", &kernel), ("Terrane:", &terrane)] {
            let _ = writeln!(told, "{side} {}", tell(op, outcome, &self.setup));
        }
        if let (Outcome::Value(_, kernel), Outcome::Value(_, terrane)) = (&kernel, &terrane)
            && let Some(at) = kernel.iter().zip(terrane).position(|(kernel, terrane)| kernel != terrane)
        {
            let _ =
                writeln!(told, "byte {at:#x}: {:#04x} in Linux, {:#04x} in Terrane", kernel[at], terrane[at]);
        }
        Err(different(at, What::Outcome, told))
    }

    fn compare_listing(&mut self, at: usize, process: usize) -> Result<Vec<Area>, Stop> {
        let mut kernel = self.kernel.areas(process)?;
        let mut terrane = self.terrane.areas(process)?;
        canonical(&mut kernel);
        canonical(&mut terrane);
        if kernel == terrane {
            return Ok(kernel);
        }
        let lines = |areas: &[Area]| areas.iter().map(|area| area.line(&self.setup)).collect::<Vec<_>>();
        Err(different(at, What::Listing, beside(process, &lines(&kernel), &lines(&terrane))))
    }

    fn compare_present(&mut self, at: usize, process: usize) -> Result<(), Stop> {
        if self.is_loose {
            return Ok(());
        }
        let kernel = self.kernel.present(process)?;
        let terrane = self.terrane.present(process)?;
        if kernel == terrane {
            return Ok(());
        }
        let pages =
            kernel.iter().zip(&terrane).enumerate().filter(|(_, (kernel, terrane))| kernel != terrane);
        let mut told = format!("process {process}: pages of its own\n");
        for (page, (kernel, terrane)) in pages {
            let _ = writeln!(told, "w+{:#x}: Linux {kernel:?}, Terrane {terrane:?}", page << 12);
        }
        Err(different(at, What::Present, told))
    }

    fn compare_flags(&mut self, at: usize, process: usize) -> Result<(), Stop> {
        let mask = deliberate::compared_flags();
        let details = self.kernel.details(process)?;
        let kernel: Vec<_> = details.iter().map(|detail| (detail.start, detail.flags & mask)).collect();
        let terrane: Vec<_> =
            self.terrane.flags(process)?.into_iter().map(|(start, flags)| (start, flags & mask)).collect();
        if kernel != terrane {
            let lines = |list: &[(u64, u64)]| {
                let line =
                    |&(start, flags): &(u64, u64)| format!("w+{:#x} {flags:#x}", start - self.setup.start);
                list.iter().map(line).collect::<Vec<_>>()
            };
            return Err(different(at, What::Flags, beside(process, &lines(&kernel), &lines(&terrane))));
        }
        if self.is_loose {
            return Ok(());
        }
        let stable = |(start, counts): (u64, Counts)| {
            let memory = details.iter().any(|detail| detail.start == start && detail.memory);
            (start, counts.stable(memory))
        };
        let kernel: Vec<_> = details.iter().map(|detail| stable((detail.start, detail.counts))).collect();
        let terrane: Vec<_> = self.terrane.counts(process)?.into_iter().map(stable).collect();
        if kernel == terrane {
            return Ok(());
        }
        let lines = |list: &[(u64, Counts)]| {
            let line =
                |&(start, counts): &(u64, Counts)| format!("w+{:#x} {counts:?}", start - self.setup.start);
            list.iter().map(line).collect::<Vec<_>>()
        };
        Err(different(at, What::Counts, beside(process, &lines(&kernel), &lines(&terrane))))
    }

    fn compare_process(&mut self, at: usize, process: usize) -> Result<(), Stop> {
        self.compare_listing(at, process)?;
        self.compare_present(at, process)?;
        self.compare_flags(at, process)
    }

    fn compare_all(&mut self, at: usize) -> Result<(), Stop> {
        (0..PROCESSES)
            .filter(|&process| self.living[process])
            .collect::<Vec<_>>()
            .into_iter()
            .try_for_each(|process| self.compare_process(at, process))
    }

    /// Ends the script: every byte that any process can be allowed to read, and that of every file, is compared. Then all frames must be free.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn finish(&mut self) -> Result<(), Stop> {
        self.compare_all(self.at.saturating_sub(1))?;
        let at = self.at;
        for process in (0..PROCESSES).filter(|&process| self.living[process]).collect::<Vec<_>>() {
            self.acting = process;
            for area in self.compare_listing(at, process)? {
                let (addr, len) = (area.start, area.end - area.start);
                self.call(at, &Op::Protect { addr, len, prot: area.prot as u64 | 1 })?;
                for addr in (area.start..area.end).step_by(4096) {
                    self.call(at, &Op::Load { addr, len: 4096 })?;
                }
            }
        }
        for file in 0..crate::script::FILES as u64 {
            for part in 0..2 * self.setup.pages {
                let read = Op::Read { file, offset: part << 14, len: 1 << 14 };
                if self.call(at, &read)? == Outcome::value(0) {
                    break;
                }
            }
        }
        self.kernel.end()?;
        match self.terrane.lost_frames() {
            0 => Ok(()),
            lost => {
                Err(different(at, What::Frames, format!("{lost} frames of Terrane are not free again\n")))
            }
        }
    }

    /// Carries a whole script out.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn run(&mut self, script: &Script) -> Result<(), Stop> {
        self.begin(&script.setup)?;
        for op in &script.ops {
            self.step(op)?;
        }
        self.finish()
    }
}

fn different(at: usize, what: What, told: String) -> Stop {
    Stop::Difference(Box::new(Difference { at, what, told }))
}

/// Both listings, with what only one has marked.
fn beside(process: usize, kernel: &[String], terrane: &[String]) -> String {
    let mut text = format!("process {process}\n");
    for (name, own, other) in [("Linux", kernel, terrane), ("Terrane", terrane, kernel)] {
        let _ = writeln!(text, "{name}:");
        for line in own {
            let mark = if other.contains(line) { ' ' } else { '*' };
            let _ = writeln!(text, "  {mark} {line}");
        }
    }
    text
}

/// An outcome in words.
fn tell(op: &Op, outcome: &Outcome, setup: &Setup) -> String {
    let bytes = |bytes: &[u8]| {
        let shown: Vec<_> = bytes.iter().take(48).map(|byte| format!("{byte:02x}")).collect();
        if bytes.is_empty() { String::new() } else { format!(", bytes {}", shown.join(" ")) }
    };
    let text = match outcome {
        Outcome::Value(value, data) => {
            let is_address = matches!(op, Op::Map { .. } | Op::Remap { .. } | Op::Brk { .. });
            let kind = if is_address { crate::operation::Kind::Addr } else { crate::operation::Kind::Number };
            format!("{}{}", crate::script::show(kind, *value, setup), bytes(data))
        }
        Outcome::Errno(errno) => format!("{}", std::io::Error::from_raw_os_error(*errno)),
        Outcome::Signal { signal, code, done, bytes: data } => {
            format!("signal {signal}, code {code}, after {done} bytes{}", bytes(data))
        }
        Outcome::Nothing => "nothing to do".to_owned(),
    };
    format!("{} → {text}", line(op, setup))
}
