//! Programs on Terrane's kernel: those of `programs/`, which run on the host first, so that Linux itself says what is right.
//!
//! Without QEMU or a C compiler the tests are skipped, and say so.

use object::{Object as _, ObjectSymbol as _};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::{BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// A program says so when the host's kernel lacks what it asks for.
const LACKING: i32 = 77;

/// What the programs are made with, as in `programs/Makefile`.
const FLAGS: [&str; 6] = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-static", "-pthread"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("a workspace")
}

/// Says that something is not tested. Not by `eprintln`, which a passing test swallows.
fn skip(what: impl Display) {
    let _ = writeln!(std::io::stderr(), "skipped: {what}");
}

fn installed(program: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
}

/// The kernel's image, built once; `None` where it cannot run.
fn kernel() -> Option<&'static Path> {
    static KERNEL: OnceLock<Option<PathBuf>> = OnceLock::new();
    KERNEL
        .get_or_init(|| {
            if !installed("qemu-system-x86_64") {
                skip("programs on the kernel: qemu-system-x86_64 is not installed");
                return None;
            }
            let output = Command::new(env!("CARGO"))
                .args([
                    "build",
                    "--release",
                    "--package",
                    "terrane-kernel",
                    "--features",
                    "image",
                    "--message-format",
                    "json",
                ])
                .current_dir(root())
                .output()
                .expect("cargo starts");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let messages = String::from_utf8(output.stdout).expect("UTF-8");
            let image = messages.lines().find_map(|line| {
                let message: serde_json::Value = serde_json::from_str(line).ok()?;
                let ours = message["target"]["name"] == "terrane-kernel";
                message["executable"].as_str().filter(|_| ours).map(PathBuf::from)
            });
            Some(image.expect("cargo says where the kernel is"))
        })
        .as_deref()
}

/// The program `name` of `programs/`, made with `compiler`; `None` without that.
fn made(name: &str, compiler: &str) -> Option<PathBuf> {
    static MADE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    if !installed(compiler) {
        skip(format_args!("{name}: {compiler} is not installed"));
        return None;
    }
    let source = root().join("programs").join(name).with_extension("c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(compiler).join(name);
    let mut made = MADE.lock().unwrap_or_else(|poison| poison.into_inner());
    if made.contains(&program) {
        return Some(program);
    }
    std::fs::create_dir_all(program.parent().expect("a folder")).expect("a folder");
    let output =
        Command::new(compiler).args(FLAGS).arg("-o").arg(&program).arg(source).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    made.insert(program.clone());
    Some(program)
}

/// `terrane boot`, with what every test wants.
fn boot(kernel: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_terrane"));
    command.args(["boot", "--timeout", "240", "--memory", "512M", "--kernel"]).arg(kernel);
    command.stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The first lines that differ, for a message.
fn differing(expected: &str, got: &str) -> String {
    let mut told = String::new();
    let (mut expected, mut got) = (expected.lines(), got.lines());
    for number in 1.. {
        let (one, other) = (expected.next(), got.next());
        if one.is_none() && other.is_none() || told.lines().count() > 40 {
            break;
        }
        if one != other {
            told +=
                &format!("line {number}: Linux: {}\n   here: {}\n", one.unwrap_or("–"), other.unwrap_or("–"));
        }
    }
    told
}

/// Runs the program on the host, and then in guests; output and exit status must be the same.
fn same_as_linux(name: &str, arguments: &[&str], guests: &[(&str, &[&str])]) {
    let Some(kernel) = kernel() else { return };
    let mut told = String::new();
    for &(compiler, options) in guests {
        let Some(program) = made(name, compiler) else { continue };
        let native = Command::new(&program).args(arguments).stdin(Stdio::null()).output().expect("it starts");
        if native.status.code() == Some(LACKING) {
            skip(format_args!("{name}: this machine's Linux lacks what it asks for"));
            return;
        }
        assert!(native.status.success(), "on the host: {}\n{}", native.status, text(&native.stderr));
        let guest = boot(kernel).args(options).arg(&program).args(arguments).output().expect("it starts");
        if guest.stdout != native.stdout || guest.status.code() != native.status.code() {
            told += &format!(
                "{name}, {compiler}, {options:?}: {}\n{}{}\n",
                guest.status,
                differing(&text(&native.stdout), &text(&guest.stdout)),
                text(&guest.stderr)
            );
        }
    }
    assert!(told.is_empty(), "\n{told}");
}

const CLASSIC: [&str; 2] = ["--locking", "classic"];

/// Both ways of locking, and both C libraries.
fn everywhere(name: &str, arguments: &[&str]) {
    same_as_linux(name, arguments, &[("gcc", &[]), ("musl-gcc", &CLASSIC)]);
}

macro_rules! conformance {
    ($($test:ident $name:literal;)*) => { $(
        #[test]
        fn $test() {
            everywhere(concat!("conformance/", $name), &[]);
        }
    )* };
}

conformance! {
    mmap_is_as_on_linux "map";
    mprotect_is_as_on_linux "protect";
    mremap_is_as_on_linux "remap";
    brk_is_as_on_linux "brk";
    madvise_is_as_on_linux "advise";
    guards_and_seals_are_as_on_linux "guard";
    mlock_is_as_on_linux "lock";
    processes_are_as_on_linux "processes";
    threads_are_as_on_linux "threads";
    futexes_are_as_on_linux "futex";
    signals_are_as_on_linux "signals";
    scheduling_is_as_on_linux "scheduling";
    clocks_are_as_on_linux "clocks";
    pipes_are_as_on_linux "pipes";
    files_are_as_on_linux "files";
    the_texts_of_proc_are_as_on_linux "proc";
    limits_are_as_on_linux "limits";
    wild_pointers_are_errors "wild";
    the_memory_of_others_is_as_on_linux "remote";
    secrets_and_pools_are_as_on_linux "secret";
    traced_children_are_as_on_linux "trace";
}

#[test]
fn handlers_of_faults_are_as_on_linux() {
    // musl has not got Linux's headers.
    same_as_linux("conformance/handler", &[], &[("gcc", &[]), ("gcc", &CLASSIC)]);
}

#[test]
fn refusals_of_memory_calls_are_as_on_linux() {
    // musl's `brk` refuses everything.
    same_as_linux("conformance/refusals", &[], &[("gcc", &[]), ("gcc", &CLASSIC)]);
}

#[test]
fn other_descriptors_are_as_on_linux() {
    same_as_linux("conformance/descriptors", &[], &[("gcc", &[]), ("gcc", &CLASSIC)]);
}

macro_rules! experiments {
    ($($test:ident $name:literal [$($argument:literal),*];)*) => { $(
        #[test]
        fn $test() {
            everywhere($name, &[$($argument),*]);
        }
    )* };
}

experiments! {
    multi_fault_runs "multi-fault" ["-t", "2", "-s", "0.3"];
    multi_fault_runs_beside_a_churner "multi-fault" ["-t", "2", "-s", "0.3", "-m", "-o"];
    ebizzy_runs "ebizzy" ["-t", "8", "-s", "0.3"];
    a_build_runs "processes" ["-s", "0.3"];
    start_up_runs "startup" ["-n", "1"];
    gaps_run "gaps" ["-n", "5000", "-c", "200", "-r", "2"];
    split_and_merge_runs "split-merge" ["-t", "2", "-s", "0.1"];
    populate_runs "populate" ["-r", "1"];
    populate_runs_in_processes "populate" ["-r", "1", "-p"];
    heaps_run "heap" ["-t", "40", "-s", "0.3"];
    map_and_unmap_run "map-unmap" ["-s", "0.2"];
    faults_run "faults" ["-r", "1"];
}

#[test]
fn a_stress_keeps_every_byte() {
    let seconds = std::env::var("TERRANE_STRESS_SECONDS").unwrap_or_else(|_| "4".to_owned());
    let guests: [(&str, &[&str]); 2] =
        [("gcc", &["--cpus", "4"]), ("gcc", &["--cpus", "4", "--locking", "classic"])];
    same_as_linux("conformance/stress", &["-t", "16", "-s", &seconds], &guests);
}

#[test]
fn a_stress_with_too_little_memory_keeps_every_byte() {
    let guests: [(&str, &[&str]); 1] = [("gcc", &["--append", "memory-limit=16M", "--append", "swap=64M"])];
    same_as_linux("conformance/stress", &["-t", "8", "-s", "2"], &guests);
}

#[test]
fn memory_that_runs_out_is_no_loss() {
    let guests: [(&str, &[&str]); 2] =
        [("gcc", &["--memory", "96M"]), ("gcc", &["--memory", "96M", "--locking", "classic"])];
    same_as_linux("conformance/out-of-memory", &["-m", "256"], &guests);
}

/// A guest that runs the program `name` with these options and arguments.
fn run(name: &str, options: &[&str], arguments: &[&str]) -> Option<Output> {
    let program = made(name, "gcc").or_else(|| made(name, "musl-gcc"))?;
    let output = boot(kernel()?).args(options).arg(program).args(arguments).output().expect("it starts");
    Some(output)
}

#[test]
fn status_streams_and_environment_pass() {
    let Some(output) = run("conformance/streams", &["--env", "NAME=value"], &["status", "42", "a b", ""])
    else {
        return;
    };
    assert_eq!(output.status.code(), Some(42), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    assert!(out.contains("argument ‘a b’\nargument ‘’\n") && out.contains("NAME=value\n"), "{out}");
    assert_eq!(text(&output.stderr), "on standard error\n");
}

#[test]
fn a_signal_is_128_and_its_number() {
    let Some(output) = run("conformance/streams", &[], &["signal", "11"]) else { return };
    assert_eq!(output.status.code(), Some(139));
    assert!(text(&output.stderr).contains("was killed by signal 11 (SIGSEGV)"));
}

#[test]
fn input_arrives_whole() {
    let (Some(kernel), Some(program)) = (kernel(), made("conformance/streams", "gcc")) else { return };
    let mut child = boot(kernel)
        .arg(program)
        .args(["copy", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let bytes: Vec<u8> = (0..=255).cycle().take(3000).collect();
    child.stdin.take().expect("a pipe").write_all(&bytes).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success());
    assert!(output.stdout == bytes, "{} bytes came back of {}", output.stdout.len(), bytes.len());
}

#[test]
fn files_and_folders_are_given() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("file"), "inside").expect("a file");
    let given = format!("{}=/data", folder.path().display());
    let Some(output) = run("conformance/streams", &["--file", &given], &["file", "/data/file"]) else {
        return;
    };
    assert_eq!(text(&output.stdout), "inside\n", "{}", text(&output.stderr));
}

#[test]
fn a_guest_that_takes_too_long_is_ended() {
    let start = Instant::now();
    let Some(output) = run("conformance/streams", &["--timeout", "4"], &["wait", "0"]) else { return };
    assert_eq!(output.status.code(), Some(124), "{}", text(&output.stderr));
    assert!(text(&output.stderr).ends_with("terrane: ended after 4 s (--timeout)\n"));
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_missing_call_is_named_once() {
    let Some(output) = run("conformance/streams", &[], &["missing", "0"]) else { return };
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr).matches("system call 400").count(), 1, "{}", text(&output.stderr));
}

#[test]
fn counters_are_told_as_perf_does() {
    let (Some(kernel), Some(program)) = (kernel(), made("multi-fault", "gcc")) else { return };
    let file = tempfile::NamedTempFile::new().expect("a file");
    let output = boot(kernel)
        .args(["--stat", "--json"])
        .arg(file.path())
        .arg(program)
        .args(["-s", "0.2"])
        .output()
        .expect("it starts");
    assert!(output.status.success());
    let told = text(&output.stderr);
    for name in ["page-faults", "speculative-faults", "spf_vma_changed", "spf_pmd_changed", "tlb-shoot-downs"]
    {
        assert!(told.contains(name), "{told}");
    }
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file.path()).expect("a report")).expect("JSON");
    let counters = &report["boot"]["counters"];
    let count = |name: &str| counters[name].as_u64().unwrap_or(0);
    assert!(
        count("pgfault") > 1000 && count("speculative_pgfault") * 10 > count("pgfault") * 9,
        "{counters}"
    );
    // The goal is two seconds on a machine that does nothing else.
    let ready = report["boot"]["ready_seconds"].as_f64().expect("a time");
    assert!(ready < 20.0, "it took {ready} s to the first instruction");
}

#[test]
fn errors_of_swap_and_of_files_harm_nobody_else() {
    for options in [
        &["--append", "memory-limit=16M", "--append", "swap=64M", "--append", "inject=swap:50"][..],
        &["--append", "inject=file:7"],
    ] {
        // What meets the error may fail; the kernel stays, and says how it ended.
        let arguments = ["-t", "4", "-s", "1"];
        let Some(output) = run("conformance/stress", options, &arguments) else { return };
        let status = output.status.code();
        assert!(
            matches!(status, Some(0 | 1 | 135 | 139)),
            "{options:?}: {status:?}\n{}",
            text(&output.stderr)
        );
    }
}

#[test]
fn a_stack_that_overflows_ends_the_machine_with_a_backtrace() {
    for locking in ["speculative", "classic"] {
        let options = ["--append", "plant=overflow", "--locking", locking];
        let Some(output) = run("conformance/streams", &options, &["status", "0"]) else { return };
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{error}");
        assert!(
            error.contains("the kernel panicked") && error.contains("a kernel stack has overflowed"),
            "{error}"
        );
        // Who did it, by name, and that it was a recursion.
        assert!(error.matches(" overflow at ").count() > 10, "{error}");
    }
}

#[test]
fn a_program_that_is_not_there_is_status_127() {
    let Some(output) = run("conformance/streams", &["--append", "init=/bin/none"], &["status", "0"]) else {
        return;
    };
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(127), "{error}");
    assert!(error.contains("cannot run /bin/none") && !error.contains("panicked"), "{error}");
}

#[test]
fn refused_frames_harm_no_kernel() {
    for every in ["3", "7", "100"] {
        for locking in ["speculative", "classic"] {
            let inject = format!("inject=frame:{every}");
            let options = ["--append", &inject, "--locking", locking];
            for (name, arguments) in
                [("conformance/stress", &["-t", "4", "-s", "0.5"][..]), ("conformance/processes", &[])]
            {
                // The program may be refused something, or be killed for want of memory; the kernel stays, and says how it ended.
                let Some(output) = run(name, &options, arguments) else { return };
                let (status, error) = (output.status.code(), text(&output.stderr));
                assert!(
                    matches!(status, Some(0 | 1 | 126 | 127 | 135 | 137 | 139)),
                    "{name}, {options:?}: {status:?}\n{error}"
                );
                assert!(!error.contains("panicked"), "{name}, {options:?}\n{error}");
            }
        }
    }
}

#[test]
fn the_collapser_joins_pages_in_use() {
    let Some(kernel) = kernel() else { return };
    let often = ["--append", "collapse-every=5"];
    same_as_linux(
        "conformance/collapse",
        &[],
        &[("gcc", &often), ("musl-gcc", &[often[0], often[1], "--locking", "classic"])],
    );
    let Some(program) = made("conformance/collapse", "gcc") else { return };
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut command = boot(kernel);
    command.args(often).args(["--stat", "--json"]).arg(file.path()).arg(program);
    assert!(command.output().expect("it starts").status.success());
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file.path()).expect("a report")).expect("JSON");
    let counters = &report["boot"]["counters"];
    assert!(counters["thp_collapse_alloc"].as_u64() > Some(0), "{counters}");
    // Under a stress, too.
    let often: [(&str, &[&str]); 1] = [("gcc", &["--cpus", "4", "--append", "collapse-every=1"])];
    same_as_linux("conformance/stress", &["-t", "8", "-s", "1"], &often);
}

#[test]
fn empty_exceptions_are_measured() {
    let (Some(kernel), Some(program)) = (kernel(), made("conformance/streams", "gcc")) else { return };
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut command = boot(kernel);
    command.args(["--cpus", "2", "--append", "measure=traps", "--stat", "--json"]).arg(file.path());
    let output = command.arg(program).args(["status", "0"]).output().expect("it starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file.path()).expect("a report")).expect("JSON");
    let counters = &report["boot"]["counters"];
    let ns = |name: &str| counters[name].as_u64().unwrap_or(0);
    // No bound in time holds on a busy machine, but a fault takes some, and one that zeroes more.
    assert!(ns("trap_empty_cpus_1_ns") > 0 && ns("trap_empty_cpus_2_ns") > 0, "{counters}");
    assert!(ns("trap_zeroed_own_lock_cpus_1_ns") > ns("trap_empty_cpus_1_ns"), "{counters}");
    // How much of a stack was used, of 28 KiB.
    assert!((1..24 << 10).contains(&ns("kernel_stack_used_most")), "{counters}");
}

#[test]
fn what_a_guest_cannot_have_is_one_line() {
    let (Some(kernel), Some(program)) = (kernel(), made("conformance/streams", "gcc")) else { return };
    let dynamic = program.with_extension("dynamic");
    let source = root().join("programs/conformance/streams.c");
    let output = Command::new("gcc").args(["-o"]).arg(&dynamic).arg(source).output().expect("it starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let refused = |command: &mut Command, part: &str| {
        let output = command.output().expect("it starts");
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(output.stdout.is_empty() && error.lines().count() == 1 && error.contains(part), "{error}");
    };
    refused(boot(kernel).arg(&dynamic), "is dynamically linked");
    refused(boot(kernel).env("PATH", "").arg(&program), "qemu-system-x86_64 is not installed");
    let large = program.with_extension("large");
    std::fs::write(&large, vec![1; 40 << 20]).expect("a file");
    let given = format!("{}=/large", large.display());
    refused(boot(kernel).args(["--memory", "64M", "--file", &given]).arg(&program), "too little memory");
    refused(boot(kernel).args(["--kernel", "/no/such/kernel"]).arg(&program), "/no/such/kernel");
}

/// The protocol that debuggers speak with a guest.
struct Debugger(TcpStream);

impl Debugger {
    /// Connects as soon as the guest is there.
    fn connect(guest: &mut Child) -> Self {
        let start = Instant::now();
        loop {
            if let Ok(stream) = TcpStream::connect("localhost:1234") {
                stream.set_read_timeout(Some(Duration::from_secs(100))).expect("a time");
                return Self(stream);
            }
            assert!(guest.try_wait().expect("a status").is_none(), "the guest has not waited");
            assert!(start.elapsed() < Duration::from_secs(60), "nobody listens for a debugger");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Sends a packet, and returns what answers it.
    fn ask(&mut self, packet: &str) -> String {
        let sum = packet.bytes().fold(0, u8::wrapping_add);
        write!(self.0, "${packet}#{sum:02x}").expect("it listens");
        // Nothing but the answer comes, so nothing behind it is lost with the buffer.
        let mut bytes = BufReader::new(&self.0).bytes().map(|byte| byte.expect("an answer"));
        // Behind what acknowledges the packet.
        bytes.find(|&byte| byte == b'$').expect("a packet");
        let answer = bytes.by_ref().take_while(|&byte| byte != b'#').map(char::from).collect();
        bytes.nth(1).expect("the packet's sum");
        (&self.0).write_all(b"+").expect("it listens");
        answer
    }

    /// The instruction pointer: behind the 16 general registers, the lowest byte first.
    fn instruction(&mut self) -> u64 {
        let registers = self.ask("g");
        let digits = registers.get(16 * 16..17 * 16).expect("registers of 64 bits");
        u64::from_str_radix(digits, 16).expect("a number").swap_bytes()
    }
}

#[test]
fn a_debugger_finds_the_guest_waiting_and_stops_it_in_the_kernel() {
    let (Some(kernel), Some(program)) = (kernel(), made("conformance/streams", "gcc")) else { return };
    if TcpListener::bind("localhost:1234").is_err() {
        return skip("a debugger: somebody else has its port");
    }
    let image = std::fs::read(kernel).expect("the image");
    let image = object::File::parse(&*image).expect("an ELF file");
    let entry = image.symbol_by_name("page_fault_entry").expect("its symbol").address();
    let mut guest = boot(kernel)
        .arg("--gdb")
        .arg(program)
        .args(["status", "42"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut debugger = Debugger::connect(&mut guest);
    assert!(debugger.ask("qSupported").contains("PacketSize="));
    assert_eq!(debugger.instruction(), 0xfff0, "the guest has not waited for its debugger");
    assert_eq!(debugger.ask(&format!("Z1,{entry:x},1")), "OK");
    let stopped = debugger.ask("c");
    assert!(stopped.starts_with("T05"), "{stopped}");
    assert_eq!(debugger.instruction(), entry);
    assert_eq!(debugger.ask(&format!("z1,{entry:x},1")), "OK");
    // From here on it runs by itself.
    assert_eq!(debugger.ask("D"), "OK");
    let output = guest.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(42), "{}", text(&output.stderr));
    let told = text(&output.stderr);
    assert!(told.starts_with("terrane: the guest waits") && told.contains("localhost:1234"), "{told}");
}
