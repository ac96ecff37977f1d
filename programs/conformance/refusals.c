/*
 * What the calls about memory take and refuse, and in which order they look at what is wrong: one line a case, most of them cases that public tests of
 * these calls ask too.
 */
#include "check.h"
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <stdint.h>

#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 3
#endif
#define MM(...) (mmap(__VA_ARGS__) == MAP_FAILED ? -1 : 0)

static void stacks(void)
{
	puts("# grows down");
	char *w = window(600);
	char *st = mmap(w + 512*PAGE, PAGE, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_GROWSDOWN, -1, 0);
	IS(st != MAP_FAILED);
	STORE(st, 1);
	STORE(st - 1, 1);
	STORE(st - PAGE - 1, 1);
	STORE(st - 20 * PAGE, 2);
	list("grown", w, 600);
	/* near another mapping: guard gap of 256 pages */
	char *v = window(600);
	map_at(v, 1, 3);
	st = mmap(v + 300 * PAGE, PAGE, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_GROWSDOWN, -1, 0);
	STORE(st - PAGE, 1);
	STORE(v + 270 * PAGE, 1);
	STORE(v + 250 * PAGE, 1);
	list("gap", v, 600);
	char *u = window(600);
	map_at(u, 1, PROT_NONE);
	st = mmap(u + 300 * PAGE, PAGE, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_GROWSDOWN, -1, 0);
	STORE(u + 250 * PAGE, 1);
	STORE(u + PAGE, 1);
	STORE(u, 1);
	list("none", u, 600);
}

static void files(void)
{
	puts("# files");
	int fd = file_of(2);
	R(ftruncate(fd, PAGE + 100));
	char *p = mmap(NULL, 4*PAGE, 3, MAP_SHARED, fd, 0);
	IS(p[PAGE + 100] == 0 || p[PAGE + 100] == 2);
	p[PAGE + 100]='z';
	LOAD(p + 2 * PAGE);
	STORE(p + 2 * PAGE, 1);
	STORE(p + 3 * PAGE, 1);
	R(ftruncate(fd, 3 * PAGE));
	LOAD(p + PAGE + 100);
	LOAD(p + 2 * PAGE);
	STORE(p + 2 * PAGE, 7);
	LOAD(p + 3 * PAGE);
	R(ftruncate(fd, PAGE));
	LOAD(p + PAGE);
	LOAD(p);
	R(ftruncate(fd, 3 * PAGE));
	LOAD(p + 2 * PAGE);
	R(msync(p, 4 * PAGE, MS_SYNC));
	R(msync(p, 4 * PAGE, MS_ASYNC | MS_SYNC));
	R(msync(p + 1, PAGE, MS_SYNC));
	R(msync(p, PAGE, 8));
	R(msync(p, 0, MS_SYNC));
	R(mlock(p, PAGE));
	R(msync(p, PAGE, MS_INVALIDATE));
	R(munlock(p, PAGE));
	R(msync(p, PAGE, MS_INVALIDATE));
	munmap(p + PAGE, PAGE);
	R(msync(p, 4 * PAGE, MS_SYNC));
	R(msync(p + PAGE, PAGE, MS_SYNC));
	int ro = open("/proc/self/exe", O_RDONLY);
	R(MM(NULL, PAGE, PROT_WRITE, MAP_SHARED, ro, 0));
	R(MM(NULL, PAGE, PROT_WRITE, MAP_PRIVATE, ro, 0));
	R(MM(NULL, PAGE, 1, MAP_SHARED, ro, 1));
	R(MM(NULL, PAGE, 1, 0, ro, 0));
	R(MM(NULL, PAGE, 1, MAP_SHARED | MAP_PRIVATE, ro, 0));
	R(MM(NULL, PAGE, 1, MAP_SHARED_VALIDATE, ro, 0));
	R(MM(NULL, PAGE, 1, MAP_SHARED_VALIDATE | 1 << 30, ro, 0));
	R(MM(NULL, PAGE, 1, MAP_SHARED_VALIDATE | 0x80000, ro, 0));
	R(MM(NULL, PAGE, 1, MAP_PRIVATE, -1, 0));
	R(MM(NULL, 0, 1, MAP_PRIVATE, ro, 0));
	R(MM(NULL, ~0ul, 1, MAP_PRIVATE, ro, 0));
	R(MM(NULL, PAGE, 1, MAP_PRIVATE, ro, ~0ul&~4095));
	R(MM((void *)0x7ffffffff000, PAGE, 1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
	R(MM((void *)1, PAGE, 1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
	int dir = open("/tmp", O_RDONLY);
	R(MM(NULL, PAGE, 1, MAP_PRIVATE, dir, 0));
	int pp[2];
	R(pipe(pp));
	R(MM(NULL, PAGE, 1, MAP_PRIVATE, pp[0], 0));
	R(MM(NULL, PAGE, 1, MAP_PRIVATE, pp[1], 0));
	int wo = open("/tmp/wo", O_WRONLY | O_CREAT, 0600);
	R(MM(NULL, PAGE, 1, MAP_PRIVATE, wo, 0));
	R(MM(NULL, PAGE, 2, MAP_SHARED, wo, 0));
	int ap = open("/tmp/wo", O_RDWR | O_APPEND);
	R(MM(NULL, PAGE, 3, MAP_SHARED, ap, 0));
	int pa = open("/tmp/wo", O_PATH);
	R(MM(NULL, PAGE, 1, MAP_SHARED, pa, 0));
	R(MM(NULL, PAGE, 0x1000, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	R(MM(NULL, PAGE, 8, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	R(MM(NULL, PAGE, 1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_STACK, -1, 0));
	R(MM(NULL, PAGE, 1, MAP_SHARED | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, 0));
	R(MM(NULL, PAGE, 1, MAP_PRIVATE | MAP_GROWSDOWN, fd, 0));
	R(MM(NULL, PAGE, 1, MAP_SHARED | MAP_ANONYMOUS | 0x800000, -1, 0));
	R(MM(NULL, PAGE, 1, 0x8 | MAP_ANONYMOUS, -1, 0));
	R(MM(NULL, PAGE, 1, 0x8 | MAP_ANONYMOUS, -1, PAGE));
	R(MM(NULL, PAGE, 1, 0x7 | MAP_ANONYMOUS, -1, 0));
	R(unlink("/tmp/wo"));
}

static void protections(void)
{
	puts("# mprotect");
	int ro = open("/proc/self/exe", O_RDONLY);
	char *p = mmap(NULL, 2*PAGE, 1, MAP_SHARED, ro, 0);
	R(mprotect(p, PAGE, 3));
	R(mprotect(p, PAGE, 5));
	R(mprotect(p + 1, PAGE, 1));
	R(mprotect(p, PAGE, 0x1000000));
	R(mprotect(p, PAGE, 0x3000000));
	R(mprotect(p, PAGE, 8));
	R(mprotect(p, PAGE, 0x10));
	R(mprotect(NULL, 0, 1));
	R(mprotect((void *)4096, 0, 99));
	R(mprotect(p, ~0ul, 1));
	R(mprotect(p, 2 * PAGE, 0x1000001));
	R(mprotect(p, 2 * PAGE, 0x2000001));
}

static void remaps(void)
{
	puts("# mremap");
	char *p = map(8*PAGE, 3);
	memset(p, 5, 8 * PAGE);
	R(mremap(p + 1, PAGE, PAGE, 0) == MAP_FAILED ? -1 : 0);
	R(mremap(p, PAGE, 0, 0) == MAP_FAILED ? -1 : 0);
	R(mremap(p, PAGE, PAGE, 64) == MAP_FAILED ? -1 : 0);
	R(mremap(p, PAGE, PAGE, MREMAP_FIXED, p) == MAP_FAILED ? -1 : 0);
	R(mremap(p, PAGE, PAGE, 3, p) == MAP_FAILED ? -1 : 0);
	R(mremap(p, PAGE, 2 * PAGE, 3, p + 1) == MAP_FAILED ? -1 : 0);
	R(mremap(p, 0, PAGE, 1) == MAP_FAILED ? -1 : 0);
	R(mremap(p, 8 * PAGE, 16 * PAGE, 0) == MAP_FAILED ? -1 : 0);
	R(mremap((void *)(8ul << 40), PAGE, PAGE, 1) == MAP_FAILED ? -1 : 0);
	R(mremap(p, ~0ul, PAGE, 1) == MAP_FAILED ? -1 : 0);
	R(mremap(p, PAGE, ~0ul, 1) == MAP_FAILED ? -1 : 0);
	R(mremap(p, 2 * PAGE, PAGE, 4 | 1) == MAP_FAILED ? -1 : 0);
	R(mremap(p, PAGE, PAGE, 4) == MAP_FAILED ? -1 : 0);
	char *s = mmap(NULL, 4*PAGE, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	memset(s, 3, 4 * PAGE);
	char *t = mremap(s, 0, 4*PAGE, 1);
	IS(t != MAP_FAILED && t != s && t[5] == 3);
	t = mremap(s, 0, 2 * PAGE, 1);
	IS(t != MAP_FAILED && t[5] == 3);
	unmap(p + 4 * PAGE, PAGE);
	R(mremap(p, 8 * PAGE, 9 * PAGE, 1) == MAP_FAILED ? -1 : 0);
	R(mremap(p, 8 * PAGE, 2 * PAGE, 1) == MAP_FAILED ? -1 : 0);
	list("left", p, 8);
	struct rlimit l, old;
	getrlimit(RLIMIT_AS, &old);
	l = old;
	l.rlim_cur = 64 << 20;
	IN_CHILD("limit", {
		setrlimit(RLIMIT_AS, &l);
		R(mremap(s, PAGE, 256 << 20, 1) == MAP_FAILED ? -1 : 0);
		R(MM(NULL, 128 << 20, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
		R(sbrk(128 << 20) == (void *)-1 ? -1 : 0);
	});
	char *lk = map(2*PAGE, 3);
	mlock(lk, PAGE);
	IN_CHILD("memlock", {
		char *q = map(2*PAGE, 3);
		unmap(q + PAGE, PAGE);
		R(mlock(q, PAGE));
		l.rlim_cur = l.rlim_max = PAGE;
		setrlimit(RLIMIT_MEMLOCK, &l);
		seteuid(65534);
		R(mremap(q, PAGE, 3 * PAGE, 1) == MAP_FAILED ? -1 : 0);
		R(mlock(lk, 2 * PAGE));
		R(mlockall(MCL_CURRENT));
		R(mlockall(MCL_FUTURE));
		R(MM(NULL, 4 * PAGE, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0));
		R(MM(NULL, 4 * PAGE, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
		l.rlim_cur = 0;
		setrlimit(RLIMIT_MEMLOCK, &l);
		R(mlock(lk, 1));
		R(munlock(lk, 1));
		R(MM(NULL, 4 * PAGE, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0));
	});
}

static void locks(void)
{
	puts("# mlock");
	char *p = map(4*PAGE, 3);
	R(mlock(p, 0));
	R(mlock(p + 5, 1));
	R(mlock2(p, PAGE, 1));
	R(mlock2(p, PAGE, 2));
	R(mlock2(p, PAGE, -1));
	R(mlockall(0));
	R(mlockall(4));
	R(mlockall(8));
	R(mlockall(MCL_ONFAULT | MCL_FUTURE));
	R(munlockall());
	R(mlock(p, ~0ul));
	R(munlock(p, ~0ul));
	R(mlock((void *)-4096ul, 8192));
	unmap(p + PAGE, PAGE);
	R(mlock(p, 4 * PAGE));
	R(munlock(p, 4 * PAGE));
	R(mlock(p + PAGE, PAGE));
	char *n = map(PAGE, PROT_NONE);
	R(mlock(n, PAGE));
	unsigned char v[8];
	R(mincore(p, PAGE, v));
	R(mincore(p + 1, PAGE, v));
	R(mincore(p, PAGE, (void *)8));
	R(mincore(p, 4 * PAGE, v));
	R(mincore(p, ~0ul, v));
	R(mincore(n, PAGE, v));
	R(mincore(p, 0, v));
	R(mincore(p, 0, NULL));
}

static void advices(void)
{
	puts("# madvise");
	int fd = file_of(4);
	char *f = mmap(NULL, 4*PAGE, 3, MAP_SHARED, fd, 0), *fp = mmap(NULL, 4*PAGE, 3, MAP_PRIVATE, fd, 0), *fr = mmap(NULL, 4*PAGE, 1, MAP_SHARED, open("/proc/self/exe", O_RDONLY), 0), *a = map(8*PAGE, 3), *s = mmap(NULL, 4*PAGE, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0), *lk = map(2*PAGE, 3);
	mlock(lk, PAGE);
	char *all[] = {f, fp, fr, a, s, lk};
	const char *nm[] = {"file", "private", "readonly", "anon", "shared", "locked"};
	int adv[] = {0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 104, -1, 5, 6, 7, 26};
	for (int i = 0; i < 6; i++) {
		printf("%s:", nm[i]);
		for (unsigned k = 0; k < sizeof adv / sizeof *adv; k++) {
			errno = 0;
			int r = madvise(all[i], PAGE, adv[k]);
			printf(" %d=%s", adv[k], r ? errno_name(errno) : "0");
		}
		puts("");
	}
	R(madvise(a + 1, PAGE, 0));
	R(madvise(a, ~0ul, 0));
	R(madvise(a, 0, 0));
	R(madvise(a, 0, 999));
	R(madvise((void *)~4095ul, PAGE, 0));
	unmap(a + 2 * PAGE, PAGE);
	R(madvise(a, 8 * PAGE, MADV_DONTNEED));
	R(madvise(a, 8 * PAGE, MADV_WILLNEED));
	R(madvise(a, 8 * PAGE, MADV_FREE));
	R(madvise(a, 8 * PAGE, 23));
	R(madvise(a, 8 * PAGE, 21));
	R(madvise(a, 8 * PAGE, 20));
	R(madvise(a, 8 * PAGE, 25));
	R(madvise(a, 8 * PAGE, 14));
	R(madvise(f, 4 * PAGE, MADV_REMOVE));
	IS(f[0] == 0);
	char *w = map(2*PAGE, 3);
	strcpy(w, "wipe");
	R(madvise(w, PAGE, 18));
	IN_CHILD("wiped", IS(w[0] == 0));
	R(madvise(w, PAGE, 19));
	IN_CHILD("kept", IS(w[0]=='w'));
	R(madvise(w, PAGE, 10));
	IN_CHILD("gone", LOAD(w));
	R(madvise(w, PAGE, 11));
	IN_CHILD("back", LOAD(w));
}

static void heaps(void)
{
	puts("# brk");
	char *b = sbrk(0);
	R(brk(b + 3 * PAGE));
	IS(sbrk(0) == b + 3 * PAGE);
	memset(b, 1, 3 * PAGE);
	R(brk(b));
	LOAD(((char*)(((uintptr_t)b + PAGE - 1)&~4095ul)) + PAGE);
	R(brk(b + PAGE));
	IS(b[PAGE - 1] == 0);
	R(brk((void *)-1));
	R(brk(0));
	R(brk((void *)4096));
	IS(sbrk(0) == b + PAGE);
	struct rlimit l = {16 * PAGE, RLIM_INFINITY};
	IN_CHILD("data", {
		setrlimit(RLIMIT_DATA, &l);
		R(brk(b + (64 << 20)));
		R(MM(NULL, 64 << 20, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
		R(MM(NULL, 64 << 20, 1, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
		R(MM(NULL, 64 << 20, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
	});
}

static void segments(void)
{
	puts("# shm");
	int id = shmget(IPC_PRIVATE, 3 * PAGE + 5, 0600 | IPC_CREAT);
	IS(id>=0);
	char *a = shmat(id, 0, 0), *r = shmat(id, 0, SHM_RDONLY);
	strcpy(a, "hi");
	IS(!strcmp(r, "hi"));
	STORE(r, 1);
	STORE(a + 4 * PAGE - 1, 1);
	R(shmat(id, a + 1, 0) == (void *)-1 ? -1 : 0);
	R(shmat(id, a, 0) == (void *)-1 ? -1 : 0);
	R(shmat(id, a, SHM_REMAP) == (void *)-1 ? -1 : 0);
	R(shmat(id, NULL, SHM_REMAP) == (void *)-1 ? -1 : 0);
	char *w = window(16);
	R(shmat(id, w + 100, SHM_RND) == w ? 0 : -1);
	R(shmat(12345678, 0, 0) == (void *)-1 ? -1 : 0);
	R(shmdt(a + PAGE));
	R(shmdt((void *)8));
	struct shmid_ds d;
	R(shmctl(id, IPC_STAT, &d));
	printf("%lu %lu %o\n", (long)d.shm_nattch, (long)d.shm_segsz, d.shm_perm.mode);
	R(mprotect(r, PAGE, 3));
	R(munmap(a, PAGE));
	R(shmctl(id, IPC_STAT, &d));
	printf("%lu\n", (long)d.shm_nattch);
	R(shmctl(id, IPC_RMID, 0));
	R(shmctl(id, IPC_STAT, &d));
	printf("%o\n", d.shm_perm.mode);
	R(shmdt(r));
	R(shmdt(a));
	R(shmdt(a + PAGE));
	R(shmdt(w));
	R(shmctl(id, IPC_STAT, &d));
	R(shmctl(id, 99, &d));
	R(shmget(IPC_PRIVATE, 0, 0600));
	R(shmget(0x1234567, 10, 0600));
	id = shmget(0x1234567, 10, 0600 | IPC_CREAT);
	IS(id>=0);
	R(shmget(0x1234567, 10, 0600 | IPC_CREAT | IPC_EXCL));
	R(shmget(0x1234567, 5000, 0600));
	R(shmctl(id, IPC_RMID, 0));
	R(shmget(IPC_PRIVATE, ~0ul, 0600));
}

static void others(void)
{
	puts("# munmap");
	char *p = map(4*PAGE, 3);
	R(munmap(p, 0));
	R(munmap(p + 1, PAGE));
	R(munmap(p, ~0ul));
	R(munmap(p, (1ul << 47)));
	R(munmap((void *)0x800000000000, PAGE));
	R(munmap(p + PAGE, 1));
	list("hole", p, 4);
	R(munmap(p, 100 * PAGE));
	puts("# memfd");
	int m = memfd_create("x", MFD_ALLOW_SEALING);
	R(ftruncate(m, 2 * PAGE));
	char *q = mmap(NULL, PAGE, 3, MAP_SHARED, m, 0);
	R(fcntl(m, 1033, 8));
	R(fcntl(m, 1033, 16));
	R(MM(NULL, PAGE, 3, MAP_SHARED, m, 0));
	R(MM(NULL, PAGE, 1, MAP_SHARED, m, 0));
	R(write(m, "x", 1));
	q[0] = 9;
	munmap(q, PAGE);
	R(fcntl(m, 1033, 8));
	R(fcntl(m, 1034));
	R(fcntl(m, 1033, 4));
	R(ftruncate(m, 9 * PAGE));
	R(ftruncate(m, PAGE));
	R(fcntl(m, 1033, 1));
	R(fcntl(m, 1033, 2));
	R(fcntl(0, 1034));
	R(memfd_create("x", 0x40));
	char big[300];
	memset(big, 'a', 299);
	big[299] = 0;
	R(memfd_create(big, 0));
	big[249] = 0;
	OK(memfd_create(big, 0));
	big[249]='a';
	big[250] = 0;
	OK(memfd_create(big, 0));
	puts("# prctl");
	R(prctl(41, 1, 0, 0, 0));
	R(prctl(42, 0, 0, 0, 0));
	R(prctl(41, 0, 0, 0, 0));
	R(prctl(42, 1, 0, 0, 0));
	R(prctl(42, 0, 0, 0, 0));
	R(prctl(0x53564d41, 0, (long)map(PAGE, 3), PAGE, "name"));
	R(prctl(9999, 0, 0, 0, 0));
}

int main(void)
{
	see_faults();
	stacks();
	files();
	protections();
	remaps();
	locks();
	advices();
	heaps();
	segments();
	others();
	return 0;
}
