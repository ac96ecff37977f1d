//! A swap device that goes out of use: all that is on it comes back. How, is said in the head of [`swap`](crate::swap).

use super::anon::map_back;
use crate::error::{Error, FaultError};
use crate::host::Host;
use crate::machine::{Cpu, Machine};
use crate::object::Object;
use crate::swap::Emptying;
use crate::sync::Shared;

/// Looks for memory before it is given up.
const TRIES: u32 = 3;

/// What a look at a slot has come to.
enum Step<H: Host> {
    Done,
    Again,
    Read,
    Map(crate::addr::Frame),
    Object(Shared<Object<H>>, u64),
}

impl<H: Host> Machine<H> {
    /// Takes swap device `device` out of use (`swapoff`): every page on it comes back to memory, or goes to another device from there. When it returns, the
    /// device is asked for nothing any more; it is dropped with the machine. Blocks; not while pinned. `cpu` is one of this machine.
    /// O(slots of the device).
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such device, or it is out of use; [`Error::NoMemory`] when memory has no room for all;
    /// [`Error::Io`] when a page cannot be read. The device is in use again then, and nothing is lost.
    pub fn swap_off(&self, cpu: &Cpu<H>, device: u32) -> Result<(), Error> {
        let swap = self.swap();
        let (first, count) = swap.close(device)?;
        let result = (first..first + count).try_for_each(|number| empty(cpu, number));
        if result.is_err() {
            swap.reopen(device);
        }
        cpu.tidy();
        result
    }
}

/// Brings the page of a slot back.
fn empty<H: Host>(cpu: &Cpu<H>, number: u64) -> Result<(), Error> {
    let machine = &**cpu.machine();
    let (mut rounds, mut tries) = (0, 0);
    loop {
        let step = {
            let pin = cpu.pin();
            machine.swap().empty(&machine.ram(&pin), number, |found| match found {
                Emptying::Free => Step::Done,
                Emptying::Busy => mutant!("swap_off_leaves_readers", Step::Again, Step::Done),
                Emptying::Away => Step::Read,
                Emptying::Known(frame) => Step::Map(frame),
                Emptying::Object(object, index) => {
                    // SAFETY: who put the page there said which object's it is, by its exposed address; an object gives its slots up, which takes
                    // the lock that is held here, before its memory is freed.
                    let object = unsafe { Shared::try_own(object.cast_const().cast::<Object<H>>()) };
                    object.map_or(Step::Again, |object| Step::Object(object, index))
                }
            })
        };
        let result = match step {
            Step::Done => return Ok(()),
            Step::Again => Ok(()),
            Step::Read => machine.swap().read_in(cpu, number),
            Step::Map(frame) => {
                // What cannot be had now finds the page in memory when it is touched.
                map_back(cpu, frame);
                return Ok(());
            }
            Step::Object(object, index) => object.read_in(cpu, index, false),
        };
        match result {
            // The object is shorter by now, and has given the page up or is about to.
            Ok(()) | Err(FaultError::BeyondEnd) => {}
            Err(FaultError::OutOfMemory) => {
                tries += 1;
                if !cpu.find_memory() && tries >= TRIES {
                    return Err(Error::NoMemory);
                }
            }
            Err(_) => return Err(Error::Io),
        }
        machine.host().relax(cpu.id(), rounds);
        rounds += 1;
    }
}
