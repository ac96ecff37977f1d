//! `signalfd`: signals that are read. A read takes what waits for the thread that reads, whoever has made the descriptor.

use super::abi::POLLIN;
use super::current;
use crate::errno::Errno;
use crate::sync::SpinLock;
use crate::task::signal::{Info, SIGCHLD, Set};
use crate::task::wait::{self, Wake};

/// Bytes of `struct signalfd_siginfo`.
const MESSAGE: usize = 128;

/// What a `signalfd` stands for.
pub struct Signals {
    set: SpinLock<u64>,
}

impl Signals {
    /// For the signals of `set`.
    pub fn new(set: u64) -> Self {
        Self { set: SpinLock::new(set & !Set::ALWAYS.0) }
    }

    /// Changes the set.
    pub fn set(&self, set: u64) {
        *self.set.lock() = set & !Set::ALWAYS.0;
    }

    /// The set: who waits for the descriptor is to be woken by these.
    pub fn wanted(&self) -> u64 {
        *self.set.lock()
    }

    /// What `poll` says to the thread that asks.
    pub fn ready(&self) -> u32 {
        if current::waiting_signals(self.wanted()) != 0 { POLLIN } else { 0 }
    }

    /// Takes signals, as many as there are and as the buffer takes.
    ///
    /// # Errors
    /// `EINVAL` for too small a buffer, `EAGAIN`, `ERESTARTSYS`.
    pub fn read(&self, buffer: &mut [u8], blocks: bool) -> Result<usize, Errno> {
        if buffer.len() < MESSAGE {
            return Err(Errno::EINVAL);
        }
        let wanted = self.wanted();
        let mut done = 0;
        for place in buffer.chunks_exact_mut(MESSAGE) {
            let Some(info) = take(wanted, blocks && done == 0)? else { break };
            write(place, &info);
            done += MESSAGE;
        }
        if done == 0 { Err(Errno::EAGAIN) } else { Ok(done) }
    }
}

fn take(wanted: u64, blocks: bool) -> Result<Option<Info>, Errno> {
    loop {
        if let Some(info) = current::take_signal(wanted) {
            return Ok(Some(info));
        }
        if !blocks {
            return Ok(None);
        }
        let there = || current::waiting_signals(wanted) != 0;
        match current::awaiting(wanted, || wait::on_any(&[], None, there)) {
            Err(Wake::Signal) if !there() => return Err(Errno::ERESTARTSYS),
            _ => {}
        }
    }
}

fn write(place: &mut [u8], info: &Info) {
    let [first, second, third, fourth] = info.words;
    let low = |word: u64| word as u32;
    place.fill(0);
    let mut put32 = |at: usize, value: u32| place[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    put32(0, info.signal);
    put32(4, info.errno as u32);
    put32(8, info.code as u32);
    // Who sent it; for a timer, its number and how often it went off.
    put32(12, low(first));
    put32(16, (first >> 32) as u32);
    let is_timer = info.code == crate::task::signal::SI_TIMER;
    if is_timer {
        put32(24, low(first));
        put32(32, (first >> 32) as u32);
    }
    if info.signal == SIGCHLD && info.code > 0 {
        put32(40, low(second));
        place[56..64].copy_from_slice(&third.to_ne_bytes());
        place[64..72].copy_from_slice(&fourth.to_ne_bytes());
    } else {
        put32(44, low(second));
        place[48..56].copy_from_slice(&second.to_ne_bytes());
    }
}
