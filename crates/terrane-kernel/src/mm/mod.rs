//! Memory: the machine that Terrane manages.

mod heap;
mod host;

pub use host::KernelHost;

use crate::errno::Errno;
use alloc::sync::Arc;
use terrane::machine::{Cpu, Machine};
use terrane::space::{AddressSpace, SpaceConfig};
use terrane::sync::Shared;

/// Terrane's machine.
pub type KernelMachine = Machine<KernelHost>;
/// One of its processors: what every call of Terrane takes.
pub type KernelCpu = Cpu<KernelHost>;
/// An object: a file or shared memory.
pub type Object = Shared<terrane::object::Object<KernelHost>>;

/// An address space that processors can run.
pub struct Space {
    inner: AddressSpace<KernelHost>,
}

impl core::ops::Deref for Space {
    type Target = AddressSpace<KernelHost>;
    fn deref(&self) -> &Self::Target {
        &self.inner
    }
}

/// The machine.
pub fn machine() -> &'static Shared<KernelMachine> {
    todo!()
}

/// Runs `act` with a processor of Terrane's: this one's own as a rule. `act` may block. Not to be nested, except where `act` calls what
/// takes the processor by argument.
pub fn with_cpu<R>(_act: impl FnOnce(&KernelCpu) -> R) -> R {
    todo!()
}

/// The configuration that the command line asks for (`locking=`, `placement=`).
pub fn space_config() -> SpaceConfig {
    todo!()
}

/// A new, empty space with the kernel in its upper half.
///
/// # Errors
/// `ENOMEM`.
pub fn new_space(_cpu: &KernelCpu, _config: SpaceConfig) -> Result<Arc<Space>, Errno> {
    todo!()
}

/// A copy of `parent`, with the kernel in its upper half: for fork.
///
/// # Errors
/// `ENOMEM`.
pub fn fork_space(_cpu: &KernelCpu, _parent: &Space) -> Result<Arc<Space>, Errno> {
    todo!()
}

/// Runs `space` on this processor from now on; `None`: only the kernel. The processor keeps it alive while it runs it.
pub fn activate(_space: Option<&Arc<Space>>) {
    todo!()
}
