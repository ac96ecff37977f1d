//! An object's number and name; see [`identity`](crate::identity).

use super::Object;
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::identity::Identity;
use crate::sync::Shared;
use crate::sync::atomic::Ordering;

impl<H: Host> Object<H> {
    /// The object's number, which no other object of the machine ever has. Never 0.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Says what listings are to call the object; in place of what was said before. Memory that nobody has named is shown as
    /// Linux shows shared anonymous memory, with the object's [`number`](Self::number) for an inode.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn set_identity(&self, identity: Identity) -> Result<(), OutOfMemory> {
        self.machine().identities().set(self.number, identity)?;
        self.named.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// What listings call the object, if the host has said it.
    pub fn identity(&self) -> Option<Shared<Identity>> {
        self.machine().identities().get(self.number)
    }

    /// The object ends.
    pub(super) fn forget_identity(&self) {
        if self.named.load(Ordering::Relaxed) {
            self.machine().identities().end(self.number);
        }
    }
}
