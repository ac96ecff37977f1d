/*
 * Many threads change one address space, and each checks every byte of what is its own; processes fork from it and check that
 * nothing of theirs changes.
 */
#include "check.h"

#define PAGES 64

static double threads = 16, seconds = 5, seed = 1;

struct worker {
	pthread_t thread;
	uint64_t random;
	uint64_t operations;
	char *area;
	/* What each page holds; -1: not there; and whether it may be written. */
	int16_t holds[PAGES];
	bool writable[PAGES];
};

static void check(struct worker *self, int page)
{
	if (self->holds[page] >= 0 && self->area[page * PAGE + 7] != (char)self->holds[page])
		wrong("page %d holds %d, not %d", page, self->area[page * PAGE + 7], self->holds[page]);
}

static void step(struct worker *self)
{
	uint64_t random = next_random(&self->random);
	int first = random % PAGES, count = 1 + (random >> 8) % (PAGES - first), way = (random >> 16) % 100;
	char byte = random >> 24, *at = self->area + first * PAGE;
	self->operations++;
	if (way < 55) {
		for (int i = first; i < first + count; i++) {
			if (self->holds[i] >= 0 && self->writable[i]) {
				self->area[i * PAGE + 7] = byte;
				self->holds[i] = (unsigned char)byte;
			}
			check(self, i);
		}
	} else if (way < 63) {
		unmap(at, count * PAGE);
		for (int i = first; i < first + count; i++)
			self->holds[i] = -1;
	} else if (way < 75) {
		if (mmap(at, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at)
			failed("mmap");
		for (int i = first; i < first + count; i++) {
			self->holds[i] = 0;
			self->writable[i] = true;
		}
	} else if (way < 83) {
		/* Up to a hole, it changes what it finds; so only where there is none. */
		for (int i = first; i < first + count; i++)
			if (self->holds[i] < 0)
				return;
		bool write = random >> 40 & 1;
		if (mprotect(at, count * PAGE, write ? PROT_READ | PROT_WRITE : PROT_READ))
			failed("mprotect");
		for (int i = first; i < first + count; i++)
			self->writable[i] = write;
	} else if (way < 91) {
		int result = madvise(at, count * PAGE, MADV_DONTNEED);
		if (result && errno != ENOMEM)
			failed("madvise");
		for (int i = first; i < first + count; i++)
			if (self->holds[i] >= 0)
				self->holds[i] = 0;
	} else if (way < 95) {
		char *moved = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (moved == MAP_FAILED)
			failed("mmap");
		touch(moved, 4 * PAGE, byte);
		moved = mremap(moved, 4 * PAGE, 8 * PAGE, MREMAP_MAYMOVE);
		if (moved == MAP_FAILED)
			failed("mremap");
		expect(moved, 4 * PAGE, byte);
		expect(moved + 4 * PAGE, 4 * PAGE, 0);
		unmap(moved, 8 * PAGE);
	} else if (way < 98) {
		madvise(at, count * PAGE, MADV_POPULATE_READ);
		for (int i = first; i < first + count; i++)
			check(self, i);
	} else if ((random >> 32) % 8 == 0) {
		pid_t child = fork();
		if (child < 0 && errno != EAGAIN && errno != ENOMEM)
			failed("fork");
		if (child == 0) {
			for (int i = 0; i < PAGES; i++) {
				check(self, i);
				if (self->holds[i] >= 0 && self->writable[i])
					self->area[i * PAGE + 7] = ~self->holds[i];
			}
			_exit(0);
		}
		int status;
		if (child > 0 && (waitpid(child, &status, 0) != child || status))
			wrong("a child ended with status %#x", status);
	}
}

static void *work(void *with)
{
	struct worker *self = with;
	while (!atomic_load(&over))
		step(self);
	for (int i = 0; i < PAGES; i++)
		check(self, i);
	return NULL;
}

int main(int argc, char **argv)
{
	options(argc, argv, "many threads change one address space and check every byte", (struct option_of[]){
		{ 't', "threads", &threads, 1, 256 },
		{ 's', "seconds", &seconds, 0.01, 36000 },
		{ 'r', "where random numbers begin", &seed, 0, 1e9 },
		{ 0 } });
	int count = threads;
	struct worker *workers = calloc(count, sizeof *workers);
	if (!workers)
		failed("calloc");
	for (int i = 0; i < count; i++) {
		workers[i].random = seed * 1000 + i;
		/* Far from where the kernel puts things by itself: nobody else comes into the holes. */
		workers[i].area = map_at((char *)0x100000000000 + i * 16 * MIB, PAGES, PROT_READ | PROT_WRITE);
		for (int page = 0; page < PAGES; page++)
			workers[i].writable[page] = true;
	}
	for (int i = 0; i < count; i++)
		workers[i].thread = start(work, &workers[i]);
	run_for(seconds);
	uint64_t operations = 0;
	for (int i = 0; i < count; i++) {
		join(workers[i].thread);
		operations += workers[i].operations;
	}
	figure("operations", operations / seconds, "operations/s");
	printf("%d threads: every byte was right\n", count);
	return 0;
}
