/*
 * Source B's start-up of applications with many threads: from the first pthread_create until all threads run, each having
 * touched its stack and memory of its own.
 */
#include "terrane.h"

static double threads = 100, rounds = 5;
static atomic_int up;
static pthread_barrier_t barrier;

static void *work(void *with)
{
	volatile char stack[16 * PAGE];
	size_t own = 32 * PAGE;
	char byte = (char)(uintptr_t)with;
	for (size_t at = 0; at < sizeof stack; at += PAGE)
		stack[at] = byte;
	char *memory = map(own, PROT_READ | PROT_WRITE);
	touch(memory, own, byte);
	atomic_fetch_add(&up, 1);
	pthread_barrier_wait(&barrier);
	expect(memory, own, byte);
	for (size_t at = 0; at < sizeof stack; at += PAGE)
		if (stack[at] != byte)
			wrong("a stack holds %d, not %d", stack[at], byte);
	unmap(memory, own);
	return NULL;
}

int main(int argc, char **argv)
{
	options(argc, argv, "time until many threads are up (source B)", (struct option_of[]){
		{ 't', "threads", &threads, 1, 1000 },
		{ 'n', "rounds", &rounds, 1, 1000 },
		{ 0 } });
	int count = threads;
	pthread_t *all = calloc(count, sizeof *all);
	if (!all)
		failed("calloc");
	double best = 1e9, sum = 0;
	for (int round = 0; round < rounds; round++) {
		atomic_store(&up, 0);
		pthread_barrier_init(&barrier, NULL, count + 1);
		double began = now();
		for (int i = 0; i < count; i++)
			all[i] = start(work, (void *)(uintptr_t)(i % 100 + 1));
		pthread_barrier_wait(&barrier);
		double took = now() - began;
		if (atomic_load(&up) != count)
			wrong("%d threads are up, not %d", atomic_load(&up), count);
		for (int i = 0; i < count; i++)
			join(all[i]);
		pthread_barrier_destroy(&barrier);
		sum += took;
		best = took < best ? took : best;
	}
	figure("startup", sum / rounds * 1e3, "ms");
	figure("startup-best", best * 1e3, "ms");
	printf("%d threads came up, with stacks and memory of their own\n", count);
	return 0;
}
