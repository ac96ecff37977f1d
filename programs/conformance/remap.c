/* mremap: growing, shrinking, moving. */
#include "check.h"

#define RW (PROT_READ | PROT_WRITE)
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

static void fill(char *at, int pages)
{
	for (int i = 0; i < pages; i++)
		at[i * PAGE] = i + 1;
}

static void holds(const char *what, const char *at, int pages)
{
	int good = 0;
	for (int i = 0; i < pages; i++)
		good += at[i * PAGE] == i + 1;
	printf("%s: %d of %d pages are right\n", what, good, pages);
}

int main(void)
{
	see_faults();
	char *w = window(64);
	map_at(w, 8, RW);
	fill(w, 8);

	puts("# Arguments");
	R(mremap(w + 1, PAGE, 2 * PAGE, 0));
	R(mremap(w, PAGE, 0, 0));
	R(mremap(w, PAGE, 2 * PAGE, 64));
	R(mremap(w, PAGE, PAGE, MREMAP_FIXED, w + 32 * PAGE));
	R(mremap(w, PAGE, PAGE, MREMAP_FIXED | MREMAP_MAYMOVE, w + 32 * PAGE + 1));
	R(mremap(w, 2 * PAGE, 2 * PAGE, MREMAP_FIXED | MREMAP_MAYMOVE, w + PAGE));
	R(mremap(w + 32 * PAGE, PAGE, 2 * PAGE, MREMAP_MAYMOVE));
	R(mremap(w, 0, PAGE, MREMAP_MAYMOVE));
	R(mremap(w, 16 * PAGE, 32 * PAGE, MREMAP_MAYMOVE));
	R(mremap(w, PAGE, 2 * PAGE, 0));
	list("before", w, 64);

	puts("# In place");
	IS(mremap(w, 8 * PAGE, 16 * PAGE, 0) == w);
	holds("grown", w, 8);
	LOAD(w + 15 * PAGE);
	IS(mremap(w, 16 * PAGE, 4 * PAGE, 0) == w);
	list("shrunk", w, 64);
	LOAD(w + 4 * PAGE);
	IS(mremap(w, 4 * PAGE, 4 * PAGE, 0) == w);
	map_at(w + 6 * PAGE, 1, PROT_READ);
	R(mremap(w, 4 * PAGE, 8 * PAGE, 0));

	puts("# Moving");
	char *moved = mremap(w, 4 * PAGE, 8 * PAGE, MREMAP_MAYMOVE);
	IS(moved != MAP_FAILED && moved != w);
	holds("moved", moved, 4);
	LOAD(w);
	LOAD(moved + 7 * PAGE);
	IS(mremap(moved, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, w + 32 * PAGE) == w + 32 * PAGE);
	holds("fixed", w + 32 * PAGE, 4);
	list("there", w, 64);
	map_at(w + 48 * PAGE, 8, PROT_READ);
	IS(mremap(w + 32 * PAGE, 4 * PAGE, 6 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, w + 50 * PAGE) == w + 50 * PAGE);
	holds("over another", w + 50 * PAGE, 4);
	list("over another", w, 64);

	puts("# What stays");
	char *stays = map(4 * PAGE, RW);
	fill(stays, 4);
	char *copy = mremap(stays, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
	IS(copy != MAP_FAILED && copy != stays);
	holds("taken", copy, 4);
	LOAD(stays);
	R(mremap(stays, 4 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL));

	puts("# Shared");
	int fd = file_of(4);
	char *shared = mmap(NULL, 4 * PAGE, RW, MAP_SHARED, fd, 0);
	char *again = mremap(shared, 0, 4 * PAGE, MREMAP_MAYMOVE);
	IS(again != MAP_FAILED && again != shared);
	STORE(again, 42);
	LOAD(shared);
	char *part = mremap(shared + PAGE, 2 * PAGE, 2 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, w);
	IS(part == w);
	LOAD(part);
	LOAD(part + PAGE);
	LOAD(shared + PAGE);

	puts("# Across a fork");
	char *own = map(4 * PAGE, RW);
	fill(own, 4);
	IN_CHILD("child", {
		char *there = mremap(own, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, w + 8 * PAGE);
		there[0] = 9;
		LOAD(there);
		LOAD(there + PAGE);
	});
	holds("parent", own, 4);
	return 0;
}
