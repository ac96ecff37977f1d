//! The end of the machine: counters and the first process's status, for the host to read.

use core::sync::atomic::{AtomicBool, Ordering};

use super::{sched, tree};
use crate::{arch, mm, options, report};

static DOWN: AtomicBool = AtomicBool::new(false);

/// Reports the status of the first process, and ends the machine.
pub fn shut_down(status: u32) -> ! {
    if DOWN.swap(true, Ordering::SeqCst) {
        // Another CPU is at it.
        loop {
            arch::relax();
        }
    }
    if options::value("stat") == Some("1") {
        statistics();
    }
    match status & 0x7f {
        0 => report!("@exit {}", status >> 8 & 0xff),
        signal => report!("@signal {signal}"),
    }
    arch::exit(0)
}

fn statistics() {
    let snapshot = mm::counters();
    for (name, value) in snapshot.iter() {
        report!("@stat {name} {value}");
    }
    report!("@stat context_switches {}", sched::switches());
    report!("@stat wall_time_ns {}", arch::now());
    let (stacks, most) = arch::most_used_stack();
    report!("@stat kernel_stacks {stacks}");
    report!("@stat kernel_stack_used_most {most}");
    let tree = tree::tree();
    let mut cpu_time = 0;
    let mut in_kernel = 0;
    for node in tree.processes() {
        for usage in [&node.process.ended, &node.process.children] {
            let usage = usage.lock();
            cpu_time += usage.time;
            in_kernel += usage.in_kernel;
        }
    }
    for thread in tree.threads() {
        cpu_time += thread.run_time();
        in_kernel += thread.kernel_time();
    }
    drop(tree);
    report!("@stat cpu_time_ns {cpu_time}");
    report!("@stat system_time_ns {in_kernel}");
}
