/*
 * What the programs of this folder share. Each asks one family of system calls, and prints what they answer: the same lines
 * on every kernel that keeps to Linux. Addresses, times and numbers of processes are never printed, only what follows from them.
 */
#ifndef CHECK_H
#define CHECK_H

#include "../terrane.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* Lines go out as they are made: so the last one shows where a program hangs, and a child repeats none. */
__attribute__((constructor)) static void line_by_line(void)
{
	static char buffer[4096];
	setvbuf(stdout, buffer, _IOLBF, sizeof buffer);
}

/* An exit status for: this kernel lacks what the program asks. */
#define LACKING 77

UNUSED static const char *errno_name(int number)
{
	static char other[16];
	switch (number) {
#define NAME(name) case name: return #name;
	NAME(EPERM) NAME(ENOENT) NAME(ESRCH) NAME(EINTR) NAME(EIO) NAME(ENXIO) NAME(E2BIG) NAME(ENOEXEC) NAME(EBADF)
	NAME(ECHILD) NAME(EAGAIN) NAME(ENOMEM) NAME(EACCES) NAME(EFAULT) NAME(EBUSY) NAME(EEXIST) NAME(EXDEV) NAME(ENODEV)
	NAME(ENOTDIR) NAME(EISDIR) NAME(EINVAL) NAME(ENFILE) NAME(EMFILE) NAME(ENOTTY) NAME(ETXTBSY) NAME(EFBIG)
	NAME(ENOSPC) NAME(ESPIPE) NAME(EROFS) NAME(EMLINK) NAME(EPIPE) NAME(EDOM) NAME(ERANGE) NAME(EDEADLK)
	NAME(ENAMETOOLONG) NAME(ENOSYS) NAME(ENOTEMPTY) NAME(ELOOP) NAME(EOVERFLOW) NAME(EOPNOTSUPP) NAME(ETIMEDOUT)
	NAME(ENOTSOCK) NAME(EOWNERDEAD)
#undef NAME
	}
	snprintf(other, sizeof other, "errno %d", number);
	return other;
}

/* Says what a call answered. */
UNUSED static long told(const char *call, long result)
{
	if (result == -1)
		printf("%s = %s\n", call, errno_name(errno));
	else
		printf("%s = %ld\n", call, result);
	return result;
}

/* The same for calls whose result is different each time. */
UNUSED static long told_ok(const char *call, long result)
{
	if (result == -1)
		printf("%s = %s\n", call, errno_name(errno));
	else
		printf("%s = ok\n", call);
	return result;
}

#define R(call) (errno = 0, told(#call, (long)(call)))
#define OK(call) (errno = 0, told_ok(#call, (long)(call)))
/* A thing that must be so: said either way, so that a difference shows. */
#define IS(what) printf("%s: %s\n", #what, (what) ? "yes" : "NO")

/* An address where nothing is, of which the compiler knows nothing. */
UNUSED static char *volatile nowhere = (char *)8;

/* What happened when an address was touched. */
struct seen {
	volatile int signal, code;
	char *volatile at;
};
UNUSED static struct seen seen;
UNUSED static sigjmp_buf back;

UNUSED static void see(int number, siginfo_t *info, void *context)
{
	(void)context;
	seen.signal = number;
	seen.code = info->si_code;
	seen.at = info->si_addr;
	siglongjmp(back, 1);
}

UNUSED static void see_faults(void)
{
	struct sigaction action = { .sa_sigaction = see, .sa_flags = SA_SIGINFO | SA_NODEFER };
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
}

UNUSED static const char *code_name(int number, int code)
{
	if (code == SI_USER)
		return "USER";
	if (code == SI_KERNEL)
		return "KERNEL";
	if (number == SIGSEGV)
		return code == SEGV_MAPERR ? "MAPERR" : code == SEGV_ACCERR ? "ACCERR" : "?";
	if (number == SIGBUS)
		return code == BUS_ADRERR ? "ADRERR" : code == BUS_ADRALN ? "ADRALN" : "?";
	return "?";
}

/* Loads a byte, or stores one if it is not negative, and says what came of it. */
UNUSED static void try_at(const char *what, char *at, int store)
{
	if (sigsetjmp(back, 1)) {
		printf("%s: %s %s, %s\n", what, seen.signal == SIGSEGV ? "SIGSEGV" : "SIGBUS", code_name(seen.signal, seen.code),
		       seen.at == at ? "there" : "ELSEWHERE");
		return;
	}
	if (store >= 0) {
		*(volatile char *)at = store;
		printf("%s: stored\n", what);
	} else {
		printf("%s: %d\n", what, *(volatile char *)at);
	}
}

#define LOAD(at) try_at("load " #at, (char *)(at), -1)
#define STORE(at, byte) try_at("store " #at, (char *)(at), byte)

/* The mappings from `from` on, `pages` long, as /proc/self/maps has them: pages from there, protection. */
UNUSED static void list(const char *what, const char *from, size_t pages)
{
	static char text[1 << 20];
	size_t length = 0;
	ssize_t got;
	int fd = open("/proc/self/maps", O_RDONLY);
	if (fd < 0) {
		printf("%s: no maps\n", what);
		return;
	}
	while (length < sizeof text - 1 && (got = read(fd, text + length, sizeof text - 1 - length)) > 0)
		length += got;
	close(fd);
	text[length] = 0;
	printf("%s:", what);
	for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
		unsigned long start, end;
		char prot[8];
		if (sscanf(line, "%lx-%lx %7s", &start, &end, prot) != 3)
			continue;
		if (end <= (unsigned long)from || start >= (unsigned long)from + pages * PAGE)
			continue;
		if (start < (unsigned long)from)
			start = (unsigned long)from;
		if (end > (unsigned long)from + pages * PAGE)
			end = (unsigned long)from + pages * PAGE;
		printf(" %lu+%lu %s", (start - (unsigned long)from) / PAGE, (end - start) / PAGE, prot);
	}
	putchar('\n');
}

/* A window of so many free pages, with free ones around. */
UNUSED static char *window(size_t pages)
{
	char *at = map((pages + 32) * PAGE, PROT_NONE);
	unmap(at, (pages + 32) * PAGE);
	return at + 16 * PAGE;
}

/* Anonymous memory at this place. */
UNUSED static char *map_at(char *at, size_t pages, int protection)
{
	char *got = mmap(at, pages * PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	if (got != at)
		wrong("mmap at a fixed place");
	return got;
}

/* Says how a child ended. */
UNUSED static void ended(const char *what, int status)
{
	if (WIFEXITED(status))
		printf("%s: exit %d\n", what, WEXITSTATUS(status));
	else if (WIFSIGNALED(status))
		printf("%s: signal %d\n", what, WTERMSIG(status));
	else if (WIFSTOPPED(status))
		printf("%s: stopped by %d\n", what, WSTOPSIG(status));
	else
		printf("%s: status %#x\n", what, status);
}

/* Runs something in a child, and says how it ended. */
#define IN_CHILD(what, ...) \
	do { \
		fflush(stdout); \
		pid_t child_ = fork(); \
		if (child_ < 0) \
			failed("fork"); \
		if (child_ == 0) { \
			__VA_ARGS__; \
			fflush(stdout); \
			_exit(0); \
		} \
		int status_; \
		if (waitpid(child_, &status_, 0) != child_) \
			failed("waitpid"); \
		ended(what, status_); \
	} while (0)

/* A file of these pages, each filled with its number and one. */
UNUSED static int file_of(int pages)
{
	char path[64], page[PAGE];
	static int number;
	snprintf(path, sizeof path, "/tmp/terrane-check-%d-%d", (int)getpid(), number++);
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	if (fd < 0)
		failed("open");
	unlink(path);
	for (int i = 0; i < pages; i++) {
		memset(page, i + 1, PAGE);
		if (write(fd, page, PAGE) != (ssize_t)PAGE)
			failed("write");
	}
	return fd;
}

/* The value of a field like "VmLck:" in /proc/self/status or smaps_rollup, in its own unit; -1 without it. */
UNUSED static long field(const char *path, const char *name)
{
	char text[8192];
	size_t length = 0;
	ssize_t got;
	/* Without stdio, which may map memory. */
	int fd = open(path, O_RDONLY);
	while (fd >= 0 && length < sizeof text - 1 && (got = read(fd, text + length, sizeof text - 1 - length)) > 0)
		length += got;
	if (fd >= 0)
		close(fd);
	text[length] = 0;
	for (char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
		if (!strncmp(line, name, strlen(name)))
			return atol(line + strlen(name));
	return -1;
}

UNUSED static void pause_for(long milliseconds)
{
	struct timespec time = { milliseconds / 1000, milliseconds % 1000 * 1000000 };
	while (nanosleep(&time, &time) && errno == EINTR)
		;
}

#endif
