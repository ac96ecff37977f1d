//! The tree of names: what changes it.
//!
//! One lock for all changes: each looks names up again under it, so that what it has found stays until it is done.

use super::abi::S_IFDIR;
use super::directory::Directory;
use super::inode::{Inode, Kind, Node, Volume};
use super::path::{Dots, Found, path_of};
use super::permission::Who;
use super::regular::{Nature, Regular};
use crate::errno::Errno;
use crate::sync::Mutex;
use alloc::string::String;
use alloc::vec::Vec;
use terrane::identity::Identity;
use terrane::sync::Shared;

static CHANGES: Mutex<()> = Mutex::new(());
static ROOT: spin_once::Once = spin_once::Once::new();

/// A value that is set once, before anybody asks for it.
mod spin_once {
    use super::Node;
    use crate::sync::SpinLock;
    use core::sync::atomic::{AtomicPtr, Ordering};
    use terrane::sync::Shared;

    pub struct Once {
        keeper: SpinLock<Option<Shared<Node>>>,
        value: AtomicPtr<Node>,
    }

    impl Once {
        pub const fn new() -> Self {
            Self { keeper: SpinLock::new(None), value: AtomicPtr::new(core::ptr::null_mut()) }
        }

        pub fn set(&self, value: Node) {
            let Ok(shared) = Shared::try_new(value) else { return };
            self.value.store(Shared::as_ptr(&shared).cast_mut(), Ordering::Release);
            *self.keeper.lock() = Some(shared);
        }

        pub fn get(&self) -> &Node {
            let value = self.value.load(Ordering::Acquire);
            assert!(!value.is_null(), "the file system is not set up");
            // SAFETY: `set` has stored it, and keeps it for good.
            unsafe { &*value }
        }
    }
}

/// Makes the root.
///
/// # Errors
/// `ENOMEM`.
pub fn set_up() -> Result<(), Errno> {
    ROOT.set(Inode::try_new(Volume::Root, Kind::Directory(Directory::new(None)), 0o755)?);
    Ok(())
}

/// The root.
pub fn root() -> &'static Node {
    ROOT.get()
}

fn entries(node: &Node) -> Result<&Directory, Errno> {
    match &node.kind {
        Kind::Directory(directory) => Ok(directory),
        // Nothing can be made in what is made up.
        Kind::Proc(entry) if entry.file_type() == S_IFDIR => Err(Errno::EPERM),
        _ => Err(Errno::ENOTDIR),
    }
}

/// Makes an entry for `node`.
fn enter(parent: &Node, name: &[u8], node: &Node) -> Result<(), Errno> {
    let entries = entries(parent)?;
    Who::calls().may_change(parent, None)?;
    entries.insert(name, node)?;
    if node.is_directory() {
        parent.attributes.lock().links += 1;
    }
    parent.touch();
    Ok(())
}

/// A new file, device, link or pipe.
///
/// # Errors
/// `EEXIST`, `ENOENT`, `ENOTDIR`, `ENOMEM`.
pub fn create(parent: &Node, name: &[u8], kind: Kind, mode: u32) -> Result<Node, Errno> {
    let node = Inode::try_new(Volume::Root, kind, mode)?;
    let _alone = CHANGES.lock();
    enter(parent, name, &node)?;
    Ok(node)
}

/// A new regular file.
///
/// # Errors
/// As [`create`].
pub fn create_file(parent: &Node, name: &[u8], mode: u32) -> Result<Node, Errno> {
    create(parent, name, Kind::Regular(Regular::try_new()?), mode)
}

/// A new directory.
///
/// # Errors
/// As [`create`].
pub fn create_directory(parent: &Node, name: &[u8], mode: u32) -> Result<Node, Errno> {
    create(parent, name, Kind::Directory(Directory::new(Some(parent.clone()))), mode)
}

/// Another name for `node`.
///
/// # Errors
/// As [`create`]; `EPERM` for a directory or what is made up, `ENOENT` for what has no name any more.
pub fn link(parent: &Node, name: &[u8], node: &Node) -> Result<(), Errno> {
    let _alone = CHANGES.lock();
    if node.volume != Volume::Root {
        return Err(Errno::EXDEV);
    }
    if node.is_directory() || matches!(node.kind, Kind::Proc(_)) {
        return Err(Errno::EPERM);
    }
    if node.attributes.lock().links == 0 {
        return Err(Errno::ENOENT);
    }
    enter(parent, name, node)?;
    node.attributes.lock().links += 1;
    node.touch_attributes();
    Ok(())
}

/// A name less leads to `node`.
fn unlinked(node: &Node) {
    let links = {
        let mut attributes = node.attributes.lock();
        attributes.links = if node.is_directory() { 0 } else { attributes.links.saturating_sub(1) };
        attributes.links
    };
    node.touch_attributes();
    if links == 0
        && let Some(identity) = node.object().and_then(|object| object.identity())
    {
        identity.set_deleted();
    }
}

/// `unlink`.
///
/// # Errors
/// `ENOENT`, `EISDIR` for a directory, `ENOTDIR`, `EPERM`.
pub fn unlink(found: &Found) -> Result<(), Errno> {
    let node = found.node.as_ref().ok_or(Errno::ENOENT)?;
    if node.is_directory() {
        return Err(Errno::EISDIR);
    }
    if found.slash {
        return Err(Errno::ENOTDIR);
    }
    let parent = found.parent.as_ref().ok_or(Errno::EPERM)?;
    let removed = {
        let _alone = CHANGES.lock();
        let entries = entries(parent)?;
        match entries.get(&found.name) {
            None => return Err(Errno::ENOENT),
            Some(now) if now.is_directory() => return Err(Errno::EISDIR),
            Some(now) => {
                Who::calls().may_change(parent, Some(&now))?;
                entries.remove(&found.name)
            }
        }
    };
    if let Some(node) = removed {
        parent.touch();
        unlinked(&node);
    }
    Ok(())
}

/// `rmdir`.
///
/// # Errors
/// `ENOENT`, `ENOTDIR`, `ENOTEMPTY`, `EBUSY` for the root, `EINVAL` for a path that ends in a dot.
pub fn remove_directory(found: &Found) -> Result<(), Errno> {
    match found.dots {
        Dots::One => return Err(Errno::EINVAL),
        Dots::Two => return Err(Errno::ENOTEMPTY),
        Dots::Root => return Err(Errno::EBUSY),
        Dots::None => {}
    }
    let node = found.node.as_ref().ok_or(Errno::ENOENT)?;
    if !node.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    let parent = found.parent.as_ref().ok_or(Errno::EPERM)?;
    let _alone = CHANGES.lock();
    let entries_of_parent = entries(parent)?;
    let now = entries_of_parent.get(&found.name).ok_or(Errno::ENOENT)?;
    let directory = now.directory().ok_or(if now.is_directory() { Errno::EPERM } else { Errno::ENOTDIR })?;
    Who::calls().may_change(parent, Some(&now))?;
    if directory.has_processes {
        return Err(Errno::EBUSY);
    }
    directory.set_removed()?;
    entries_of_parent.remove(&found.name);
    parent.attributes.lock().links -= 1;
    parent.touch();
    unlinked(&now);
    Ok(())
}

/// `RENAME_NOREPLACE`.
pub const NO_REPLACE: u32 = 1;
/// `RENAME_EXCHANGE`.
pub const EXCHANGE: u32 = 2;

/// `rename`.
///
/// # Errors
/// As Linux: `ENOENT`, `EEXIST`, `EISDIR`, `ENOTDIR`, `ENOTEMPTY`, `EBUSY`, `EINVAL` when a directory would come into itself, `EXDEV`.
pub fn rename(from: &Found, to: &Found, flags: u32) -> Result<(), Errno> {
    if from.dots != Dots::None {
        return Err(Errno::EBUSY);
    }
    if to.dots != Dots::None {
        return Err(if flags & NO_REPLACE != 0 { Errno::EEXIST } else { Errno::EBUSY });
    }
    let (Some(old), Some(new)) = (&from.parent, &to.parent) else { return Err(Errno::EXDEV) };
    let _alone = CHANGES.lock();
    let (old_entries, new_entries) = (entries(old)?, entries(new)?);
    let node = old_entries.get(&from.name).ok_or(Errno::ENOENT)?;
    let target = new_entries.get(&to.name);
    let is_directory = node.is_directory();
    let who = Who::calls();
    who.may_change(old, Some(&node))?;
    who.may_change(new, target.as_ref())?;
    if flags & NO_REPLACE != 0 && target.is_some() {
        return Err(Errno::EEXIST);
    }
    let exchanges = flags & EXCHANGE != 0;
    if exchanges && target.is_none() {
        return Err(Errno::ENOENT);
    }
    let target_is_file = target.as_ref().is_some_and(|target| !target.is_directory());
    if !is_directory && (from.slash || to.slash && !exchanges) || exchanges && to.slash && target_is_file {
        return Err(Errno::ENOTDIR);
    }
    if matches!(node.kind, Kind::Proc(_)) || node.directory().is_some_and(|directory| directory.has_processes)
    {
        return Err(Errno::EBUSY);
    }
    // The directory must not come to lie in itself, nor replace one in which it lies.
    if is_directory && lies_in(new, &node) {
        return Err(Errno::EINVAL);
    }
    let Some(target) = target else {
        new_entries.insert(&to.name, &node)?;
        old_entries.remove(&from.name);
        moved(&node, old, new, &to.name);
        return Ok(());
    };
    if Node::ptr_eq(&target, &node) {
        return Ok(());
    }
    if target.is_directory() && lies_in(old, &target) {
        return Err(if exchanges { Errno::EINVAL } else { Errno::ENOTEMPTY });
    }
    if exchanges {
        new_entries.replace(&to.name, &node);
        old_entries.replace(&from.name, &target);
        moved(&node, old, new, &to.name);
        moved(&target, new, old, &from.name);
        return Ok(());
    }
    match (is_directory, target.directory()) {
        (true, Some(directory)) => {
            directory.set_removed()?;
            new.attributes.lock().links -= 1;
        }
        (true, None) => return Err(Errno::ENOTDIR),
        (false, _) if target.is_directory() => return Err(Errno::EISDIR),
        (false, _) => {}
    }
    new_entries.replace(&to.name, &node);
    old_entries.remove(&from.name);
    moved(&node, old, new, &to.name);
    unlinked(&target);
    Ok(())
}

/// `node` has come from one directory to the other.
fn moved(node: &Node, from: &Node, to: &Node, name: &[u8]) {
    if let Some(directory) = node.directory() {
        directory.set_parent(to);
        from.attributes.lock().links -= 1;
        to.attributes.lock().links += 1;
    }
    node.touch_attributes();
    from.touch();
    to.touch();
    if let Some(object) = node.object()
        && object.identity().is_some()
        && let Ok(mut path) = path_of(to)
    {
        // Without memory, listings show the old name.
        if path.try_reserve(name.len() + 1).is_ok() {
            if path.len() > 1 {
                path.push(b'/');
            }
            path.extend_from_slice(name);
            let _ = name_object(node, &path);
        }
    }
}

fn lies_in(node: &Node, directory: &Node) -> bool {
    let mut here = Some(node.clone());
    while let Some(node) = here {
        if Node::ptr_eq(&node, directory) {
            return true;
        }
        here = node.directory().and_then(Directory::parent);
    }
    false
}

/// Says what listings are to call the pages of a regular file.
///
/// # Errors
/// `ENOMEM`.
pub fn name_object(node: &Node, path: &[u8]) -> Result<(), Errno> {
    let Some(object) = node.object() else { return Ok(()) };
    let path = text(path)?;
    let identity = Identity::try_new(0, node.volume as u32, node.number, &path)?;
    if node.attributes.lock().links == 0 {
        identity.set_deleted();
    }
    object.set_identity(identity)?;
    Ok(())
}

/// Bytes as text; what is no text shows as `?`.
///
/// # Errors
/// `ENOMEM`.
pub fn text(bytes: &[u8]) -> Result<String, Errno> {
    let mut text: Vec<u8> = Vec::new();
    text.try_reserve_exact(bytes.len())?;
    for part in bytes.utf8_chunks() {
        text.extend_from_slice(part.valid().as_bytes());
        text.extend(part.invalid().iter().map(|_| b'?'));
    }
    // It is text by now.
    Ok(String::from_utf8(text).unwrap_or_default())
}

/// A new regular file without a name: for `memfd_create` and `O_TMPFILE`.
///
/// # Errors
/// `ENOMEM`.
pub fn nameless(volume: Volume, seals: u32, mode: u32) -> Result<Node, Errno> {
    let node = Inode::try_new(volume, Kind::Regular(Regular::with_seals(seals)?), mode)?;
    node.attributes.lock().links = 0;
    Ok(node)
}

/// The same of another nature.
///
/// # Errors
/// `ENOMEM`.
pub fn nameless_of(nature: Nature, seals: u32, mode: u32) -> Result<Node, Errno> {
    let node = Inode::try_new(Volume::Memory, Kind::Regular(Regular::of_nature(nature, seals)?), mode)?;
    node.attributes.lock().links = 0;
    Ok(node)
}

/// The two are one inode.
pub fn same(a: &Node, b: &Node) -> bool {
    Shared::ptr_eq(a, b)
}
