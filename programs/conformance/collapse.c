/*
 * Small pages become huge ones while a program uses them: it notices nothing.
 */
#include "check.h"

int main(int argc, char **argv)
{
	options(argc, argv, "pages that a collapser may join keep every byte", (struct option_of[]){ { 0 } });
	size_t length = 8 * MIB;
	char *at = map(length, PROT_READ | PROT_WRITE);
	madvise(at, length, MADV_NOHUGEPAGE);
	touch(at, length, 7);
	madvise(at, length, MADV_HUGEPAGE);
	for (int round = 0; round < 50; round++) {
		usleep(10 * 1000);
		expect(at, length, 7 + round);
		touch(at, length, 8 + round);
	}
	puts("every byte was kept");
	return 0;
}
