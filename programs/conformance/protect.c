/* mprotect: splits, merges, faults and refusals. */
#include "check.h"

#define RW (PROT_READ | PROT_WRITE)

int main(void)
{
	see_faults();
	char *w = window(64);
	map_at(w, 16, RW);
	for (int i = 0; i < 16; i++)
		w[i * PAGE] = i + 1;

	puts("# Arguments");
	R(mprotect(w + 1, PAGE, PROT_READ));
	R(mprotect(w, 0, PROT_READ));
	R(mprotect(w, PAGE, 0x40));
	R(mprotect(w, -1, PROT_READ));
	R(mprotect(w + 16 * PAGE, PAGE, PROT_READ));
	R(mprotect(w, PAGE, RW | PROT_GROWSDOWN));
	R(mprotect(w, PAGE, RW | PROT_GROWSDOWN | PROT_GROWSUP));
	list("before", w, 64);

	puts("# Splits and merges");
	R(mprotect(w + 4 * PAGE, 4 * PAGE, PROT_READ));
	list("one part", w, 64);
	LOAD(w + 4 * PAGE);
	STORE(w + 4 * PAGE, 9);
	STORE(w + 3 * PAGE, 4);
	R(mprotect(w + 8 * PAGE, 4 * PAGE, PROT_READ));
	list("next to it", w, 64);
	R(mprotect(w + 6 * PAGE, 4 * PAGE, PROT_NONE));
	list("between", w, 64);
	LOAD(w + 6 * PAGE);
	STORE(w + 9 * PAGE, 9);
	LOAD(w + 10 * PAGE);
	R(mprotect(w, 16 * PAGE, RW));
	list("all again", w, 64);
	for (int i = 0; i < 16; i++)
		if (w[i * PAGE] != i + 1)
			wrong("page %d holds %d", i, w[i * PAGE]);
	R(mprotect(w + 2 * PAGE, 1, PROT_READ));
	list("a byte", w, 64);
	R(mprotect(w + 2 * PAGE, 1, RW));

	puts("# Holes");
	R(munmap(w + 8 * PAGE, PAGE));
	R(mprotect(w + 4 * PAGE, 8 * PAGE, PROT_READ));
	list("up to the hole", w, 64);
	R(mprotect(w + 8 * PAGE, 4 * PAGE, PROT_READ));
	list("from the hole", w, 64);

	puts("# Code");
	static const unsigned char code[] = { 0xb8, 42, 0, 0, 0, 0xc3 };
	char *program = map(PAGE, RW);
	memcpy(program, code, sizeof code);
	R(mprotect(program, PAGE, PROT_READ | PROT_EXEC));
	IS(((int (*)(void))program)() == 42);
	STORE(program, 1);
	R(mprotect(program, PAGE, RW));
	if (sigsetjmp(back, 1) == 0)
		printf("ran: %d\n", ((int (*)(void))program)());
	else
		printf("run: signal %d, %s, %s\n", seen.signal, code_name(seen.signal, seen.code), seen.at == program ? "there" : "ELSEWHERE");
	R(mprotect(program, PAGE, PROT_EXEC));
	IS(((int (*)(void))program)() == 42);

	puts("# After a fork");
	char *own = map(2 * PAGE, RW);
	own[0] = 1;
	IN_CHILD("child", see_faults(); R(mprotect(own, PAGE, PROT_READ)); STORE(own, 2); R(mprotect(own, PAGE, RW)); STORE(own, 3); LOAD(own));
	LOAD(own);
	STORE(own, 4);
	LOAD(own);

	puts("# Zero page");
	char *zero = map(4 * PAGE, PROT_READ);
	LOAD(zero);
	R(mprotect(zero, 4 * PAGE, RW));
	STORE(zero, 8);
	LOAD(zero);
	LOAD(zero + PAGE);
	return 0;
}
