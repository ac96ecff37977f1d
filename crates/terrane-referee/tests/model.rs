//! Terrane against the plain model, with random bytes: what the fuzzer does, without a fuzzer.

use terrane_referee::fuzz::{check, decode};
use terrane_referee::generate::Random;
use terrane_referee::machine::{Plant, Terrane};

fn bytes(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..100 + random.below(1500)).map(|_| random.number() as u8).collect()
}

#[test]
fn terrane_does_as_the_model() {
    let mut terrane = Terrane::new(None).unwrap();
    let mut operations = 0;
    for seed in 0..60 {
        let script = decode(&bytes(seed));
        operations += script.ops.len();
        check(&mut terrane, &script).unwrap_or_else(|error| panic!("seed {seed}\n{error}"));
    }
    assert!(operations > 2_000, "{operations}");
}

#[test]
fn the_model_notices_what_is_wrong() {
    for plant in [Plant::Unmap, Plant::Store, Plant::Protect] {
        let mut terrane = Terrane::new(Some(plant)).unwrap();
        let found = (0..20).any(|seed| check(&mut terrane, &decode(&bytes(seed))).is_err());
        assert!(found, "{plant:?}");
    }
}

#[test]
fn scripts_of_a_fuzzer_can_be_read_and_replayed() {
    for seed in 0..50 {
        let script = decode(&bytes(seed));
        assert_eq!(script.to_string().parse(), Ok(script));
    }
}
