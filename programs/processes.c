/*
 * Source B's build: many processes of one thread. A parent with a hundred mappings forks; the child stores to some pages that
 * it shares with its parent, becomes another program (this one, as a compiler), which maps, reads a source, grows its heap,
 * writes a result, and exits.
 */
#include "terrane.h"
#include <fcntl.h>
#include <sys/wait.h>

#define MAPPINGS 100
#define LENGTH (8 * PAGE)
#define SOURCE (256 * KIB)

static double jobs = 2, seconds = 1;
static const char *folder = "/tmp";

/* The compiler: reads the source, works on it in memory of its own, writes a sum. */
static int compile(const char *source, const char *result)
{
	int fd = open(source, O_RDONLY);
	if (fd < 0)
		failed("open");
	const unsigned char *text = mmap(NULL, SOURCE, PROT_READ, MAP_PRIVATE, fd, 0);
	if (text == MAP_FAILED)
		failed("mmap");
	close(fd);
	uint64_t sum = 0;
	for (int pass = 0; pass < 4; pass++) {
		char *block = map(256 * KIB, PROT_READ | PROT_WRITE);
		memcpy(block, text, SOURCE);
		char *heap = move_heap(132 * KIB);
		touch(heap, 132 * KIB, pass + 1);
		for (size_t at = 0; at < SOURCE; at += 64)
			sum = sum * 31 + (unsigned char)block[at];
		expect(heap, 132 * KIB, pass + 1);
		unmap(block, 256 * KIB);
	}
	fd = open(result, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	if (fd < 0 || write(fd, &sum, sizeof sum) != sizeof sum || close(fd))
		failed("write");
	return 0;
}

static uint64_t read_sum(const char *path)
{
	uint64_t sum;
	int fd = open(path, O_RDONLY);
	if (fd < 0 || read(fd, &sum, sizeof sum) != sizeof sum || close(fd))
		failed("read");
	return sum;
}

/* One job of the build: processes, one after the other. Returns how many. */
static uint64_t build(int number, const char *source, double until)
{
	char result[128];
	char *mappings[MAPPINGS];
	uint64_t done = 0, expected = 0;
	snprintf(result, sizeof result, "%s/terrane-%d-%d.o", folder, (int)getppid(), number);
	for (int i = 0; i < MAPPINGS; i++) {
		mappings[i] = map(LENGTH, i % 2 ? PROT_READ : PROT_READ | PROT_WRITE);
		if (i % 2 == 0)
			touch(mappings[i], LENGTH, i + 1);
	}
	while (done == 0 || now() < until) {
		pid_t child = fork();
		if (child < 0)
			failed("fork");
		if (child == 0) {
			for (int i = 0; i < 24; i += 2) {
				touch(mappings[i], PAGE, -1);
				expect(mappings[i] + PAGE, LENGTH - PAGE, i + 1);
			}
			execl("/proc/self/exe", "compiler", "--compile", source, result, (char *)NULL);
			failed("execl");
		}
		int status;
		if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status))
			wrong("a compiler ended with status %#x", status);
		uint64_t sum = read_sum(result);
		if (done == 0)
			expected = sum;
		if (sum != expected)
			wrong("a compiler wrote %jx, not %jx", (uintmax_t)sum, (uintmax_t)expected);
		for (int i = 0; i < MAPPINGS; i += 2)
			expect(mappings[i], LENGTH, i + 1);
		done++;
	}
	unlink(result);
	return done;
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "--compile"))
		return compile(argv[2], argv[3]);
	options(argc, argv, "a build of many processes: fork, copy on write, execve, work, exit (source B)", (struct option_of[]){
		{ 'j', "jobs side by side", &jobs, 1, 64 },
		{ 's', "seconds", &seconds, 0.01, 3600 },
		{ 0 } });
	char source[128];
	unsigned char *text = malloc(SOURCE);
	uint64_t random = 1;
	snprintf(source, sizeof source, "%s/terrane-%d.c", folder, (int)getpid());
	for (size_t at = 0; text && at < SOURCE; at++)
		text[at] = next_random(&random);
	int fd = open(source, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	if (!text || fd < 0 || write(fd, text, SOURCE) != SOURCE || close(fd))
		failed("write");
	uint64_t *done = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (done == MAP_FAILED)
		failed("mmap");
	double began = now(), until = began + seconds;
	int count = jobs;
	for (int number = 0; number < count; number++) {
		pid_t job = fork();
		if (job < 0)
			failed("fork");
		if (job == 0) {
			done[number] = build(number, source, until);
			_exit(0);
		}
	}
	for (int number = 0; number < count; number++) {
		int status;
		if (wait(&status) < 0 || status)
			wrong("a job ended with status %#x", status);
	}
	uint64_t all = 0;
	for (int number = 0; number < count; number++)
		all += done[number];
	double took = now() - began;
	unlink(source);
	figure("processes", all / took, "processes/s");
	figure("process", took * count / all * 1e6, "us");
	printf("%d jobs: every compiler wrote the same sum, and no parent saw its child's stores\n", count);
	return 0;
}
