/* Limits, usage, identities, random bytes, and what C libraries ask for. */
#include "check.h"
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>

#define RW (PROT_READ | PROT_WRITE)

static int deep(int left)
{
	volatile char room[16 * 1024];
	room[0] = 1;
	return left ? deep(left - 1) + room[0] : 0;
}

int main(void)
{
	see_faults();
	struct rlimit limit, old;
	puts("# Limits");
	R(getrlimit(RLIMIT_STACK, &limit));
	IS(limit.rlim_cur >= 1 * MIB && limit.rlim_cur <= limit.rlim_max);
	R(getrlimit(RLIMIT_AS, &limit));
	IS(limit.rlim_cur == RLIM_INFINITY);
	R(getrlimit(99, &limit));
	limit = (struct rlimit){ 2, 1 };
	R(setrlimit(RLIMIT_CORE, &limit));
	R(prlimit(0, RLIMIT_NOFILE, NULL, &old));
	R(prlimit(1 << 22, RLIMIT_NOFILE, NULL, &old));
	R(syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, 1));
	IN_CHILD("address space", {
		limit = (struct rlimit){ 64 * MIB, 64 * MIB };
		R(setrlimit(RLIMIT_AS, &limit));
		R(mmap(NULL, 128 * MIB, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
		OK(mmap(NULL, 16 * MIB, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
		limit.rlim_cur = RLIM_INFINITY;
		IN_CHILD("inherited", getrlimit(RLIMIT_AS, &old); IS(old.rlim_cur == 64 * MIB));
	});
	IN_CHILD("data", {
		limit = (struct rlimit){ 16 * MIB, 16 * MIB };
		R(setrlimit(RLIMIT_DATA, &limit));
		R(mmap(NULL, 64 * MIB, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
		OK(mmap(NULL, 64 * MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	});
	IN_CHILD("size of a file", {
		int fd = file_of(1);
		limit = (struct rlimit){ 8192, 8192 };
		R(setrlimit(RLIMIT_FSIZE, &limit));
		signal(SIGXFSZ, SIG_IGN);
		R(pwrite(fd, "abcdef", 6, 8190));
		R(pwrite(fd, "abcdef", 6, 8192));
		signal(SIGXFSZ, SIG_DFL);
		R(pwrite(fd, "abcdef", 6, 8192));
	});

	puts("# Stack");
	IN_CHILD("deep", IS(deep(300) >= 0));
	IN_CHILD("too deep", {
		limit = (struct rlimit){ 2 * MIB, 2 * MIB };
		setrlimit(RLIMIT_STACK, &limit);
		signal(SIGSEGV, SIG_DFL);
		deep(300);
	});
	IN_CHILD("far below the stack", {
		signal(SIGSEGV, SIG_DFL);
		volatile uintptr_t below = (uintptr_t)__builtin_frame_address(0) - 512 * MIB;
		*(volatile char *)below = 1;
	});

	puts("# Usage");
	struct rusage usage, later;
	R(getrusage(RUSAGE_SELF, &usage));
	touch(map(64 * PAGE, RW), 64 * PAGE, 1);
	R(getrusage(RUSAGE_SELF, &later));
	IS(later.ru_minflt >= usage.ru_minflt + 64);
	IS(later.ru_maxrss > 0);
	IN_CHILD("work", for (volatile long i = 0; i < 3000000; i++));
	R(getrusage(RUSAGE_CHILDREN, &later));
	IS(later.ru_utime.tv_sec > 0 || later.ru_utime.tv_usec > 0 || later.ru_stime.tv_usec > 0);
	R(getrusage(RUSAGE_THREAD, &later));
	R(getrusage(77, &later));
	R(syscall(SYS_getrusage, RUSAGE_SELF, 1));

	puts("# Names and numbers");
	struct utsname name;
	R(uname(&name));
	IS(!strcmp(name.sysname, "Linux"));
	IS(!strcmp(name.machine, "x86_64"));
	IS(name.release[0] >= '4' && name.release[0] <= '9');
	R(uname((void *)nowhere));
	struct sysinfo info;
	R(sysinfo(&info));
	IS(info.totalram > 0 && info.freeram <= info.totalram && info.mem_unit >= 1 && info.procs >= 1);
	R(syscall(SYS_sysinfo, 1));
	IS(sysconf(_SC_PAGESIZE) == 4096);
	unsigned char one[32] = { 0 }, two[32] = { 0 };
	R(getrandom(one, 32, 0));
	R(getrandom(two, 32, GRND_NONBLOCK));
	IS(memcmp(one, two, 32) != 0);
	R(getrandom(nowhere, 32, 0));
	R(getrandom(one, 32, 99));
	R(syscall(SYS_getrandom, one, 0, 0));

	puts("# Of C libraries");
	unsigned long base = 0;
	R(syscall(SYS_arch_prctl, 0x1003, &base));
	IS(base == (unsigned long)__builtin_thread_pointer());
	R(syscall(SYS_arch_prctl, 0x1002, 1ul << 63));
	R(syscall(SYS_arch_prctl, 77, 0));
	R(syscall(SYS_arch_prctl, 0x1003, 1));
	IS(syscall(SYS_set_tid_address, &base) == getpid());
	R(syscall(SYS_set_robust_list, &base, 5));
	R(syscall(SYS_rseq, &base, 1, 0, 0));
	R(syscall(SYS_prctl, 15, "a name"));
	memset(one, 0, 16);
	R(syscall(SYS_prctl, 16, one));
	puts((char *)one);
	R(syscall(100000));
	R(syscall(-1));
	R(getpgid(1 << 22));
	IS(getsid(0) > 0 || getsid(0) == 0);
	return 0;
}
