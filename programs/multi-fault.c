/*
 * Source A's experiment: every thread touches 2 MiB of its own area page by page, meets the others at a barrier, gives the
 * pages back, and begins again.
 */
#include "terrane.h"

#define AREA (8 * MIB)
#define TOUCHED (2 * MIB)

static double threads = 2, seconds = 1, together = 0, churner = 0;
static pthread_barrier_t barrier;
static bool last;
static char *shared_area;

struct worker {
	pthread_t thread;
	int number;
	char *area;
	uint64_t faults;
	double in_faults;
};

static void *work(void *with)
{
	struct worker *self = with;
	pin(self->number);
	for (unsigned round = 1;; round++) {
		char byte = round % 100 + self->number % 20 + 1;
		pthread_barrier_wait(&barrier);
		if (last)
			return NULL;
		double start = now();
		touch(self->area, TOUCHED, byte);
		self->in_faults += now() - start;
		self->faults += TOUCHED / PAGE;
		if (round % 8 == 1)
			expect(self->area, TOUCHED, byte);
		pthread_barrier_wait(&barrier);
		if (madvise(self->area, TOUCHED, MADV_DONTNEED))
			failed("madvise");
		if (round % 8 == 1 && self->area[(round * PAGE) % TOUCHED] != 0)
			wrong("a page that was given back is not zero");
		if (self->number == 0)
			last = atomic_load(&over);
	}
}

static void *churn(void *with)
{
	uint64_t *pairs = with;
	while (!atomic_load(&over)) {
		char *page = map(PAGE, PROT_READ | PROT_WRITE);
		*page = 1;
		unmap(page, PAGE);
		++*pairs;
	}
	return NULL;
}

int main(int argc, char **argv)
{
	options(argc, argv, "page faults of many threads (source A)", (struct option_of[]){
		{ 't', "threads", &threads, 1, 256 },
		{ 's', "seconds", &seconds, 0.01, 3600 },
		{ 'o', "the threads' areas lie in one mapping", &together, 0, 0 },
		{ 'm', "another thread maps, stores to and unmaps a page all the while", &churner, 0, 0 },
		{ 0 } });
	int count = threads;
	struct worker *workers = calloc(count, sizeof *workers);
	if (!workers)
		failed("calloc");
	pthread_barrier_init(&barrier, NULL, count);
	if (together)
		shared_area = map(AREA * count, PROT_READ | PROT_WRITE);
	for (int i = 0; i < count; i++) {
		workers[i].number = i;
		workers[i].area = together ? shared_area + AREA * i : map(AREA, PROT_READ | PROT_WRITE);
		if (madvise(workers[i].area, AREA, MADV_NOHUGEPAGE) && errno != EINVAL)
			failed("madvise");
		/* A hole, so that areas stay apart. */
		if (!together)
			map(PAGE, PROT_NONE);
	}
	uint64_t pairs = 0;
	pthread_t churning = 0;
	double began = now();
	for (int i = 0; i < count; i++)
		workers[i].thread = start(work, &workers[i]);
	if (churner)
		churning = start(churn, &pairs);
	run_for(seconds);
	uint64_t faults = 0;
	double in_faults = 0;
	for (int i = 0; i < count; i++) {
		join(workers[i].thread);
		faults += workers[i].faults;
		in_faults += workers[i].in_faults;
	}
	if (churner)
		join(churning);
	double took = now() - began;
	figure("faults", faults / took, "faults/s");
	figure("fault", in_faults / faults * 1e9, "ns");
	if (churner)
		figure("pairs", pairs / took, "pairs/s");
	printf("%d threads: every page held what was stored, and zero after it was given back\n", count);
	return 0;
}
