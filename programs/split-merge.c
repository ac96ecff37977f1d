/*
 * The reply in source C: a page in the middle of many mappings changes its protection to and fro, which splits a mapping and
 * merges it again; and is unmapped and mapped again at the same place.
 */
#include "terrane.h"

static double threads = 1, others = 1000, seconds = 0.5;
static pthread_barrier_t barrier;

struct worker {
	pthread_t thread;
	int number;
	uint64_t protects, remaps;
	double protecting, remapping;
};

static void *work(void *with)
{
	struct worker *self = with;
	char *area = map(64 * PAGE, PROT_READ | PROT_WRITE), *middle = area + 32 * PAGE;
	pin(self->number);
	touch(area, 64 * PAGE, 5);
	pthread_barrier_wait(&barrier);
	double began = now();
	do {
		for (int i = 0; i < 16; i++) {
			if (mprotect(middle, PAGE, PROT_NONE) || mprotect(middle, PAGE, PROT_READ | PROT_WRITE))
				failed("mprotect");
			self->protects += 2;
		}
	} while ((self->protecting = now() - began) < seconds);
	expect(area, 64 * PAGE, 5);
	began = now();
	do {
		for (int i = 0; i < 16; i++) {
			unmap(middle, PAGE);
			if (mmap(middle, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != middle)
				failed("mmap");
			self->remaps++;
		}
	} while ((self->remapping = now() - began) < seconds);
	if (*middle != 0)
		wrong("a page that was mapped again holds %d", *middle);
	*middle = 5;
	expect(area, 64 * PAGE, 5);
	return NULL;
}

int main(int argc, char **argv)
{
	options(argc, argv, "split and merge a mapping among many (source C)", (struct option_of[]){
		{ 't', "threads, each in an area of its own", &threads, 1, 256 },
		{ 'n', "other mappings", &others, 0, 60000 },
		{ 's', "seconds for each of two parts", &seconds, 0.01, 3600 },
		{ 0 } });
	for (int i = 0; i < others; i++)
		map(PAGE, i % 2 ? PROT_READ : PROT_READ | PROT_WRITE);
	int count = threads;
	struct worker *workers = calloc(count, sizeof *workers);
	if (!workers)
		failed("calloc");
	pthread_barrier_init(&barrier, NULL, count);
	for (int i = 0; i < count; i++) {
		workers[i].number = i;
		workers[i].thread = start(work, &workers[i]);
	}
	double protect = 0, remap = 0;
	for (int i = 0; i < count; i++) {
		join(workers[i].thread);
		protect += workers[i].protecting / workers[i].protects / count;
		remap += workers[i].remapping / workers[i].remaps / count;
	}
	figure("protect", protect * 1e6, "us");
	figure("unmap-map", remap * 1e6, "us");
	printf("%d threads: all pages kept their bytes\n", count);
	return 0;
}
