//! One strict parser for both: what it accepts has the kernel's layout to the byte.

/// The first line of a mapping in `maps` and `smaps`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    pub start: u64,
    pub end: u64,
    pub perms: String,
    pub offset: u64,
    pub device: (u32, u32),
    pub inode: u64,
    pub path: String,
}

/// A mapping in `smaps`, or all of them in `smaps_rollup`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub header: Header,
    /// Names and sizes in KiB, in the order of the text.
    pub sizes: Vec<(String, u64)>,
    pub eligible: Option<u64>,
    pub flags: Option<Vec<String>>,
}

impl Entry {
    pub fn names(&self) -> Vec<&str> {
        self.sizes.iter().map(|(name, _)| name.as_str()).collect()
    }

    pub fn size(&self, name: &str) -> u64 {
        self.sizes.iter().find(|(other, _)| other == name).unwrap_or_else(|| panic!("no {name}")).1
    }
}

impl Header {
    /// The line as the kernel lays it out.
    fn print(&self) -> String {
        let (major, minor) = self.device;
        let prefix = format!(
            "{:08x}-{:08x} {} {:08x} {major:02x}:{minor:02x} {} ",
            self.start, self.end, self.perms, self.offset, self.inode
        );
        if self.path.is_empty() { prefix } else { format!("{prefix:<72} {}", self.path) }
    }

    /// Takes a line apart, and checks that it is laid out as the kernel does it.
    pub fn parse(line: &str) -> Self {
        let mut words = line.splitn(6, ' ');
        let mut word = || words.next().unwrap_or_else(|| panic!("too short: {line:?}"));
        let hex = |word: &str| u64::from_str_radix(word, 16).unwrap_or_else(|_| panic!("{line:?}"));
        let (start, end) = word().split_once('-').unwrap();
        let perms = word().to_owned();
        let offset = hex(word());
        let (major, minor) = word().split_once(':').unwrap();
        let inode = word().parse().unwrap_or_else(|_| panic!("{line:?}"));
        let header = Self {
            start: hex(start),
            end: hex(end),
            perms,
            offset,
            device: (hex(major) as u32, hex(minor) as u32),
            inode,
            path: word().trim_start_matches(' ').to_owned(),
        };
        assert!(header.start < header.end, "{line:?}");
        let marks = header.perms.as_bytes();
        assert!(
            marks.len() == 4 && marks.iter().zip([b"r-", b"w-", b"x-", b"sp"]).all(|(m, of)| of.contains(m))
        );
        assert_eq!(header.print(), line);
        header
    }
}

/// A whole `maps`: ascending, without overlaps.
pub fn maps(text: &str) -> Vec<Header> {
    assert!(text.is_empty() || text.ends_with('\n'));
    let list: Vec<_> = text.lines().map(Header::parse).collect();
    assert!(list.windows(2).all(|two| two[0].end <= two[1].start));
    list
}

/// `Name:` and a number with ` kB`, aligned as the kernel does it.
fn size(line: &str) -> (String, u64) {
    let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no size: {line:?}"));
    let number = value.trim_start().strip_suffix(" kB").unwrap_or_else(|| panic!("no kB: {line:?}"));
    let number: u64 = number.parse().unwrap_or_else(|_| panic!("no number: {line:?}"));
    let width = 23usize.saturating_sub(name.len());
    assert_eq!(format!("{name}:{number:>width$} kB"), line, "alignment");
    (name.to_owned(), number)
}

/// A whole `smaps` or `smaps_rollup`.
pub fn smaps(text: &str) -> Vec<Entry> {
    assert!(text.is_empty() || text.ends_with('\n'));
    let mut list: Vec<Entry> = Vec::new();
    for line in text.lines() {
        if !line.starts_with(|first: char| first.is_ascii_uppercase()) {
            let header = Header::parse(line);
            list.push(Entry { header, sizes: Vec::new(), eligible: None, flags: None });
            continue;
        }
        let entry = list.last_mut().expect("a mapping before its sizes");
        assert!(entry.flags.is_none(), "behind VmFlags: {line:?}");
        if let Some(flags) = line.strip_prefix("VmFlags: ") {
            assert!(flags.is_empty() || flags.ends_with(' '), "{line:?}");
            let flags: Vec<_> = flags.split_terminator(' ').map(str::to_owned).collect();
            assert!(flags.iter().all(|flag| flag.len() == 2 && flag != "??"), "{line:?}");
            entry.flags = Some(flags);
        } else if let Some(value) = line.strip_prefix("THPeligible:") {
            let value: u64 = value.trim_start().parse().unwrap();
            assert_eq!(line, format!("THPeligible:    {value:>8}"));
            entry.eligible = Some(value);
        } else if let Some(value) = line.strip_prefix("ProtectionKey:") {
            value.trim_start().parse::<u64>().unwrap();
        } else {
            assert!(entry.eligible.is_none(), "behind THPeligible: {line:?}");
            entry.sizes.push(size(line));
        }
    }
    list
}

/// The lines of `status` from `VmPeak` to `THP_enabled`, with their values.
pub fn status(text: &str) -> Vec<(String, u64)> {
    let lines = text.lines().skip_while(|line| !line.starts_with("VmPeak:"));
    let mut list = Vec::new();
    for line in lines {
        let (name, value) = line.split_once(":\t").unwrap_or_else(|| panic!("{line:?}"));
        let number = value.strip_suffix(" kB").unwrap_or(value);
        let number: u64 = number.trim_start().parse().unwrap_or_else(|_| panic!("{line:?}"));
        if value.ends_with(" kB") {
            assert_eq!(line, format!("{name}:\t{number:>8} kB"));
        }
        list.push((name.to_owned(), number));
        if name == "THP_enabled" {
            return list;
        }
    }
    panic!("no THP_enabled");
}

/// A whole `vmstat`.
pub fn vmstat(text: &str) -> Vec<(String, u64)> {
    let parse = |line: &str| {
        let (name, value) = line.split_once(' ').unwrap_or_else(|| panic!("{line:?}"));
        assert!(name.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_'), "{line:?}");
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line:?}")))
    };
    text.lines().map(parse).collect()
}
