//! Descriptor tables.

use super::abi::{O_RDWR, O_WRONLY};
use super::device::{Device, is_terminal};
use super::directory::copy;
use super::inode::{Inode, Kind, Volume};
use super::open::{Open, OpenFile};
use crate::errno::Errno;
use crate::sync::SpinLock;
use alloc::vec::Vec;

/// What a descriptor stands for.
struct Slot {
    file: Open,
    close_on_exec: bool,
}

/// A descriptor table. Threads of a process share it as a rule.
pub struct Files {
    slots: SpinLock<Vec<Option<Slot>>>,
}

impl Files {
    /// No descriptors.
    pub const fn new() -> Self {
        Self { slots: SpinLock::new(Vec::new()) }
    }

    /// The descriptors of the first process: standard input, output and error.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Self, Errno> {
        let files = Self::new();
        for (device, flags) in
            [(Device::Console, 0), (Device::Console, O_WRONLY), (Device::ErrorConsole, O_RDWR)]
        {
            let flags = if is_terminal() { O_RDWR } else { flags };
            let node = Inode::try_new(Volume::Root, Kind::Device(device), 0o620)?;
            files.add(OpenFile::try_new(node, flags, copy(b"/dev/console")?)?, false, 0, 3)?;
        }
        Ok(files)
    }

    /// A table with the same descriptors.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn fork(&self) -> Result<Self, Errno> {
        let slots = self.slots.lock();
        let mut copy = Vec::new();
        copy.try_reserve_exact(slots.len())?;
        for slot in slots.iter() {
            copy.push(slot.as_ref().map(|slot| {
                slot.file.add_descriptor();
                Slot { file: slot.file.clone(), close_on_exec: slot.close_on_exec }
            }));
        }
        Ok(Self { slots: SpinLock::new(copy) })
    }

    /// What `fd` stands for.
    ///
    /// # Errors
    /// `EBADF`, also for one that was opened for its name only.
    pub fn get(&self, fd: i32) -> Result<Open, Errno> {
        self.get_path(fd).and_then(|file| if file.is_path() { Err(Errno::EBADF) } else { Ok(file) })
    }

    /// What `fd` stands for, also if it was opened for its name only.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn get_path(&self, fd: i32) -> Result<Open, Errno> {
        let slots = self.slots.lock();
        let slot = usize::try_from(fd).ok().and_then(|fd| slots.get(fd)).and_then(Option::as_ref);
        slot.map(|slot| slot.file.clone()).ok_or(Errno::EBADF)
    }

    /// Gives `file` the lowest free number from `from` on.
    ///
    /// # Errors
    /// `EMFILE` at `limit`, `ENOMEM`.
    pub fn add(&self, file: Open, close_on_exec: bool, from: usize, limit: u64) -> Result<i32, Errno> {
        let mut slots = self.slots.lock();
        let free = (from..slots.len()).find(|&fd| slots[fd].is_none());
        let fd = free.unwrap_or_else(|| slots.len().max(from));
        if fd as u64 >= limit {
            return Err(Errno::EMFILE);
        }
        Self::make_room(&mut slots, fd)?;
        file.add_descriptor();
        slots[fd] = Some(Slot { file, close_on_exec });
        Ok(fd as i32)
    }

    /// Gives `file` the number `fd`; what that stood for is closed.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn put(&self, file: Open, close_on_exec: bool, fd: usize) -> Result<(), Errno> {
        let before = {
            let mut slots = self.slots.lock();
            Self::make_room(&mut slots, fd)?;
            file.add_descriptor();
            slots[fd].replace(Slot { file, close_on_exec })
        };
        if let Some(slot) = before {
            OpenFile::remove_descriptor(&slot.file);
        }
        Ok(())
    }

    fn make_room(slots: &mut Vec<Option<Slot>>, fd: usize) -> Result<(), Errno> {
        if fd >= slots.len() {
            slots.try_reserve(fd + 1 - slots.len())?;
            slots.resize_with(fd + 1, || None);
        }
        Ok(())
    }

    /// Closes `fd`; what it stood for.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn close(&self, fd: i32) -> Result<Open, Errno> {
        let slot = {
            let mut slots = self.slots.lock();
            usize::try_from(fd).ok().and_then(|fd| slots.get_mut(fd)).and_then(Option::take)
        };
        // Outside of the lock: it may be the file's end.
        let file = slot.ok_or(Errno::EBADF)?.file;
        OpenFile::remove_descriptor(&file);
        Ok(file)
    }

    /// Closes those from `first` to `last`, or, with `mark`, says that `execve` is to close them.
    pub fn close_range(&self, first: usize, last: usize, mark: bool) {
        let count = self.slots.lock().len();
        for fd in first..count.min(last.saturating_add(1)) {
            if mark {
                let _ = self.set_close_on_exec(fd as i32, true);
            } else {
                let _ = self.close(fd as i32);
            }
        }
    }

    /// Closes what `execve` is to close.
    pub fn close_on_exec(&self) {
        let mut fd = 0;
        loop {
            let slot = {
                let mut slots = self.slots.lock();
                let Some(slot) = slots.get_mut(fd) else { return };
                slot.take_if(|slot| slot.close_on_exec)
            };
            if let Some(slot) = slot {
                OpenFile::remove_descriptor(&slot.file);
            }
            fd += 1;
        }
    }

    /// True when `execve` closes `fd`.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn closes_on_exec(&self, fd: i32) -> Result<bool, Errno> {
        self.with(fd, |slot| slot.close_on_exec)
    }

    /// Says whether `execve` closes `fd`.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn set_close_on_exec(&self, fd: i32, closes: bool) -> Result<(), Errno> {
        self.with(fd, |slot| slot.close_on_exec = closes)
    }

    fn with<R>(&self, fd: i32, act: impl FnOnce(&mut Slot) -> R) -> Result<R, Errno> {
        let mut slots = self.slots.lock();
        let slot = usize::try_from(fd).ok().and_then(|fd| slots.get_mut(fd)).and_then(Option::as_mut);
        slot.map(act).ok_or(Errno::EBADF)
    }

    /// The descriptors in use from `from` on, at most `limit`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn list(&self, from: usize, limit: usize) -> Result<Vec<usize>, Errno> {
        let slots = self.slots.lock();
        let mut list = Vec::new();
        for fd in (from..slots.len()).filter(|&fd| slots[fd].is_some()).take(limit) {
            list.try_reserve(1)?;
            list.push(fd);
        }
        Ok(list)
    }

    /// How many numbers it has room for.
    pub fn capacity(&self) -> usize {
        self.slots.lock().len().next_multiple_of(64)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for slot in self.slots.get_mut().drain(..).flatten() {
            OpenFile::remove_descriptor(&slot.file);
        }
    }
}
