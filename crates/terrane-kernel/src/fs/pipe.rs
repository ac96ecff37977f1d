//! Pipes.
//!
//! Bytes in a ring, under a spin lock; copies from and to programs are made outside of it, by way of the kernel's buffers. Up to
//! [`ATOMIC`] bytes go in together or not at all.

use super::abi::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLRDNORM, POLLWRNORM};
use super::bell::Bell;
use crate::errno::Errno;
use crate::sync::SpinLock;
use alloc::collections::VecDeque;

/// `PIPE_BUF`.
pub const ATOMIC: usize = 4096;
/// Bytes that a pipe takes at first.
const CAPACITY: usize = 1 << 16;
/// The most that `F_SETPIPE_SZ` gives.
const MAX_CAPACITY: u64 = 1 << 20;

struct State {
    bytes: VecDeque<u8>,
    capacity: usize,
    readers: usize,
    writers: usize,
    /// Ends that were ever opened: who opens a named pipe waits for the other end to come, even if it has gone again.
    readers_seen: u64,
    writers_seen: u64,
    /// Nothing goes in any more, and what is in it can be read to the end.
    stopped: bool,
    /// How long the packets are that the bytes are, where they are to be read as they were written.
    packets: Option<VecDeque<usize>>,
}

impl State {
    /// Bytes that a read may take at most: the first packet's, or all.
    fn next(&self) -> usize {
        let first = self.packets.as_ref().map(|packets| packets.front().copied().unwrap_or(0));
        first.unwrap_or(self.bytes.len())
    }

    /// Nobody will write.
    fn is_over(&self) -> bool {
        self.writers == 0 || self.stopped
    }
}

/// A pipe.
pub struct Pipe {
    state: SpinLock<State>,
    /// Rung when bytes come or go, and when an end is opened or closed.
    pub bell: Bell,
}

impl Pipe {
    /// An empty pipe without ends.
    pub fn new() -> Self {
        let state = State {
            bytes: VecDeque::new(),
            capacity: CAPACITY,
            readers: 0,
            writers: 0,
            readers_seen: 0,
            writers_seen: 0,
            stopped: false,
            packets: None,
        };
        Self { state: SpinLock::new(state), bell: Bell::new() }
    }

    /// The same, for packets: a read takes one, and what it has no room for is lost.
    pub fn of_packets() -> Self {
        let pipe = Self::new();
        pipe.state.lock().packets = Some(VecDeque::new());
        pipe
    }

    /// Somebody opens it.
    pub fn open(&self, reads: bool, writes: bool) {
        {
            let mut state = self.state.lock();
            state.readers += usize::from(reads);
            state.writers += usize::from(writes);
            state.readers_seen += u64::from(reads);
            state.writers_seen += u64::from(writes);
        }
        self.bell.ring();
    }

    /// Somebody closes it.
    pub fn close(&self, reads: bool, writes: bool) {
        {
            let mut state = self.state.lock();
            state.readers -= usize::from(reads);
            state.writers -= usize::from(writes);
            if state.readers + state.writers == 0 {
                state.bytes = VecDeque::new();
            }
        }
        self.bell.ring();
    }

    /// Waits, after one end of a named pipe was opened, for the other.
    ///
    /// # Errors
    /// `ERESTARTSYS`; `ENXIO` for a writer without a reader that does not wait.
    pub fn meet(&self, reads: bool, writes: bool, blocks: bool) -> Result<(), Errno> {
        if reads == writes {
            return Ok(());
        }
        let (there, seen) = {
            let state = self.state.lock();
            if reads { (state.writers, state.writers_seen) } else { (state.readers, state.readers_seen) }
        };
        if there > 0 || (reads && !blocks) {
            return Ok(());
        }
        if !blocks {
            return Err(Errno::ENXIO);
        }
        self.bell.wait(|| {
            let state = self.state.lock();
            seen != if reads { state.writers_seen } else { state.readers_seen }
        })
    }

    /// Takes bytes; 0 when there are none and nobody writes.
    ///
    /// # Errors
    /// `EAGAIN`, `ERESTARTSYS`.
    pub fn read(&self, buffer: &mut [u8], blocks: bool) -> Result<usize, Errno> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            {
                let mut state = self.state.lock();
                let next = state.next();
                let count = buffer.len().min(next);
                if count > 0 {
                    let (first, second) = state.bytes.as_slices();
                    let split = count.min(first.len());
                    buffer[..split].copy_from_slice(&first[..split]);
                    buffer[split..count].copy_from_slice(&second[..count - split]);
                    let taken = if state.packets.is_some() { next } else { count };
                    state.bytes.drain(..taken);
                    if let Some(packets) = &mut state.packets {
                        packets.pop_front();
                    }
                }
                if count > 0 {
                    drop(state);
                    self.bell.ring();
                    return Ok(count);
                }
                if state.is_over() {
                    return Ok(0);
                }
            }
            if !blocks {
                return Err(Errno::EAGAIN);
            }
            self.bell.wait(|| {
                let state = self.state.lock();
                !state.bytes.is_empty() || state.is_over()
            })?;
        }
    }

    /// Copies bytes that are in it, from the first on, and leaves them there; 0 when there are none and nobody writes.
    ///
    /// # Errors
    /// `EAGAIN`, `ERESTARTSYS`.
    pub fn peek(&self, buffer: &mut [u8], blocks: bool) -> Result<usize, Errno> {
        loop {
            {
                let state = self.state.lock();
                if !state.bytes.is_empty() || state.is_over() {
                    let count = buffer.len().min(state.next());
                    buffer[..count].iter_mut().zip(state.bytes.iter()).for_each(|(to, &from)| *to = from);
                    return Ok(count);
                }
            }
            if !blocks {
                return Err(Errno::EAGAIN);
            }
            self.bell.wait(|| {
                let state = self.state.lock();
                !state.bytes.is_empty() || state.is_over()
            })?;
        }
    }

    /// Ends it, whoever has it open (`shutdown`).
    pub fn stop(&self) {
        self.state.lock().stopped = true;
        self.bell.ring();
    }

    /// Puts bytes back that could not be delivered.
    pub fn put_back(&self, bytes: &[u8]) {
        let mut state = self.state.lock();
        if state.bytes.try_reserve(bytes.len()).is_ok() {
            if let Some(packets) = &mut state.packets {
                if packets.try_reserve(1).is_err() {
                    return;
                }
                packets.push_front(bytes.len());
            }
            bytes.iter().rev().for_each(|&byte| state.bytes.push_front(byte));
        }
    }

    /// Puts bytes in: all of them, unless they are not to be kept together (`whole`), where it may be fewer.
    ///
    /// # Errors
    /// `EPIPE` when nobody reads, `EAGAIN`, `ERESTARTSYS`, `ENOMEM`, `EMSGSIZE` for too large a packet.
    pub fn write(&self, bytes: &[u8], whole: bool, blocks: bool) -> Result<usize, Errno> {
        const TOO_LARGE: Errno = Errno(90);
        let packets = self.state.lock().packets.is_some();
        if packets && bytes.len() > self.capacity() {
            return Err(TOO_LARGE);
        }
        let needed = if whole || packets { bytes.len() } else { 1 };
        loop {
            {
                let mut state = self.state.lock();
                if state.readers == 0 || state.stopped {
                    return Err(Errno::EPIPE);
                }
                let count = bytes.len().min(state.capacity - state.bytes.len().min(state.capacity));
                if count >= needed {
                    state.bytes.try_reserve(count)?;
                    if let Some(packets) = state.packets.as_mut().filter(|_| count > 0) {
                        packets.try_reserve(1)?;
                        packets.push_back(count);
                    }
                    state.bytes.extend(&bytes[..count]);
                    drop(state);
                    self.bell.ring();
                    return Ok(count);
                }
            }
            if !blocks {
                return Err(Errno::EAGAIN);
            }
            self.bell.wait(|| {
                let state = self.state.lock();
                state.readers == 0
                    || state.stopped
                    || state.capacity.saturating_sub(state.bytes.len()) >= needed
            })?;
        }
    }

    /// What `poll` says to who has it open so.
    pub fn ready(&self, reads: bool, writes: bool) -> u32 {
        let state = self.state.lock();
        let mut ready = 0;
        if reads {
            ready |= if state.bytes.is_empty() { 0 } else { POLLIN | POLLRDNORM };
            ready |= if state.is_over() && state.writers_seen > 0 { POLLHUP } else { 0 };
        }
        if writes {
            let room = state.bytes.len() + ATOMIC <= state.capacity;
            ready |= if room { POLLOUT | POLLWRNORM } else { 0 };
            ready |= if state.readers == 0 || state.stopped { POLLERR } else { 0 };
        }
        ready
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.state.lock().bytes.len()
    }

    /// Bytes that it takes.
    pub fn capacity(&self) -> usize {
        self.state.lock().capacity
    }

    /// Sets that, rounded up to a power of two of pages.
    ///
    /// # Errors
    /// `EBUSY` when there is more in it, `EPERM` when it is too much, `EINVAL`.
    pub fn set_capacity(&self, bytes: u64) -> Result<usize, Errno> {
        let bytes = bytes.max(ATOMIC as u64).checked_next_power_of_two().ok_or(Errno::EINVAL)?;
        if bytes > MAX_CAPACITY {
            return Err(Errno::EPERM);
        }
        {
            let mut state = self.state.lock();
            if state.bytes.len() as u64 > bytes {
                return Err(Errno::EBUSY);
            }
            state.capacity = bytes as usize;
        }
        self.bell.ring();
        Ok(bytes as usize)
    }
}
