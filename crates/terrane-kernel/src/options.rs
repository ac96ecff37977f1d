//! The words of the command line: `key=value`, separated by blanks.

use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

static WORDS: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());
static LENGTH: AtomicUsize = AtomicUsize::new(0);

/// Words that mean something; others are reported.
const KNOWN: [&str; 11] = [
    "init",
    "locking",
    "placement",
    "swap",
    "stat",
    "memory-limit",
    "inject",
    "log",
    "measure",
    "plant",
    "collapse-every",
];

/// Takes the command line.
pub fn set(words: &'static str) {
    WORDS.store(words.as_ptr().cast_mut(), Ordering::Relaxed);
    LENGTH.store(words.len(), Ordering::Release);
    for word in words.split_ascii_whitespace() {
        if !word.split_once('=').is_some_and(|(key, _)| KNOWN.contains(&key)) {
            crate::log!("unknown word on the command line: {word}");
        }
    }
}

/// The command line.
pub fn words() -> &'static str {
    let (length, words) = (LENGTH.load(Ordering::Acquire), WORDS.load(Ordering::Relaxed));
    if length == 0 {
        return "";
    }
    // SAFETY: what `set` took.
    unsafe { core::str::from_utf8_unchecked(core::slice::from_raw_parts(words, length)) }
}

/// The values of the words `key=value`, in order.
pub fn values(key: &str) -> impl Iterator<Item = &'static str> {
    words().split_ascii_whitespace().filter_map(move |word| word.strip_prefix(key)?.strip_prefix('='))
}

/// The value of the last `key=value`, if there is one.
pub fn value(key: &str) -> Option<&'static str> {
    values(key).last()
}

/// The value as a number of bytes: digits, and perhaps K, M or G.
pub fn bytes(key: &str) -> Option<u64> {
    let text = value(key)?;
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        b'G' | b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    if number.is_none() {
        crate::log!("not a size: {key}={text}");
    }
    number
}
