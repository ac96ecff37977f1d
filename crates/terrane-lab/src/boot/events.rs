//! What a guest reports: lines on its second serial port. Those that begin with `@` are for programs.

/// A line of the report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The first instruction of the program is about to run, so many nanoseconds after the kernel began.
    Ready(Option<u64>),
    /// The program ended by itself, with this status.
    Exit(u8),
    /// A signal ended the program.
    Signal(u8),
    /// The kernel is beyond help.
    Panic(String),
    /// The address of an instruction in a backtrace, and what the kernel says of it.
    Frame(u64, String),
    /// A counter.
    Stat(String, u64),
    /// A system call that is not there was called for the first time.
    MissingCall(u32, String),
    /// A note of the kernel.
    Log(String),
    /// Anything else, from whoever writes to that port.
    Note(String),
}

impl Event {
    /// What `line` says. What it does not understand is a [`Note`](Event::Note).
    pub fn parse(line: &str) -> Self {
        let line = line.trim_end();
        let note = || Self::Note(line.to_owned());
        let Some(rest) = line.strip_prefix('@') else { return note() };
        let (word, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let rest = rest.trim();
        let (first, more) = rest.split_once(' ').unwrap_or((rest, ""));
        let more = more.trim();
        let event = match word {
            "ready" => Some(Self::Ready(first.parse().ok())),
            // Only eight bits of a status reach a parent.
            "exit" => first.parse::<i64>().ok().map(|status| Self::Exit(status as u8)),
            "signal" => first.parse().ok().filter(|number| (1..=64).contains(number)).map(Self::Signal),
            "panic" => Some(Self::Panic(rest.to_owned())),
            "frame" => address(first).map(|address| Self::Frame(address, more.to_owned())),
            "stat" => more.parse().ok().map(|value| Self::Stat(first.to_owned(), value)),
            "nosys" => first.parse().ok().map(|number| Self::MissingCall(number, more.to_owned())),
            "log" => Some(Self::Log(rest.to_owned())),
            _ => None,
        };
        event.unwrap_or_else(note)
    }
}

/// A number in hexadecimal, with or without `0x`.
fn address(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

/// The name of a signal on x86-64.
pub fn signal_name(number: u8) -> String {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
        "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    match NAMES.get(usize::from(number).wrapping_sub(1)) {
        Some(name) => format!("SIG{name}"),
        None => format!("real-time signal {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        for (line, event) in [
            ("@ready 123456789", Event::Ready(Some(123_456_789))),
            ("@ready", Event::Ready(None)),
            ("@exit 0", Event::Exit(0)),
            ("@exit 256\r", Event::Exit(0)),
            ("@exit -1", Event::Exit(255)),
            ("@signal 11", Event::Signal(11)),
            ("@panic out of  luck", Event::Panic("out of  luck".into())),
            ("@frame 0xffffffff80100000", Event::Frame(0xffff_ffff_8010_0000, String::new())),
            ("@frame ffffffff80100000 boot at x.rs:1", {
                Event::Frame(0xffff_ffff_8010_0000, "boot at x.rs:1".into())
            }),
            ("@stat pgfault 12", Event::Stat("pgfault".into(), 12)),
            ("@nosys 321 bpf", Event::MissingCall(321, "bpf".into())),
            ("@log hello there", Event::Log("hello there".into())),
        ] {
            assert_eq!(Event::parse(line), event, "{line}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_a_note() {
        for line in [
            "",
            "@",
            "hello",
            "@exit",
            "@exit x",
            "@signal 0",
            "@signal 99",
            "@stat a",
            "@frame zz",
            "@what 1",
        ] {
            assert_eq!(Event::parse(line), Event::Note(line.to_owned()), "{line}");
        }
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(signal_name(11), "SIGSEGV");
        assert_eq!(signal_name(31), "SIGSYS");
        assert_eq!(signal_name(40), "real-time signal 40");
    }
}
