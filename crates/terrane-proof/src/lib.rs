//! Models of the library's protocols, driven by loom and by shuttle. `docs/proof.md` says what is modelled and how to
//! run it. Without `--cfg terrane_loom` or `--cfg terrane_watch` this crate is empty.
