//! To come.
pub fn init(_archive: &'static [u8]) {}
