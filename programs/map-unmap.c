/*
 * One thread maps a page and unmaps it, over and over: alone, and beside threads that fault. Neither has anything to do with
 * the other's memory.
 */
#include "terrane.h"

#define TOUCHED (2 * MIB)

static double threads = 1, seconds = 0.5, store = 0;

struct worker {
	pthread_t thread;
	int number;
	uint64_t faults;
	double took;
};

static void *work(void *with)
{
	struct worker *self = with;
	char *area = map(TOUCHED, PROT_READ | PROT_WRITE);
	madvise(area, TOUCHED, MADV_NOHUGEPAGE);
	pin(self->number);
	while (!atomic_load(&over)) {
		char byte = self->faults / (TOUCHED / PAGE) % 100 + 1;
		double began = now();
		touch(area, TOUCHED, byte);
		self->took += now() - began;
		self->faults += TOUCHED / PAGE;
		expect(area, TOUCHED, byte);
		if (madvise(area, TOUCHED, MADV_DONTNEED))
			failed("madvise");
	}
	unmap(area, TOUCHED);
	return NULL;
}

struct mapper {
	uint64_t pairs;
	double took, worst;
};

static void *map_and_unmap(void *with)
{
	struct mapper *self = with;
	pin(0);
	double began = now(), last = began;
	while (!atomic_load(&over)) {
		char *page = map(PAGE, PROT_READ | PROT_WRITE);
		if (store) {
			if (*page)
				wrong("a fresh page holds %d", *page);
			*page = 1;
		}
		unmap(page, PAGE);
		double time = now();
		if (time - last > self->worst)
			self->worst = time - last;
		last = time;
		self->pairs++;
	}
	self->took = now() - began;
	return NULL;
}

/* Both sorts of work side by side, and their figures. */
static void measure(bool maps, int faulting, const char *how)
{
	struct mapper mapper = { 0 };
	struct worker *workers = calloc(faulting + 1, sizeof *workers);
	char name[64];
	pthread_t mapping = 0;
	if (!workers)
		failed("calloc");
	atomic_store(&over, false);
	if (maps)
		mapping = start(map_and_unmap, &mapper);
	for (int i = 0; i < faulting; i++) {
		workers[i].number = i + 1;
		workers[i].thread = start(work, &workers[i]);
	}
	run_for(seconds);
	uint64_t faults = 0;
	double took = 0;
	for (int i = 0; i < faulting; i++) {
		join(workers[i].thread);
		faults += workers[i].faults;
		took += workers[i].took;
	}
	if (maps) {
		join(mapping);
		snprintf(name, sizeof name, "pair-%s", how);
		figure(name, mapper.took / (mapper.pairs ? mapper.pairs : 1) * 1e6, "us");
		snprintf(name, sizeof name, "pair-%s-worst", how);
		figure(name, mapper.worst * 1e6, "us");
	}
	if (faulting) {
		snprintf(name, sizeof name, "fault-%s", how);
		figure(name, took / faults * 1e9, "ns");
	}
	free(workers);
}

int main(int argc, char **argv)
{
	options(argc, argv, "a thread that maps and unmaps a page, beside threads that fault", (struct option_of[]){
		{ 't', "faulting threads", &threads, 1, 256 },
		{ 's', "seconds for each of three parts", &seconds, 0.01, 3600 },
		{ 'w', "store to the page between", &store, 0, 0 },
		{ 0 } });
	measure(true, 0, "alone");
	measure(false, threads, "alone");
	measure(true, threads, "beside");
	printf("%d faulting threads: every page held what was stored\n", (int)threads);
	return 0;
}
