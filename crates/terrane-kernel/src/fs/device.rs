//! The devices in `/dev`.

use super::abi::{POLLIN, POLLOUT, POLLRDNORM, POLLWRNORM};
use super::bell::interrupted;
use super::random;
use crate::console::{self, Stream};
use crate::errno::Errno;
use crate::options;
use crate::sync::SpinLock;
use crate::task::wait::Queue;

/// A character device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    Null,
    Zero,
    Full,
    Random,
    UnlimitedRandom,
    /// Standard input and output.
    Console,
    /// The same for reading; writing goes to standard error.
    ErrorConsole,
    /// The controlling terminal: as the console.
    Terminal,
}

/// Input that was looked at and not read yet, and whether its end was there.
static PENDING: SpinLock<Pending> =
    SpinLock::new(Pending { bytes: [0; 256], len: 0, quoted: false, ended: false });

struct Pending {
    bytes: [u8; 256],
    len: usize,
    /// The byte that comes next is itself, whatever it is.
    quoted: bool,
    ended: bool,
}

/// What stands for the end of input (Ctrl-D), where a terminal would have it.
const END: u8 = 4;
/// What quotes the byte behind it (Ctrl-V).
const QUOTE: u8 = 22;

impl Pending {
    /// Takes what has come from the line.
    fn fill(&mut self) {
        while !self.ended && self.len < self.bytes.len() {
            let mut byte = [0];
            if console::read(&mut byte) == 0 {
                return;
            }
            match byte[0] {
                END if !self.quoted => self.ended = true,
                QUOTE if !self.quoted => self.quoted = true,
                byte => {
                    self.bytes[self.len] = byte;
                    self.len += 1;
                    self.quoted = false;
                }
            }
        }
    }
}

/// True when programs are to find a terminal (`tty=1`).
pub fn is_terminal() -> bool {
    options::value("tty") == Some("1")
}

impl Device {
    /// Its number, as `st_rdev` has it.
    pub fn number(self) -> u64 {
        let (major, minor) = match self {
            Device::Null => (1, 3),
            Device::Zero => (1, 5),
            Device::Full => (1, 7),
            Device::Random => (1, 8),
            Device::UnlimitedRandom => (1, 9),
            Device::Terminal => (5, 0),
            Device::Console | Device::ErrorConsole => (5, 1),
        };
        major << 8 | minor
    }

    /// The device with this number.
    pub fn of_number(number: u64) -> Option<Self> {
        use Device::{Console, Full, Null, Random, Terminal, UnlimitedRandom, Zero};
        [Null, Zero, Full, Random, UnlimitedRandom, Terminal, Console]
            .into_iter()
            .find(|device| device.number() == number)
    }

    /// True for those that lead to the serial lines.
    pub fn is_console(self) -> bool {
        matches!(self, Device::Console | Device::ErrorConsole | Device::Terminal)
    }

    /// Reads.
    ///
    /// # Errors
    /// `EAGAIN`, `ERESTARTSYS`.
    pub fn read(self, buffer: &mut [u8], blocks: bool) -> Result<usize, Errno> {
        match self {
            Device::Null => Ok(0),
            Device::Zero | Device::Full => {
                buffer.fill(0);
                Ok(buffer.len())
            }
            Device::Random | Device::UnlimitedRandom => {
                random::fill(buffer);
                Ok(buffer.len())
            }
            Device::Console | Device::ErrorConsole | Device::Terminal => read_console(buffer, blocks),
        }
    }

    /// Writes.
    ///
    /// # Errors
    /// `ENOSPC` by the full one.
    pub fn write(self, bytes: &[u8]) -> Result<usize, Errno> {
        match self {
            Device::Full => return Err(Errno::ENOSPC),
            Device::Console | Device::Terminal => console::write(Stream::Output, bytes),
            Device::ErrorConsole => console::write(Stream::Error, bytes),
            Device::Null | Device::Zero | Device::Random | Device::UnlimitedRandom => {}
        }
        Ok(bytes.len())
    }

    /// Where to wait until it becomes ready.
    pub fn queue(self) -> Option<&'static Queue> {
        self.is_console().then_some(&console::INPUT)
    }

    /// What `poll` says.
    pub fn ready(self) -> u32 {
        let readable = !self.is_console() || available() > 0;
        POLLOUT | POLLWRNORM | if readable { POLLIN | POLLRDNORM } else { 0 }
    }
}

/// Bytes that can be read from the console at once; at least 1 at the end of input.
pub fn available() -> usize {
    let mut pending = PENDING.lock();
    pending.fill();
    pending.len.max(usize::from(pending.ended))
}

fn read_console(buffer: &mut [u8], blocks: bool) -> Result<usize, Errno> {
    if buffer.is_empty() {
        return Ok(0);
    }
    loop {
        {
            let mut pending = PENDING.lock();
            pending.fill();
            let count = pending.len.min(buffer.len());
            if count > 0 {
                buffer[..count].copy_from_slice(&pending.bytes[..count]);
                let len = pending.len;
                pending.bytes.copy_within(count..len, 0);
                pending.len -= count;
            }
            if count > 0 || pending.ended {
                return Ok(count);
            }
        }
        if !blocks {
            return Err(Errno::EAGAIN);
        }
        console::INPUT.wait_until(None, || available() > 0).map_err(interrupted)?;
    }
}
