/*
 * Source D's experiment: files whose pages are in memory are mapped, and then touched page by page, or populated by one call;
 * then the mapping forgets them. One thread, or one process, for each file.
 */
#include "terrane.h"
#include <fcntl.h>
#include <sys/wait.h>

static double files = 4, mib = 4, processes = 0, rounds = 4;
static const char *folder = "/tmp";
static pthread_barrier_t *barrier;
static double (*times)[3];
static size_t length;

static char *map_file(int number, int flags)
{
	char path[128];
	snprintf(path, sizeof path, "%s/terrane-populate-%d", folder, number);
	int fd = open(path, O_RDWR);
	if (fd < 0)
		failed("open");
	char *at = mmap(NULL, length, PROT_READ, MAP_SHARED | flags, fd, 0);
	if (at == MAP_FAILED)
		failed("mmap");
	close(fd);
	return at;
}

static void *work(void *with)
{
	int number = (int)(uintptr_t)with;
	char *at = map_file(number, 0);
	for (int way = 0; way < 3; way++) {
		for (int round = 0; round < rounds; round++) {
			pthread_barrier_wait(barrier);
			double began = now();
			if (way == 0)
				expect(at, length, number + 1);
			else if (way == 1 && madvise(at, length, MADV_POPULATE_READ))
				failed("madvise");
			else if (way == 2) {
				unmap(at, length);
				at = map_file(number, MAP_POPULATE);
			}
			times[number][way] += now() - began;
			expect(at, length, number + 1);
			if (madvise(at, length, MADV_DONTNEED))
				failed("madvise");
		}
	}
	unmap(at, length);
	return NULL;
}

int main(int argc, char **argv)
{
	options(argc, argv, "touch files page by page, or populate them (source D)", (struct option_of[]){
		{ 'f', "files, with a thread for each", &files, 1, 160 },
		{ 'm', "MiB of a file", &mib, 1, 64 },
		{ 'r', "rounds", &rounds, 1, 1000 },
		{ 'p', "processes instead of threads", &processes, 0, 0 },
		{ 0 } });
	int count = files;
	length = (size_t)mib * MIB;
	char *shared = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		failed("mmap");
	barrier = (pthread_barrier_t *)shared;
	times = (double(*)[3])(shared + PAGE);
	pthread_barrierattr_t attributes;
	pthread_barrierattr_init(&attributes);
	pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(barrier, &attributes, count);
	char *page = malloc(MIB), path[128];
	if (!page)
		failed("malloc");
	for (int i = 0; i < count; i++) {
		snprintf(path, sizeof path, "%s/terrane-populate-%d", folder, i);
		int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
		memset(page, i + 1, MIB);
		for (size_t at = 0; fd >= 0 && at < length; at += MIB)
			if (write(fd, page, MIB) != (ssize_t)MIB)
				failed("write");
		if (fd < 0 || close(fd))
			failed("open");
	}
	pthread_t threads[160];
	for (int i = 0; i < count; i++) {
		if (!processes) {
			threads[i] = start(work, (void *)(uintptr_t)i);
			continue;
		}
		pid_t child = fork();
		if (child < 0)
			failed("fork");
		if (child == 0) {
			work((void *)(uintptr_t)i);
			_exit(0);
		}
	}
	double sums[3] = { 0 };
	for (int i = 0; i < count; i++) {
		int status = 0;
		if (!processes)
			join(threads[i]);
		else if (wait(&status) < 0 || status)
			wrong("a process ended with status %#x", status);
	}
	for (int i = 0; i < count; i++) {
		for (int way = 0; way < 3; way++)
			sums[way] += times[i][way];
		snprintf(path, sizeof path, "%s/terrane-populate-%d", folder, i);
		unlink(path);
	}
	double pages = (double)count * rounds * length / PAGE;
	figure("touch", sums[0] / pages * 1e9, "ns");
	figure("populate", sums[1] / pages * 1e9, "ns");
	figure("map-populate", sums[2] / pages * 1e9, "ns");
	printf("%d files: every page held what was written\n", count);
	return 0;
}
