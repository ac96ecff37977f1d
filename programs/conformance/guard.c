/* Guard pages by madvise, and mseal: younger calls, left out where the kernel has not got them. */
#include "check.h"

#define RW (PROT_READ | PROT_WRITE)
#define GUARD_INSTALL 102
#define GUARD_REMOVE 103
#define MSEAL 462

int main(void)
{
	see_faults();
	char *w = window(64);
	map_at(w, 16, RW);
	if ((madvise(w, PAGE, GUARD_INSTALL) && errno == EINVAL) || (syscall(MSEAL, w, 0, 0) && errno == ENOSYS))
		return LACKING;
	madvise(w, PAGE, GUARD_REMOVE);
	puts("# Guards");
	touch(w, 16 * PAGE, 1);
	R(madvise(w + 4 * PAGE, 4 * PAGE, GUARD_INSTALL));
	LOAD(w + 3 * PAGE);
	LOAD(w + 4 * PAGE);
	STORE(w + 7 * PAGE, 1);
	LOAD(w + 8 * PAGE);
	R(madvise(w + 4 * PAGE, PAGE, GUARD_REMOVE));
	LOAD(w + 4 * PAGE);
	IN_CHILD("child", see_faults(); LOAD(w + 5 * PAGE));
	R(madvise(w + 4 * PAGE, 4 * PAGE, MADV_POPULATE_READ));
	R(madvise(w + 4 * PAGE, 4 * PAGE, GUARD_REMOVE));
	LOAD(w + 5 * PAGE);
	puts("# Seals");
	char *sealed = map(8 * PAGE, RW);
	sealed[0] = 5;
	R(syscall(MSEAL, sealed + 1, PAGE, 0));
	R(syscall(MSEAL, sealed, PAGE, 1));
	R(syscall(MSEAL, sealed, 2 * PAGE, 0));
	R(munmap(sealed, PAGE));
	R(mprotect(sealed, PAGE, PROT_READ));
	R(mprotect(sealed + 2 * PAGE, PAGE, PROT_READ));
	R(mremap(sealed, PAGE, 2 * PAGE, MREMAP_MAYMOVE));
	R(mmap(sealed, PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
	R(munmap(sealed + 4 * PAGE, PAGE));
	STORE(sealed, 6);
	LOAD(sealed);
	return 0;
}
