//! Models of the library's protocols, driven by loom and by shuttle. `docs/proof.md` says what is modelled and how to
//! run it. Without `--cfg terrane_loom` or `--cfg terrane_watch` this crate is empty.

#[cfg(all(test, terrane_watch))]
mod calls;
#[cfg(terrane_watch)]
mod graves;
#[cfg(any(terrane_loom, terrane_watch))]
pub mod host;
#[cfg(terrane_loom)]
pub mod orders;
#[cfg(all(test, terrane_loom))]
mod protocols;
#[cfg(any(terrane_loom, terrane_watch))]
mod quiet;
#[cfg(terrane_watch)]
pub mod schedules;
