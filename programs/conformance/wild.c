/*
 * A wild pointer in every argument of every system call that takes one: the answer is an error, most often EFAULT, and neither
 * the program nor the kernel comes to harm.
 */
#include "check.h"
#include <poll.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>

/* Unmapped, in no program's half, not even an address, and memory that may only be read. */
static char *bad[4];
static const char *const kinds[] = { "unmapped", "kernel", "no address", "read-only" };
static int pipes[2], fd;
static char good[4096];

struct attempt {
	const char *name;
	/* P is the wild pointer. */
	long arguments[6];
	int number;
	bool reads_only;
};

#define P -987654321

static void child_of(const struct attempt *attempt, char *pointer, const char *kind)
{
	fflush(stdout);
	pid_t child = fork();
	if (child == 0) {
		long a[6];
		for (int i = 0; i < 6; i++)
			a[i] = attempt->arguments[i] == P ? (long)pointer : attempt->arguments[i];
		struct itimerval soon = { { 0, 0 }, { 5, 0 } };
		setitimer(ITIMER_REAL, &soon, NULL);
		errno = 0;
		long result = syscall(attempt->number, a[0], a[1], a[2], a[3], a[4], a[5]);
		printf("%s, %s: %s\n", attempt->name, kind, result == -1 ? errno_name(errno) : "ok");
		fflush(stdout);
		_exit(0);
	}
	int status;
	if (waitpid(child, &status, 0) != child || status)
		printf("%s, %s: ended with status %#x\n", attempt->name, kind, status);
}

int main(void)
{
	bad[0] = window(16);
	bad[1] = (char *)0xffffffff80100000ul;
	bad[2] = (char *)0x8000000000000000ul;
	bad[3] = map(2 * PAGE, PROT_READ);
	fd = file_of(2);
	if (pipe(pipes) || write(pipes[1], "0123456789012345678901234567890123456789", 40) != 40)
		failed("pipe");
	char *w = map(4 * PAGE, PROT_READ | PROT_WRITE);
	struct iovec vector = { good, 16 };
	struct timespec soon = { 0, 1000 };
	long here = (long)good, some = (long)w;
	const struct attempt all[] = {
		{ "read a file", { fd, P, 100 }, SYS_pread64, false },
		{ "read a pipe", { pipes[0], P, 8 }, SYS_read, false },
		{ "write a file", { fd, P, 100 }, SYS_pwrite64, true },
		{ "write a pipe", { pipes[1], P, 8 }, SYS_write, true },
		{ "readv", { fd, P, 1 }, SYS_readv, true },
		{ "writev", { fd, P, 1 }, SYS_writev, true },
		{ "open", { P, O_RDONLY }, SYS_open, true },
		{ "openat", { AT_FDCWD, P, O_RDONLY }, SYS_openat, true },
		{ "stat, name", { P, here }, SYS_stat, true },
		{ "stat, result", { (long)"/tmp", P }, SYS_stat, false },
		{ "lstat, result", { (long)"/tmp", P }, SYS_lstat, false },
		{ "fstat", { fd, P }, SYS_fstat, false },
		{ "newfstatat", { AT_FDCWD, (long)"/tmp", P, 0 }, SYS_newfstatat, false },
		{ "access", { P, 0 }, SYS_access, true },
		{ "getdents64", { AT_FDCWD, P, 4096 }, SYS_getdents64, false },
		{ "getcwd", { P, 4096 }, SYS_getcwd, false },
		{ "chdir", { P }, SYS_chdir, true },
		{ "mkdir", { P, 0700 }, SYS_mkdir, true },
		{ "rmdir", { P }, SYS_rmdir, true },
		{ "unlink", { P }, SYS_unlink, true },
		{ "rename, from", { P, (long)"/tmp/x" }, SYS_rename, true },
		{ "rename, to", { (long)"/tmp", P }, SYS_rename, true },
		{ "readlink, name", { P, here, 10 }, SYS_readlink, true },
		{ "readlink, result", { (long)"/proc/self/exe", P, 10 }, SYS_readlink, false },
		{ "truncate", { P, 0 }, SYS_truncate, true },
		{ "pipe", { P }, SYS_pipe, false },
		{ "pipe2", { P, 0 }, SYS_pipe2, false },
		{ "poll", { P, 1, 0 }, SYS_poll, true },
		{ "ppoll, time", { here, 0, P, 0, 8 }, SYS_ppoll, true },
		{ "ppoll, mask", { here, 0, (long)&soon, P, 8 }, SYS_ppoll, true },
		{ "select", { 1, P, 0, 0, 0 }, SYS_select, true },
		{ "mincore", { some, PAGE, P }, SYS_mincore, false },
		{ "execve, name", { P, 0, 0 }, SYS_execve, true },
		{ "execve, arguments", { (long)"/proc/self/exe", P, 0 }, SYS_execve, true },
		{ "execve, environment", { (long)"/proc/self/exe", 0, P }, SYS_execve, true },
		{ "wait4, status", { -1, P, WNOHANG, 0 }, SYS_wait4, true },
		{ "clone3", { P, 64 }, SYS_clone3, true },
		{ "futex, wait", { P, 0, 1, (long)&soon }, SYS_futex, true },
		{ "futex, time", { some, 0, 0, P }, SYS_futex, true },
		{ "set_robust_list", { P, 24 }, SYS_set_robust_list, true },
		{ "get_robust_list", { 0, P, here }, SYS_get_robust_list, false },
		{ "rt_sigaction, new", { SIGUSR1, P, 0, 8 }, SYS_rt_sigaction, true },
		{ "rt_sigaction, old", { SIGUSR1, 0, P, 8 }, SYS_rt_sigaction, false },
		{ "rt_sigprocmask, new", { SIG_BLOCK, P, 0, 8 }, SYS_rt_sigprocmask, true },
		{ "rt_sigprocmask, old", { SIG_BLOCK, 0, P, 8 }, SYS_rt_sigprocmask, false },
		{ "rt_sigpending", { P, 8 }, SYS_rt_sigpending, false },
		{ "rt_sigsuspend", { P, 8 }, SYS_rt_sigsuspend, false },
		{ "rt_sigtimedwait, set", { P, 0, (long)&soon, 8 }, SYS_rt_sigtimedwait, false },
		{ "rt_sigtimedwait, time", { here, 0, P, 8 }, SYS_rt_sigtimedwait, false },
		{ "sigaltstack, new", { P, 0 }, SYS_sigaltstack, true },
		{ "sigaltstack, old", { 0, P }, SYS_sigaltstack, false },
		{ "sched_setaffinity", { 0, 8, P }, SYS_sched_setaffinity, false },
		{ "sched_getaffinity", { 0, 128, P }, SYS_sched_getaffinity, false },
		{ "nanosleep", { P, 0 }, SYS_nanosleep, true },
		{ "clock_gettime", { CLOCK_MONOTONIC, P }, SYS_clock_gettime, false },
		{ "clock_getres", { CLOCK_MONOTONIC, P }, SYS_clock_getres, false },
		{ "clock_nanosleep", { CLOCK_MONOTONIC, 0, P, 0 }, SYS_clock_nanosleep, true },
		{ "gettimeofday", { P, 0 }, SYS_gettimeofday, false },
		{ "setitimer, new", { ITIMER_REAL, P, 0 }, SYS_setitimer, false },
		{ "getitimer", { ITIMER_REAL, P }, SYS_getitimer, false },
		{ "times", { P }, SYS_times, false },
		{ "getrusage", { 0, P }, SYS_getrusage, false },
		{ "getrlimit", { RLIMIT_STACK, P }, SYS_getrlimit, false },
		{ "setrlimit", { RLIMIT_CORE, P }, SYS_setrlimit, false },
		{ "prlimit64, old", { 0, RLIMIT_STACK, 0, P }, SYS_prlimit64, false },
		{ "uname", { P }, SYS_uname, false },
		{ "sysinfo", { P }, SYS_sysinfo, false },
		{ "getrandom", { P, 16, 0 }, SYS_getrandom, false },
		{ "arch_prctl", { 0x1003, P }, SYS_arch_prctl, false },
		{ "getcpu", { P, 0, 0 }, SYS_getcpu, false },
	};
	(void)vector;
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		for (int kind = 0; kind < 4; kind++)
			/* Memory that may only be read is a fault for what writes. */
			if (kind < 3 || !all[i].reads_only)
				child_of(&all[i], bad[kind], kinds[kind]);

	puts("# Across an end");
	char *edge = map(2 * PAGE, PROT_READ | PROT_WRITE);
	unmap(edge + PAGE, PAGE);
	memset(edge, 'x', PAGE);
	R(pread(fd, edge + PAGE - 10, 100, 0));
	R(pwrite(fd, edge + PAGE - 10, 100, 0));
	R(open(edge + PAGE - 4, O_RDONLY));
	char *lazy = map(4 * PAGE, PROT_READ | PROT_WRITE);
	R(pread(fd, lazy + PAGE - 10, 20, 0));
	IS(lazy[PAGE] == 'x' || lazy[PAGE] == 1);
	R(munmap(w, 4 * PAGE));
	return 0;
}
