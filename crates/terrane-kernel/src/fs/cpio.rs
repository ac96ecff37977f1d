//! The boot archive: cpio "newc".
//!
//! Each member is a header of 110 ASCII bytes (a magic number and 13 numbers of 8 hexadecimal digits), the name with a NUL, and the
//! bytes; name and bytes are each followed by zeros up to a multiple of 4. The last member is called `TRAILER!!!`.

/// A member of an archive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member<'a> {
    /// The path, without a slash at its beginning.
    pub name: &'a [u8],
    /// Type and permissions, as `stat` gives them.
    pub mode: u32,
    /// When it was changed, in seconds since 1970.
    pub modified: u32,
    /// The bytes: of a file, or the target of a symbolic link.
    pub bytes: &'a [u8],
}

const HEADER: usize = 110;

/// The members of `archive`, in order; ends at the trailer, or where it is no archive any more.
pub fn members(archive: &[u8]) -> impl Iterator<Item = Member<'_>> {
    let mut rest = archive;
    core::iter::from_fn(move || {
        let (member, behind) = next(rest)?;
        rest = behind;
        (member.name != b"TRAILER!!!").then_some(member)
    })
}

fn next(rest: &[u8]) -> Option<(Member<'_>, &[u8])> {
    let header = rest.get(..HEADER)?;
    if !header.starts_with(b"070701") && !header.starts_with(b"070702") {
        return None;
    }
    let field = |number: usize| hexadecimal(header.get(6 + 8 * number..14 + 8 * number)?);
    let (mode, modified, size, name_size) = (field(1)?, field(5)?, field(6)? as usize, field(11)? as usize);
    let name = rest.get(HEADER..HEADER.checked_add(name_size.checked_sub(1)?)?)?;
    let start = (HEADER + name_size).checked_next_multiple_of(4)?;
    let end = start.checked_add(size)?;
    let bytes = rest.get(start..end)?;
    let behind = rest.get(end.checked_next_multiple_of(4)?..).unwrap_or_default();
    let name = name.strip_prefix(b"./").unwrap_or(name);
    let name = name.strip_prefix(b"/").unwrap_or(name);
    Some((Member { name, mode, modified, bytes }, behind))
}

fn hexadecimal(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0u32, |value, &digit| {
        let digit = (digit as char).to_digit(16)?;
        Some(value << 4 | digit)
    })
}
