/*
 * A wild pointer in every argument of every system call that takes one: the answer is an error, most often EFAULT, and neither
 * the program nor the kernel comes to harm.
 */
#include "check.h"
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>

/* Calls that not every C library knows by now. */
#define PIDFD_SEND_SIGNAL 424
#define PIDFD_OPEN 434
#define CLONE3 435
#define OPENAT2 437
#define FACCESSAT2 439
#define PROCESS_MADVISE 440
#define EPOLL_PWAIT2 441
#define FUTEX_WAITV 449
#define SET_MEMPOLICY_HOME_NODE 450
#define CACHESTAT 451
#define FCHMODAT2 452
#define MSEAL 462
#define SCHED_SETATTR 314
#define SCHED_GETATTR 315
#define USERFAULTFD 323
#define UFFD(nth, size) (0xc000aa00l | (long)(size) << 16 | (nth))

/* Unmapped, in no program's half, not even an address, and memory that may only be read. */
static char *bad[4];
static const char *const kinds[] = { "unmapped", "kernel", "no address", "read-only" };
static int pipes[2], fd;
static char good[4096];

/* What holds the wild pointer, when the pointer to that is none. */
static struct iovec vector;
static struct msghdr message;
static unsigned long words[16];
static struct {
	unsigned long value, address;
	unsigned flags, reserved;
} waiter;
static struct sigevent event;

struct attempt {
	const char *name;
	/* P is the wild pointer. */
	long arguments[6];
	int number;
	bool reads_only;
};

#define P -987654321
/* This process, and a descriptor of it. */
#define SELF -987654322
#define SELF_FD -987654323

static void put_inside(char *pointer)
{
	vector = (struct iovec){ pointer, 16 };
	message = (struct msghdr){ .msg_iov = (struct iovec *)pointer, .msg_iovlen = 1 };
	for (int i = 0; i < 16; i++)
		words[i] = (unsigned long)pointer;
	waiter.address = (unsigned long)pointer;
	waiter.flags = 2;
	event.sigev_notify = SIGEV_NONE;
}

static void child_of(const struct attempt *attempt, char *pointer, const char *kind)
{
	fflush(stdout);
	pid_t child = fork();
	if (child == 0) {
		long a[6];
		put_inside(pointer);
		for (int i = 0; i < 6; i++) {
			long given = attempt->arguments[i];
			a[i] = given == P ? (long)pointer
				: given == SELF ? getpid()
				: given == SELF_FD ? syscall(PIDFD_OPEN, getpid(), 0)
				: given;
		}
		struct itimerval soon = { { 0, 0 }, { 5, 0 } };
		setitimer(ITIMER_REAL, &soon, NULL);
		raise(SIGUSR1);
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
	struct timespec soon = { 0, 1000 };
	long here = (long)good, some = (long)w, inside = (long)words, page = PAGE;
	static struct iovec fine[1];
	fine[0] = (struct iovec){ good, 16 };
	long in = (long)&vector, right = (long)fine, now = (long)&soon, root = (long)"/tmp";
	int pair[2], counter = eventfd(100, EFD_SEMAPHORE), timer = timerfd_create(CLOCK_MONOTONIC, 0), watch = epoll_create1(0);
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || write(pair[1], good, 40) != 40 || counter < 0 || timer < 0 || watch < 0)
		failed("descriptors");
	if (epoll_ctl(watch, EPOLL_CTL_ADD, counter, &(struct epoll_event){ .events = EPOLLIN }))
		failed("epoll_ctl");
	int faults = syscall(USERFAULTFD, 0x80001), ready = syscall(USERFAULTFD, 0x80001), maps = open("/proc/self/pagemap", O_RDONLY);
	int memory = open("/proc/self/mem", O_RDWR);
	/* UFFDIO_API. */
	unsigned long api[3] = { 0xaa };
	if (faults < 0 || ready < 0 || ioctl(ready, UFFD(0x3f, 24), api) || maps < 0 || memory < 0)
		failed("userfaultfd");
	int segment = shmget(IPC_PRIVATE, PAGE, 0600);
	if (segment < 0)
		failed("shmget");
	sigset_t usr1;
	sigemptyset(&usr1);
	sigaddset(&usr1, SIGUSR1);
	sigprocmask(SIG_BLOCK, &usr1, NULL);
	int signals = syscall(SYS_signalfd4, -1, &usr1, 8, 0);
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
		{ "preadv", { fd, P, 1, 0 }, SYS_preadv, true },
		{ "preadv, base", { fd, in, 1, 0 }, SYS_preadv, false },
		{ "pwritev", { fd, P, 1, 0 }, SYS_pwritev, true },
		{ "pwritev, base", { fd, in, 1, 0 }, SYS_pwritev, true },
		{ "preadv2", { fd, P, 1, 0, 0, 0 }, SYS_preadv2, true },
		{ "pwritev2", { fd, P, 1, 0, 0, 0 }, SYS_pwritev2, true },
		{ "sendfile, offset", { pipes[1], fd, P, 8 }, SYS_sendfile, false },
		{ "copy_file_range, from", { fd, P, fd, 0, 8, 0 }, SYS_copy_file_range, true },
		{ "copy_file_range, to", { fd, 0, fd, P, 8, 0 }, SYS_copy_file_range, true },
		{ "splice, from", { fd, P, pipes[1], 0, 8, 0 }, SYS_splice, false },
		{ "splice, to", { pipes[0], 0, fd, P, 8, 0 }, SYS_splice, false },
		{ "vmsplice", { pipes[1], P, 1, 0 }, SYS_vmsplice, true },
		{ "vmsplice, base", { pipes[1], in, 1, 0 }, SYS_vmsplice, true },
		{ "vmsplice out, base", { pipes[0], in, 1, 0 }, SYS_vmsplice, true },
		{ "creat", { P, 0600 }, SYS_creat, true },
		{ "openat2, name", { AT_FDCWD, P, here, 24 }, OPENAT2, true },
		{ "openat2, how", { AT_FDCWD, root, P, 24 }, OPENAT2, true },
		{ "mkdirat", { AT_FDCWD, P, 0700 }, SYS_mkdirat, true },
		{ "mknod", { P, S_IFREG | 0600, 0 }, SYS_mknod, true },
		{ "mknodat", { AT_FDCWD, P, S_IFREG | 0600, 0 }, SYS_mknodat, true },
		{ "link, from", { P, root }, SYS_link, true },
		{ "link, to", { root, P }, SYS_link, true },
		{ "linkat, from", { AT_FDCWD, P, AT_FDCWD, root, 0 }, SYS_linkat, true },
		{ "symlink, target", { P, root }, SYS_symlink, true },
		{ "symlink, name", { root, P }, SYS_symlink, true },
		{ "symlinkat, name", { root, AT_FDCWD, P }, SYS_symlinkat, true },
		{ "unlinkat", { AT_FDCWD, P, 0 }, SYS_unlinkat, true },
		{ "renameat2, from", { AT_FDCWD, P, AT_FDCWD, root, 0 }, SYS_renameat2, true },
		{ "renameat2, to", { AT_FDCWD, root, AT_FDCWD, P, 0 }, SYS_renameat2, true },
		{ "readlinkat, name", { AT_FDCWD, P, here, 10 }, SYS_readlinkat, true },
		{ "readlinkat, result", { AT_FDCWD, (long)"/proc/self/exe", P, 10 }, SYS_readlinkat, false },
		{ "newfstatat, name", { AT_FDCWD, P, here, 0 }, SYS_newfstatat, true },
		{ "statx, name", { AT_FDCWD, P, 0, 0xfff, here }, SYS_statx, true },
		{ "statx, result", { AT_FDCWD, root, 0, 0xfff, P }, SYS_statx, false },
		{ "faccessat", { AT_FDCWD, P, 0 }, SYS_faccessat, true },
		{ "faccessat2", { AT_FDCWD, P, 0, 0 }, FACCESSAT2, true },
		{ "chmod", { P, 0600 }, SYS_chmod, true },
		{ "fchmodat", { AT_FDCWD, P, 0600 }, SYS_fchmodat, true },
		{ "fchmodat2", { AT_FDCWD, P, 0600, 0 }, FCHMODAT2, true },
		{ "chown", { P, -1, -1 }, SYS_chown, true },
		{ "lchown", { P, -1, -1 }, SYS_lchown, true },
		{ "fchownat", { AT_FDCWD, P, -1, -1, 0 }, SYS_fchownat, true },
		{ "utimensat, name", { AT_FDCWD, P, 0, 0 }, SYS_utimensat, true },
		{ "utimensat, times", { AT_FDCWD, root, P, 0 }, SYS_utimensat, true },
		{ "futimesat, times", { AT_FDCWD, root, P }, SYS_futimesat, true },
		{ "utimes, times", { root, P }, SYS_utimes, true },
		{ "utime, times", { root, P }, SYS_utime, true },
		{ "statfs, name", { P, here }, SYS_statfs, true },
		{ "statfs, result", { root, P }, SYS_statfs, false },
		{ "fstatfs", { fd, P }, SYS_fstatfs, false },
		{ "fcntl, F_GETLK", { fd, F_GETLK, P }, SYS_fcntl, false },
		{ "fcntl, F_SETLK", { fd, F_SETLK, P }, SYS_fcntl, true },
		{ "fcntl, F_OFD_GETLK", { fd, 36, P }, SYS_fcntl, true },
		{ "fcntl, F_OFD_SETLK", { fd, 37, P }, SYS_fcntl, true },
		{ "ioctl, FIONREAD", { pipes[0], FIONREAD, P }, SYS_ioctl, false },
		{ "ioctl, FIONBIO", { pipes[0], FIONBIO, P }, SYS_ioctl, true },
		{ "chroot", { P }, SYS_chroot, true },
		{ "memfd_create", { P, 0 }, SYS_memfd_create, true },
		{ "cachestat, range", { fd, P, here, 0 }, CACHESTAT, true },
		{ "cachestat, result", { fd, here, P, 0 }, CACHESTAT, false },
		{ "read an eventfd", { counter, P, 8 }, SYS_read, false },
		{ "write an eventfd", { counter, P, 8 }, SYS_write, true },
		{ "timerfd_settime, new", { timer, 0, P, 0 }, SYS_timerfd_settime, false },
		{ "timerfd_settime, old", { timer, 0, here, P }, SYS_timerfd_settime, false },
		{ "timerfd_gettime", { timer, P }, SYS_timerfd_gettime, false },
		{ "signalfd4", { -1, P, 8, 0 }, SYS_signalfd4, true },
		{ "select, writes", { 1, 0, P, 0, now }, SYS_select, true },
		{ "select, exceptions", { 1, 0, 0, P, now }, SYS_select, true },
		{ "select, time", { 0, 0, 0, 0, P }, SYS_select, true },
		{ "pselect6, reads", { 1, P, 0, 0, now, 0 }, SYS_pselect6, true },
		{ "pselect6, time", { 0, 0, 0, 0, P, 0 }, SYS_pselect6, true },
		{ "pselect6, mask", { 0, 0, 0, 0, now, P }, SYS_pselect6, true },
		{ "epoll_ctl", { watch, EPOLL_CTL_ADD, pair[0], P }, SYS_epoll_ctl, true },
		{ "epoll_wait", { watch, P, 1, 0 }, SYS_epoll_wait, false },
		{ "epoll_pwait, mask", { watch, here, 1, 0, P, 8 }, SYS_epoll_pwait, true },
		{ "epoll_pwait2, time", { watch, here, 1, P, 0, 8 }, EPOLL_PWAIT2, true },
		{ "socketpair", { AF_UNIX, SOCK_STREAM, 0, P }, SYS_socketpair, false },
		{ "sendto", { pair[0], P, 8, 0, 0, 0 }, SYS_sendto, true },
		{ "recvfrom", { pair[0], P, 8, 0, 0, 0 }, SYS_recvfrom, false },
		{ "sendmsg", { pair[0], P, 0 }, SYS_sendmsg, true },
		{ "sendmsg, vector", { pair[0], (long)&message, 0 }, SYS_sendmsg, true },
		{ "recvmsg", { pair[0], P, 0 }, SYS_recvmsg, true },
		{ "recvmsg, vector", { pair[0], (long)&message, 0 }, SYS_recvmsg, true },
		{ "munmap", { P, page }, SYS_munmap, false },
		{ "mprotect", { P, page, PROT_READ }, SYS_mprotect, false },
		{ "mmap", { P, page, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0 }, SYS_mmap, false },
		{ "mmap, fixed", { P, page, 3, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0 }, SYS_mmap, false },
		{ "brk", { P }, SYS_brk, false },
		{ "madvise", { P, page, MADV_DONTNEED }, SYS_madvise, false },
		{ "madvise, populate", { P, page, 23 }, SYS_madvise, false },
		{ "mlock", { P, page }, SYS_mlock, false },
		{ "mlock2", { P, page, 1 }, SYS_mlock2, false },
		{ "munlock", { P, page }, SYS_munlock, false },
		{ "msync", { P, page, MS_SYNC }, SYS_msync, false },
		{ "mincore, memory", { P, page, here }, SYS_mincore, false },
		{ "mremap", { P, page, 2 * page, MREMAP_MAYMOVE }, SYS_mremap, false },
		{ "mremap, to", { some + page, page, page, MREMAP_MAYMOVE | MREMAP_FIXED, P }, SYS_mremap, false },
		{ "mseal", { P, page, 0 }, MSEAL, false },
		{ "remap_file_pages", { P, page, 0, 0, 0 }, SYS_remap_file_pages, false },
		{ "pkey_mprotect", { P, page, PROT_READ, -1 }, SYS_pkey_mprotect, false },
		{ "mbind", { P, page, 0, 0, 0, 0 }, SYS_mbind, false },
		{ "mbind, nodes", { some, page, 2, P, 64, 0 }, SYS_mbind, false },
		{ "set_mempolicy", { 2, P, 64 }, SYS_set_mempolicy, false },
		{ "get_mempolicy, mode", { P, 0, 0, 0, 0 }, SYS_get_mempolicy, false },
		{ "get_mempolicy, nodes", { 0, P, 1024, 0, 0 }, SYS_get_mempolicy, false },
		{ "get_mempolicy, address", { here, 0, 0, P, 2 }, SYS_get_mempolicy, false },
		{ "get_mempolicy, node of", { here, 0, 0, P, 3 }, SYS_get_mempolicy, false },
		{ "set_mempolicy_home_node", { P, page, 0, 0 }, SET_MEMPOLICY_HOME_NODE, false },
		{ "migrate_pages, old", { 0, 64, P, here }, SYS_migrate_pages, false },
		{ "migrate_pages, new", { 0, 64, here, P }, SYS_migrate_pages, false },
		{ "move_pages, pages", { 0, 1, P, 0, here, 2 }, SYS_move_pages, false },
		{ "move_pages, page", { 0, 1, inside, 0, here, 2 }, SYS_move_pages, false },
		{ "move_pages, nodes", { 0, 1, inside, P, here, 2 }, SYS_move_pages, true },
		{ "move_pages, status", { 0, 1, inside, 0, P, 2 }, SYS_move_pages, false },
		{ "process_vm_readv, local", { SELF, P, 1, right, 1, 0 }, SYS_process_vm_readv, true },
		{ "process_vm_readv, remote", { SELF, right, 1, P, 1, 0 }, SYS_process_vm_readv, true },
		{ "process_vm_readv, to", { SELF, in, 1, right, 1, 0 }, SYS_process_vm_readv, false },
		{ "process_vm_readv, from", { SELF, right, 1, in, 1, 0 }, SYS_process_vm_readv, false },
		{ "process_vm_writev, local", { SELF, P, 1, right, 1, 0 }, SYS_process_vm_writev, true },
		{ "process_vm_writev, remote", { SELF, right, 1, P, 1, 0 }, SYS_process_vm_writev, true },
		{ "process_vm_writev, from", { SELF, in, 1, right, 1, 0 }, SYS_process_vm_writev, false },
		{ "process_vm_writev, to", { SELF, right, 1, in, 1, 0 }, SYS_process_vm_writev, false },
		{ "process_madvise, vector", { SELF_FD, P, 1, 20, 0 }, PROCESS_MADVISE, true },
		{ "process_madvise, base", { SELF_FD, in, 1, 20, 0 }, PROCESS_MADVISE, false },
		{ "shmat", { segment, P, 0 }, SYS_shmat, false },
		{ "shmdt", { P }, SYS_shmdt, false },
		{ "shmctl, IPC_STAT", { segment, IPC_STAT, P }, SYS_shmctl, false },
		{ "shmctl, IPC_SET", { segment, IPC_SET, P }, SYS_shmctl, true },
		{ "shmctl, IPC_INFO", { 0, 3, P }, SYS_shmctl, false },
		{ "read pagemap", { maps, P, 8, 0 }, SYS_pread64, false },
		{ "read mem, to", { memory, P, 8, here }, SYS_pread64, false },
		{ "read mem, from", { memory, here, 8, P }, SYS_pread64, false },
		{ "write mem, from", { memory, P, 8, here }, SYS_pwrite64, false },
		{ "UFFDIO_API", { faults, UFFD(0x3f, 24), P }, SYS_ioctl, false },
		{ "UFFDIO_REGISTER", { ready, UFFD(0, 32), P }, SYS_ioctl, false },
		{ "UFFDIO_REGISTER, inside", { ready, UFFD(0, 32), inside }, SYS_ioctl, false },
		{ "UFFDIO_UNREGISTER", { ready, 0x8010aa01, P }, SYS_ioctl, false },
		{ "UFFDIO_UNREGISTER, inside", { ready, 0x8010aa01, inside }, SYS_ioctl, false },
		{ "UFFDIO_WAKE", { ready, 0x8010aa02, P }, SYS_ioctl, false },
		{ "UFFDIO_COPY", { ready, UFFD(3, 40), P }, SYS_ioctl, false },
		{ "UFFDIO_COPY, inside", { ready, UFFD(3, 40), inside }, SYS_ioctl, false },
		{ "UFFDIO_ZEROPAGE", { ready, UFFD(4, 32), P }, SYS_ioctl, false },
		{ "UFFDIO_ZEROPAGE, inside", { ready, UFFD(4, 32), inside }, SYS_ioctl, false },
		{ "UFFDIO_MOVE", { ready, UFFD(5, 40), P }, SYS_ioctl, false },
		{ "UFFDIO_MOVE, inside", { ready, UFFD(5, 40), inside }, SYS_ioctl, false },
		{ "UFFDIO_WRITEPROTECT", { ready, UFFD(6, 24), P }, SYS_ioctl, false },
		{ "UFFDIO_WRITEPROTECT, inside", { ready, UFFD(6, 24), inside }, SYS_ioctl, false },
		{ "UFFDIO_CONTINUE", { ready, UFFD(7, 32), P }, SYS_ioctl, false },
		{ "UFFDIO_CONTINUE, inside", { ready, UFFD(7, 32), inside }, SYS_ioctl, false },
		{ "UFFDIO_POISON", { ready, UFFD(8, 32), P }, SYS_ioctl, false },
		{ "UFFDIO_POISON, inside", { ready, UFFD(8, 32), inside }, SYS_ioctl, false },
		{ "wait4, usage", { -1, 0, WNOHANG, P }, SYS_wait4, true },
		{ "waitid, info", { P_ALL, 0, P, WNOHANG | WEXITED, 0 }, SYS_waitid, true },
		{ "execveat, name", { AT_FDCWD, P, 0, 0, 0 }, SYS_execveat, true },
		{ "execveat, arguments", { AT_FDCWD, (long)"/proc/self/exe", P, 0, 0 }, SYS_execveat, true },
		{ "clone3, inside", { inside, 88 }, CLONE3, false },
		{ "get_robust_list, length", { 0, here, P }, SYS_get_robust_list, false },
		{ "futex, wake", { P, 1, 1 }, SYS_futex, true },
		{ "futex, requeue", { some, 3, 1, 1, P }, SYS_futex, true },
		{ "futex, compare and requeue", { some, 4, 1, 1, P, 0 }, SYS_futex, true },
		{ "futex, wake and change", { some, 5, 1, 1, P, 0 }, SYS_futex, true },
		{ "futex, lock", { P, 6, 0, 0 }, SYS_futex, false },
		{ "futex, lock, time", { some, 6, 0, P }, SYS_futex, true },
		{ "futex, try to lock", { P, 8, 0, 0 }, SYS_futex, false },
		{ "futex, unlock", { P, 7, 0, 0 }, SYS_futex, false },
		{ "futex_waitv", { P, 1, 0, 0, 0 }, FUTEX_WAITV, true },
		{ "futex_waitv, inside", { (long)&waiter, 1, 0, now, 1 }, FUTEX_WAITV, true },
		{ "futex_waitv, time", { (long)&waiter, 1, 0, P, 1 }, FUTEX_WAITV, true },
		{ "prctl, set the name", { PR_SET_NAME, P }, SYS_prctl, true },
		{ "prctl, get the name", { PR_GET_NAME, P }, SYS_prctl, false },
		{ "prctl, PR_GET_PDEATHSIG", { PR_GET_PDEATHSIG, P }, SYS_prctl, false },
		{ "prctl, PR_GET_CHILD_SUBREAPER", { 37, P }, SYS_prctl, false },
		{ "prctl, name memory", { 0x53564d41, 0, P, page, (long)"x" }, SYS_prctl, false },
		{ "prctl, memory's name", { 0x53564d41, 0, some, page, P }, SYS_prctl, true },
		{ "arch_prctl, set GS", { 0x1001, P }, SYS_arch_prctl, true },
		{ "getcpu, node", { 0, P, 0 }, SYS_getcpu, false },
		{ "capget, header", { P, here }, SYS_capget, false },
		{ "capset, header", { P, here }, SYS_capset, false },
		{ "setgroups", { 1, P }, SYS_setgroups, true },
		{ "getresuid, real", { P, here, here }, SYS_getresuid, false },
		{ "getresuid, effective", { here, P, here }, SYS_getresuid, false },
		{ "getresuid, saved", { here, here, P }, SYS_getresuid, false },
		{ "getresgid, real", { P, here, here }, SYS_getresgid, false },
		{ "sched_setparam", { 0, P }, SYS_sched_setparam, true },
		{ "sched_getparam", { 0, P }, SYS_sched_getparam, false },
		{ "sched_setscheduler", { 0, 0, P }, SYS_sched_setscheduler, true },
		{ "sched_rr_get_interval", { 0, P }, SYS_sched_rr_get_interval, false },
		{ "sched_setattr", { 0, P, 0 }, SCHED_SETATTR, false },
		{ "sched_getattr", { 0, P, 48, 0 }, SCHED_GETATTR, false },
		{ "prlimit64, new", { 0, RLIMIT_CORE, P, 0 }, SYS_prlimit64, true },
		{ "timer_create, event", { CLOCK_MONOTONIC, P, here }, SYS_timer_create, true },
		{ "timer_create, number", { CLOCK_MONOTONIC, (long)&event, P }, SYS_timer_create, false },
		{ "clock_settime", { CLOCK_REALTIME, P }, SYS_clock_settime, true },
		{ "settimeofday", { P, 0 }, SYS_settimeofday, true },
		{ "gettimeofday, zone", { 0, P }, SYS_gettimeofday, false },
		{ "time", { P }, SYS_time, false },
		{ "adjtimex", { P }, SYS_adjtimex, true },
		{ "clock_adjtime", { CLOCK_REALTIME, P }, SYS_clock_adjtime, true },
		{ "setitimer, old", { ITIMER_VIRTUAL, here, P }, SYS_setitimer, false },
		{ "rt_sigqueueinfo", { SELF, SIGUSR1, P }, SYS_rt_sigqueueinfo, true },
		{ "rt_tgsigqueueinfo", { SELF, SELF, SIGUSR1, P }, SYS_rt_tgsigqueueinfo, true },
		{ "pidfd_send_signal", { SELF_FD, SIGUSR1, P, 0 }, PIDFD_SEND_SIGNAL, true },
		{ "read a signalfd", { signals, P, 128 }, SYS_read, false },
		{ "rt_sigtimedwait, info", { (long)&usr1, P, now, 8 }, SYS_rt_sigtimedwait, false },
	};

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
