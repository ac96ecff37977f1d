//! The helper of the referee as a program of its own, for tests; `terrane` has it as a hidden command.

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    eprintln!("terrane-referee-helper: {}", terrane_referee::kernel::serve(&arguments));
    std::process::exit(2);
}
