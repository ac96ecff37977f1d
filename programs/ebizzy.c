/*
 * Source B's search load, as ebizzy -m: every thread maps a chunk, copies records into it, looks for one of them, and
 * unmaps it. With -T it only touches the chunk, as the source measured.
 */
#include "terrane.h"

#define CHUNKS 10

static double threads = 16, seconds = 1, touch_only = 0, kib = 256;
static size_t length, records;
static uint64_t *chunks[CHUNKS];

struct worker {
	pthread_t thread;
	int number;
	uint64_t done;
};

static uint64_t *search(uint64_t *from, uint64_t key)
{
	size_t low = 0, high = records;
	while (low < high) {
		size_t middle = low + (high - low) / 2;
		if (from[middle] == key)
			return &from[middle];
		if (from[middle] < key)
			low = middle + 1;
		else
			high = middle;
	}
	return NULL;
}

static void *work(void *with)
{
	struct worker *self = with;
	uint64_t random = self->number + 1;
	while (!atomic_load(&over)) {
		unsigned chosen = next_random(&random) % CHUNKS;
		uint64_t *own = (uint64_t *)map(length, PROT_READ | PROT_WRITE);
		if (touch_only) {
			touch((char *)own, length, chosen + 1);
			expect((char *)own, length, chosen + 1);
		} else {
			memcpy(own, chunks[chosen], length);
			uint64_t key = next_random(&random) % records;
			uint64_t *found = search(own, key * CHUNKS + chosen);
			if (!found || found != own + key)
				wrong("record %ju is not where it was copied to", (uintmax_t)key);
		}
		unmap(own, length);
		self->done++;
	}
	return NULL;
}

int main(int argc, char **argv)
{
	options(argc, argv, "a search load: many threads map, copy, search and unmap (source B, ebizzy)", (struct option_of[]){
		{ 't', "threads", &threads, 1, 1024 },
		{ 's', "seconds", &seconds, 0.01, 3600 },
		{ 'k', "KiB of a chunk", &kib, 4, 65536 },
		{ 'T', "touch the chunk instead of copying and searching", &touch_only, 0, 0 },
		{ 0 } });
	length = ((size_t)kib * KIB + PAGE - 1) / PAGE * PAGE;
	records = length / sizeof(uint64_t);
	for (unsigned chunk = 0; chunk < CHUNKS; chunk++) {
		chunks[chunk] = (uint64_t *)map(length, PROT_READ | PROT_WRITE);
		for (size_t record = 0; record < records; record++)
			chunks[chunk][record] = record * CHUNKS + chunk;
	}
	int count = threads;
	struct worker *workers = calloc(count, sizeof *workers);
	if (!workers)
		failed("calloc");
	double began = now();
	for (int i = 0; i < count; i++) {
		workers[i].number = i;
		workers[i].thread = start(work, &workers[i]);
	}
	run_for(seconds);
	uint64_t done = 0;
	for (int i = 0; i < count; i++) {
		join(workers[i].thread);
		done += workers[i].done;
	}
	figure("records", done / (now() - began), "records/s");
	printf("%d threads: every record was found\n", count);
	return 0;
}
