/* brk: the heap's end goes up and down. */
#include "check.h"

static char *move(char *to)
{
	return (char *)syscall(SYS_brk, to);
}

int main(void)
{
	see_faults();
	/* The C library has its own idea of the heap: nothing here allocates from now on. */
	setvbuf(stdout, NULL, _IONBF, 0);
	char *start = move(NULL);
	IS(move(NULL) == start);
	char *base = (char *)(((uintptr_t)start + PAGE - 1) & -PAGE);
	IS(move(base + 4 * PAGE) == base + 4 * PAGE);
	LOAD(base);
	STORE(base + 3 * PAGE, 5);
	LOAD(base + 3 * PAGE);
	LOAD(base + 4 * PAGE);
	IS(move(base + PAGE + 100) == base + PAGE + 100);
	STORE(base + 2 * PAGE - 1, 1);
	LOAD(base + 2 * PAGE);
	IS(move(base + 8 * PAGE) == base + 8 * PAGE);
	LOAD(base + 3 * PAGE);
	LOAD(base + 2 * PAGE - 1);
	list("heap", base, 16);
	IS(move((char *)1) == base + 8 * PAGE);
	IS(move((char *)-1) == base + 8 * PAGE);
	IS(move(base + (1ul << 46)) == base + 8 * PAGE);
	/* Something in the way. */
	map_at(base + 64 * PAGE, 1, PROT_READ);
	IS(move(base + 128 * PAGE) == base + 8 * PAGE);
	R(munmap(base + 64 * PAGE, PAGE));
	IS(move(base + 128 * PAGE) == base + 128 * PAGE);
	STORE(base + 127 * PAGE, 3);
	R(mprotect(base + 64 * PAGE, PAGE, PROT_READ));
	IS(move(base) == base);
	list("gone", base, 128);
	for (int i = 0; i < 100; i++) {
		if (move(base + 32 * PAGE) != base + 32 * PAGE)
			wrong("the heap does not grow");
		if (base[31 * PAGE])
			wrong("the heap is not fresh");
		touch(base, 32 * PAGE, i);
		expect(base, 32 * PAGE, i);
		move(base);
	}
	IN_CHILD("child", IS(move(NULL) == base); IS(move(base + PAGE) == base + PAGE); STORE(base, 1));
	IS(move(NULL) == base);
	struct rlimit limit = { 16 * MIB, RLIM_INFINITY };
	R(setrlimit(RLIMIT_DATA, &limit));
	IS(move(base + 64 * MIB) == base);
	return 0;
}
