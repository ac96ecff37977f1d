//! How the kernel is linked: alone, at fixed addresses, by its own script.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=link.ld");
    let script =
        std::path::Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("set by cargo")).join("link.ld");
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none",
        "-Wl,-z,max-page-size=4096",
        "-Wl,-z,norelro",
        "-Wl,--no-eh-frame-hdr",
    ] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
    println!("cargo::rustc-link-arg-bins=-Wl,-T,{}", script.display());
}
