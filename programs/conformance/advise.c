/* madvise: each advice does what it says or is refused. */
#include "check.h"

#define RW (PROT_READ | PROT_WRITE)
#define M(name, number) static const int name = number;
M(FREE, 8) M(REMOVE, 9) M(DONTFORK, 10) M(DOFORK, 11) M(WIPEONFORK, 18) M(KEEPONFORK, 19) M(COLD, 20) M(PAGEOUT, 21)
M(POPULATE_READ, 22) M(POPULATE_WRITE, 23)

static int present(char *at, int pages)
{
	unsigned char there[64];
	int count = 0;
	if (mincore(at, pages * PAGE, there))
		failed("mincore");
	for (int i = 0; i < pages; i++)
		count += there[i] & 1;
	return count;
}

int main(void)
{
	see_faults();
	char *w = window(64);
	map_at(w, 16, RW);

	puts("# Arguments");
	R(madvise(w + 1, PAGE, MADV_DONTNEED));
	R(madvise(w, 0, MADV_DONTNEED));
	R(madvise(w, -1, MADV_DONTNEED));
	R(madvise(w, PAGE, 12345));
	R(madvise(w, 100, MADV_NORMAL));
	R(madvise(w + 32 * PAGE, PAGE, MADV_NORMAL));
	R(madvise(w, 32 * PAGE, MADV_DONTNEED));
	R(madvise(w, 16 * PAGE, MADV_RANDOM));
	R(madvise(w, 16 * PAGE, MADV_SEQUENTIAL));
	R(madvise(w, 16 * PAGE, MADV_WILLNEED));
	R(madvise(w, 16 * PAGE, MADV_NORMAL));

	puts("# Forgetting");
	touch(w, 16 * PAGE, 3);
	IS(present(w, 16) == 16);
	R(madvise(w, 4 * PAGE, MADV_DONTNEED));
	IS(present(w, 16) == 12);
	LOAD(w);
	LOAD(w + 4 * PAGE);
	R(madvise(w + 4 * PAGE, 4 * PAGE, FREE));
	STORE(w + 4 * PAGE, 4);
	LOAD(w + 4 * PAGE);
	touch(w + 8 * PAGE, 4 * PAGE, 5);
	R(munmap(w + 10 * PAGE, PAGE));
	R(madvise(w + 8 * PAGE, 4 * PAGE, MADV_DONTNEED));
	LOAD(w + 8 * PAGE);
	LOAD(w + 11 * PAGE);
	R(madvise(w + 12 * PAGE, 4 * PAGE, COLD));
	LOAD(w + 12 * PAGE);

	puts("# Filling");
	char *fresh = map(32 * PAGE, RW);
	R(madvise(fresh, 8 * PAGE, POPULATE_READ));
	IS(present(fresh, 32) == 8);
	R(madvise(fresh + 8 * PAGE, 8 * PAGE, POPULATE_WRITE));
	IS(present(fresh, 32) == 16);
	LOAD(fresh + 8 * PAGE);
	char *reading = map(4 * PAGE, PROT_READ);
	R(madvise(reading, 4 * PAGE, POPULATE_WRITE));
	R(madvise(reading, 4 * PAGE, POPULATE_READ));
	R(mprotect(reading, 4 * PAGE, PROT_NONE));
	R(madvise(reading, 4 * PAGE, POPULATE_READ));
	R(madvise(w + 8 * PAGE, 4 * PAGE, POPULATE_READ));
	int fd = file_of(4);
	char *file = mmap(NULL, 8 * PAGE, RW, MAP_SHARED, fd, 0);
	R(madvise(file, 4 * PAGE, POPULATE_READ));
	R(madvise(file, 4 * PAGE, POPULATE_WRITE));
	R(madvise(file, 8 * PAGE, POPULATE_READ));
	LOAD(file + 3 * PAGE);

	puts("# Files");
	STORE(file, 77);
	R(madvise(file, 4 * PAGE, MADV_DONTNEED));
	LOAD(file);
	char *private = mmap(NULL, 4 * PAGE, RW, MAP_PRIVATE, fd, 0);
	STORE(private + PAGE, 78);
	R(madvise(private, 4 * PAGE, MADV_DONTNEED));
	LOAD(private + PAGE);
	R(madvise(private, 4 * PAGE, FREE));
	R(madvise(private, 4 * PAGE, REMOVE));

	puts("# Forks");
	char *gone = map(2 * PAGE, RW), *wiped = map(2 * PAGE, RW), *kept = map(2 * PAGE, RW);
	*gone = *wiped = *kept = 1;
	R(madvise(gone, 2 * PAGE, DONTFORK));
	R(madvise(wiped, 2 * PAGE, WIPEONFORK));
	R(madvise(kept, 2 * PAGE, DONTFORK));
	R(madvise(kept, 2 * PAGE, DOFORK));
	R(madvise(file, 4 * PAGE, WIPEONFORK));
	IN_CHILD("child", see_faults(); LOAD(gone); LOAD(wiped); LOAD(kept));
	LOAD(gone);
	LOAD(wiped);
	R(madvise(wiped, 2 * PAGE, KEEPONFORK));
	IN_CHILD("child", LOAD(wiped));

	puts("# Locked");
	R(mlock(w, 2 * PAGE));
	R(madvise(w, 2 * PAGE, MADV_DONTNEED));
	R(madvise(w, 2 * PAGE, FREE));
	R(madvise(w, 2 * PAGE, COLD));
	R(madvise(w, 2 * PAGE, PAGEOUT));
	R(munlock(w, 2 * PAGE));
	R(madvise(w, 2 * PAGE, MADV_DONTNEED));
	R(madvise(w + 2 * PAGE, 2 * PAGE, PAGEOUT));
	LOAD(w + 2 * PAGE);
	return 0;
}
