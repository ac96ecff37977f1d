/*
 * Memory runs out: of an address space by its limit, and, in a guest with little of it, of the machine. Whoever asks for too
 * much is told so or killed; everybody else keeps every byte.
 */
#include "check.h"

static double mib = 64;

static void too_much(void)
{
	/* In small pieces, so that no single call is refused for its size. */
	for (size_t taken = 0; taken < (size_t)mib * MIB; taken += 4 * MIB) {
		char *piece = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (piece == MAP_FAILED)
			_exit(3);
		touch(piece, 4 * MIB, 1);
		expect(piece, 4 * MIB, 1);
	}
	_exit(0);
}

int main(int argc, char **argv)
{
	options(argc, argv, "memory runs out, and nothing is lost", (struct option_of[]){
		{ 'm', "MiB that a child asks for: more than there is, to see the machine run out", &mib, 1, 65536 },
		{ 0 } });
	size_t length = 4 * MIB;
	char *kept = map(length, PROT_READ | PROT_WRITE);
	touch(kept, length, 42);
	for (int round = 0; round < 4; round++) {
		fflush(stdout);
		pid_t child = fork();
		if (child < 0)
			failed("fork");
		if (child == 0)
			too_much();
		int status;
		if (waitpid(child, &status, 0) != child)
			failed("waitpid");
		bool fair = WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGBUS || WTERMSIG(status) == SIGSEGV
						: WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 3;
		if (!fair)
			wrong("the child ended with status %#x", status);
		expect(kept, length, 42);
		touch(kept, length, 42);
	}
	IN_CHILD("by a limit", {
		struct rlimit limit = { 32 * MIB, 32 * MIB };
		setrlimit(RLIMIT_AS, &limit);
		too_much();
	});
	expect(kept, length, 42);
	puts("nothing was lost");
	return 0;
}
