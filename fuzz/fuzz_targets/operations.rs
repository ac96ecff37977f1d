//! Bytes become operations; Terrane is checked against a plain model, byte by byte.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;
use terrane_referee::fuzz::{check, decode};
use terrane_referee::machine::Terrane;

thread_local! {
    static TERRANE: RefCell<Option<Terrane>> = const { RefCell::new(None) };
}

fuzz_target!(|bytes: &[u8]| {
    TERRANE.with_borrow_mut(|terrane| {
        let terrane = terrane.get_or_insert_with(|| Terrane::new(None).expect("memory for a machine"));
        if let Err(difference) = check(terrane, &decode(bytes)) {
            panic!("{difference}");
        }
    });
});
