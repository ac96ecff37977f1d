/* mlock and its relatives, mincore, msync. */
#include "check.h"

#define RW (PROT_READ | PROT_WRITE)

static long locked(void)
{
	return field("/proc/self/status", "VmLck:") / 4;
}

static int present(char *at, int pages)
{
	unsigned char there[64];
	int count = 0;
	if (mincore(at, pages * PAGE, there))
		return -1;
	for (int i = 0; i < pages; i++)
		count += there[i] & 1;
	return count;
}

int main(void)
{
	see_faults();
	char *w = window(64);
	map_at(w, 16, RW);
	puts("# mincore");
	unsigned char there[64];
	R(mincore(w + 1, PAGE, there));
	R(mincore(w, 16 * PAGE, (void *)1));
	R(mincore(w + 32 * PAGE, PAGE, there));
	R(mincore(w, 0, there));
	IS(present(w, 16) == 0);
	touch(w, 3 * PAGE, 1);
	IS(present(w, 16) == 3);
	puts("# mlock");
	IS(locked() == 0);
	R(mlock(w, 4 * PAGE));
	IS(locked() == 4);
	IS(present(w, 16) == 4);
	R(mlock(w + 100, PAGE));
	IS(locked() == 4);
	R(mlock(w + 32 * PAGE, PAGE));
	R(mlock(w, -1));
	R(mlock(w + 14 * PAGE, 4 * PAGE));
	IS(locked() == 6);
	R(syscall(SYS_mlock2, w + 8 * PAGE, 2 * PAGE, 1));
	IS(locked() == 8);
	IS(present(w + 8 * PAGE, 2) == 0);
	R(syscall(SYS_mlock2, w, PAGE, 2));
	list("locked", w, 64);
	R(munlock(w, 2 * PAGE));
	IS(locked() == 6);
	IN_CHILD("child", IS(locked() == 0));
	R(munmap(w + 14 * PAGE, 2 * PAGE));
	IS(locked() == 4);
	R(munlockall());
	IS(locked() == 0);
	R(mlockall(0));
	R(mlockall(8));
	R(mlockall(MCL_FUTURE));
	char *future = map(4 * PAGE, RW);
	IS(locked() == 4);
	IS(present(future, 4) == 4);
	R(munlockall());
	IS(locked() == 0);
	puts("# Limits");
	struct rlimit limit = { 8 * PAGE, 8 * PAGE };
	R(setrlimit(RLIMIT_MEMLOCK, &limit));
	if (getuid() == 0)
		puts("root may");
	puts("# msync");
	int fd = file_of(4);
	char *file = mmap(NULL, 4 * PAGE, RW, MAP_SHARED, fd, 0);
	file[5] = 99;
	R(msync(file, 4 * PAGE, MS_SYNC));
	R(msync(file, 4 * PAGE, MS_ASYNC));
	R(msync(file, 4 * PAGE, MS_ASYNC | MS_SYNC));
	R(msync(file + 1, PAGE, MS_SYNC));
	R(msync(file, PAGE, 64));
	R(msync(file, 0, MS_SYNC));
	R(msync(w + 32 * PAGE, PAGE, MS_SYNC));
	R(msync(file, 4 * PAGE, MS_INVALIDATE));
	char byte = 0;
	R(pread(fd, &byte, 1, 5));
	IS(byte == 99);
	return 0;
}
