//! From paths to inodes.

use super::abi::{MAX_LINKS, NAME_MAX, PATH_MAX};
use super::current;
use super::directory::copy;
use super::inode::{Kind, Node};
use super::permission::{EXECUTE, Who};
use super::procfs;
use super::tree;
use crate::errno::Errno;
use alloc::vec::Vec;

/// Where a path leads.
pub struct Found {
    /// The directory of the last name; `None` when the path ends in `.`, `..`, or a link that `/proc` has made up.
    pub parent: Option<Node>,
    /// The last name; empty without a parent.
    pub name: Vec<u8>,
    /// What there is.
    pub node: Option<Node>,
    /// The path ends in a slash.
    pub slash: bool,
    /// The path ends in `.` or `..`, or is `/`.
    pub dots: Dots,
}

/// How a path ends that names no entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dots {
    /// It names one.
    None,
    /// In `.`.
    One,
    /// In `..`.
    Two,
    /// It is the root.
    Root,
}

impl Found {
    /// What there is.
    ///
    /// # Errors
    /// `ENOENT` for nothing.
    pub fn existing(self) -> Result<Node, Errno> {
        self.node.ok_or(Errno::ENOENT)
    }

    /// The directory for a new entry, and its name.
    ///
    /// # Errors
    /// `EEXIST`.
    pub fn free(self) -> Result<(Node, Vec<u8>), Errno> {
        match (self.node, self.parent) {
            (None, Some(parent)) => Ok((parent, self.name)),
            _ => Err(Errno::EEXIST),
        }
    }

    /// The same for what is no directory.
    ///
    /// # Errors
    /// `EEXIST`; `ENOENT` for a path that ends in a slash.
    pub fn free_for_file(self) -> Result<(Node, Vec<u8>), Errno> {
        if self.slash && self.node.is_none() { Err(Errno::ENOENT) } else { self.free() }
    }

    /// The absolute path of what there is.
    ///
    /// # Errors
    /// `ENOENT` when its directory has been removed, `ENOMEM`.
    pub fn path(&self) -> Result<Vec<u8>, Errno> {
        match (&self.parent, &self.node) {
            (Some(parent), _) => {
                let mut path = path_of(parent)?;
                if path != b"/" {
                    path.try_reserve(1)?;
                    path.push(b'/');
                }
                path.try_reserve(self.name.len())?;
                path.extend_from_slice(&self.name);
                Ok(path)
            }
            (None, Some(node)) => path_of(node),
            (None, None) => Err(Errno::ENOENT),
        }
    }
}

/// The absolute path of a directory, or of an inode that `/proc` has made up: from where the caller's paths begin, if it is beneath that.
///
/// # Errors
/// `ENOENT` when it has been removed, `ENOMEM`.
pub fn path_of(node: &Node) -> Result<Vec<u8>, Errno> {
    if let Kind::Proc(entry) = &node.kind {
        return entry.path();
    }
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut node = node.clone();
    let top = current::root_directory();
    while !Node::ptr_eq(&node, &top) && !Node::ptr_eq(&node, tree::root()) {
        let parent = node.directory().and_then(super::directory::Directory::parent).ok_or(Errno::ENOENT)?;
        let name = parent.directory().ok_or(Errno::ENOENT)?.name_of(&node)?;
        names.try_reserve(1)?;
        names.push(name);
        node = parent;
    }
    let mut path = Vec::new();
    path.try_reserve_exact(names.iter().map(|name| name.len() + 1).sum::<usize>().max(1))?;
    for name in names.iter().rev() {
        path.push(b'/');
        path.extend_from_slice(name);
    }
    if path.is_empty() {
        path.push(b'/');
    }
    Ok(path)
}

fn parent_of(node: &Node) -> Result<Node, Errno> {
    match &node.kind {
        Kind::Directory(directory) => Ok(directory.parent().unwrap_or_else(|| node.clone())),
        Kind::Proc(entry) => entry.parent(),
        _ => Err(Errno::ENOTDIR),
    }
}

fn lookup(directory: &Node, name: &[u8]) -> Result<Option<Node>, Errno> {
    match &directory.kind {
        Kind::Directory(entries) => match entries.get(name) {
            None if entries.has_processes => procfs::process(name),
            found => Ok(found),
        },
        Kind::Proc(entry) => entry.lookup(name),
        _ => Err(Errno::ENOTDIR),
    }
}

/// What is to become of a link at the end of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Last {
    /// It is followed.
    Follow,
    /// It is not, unless a slash comes behind it.
    Stay,
    /// The entry itself is wanted: it is not followed, and a slash behind it is the caller's to judge.
    Entry,
    /// As `Follow` or not; a file may be made there, and so no slash may come behind it.
    Create(bool),
}

impl Last {
    /// `Follow` or `Stay`.
    pub fn following(follow: bool) -> Self {
        if follow { Last::Follow } else { Last::Stay }
    }
}

/// Walks `path` from `start`, or from the root if it begins with a slash.
///
/// # Errors
/// `ENOENT`, also for an empty path or when another directory than the last is missing; `EISDIR` as [`Last::Create`] says; `EACCES`, `ENOTDIR`, `ENAMETOOLONG`, `ELOOP`, `ENOMEM`.
pub fn walk(start: &Node, path: &[u8], end: Last) -> Result<Found, Errno> {
    if path.is_empty() {
        return Err(Errno::ENOENT);
    }
    if path.len() >= PATH_MAX {
        return Err(Errno::ENAMETOOLONG);
    }
    let who = Who::calls();
    let top = current::root_directory();
    let mut here = if path[0] == b'/' { top.clone() } else { start.clone() };
    let mut rest = copy(path)?;
    let mut at = 0;
    let mut links = 0;
    let mut dots = if path[0] == b'/' { Dots::Root } else { Dots::One };
    loop {
        let begin = at + rest[at..].iter().take_while(|&&byte| byte == b'/').count();
        if begin == rest.len() {
            let slash = begin > at;
            if slash && !here.is_directory() {
                return Err(Errno::ENOTDIR);
            }
            return Ok(Found { parent: None, name: Vec::new(), node: Some(here), slash, dots });
        }
        let name_end = begin + rest[begin..].iter().take_while(|&&byte| byte != b'/').count();
        let behind = name_end + rest[name_end..].iter().take_while(|&&byte| byte == b'/').count();
        let (slash, last) = (behind > name_end, behind == rest.len());
        if !here.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        if !who.is_superuser() {
            who.may(&here, EXECUTE)?;
        }
        let name = &rest[begin..name_end];
        at = name_end;
        if name == b"." {
            dots = Dots::One;
            continue;
        }
        if name == b".." {
            if !Node::ptr_eq(&here, &top) {
                here = parent_of(&here)?;
            }
            dots = Dots::Two;
            continue;
        }
        if name.len() > NAME_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        if last && slash && matches!(end, Last::Create(_)) {
            return Err(Errno::EISDIR);
        }
        let Some(node) = lookup(&here, name)? else {
            if !last {
                return Err(Errno::ENOENT);
            }
            let name = copy(name)?;
            return Ok(Found { parent: Some(here), name, node: None, slash, dots: Dots::None });
        };
        let follow = match end {
            Last::Follow | Last::Create(true) => true,
            Last::Stay | Last::Create(false) => slash,
            Last::Entry => false,
        };
        if node.is_link() && (!last || follow) {
            links += 1;
            if links > MAX_LINKS {
                return Err(Errno::ELOOP);
            }
            match target(&node)? {
                Target::Node(node) => {
                    here = node;
                    dots = Dots::None;
                }
                Target::Path(mut target) => {
                    if target.is_empty() {
                        return Err(Errno::ENOENT);
                    }
                    if target[0] == b'/' {
                        here = top.clone();
                        dots = Dots::Root;
                    }
                    target.try_reserve(rest.len() - name_end)?;
                    target.extend_from_slice(&rest[name_end..]);
                    (rest, at) = (target, 0);
                }
            }
            continue;
        }
        if last {
            if slash && end != Last::Entry && !node.is_directory() {
                return Err(Errno::ENOTDIR);
            }
            let name = copy(name)?;
            return Ok(Found { parent: Some(here), name, node: Some(node), slash, dots: Dots::None });
        }
        here = node;
    }
}

/// Where a link leads.
enum Target {
    Path(Vec<u8>),
    /// Without a path: `/proc/self/exe`, `/proc/self/fd/3`.
    Node(Node),
}

fn target(link: &Node) -> Result<Target, Errno> {
    match &link.kind {
        Kind::Symlink(target) => Ok(Target::Path(copy(target)?)),
        Kind::Proc(entry) => match entry.jump()? {
            Some(node) => Ok(Target::Node(node)),
            None => Ok(Target::Path(entry.read_link()?)),
        },
        _ => Err(Errno::EINVAL),
    }
}

/// What `readlink` gives.
///
/// # Errors
/// `EINVAL` for what is no link, `ENOENT`, `ENOMEM`.
pub fn read_link(link: &Node) -> Result<Vec<u8>, Errno> {
    match &link.kind {
        Kind::Symlink(target) => copy(target),
        Kind::Proc(entry) if link.is_link() => entry.read_link(),
        _ => Err(Errno::EINVAL),
    }
}
