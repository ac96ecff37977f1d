//! A small x86-64 kernel that hosts Terrane on real page tables and runs static Linux programs. See `docs/kernel.md`.

#![no_std]
#![no_main]

extern crate alloc;

mod arch;
mod console;
mod errno;
mod fs;
mod mm;
mod options;
mod sync;
mod syscall;
mod task;
mod user;

use core::panic::PanicInfo;

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    match info.location() {
        Some(place) => arch::panic(format_args!("{}, at {place}", info.message())),
        None => arch::panic(format_args!("{}", info.message())),
    }
}

/// What the unwinding tables of the prebuilt libraries refer to. Nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
