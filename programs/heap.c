/*
 * Source E's load: many tasks, forked from one parent whose memory is touched, that grow and shrink their heaps. A job grows
 * the heap by 64 KiB, touches it and gives it back, eight times.
 */
#include "terrane.h"
#include <sys/wait.h>

static double tasks = 100, seconds = 1;

struct shared {
	atomic_int go, stop;
	atomic_uint_fast64_t jobs;
};

static void task(struct shared *shared, char *data, size_t length)
{
	struct timespec moment = { 0, 1000000 };
	uint64_t jobs = 0;
	while (!atomic_load(&shared->go))
		nanosleep(&moment, NULL);
	expect(data, length, 9);
	char *own = move_heap(PAGE);
	*own = 1;
	while (!atomic_load(&shared->stop)) {
		for (int move = 0; move < 8; move++) {
			char *grown = move_heap(16 * PAGE);
			for (size_t page = 0; page < 16 * PAGE; page += PAGE)
				if (grown[page])
					wrong("a fresh page of the heap holds %d", grown[page]);
			touch(grown, 16 * PAGE, move + 1);
			expect(grown, 16 * PAGE, move + 1);
			move_heap(-(intptr_t)(16 * PAGE));
		}
		jobs++;
	}
	if (*own != 1)
		wrong("a task's own page holds %d", *own);
	atomic_fetch_add(&shared->jobs, jobs);
	_exit(0);
}

int main(int argc, char **argv)
{
	options(argc, argv, "forked tasks that grow and shrink their heaps (source E)", (struct option_of[]){
		{ 't', "tasks", &tasks, 1, 4000 },
		{ 's', "seconds", &seconds, 0.01, 3600 },
		{ 0 } });
	int count = tasks;
	struct shared *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		failed("mmap");
	size_t length = 256 * KIB;
	char *data = map(length, PROT_READ | PROT_WRITE);
	touch(data, length, 9);
	char *heap = move_heap(32 * PAGE);
	touch(heap, 32 * PAGE, 9);
	double began = now();
	for (int i = 0; i < count; i++) {
		pid_t child = fork();
		if (child < 0)
			failed("fork");
		if (child == 0)
			task(shared, data, length);
	}
	figure("fork", (now() - began) / count * 1e6, "us");
	began = now();
	atomic_store(&shared->go, 1);
	run_for(seconds);
	atomic_store(&shared->stop, 1);
	double took = now() - began;
	for (int i = 0; i < count; i++) {
		int status;
		if (wait(&status) < 0 || status)
			wrong("a task ended with status %#x", status);
	}
	figure("jobs", atomic_load(&shared->jobs) / took * 60, "jobs/min");
	printf("%d tasks: heaps were fresh when they grew, and kept what was stored\n", count);
	return 0;
}
