//! The serial lines as streams: what programs write, and what the kernel reports.

use crate::arch::interrupts;
use crate::arch::serial::{COM1, COM2, COM3, Serial};
use crate::sync::SpinLock;
use crate::task::wait::Queue;
use core::fmt::{self, Write};

/// Where bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Standard output of programs: COM1.
    Output,
    /// Standard error of programs: COM3.
    Error,
    /// The kernel's report: COM2.
    Report,
}

static LINES: [SpinLock<Serial>; 3] = [SpinLock::new(COM1), SpinLock::new(COM3), SpinLock::new(COM2)];

/// Sets the lines up.
pub fn set_up() {
    for line in &LINES {
        line.lock().set_up();
    }
}

/// Writes `bytes`; waits until they are sent.
pub fn write(stream: Stream, bytes: &[u8]) {
    // Interrupt handlers report too.
    for part in bytes.chunks(256) {
        interrupts::without(|| LINES[stream as usize].lock().send_all(part));
    }
}

/// Bytes that have come and that nobody has taken.
struct Ring {
    bytes: [u8; RING],
    from: usize,
    count: usize,
}

const RING: usize = 4096;

static RECEIVED: SpinLock<Ring> = SpinLock::new(Ring { bytes: [0; RING], from: 0, count: 0 });
/// Those who wait for input.
pub static INPUT: Queue = Queue::new();

/// Lets input interrupt.
pub fn start_input() {
    interrupts::without(|| COM1.interrupt_on_input());
}

/// Takes what has come: in the interrupt, with interrupts off. What there is no room for stays on the line, and whoever sends waits.
pub fn on_input() {
    RECEIVED.lock().take();
    INPUT.wake_all();
}

impl Ring {
    /// Takes what is on the line.
    fn take(&mut self) {
        while self.count < RING
            && let Some(byte) = COM1.receive()
        {
            let at = (self.from + self.count) % RING;
            self.bytes[at] = byte;
            self.count += 1;
        }
    }
}

/// Takes bytes that have come on standard input; returns how many, 0 when there are none.
pub fn read(buffer: &mut [u8]) -> usize {
    interrupts::without(|| {
        let mut ring = RECEIVED.lock();
        let count = ring.count.min(buffer.len());
        for byte in &mut buffer[..count] {
            *byte = ring.bytes[ring.from];
            ring.from = (ring.from + 1) % RING;
        }
        ring.count -= count;
        // What there was no room for interrupts no more.
        ring.take();
        count
    })
}

struct Report(Serial);

impl Write for Report {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.send_all(text.as_bytes());
        Ok(())
    }
}

/// Writes a line to the report; what `report!` and `log!` call.
pub fn report(text: fmt::Arguments<'_>) {
    interrupts::without(|| {
        let line = LINES[Stream::Report as usize].lock();
        // The line takes everything.
        let _ = Report(*line).write_fmt(format_args!("{text}\n"));
    });
}

/// The same in a panic: does not wait for who may never let the line go.
pub fn report_in_panic(text: fmt::Arguments<'_>) {
    let _ = Report(COM2).write_fmt(format_args!("{text}\n"));
}

/// A line of the report as it is: for those that programs read, which begin with `@`.
#[macro_export]
macro_rules! report {
    ($($text:tt)*) => { $crate::console::report(format_args!($($text)*)) };
}

/// A line of the report for people.
#[macro_export]
macro_rules! log {
    ($($text:tt)*) => { $crate::console::report(format_args!("@log {}", format_args!($($text)*))) };
}
