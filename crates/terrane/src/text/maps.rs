//! `maps`: a line for each mapping.

use super::TextError;
use crate::host::Host;
use crate::machine::Cpu;
use crate::space::{AddressSpace, Backing, Listing, Mapping};
use crate::vma::Prot;
use core::fmt::{self, Write};

/// The column at which paths begin, counted from 0.
pub(super) const PATH_COLUMN: usize = 73;

/// Writes `/proc/pid/maps`: the mappings of one moment between calls. O(n log n).
///
/// # Errors
/// [`TextError`].
pub fn write_maps<H: Host>(
    space: &AddressSpace<H>,
    cpu: &Cpu<H>,
    out: &mut impl Write,
) -> Result<(), TextError> {
    let listing = space.listing(cpu)?;
    for mapping in &listing.mappings {
        write_header(out, &listing, mapping)?;
    }
    Ok(())
}

/// A writer that knows how much it has written.
struct Counted<'a, W> {
    out: &'a mut W,
    count: usize,
}

impl<W: Write> Write for Counted<'_, W> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        self.count += s.len();
        self.out.write_str(s)
    }
}

/// Writes the line of one mapping.
pub(super) fn write_header(out: &mut impl Write, listing: &Listing, mapping: &Mapping) -> fmt::Result {
    let mut line = Counted { out, count: 0 };
    let identity = listing.identity(mapping.object);
    let (major, minor, inode) = match (identity, mapping.backing) {
        (Some(identity), _) => (identity.major(), identity.minor(), identity.inode()),
        // Where Linux keeps shared memory that has no name.
        (None, Backing::Shared) => (0, 1, mapping.object),
        (None, _) => (0, 0, mapping.object),
    };
    let name = match (identity, mapping.backing) {
        (Some(identity), _) => identity.path(),
        (None, Backing::Shared) => "/dev/zero (deleted)",
        (None, Backing::Heap) => "[heap]",
        _ if is_stack(listing, mapping) => "[stack]",
        _ => "",
    };
    write_prefix(&mut line, mapping, (major, minor, inode))?;
    if !name.is_empty() {
        while line.count < PATH_COLUMN - 1 {
            line.write_char(' ')?;
        }
        line.write_char(' ')?;
        // As Linux does it, so that a line stays a line.
        for (n, part) in name.split('\n').enumerate() {
            line.write_str(if n > 0 { "\\012" } else { "" })?;
            line.write_str(part)?;
        }
        if identity.is_some_and(|identity| identity.is_deleted()) {
            line.write_str(" (deleted)")?;
        }
    }
    line.write_char('\n')
}

/// What every line begins with.
pub(super) fn write_prefix(
    line: &mut impl Write,
    mapping: &Mapping,
    (major, minor, inode): (u32, u32, u64),
) -> fmt::Result {
    let mark = |set: Prot, c: char| if mapping.prot.contains(set) { c } else { '-' };
    write!(
        line,
        "{:08x}-{:08x} {}{}{}{} {:08x} {major:02x}:{minor:02x} {inode} ",
        mapping.range.start,
        mapping.range.end,
        mark(Prot::READ, 'r'),
        mark(Prot::WRITE, 'w'),
        mark(Prot::EXEC, 'x'),
        if mapping.shared { 's' } else { 'p' },
        mapping.offset,
    )
}

fn is_stack(listing: &Listing, mapping: &Mapping) -> bool {
    match listing.layout.stack {
        0 => mapping.backing == Backing::Stack,
        // Its end counts too: that is where the stack begins.
        mark => mapping.object == 0 && mapping.range.start <= mark && mark <= mapping.range.end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::AddrRange;
    use crate::vma::VmFlags;
    use alloc::string::String;

    fn mapping(start: u64, end: u64, backing: Backing) -> Mapping {
        Mapping {
            range: AddrRange::new(start, end),
            prot: Prot::READ | Prot::WRITE,
            shared: false,
            offset: 0,
            backing,
            flags: VmFlags::empty(),
            object: 0,
        }
    }

    #[test]
    fn paths_begin_in_their_column_or_behind_a_long_prefix() {
        let listing = Listing::default();
        let mut line = String::new();
        let high = mapping(0xffff_ffff_ff60_0000, 0xffff_ffff_ff60_1000, Backing::Heap);
        write_header(&mut line, &listing, &high).unwrap();
        assert_eq!(line.find('['), Some(PATH_COLUMN), "{line}");
        let mut line = String::new();
        let mut long = high;
        (long.offset, long.object, long.backing) = (u64::MAX << 12, u64::MAX >> 1, Backing::Shared);
        write_header(&mut line, &listing, &long).unwrap();
        assert!(line.ends_with(" 00:01 9223372036854775807  /dev/zero (deleted)\n"), "{line}");
    }

    #[test]
    fn the_mark_tells_the_stack() {
        let mut listing = Listing::default();
        let (grows, other) =
            (mapping(0x1000, 0x3000, Backing::Stack), mapping(0x5000, 0x6000, Backing::Anonymous));
        assert!(is_stack(&listing, &grows) && !is_stack(&listing, &other));
        listing.layout.stack = 0x6000;
        assert!(!is_stack(&listing, &grows) && is_stack(&listing, &other));
    }
}
