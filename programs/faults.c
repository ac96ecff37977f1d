/*
 * The kinds of page faults, one by one, in one thread: the time of each, and of the calls that make and undo mappings.
 */
#include "terrane.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

static double mib = 2, rounds = 4;
static size_t length;

static void say(const char *name, double took)
{
	figure(name, took / rounds / (length / PAGE) * 1e9, "ns");
}

static char *fresh(int flags, int fd)
{
	char *at = mmap(NULL, length, PROT_READ | PROT_WRITE, flags, fd, 0);
	if (at == MAP_FAILED)
		failed("mmap");
	if (madvise(at, length, MADV_NOHUGEPAGE) && errno != EINVAL)
		failed("madvise");
	return at;
}

int main(int argc, char **argv)
{
	options(argc, argv, "the kinds of page faults, one by one", (struct option_of[]){
		{ 'm', "MiB of a mapping", &mib, 1, 256 },
		{ 'r', "rounds", &rounds, 1, 10000 },
		{ 0 } });
	length = (size_t)mib * MIB;
	char path[128];
	snprintf(path, sizeof path, "/tmp/terrane-faults-%d", (int)getpid());
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	char *bytes = malloc(length);
	if (fd < 0 || !bytes)
		failed("open");
	memset(bytes, 7, length);
	if (write(fd, bytes, length) != (ssize_t)length)
		failed("write");
	unlink(path);
	double first = 0, zero = 0, upgrade = 0, copy = 0, private_read = 0, private_write = 0, shared_read = 0, shared_write = 0,
	       populate = 0, forking = 0, began;
	/* The first round is not counted: an emulator translates then what it runs for the first time, which took longer than all else in fork. */
	for (int round = -1; round < rounds; round++) {
		if (round == 0)
			first = zero = upgrade = copy = private_read = private_write = shared_read = shared_write = populate = forking = 0;
		char *at = fresh(MAP_PRIVATE | MAP_ANONYMOUS, -1);
		began = now();
		touch(at, length, 1);
		first += now() - began;
		expect(at, length, 1);
		began = now();
		pid_t child = fork();
		if (child < 0)
			failed("fork");
		if (child == 0) {
			touch(at, PAGE, 2);
			pause();
			_exit(0);
		}
		forking += now() - began;
		began = now();
		touch(at, length, 3);
		copy += now() - began;
		expect(at, length, 3);
		kill(child, 9);
		if (waitpid(child, NULL, 0) != child)
			failed("waitpid");
		unmap(at, length);

		at = fresh(MAP_PRIVATE | MAP_ANONYMOUS, -1);
		began = now();
		expect(at, length, 0);
		zero += now() - began;
		began = now();
		touch(at, length, 4);
		upgrade += now() - began;
		expect(at, length, 4);
		unmap(at, length);

		at = fresh(MAP_PRIVATE | MAP_ANONYMOUS, -1);
		began = now();
		if (madvise(at, length, MADV_POPULATE_WRITE))
			failed("madvise");
		populate += now() - began;
		expect(at, length, 0);
		unmap(at, length);

		at = fresh(MAP_PRIVATE, fd);
		began = now();
		expect(at, length, 7);
		private_read += now() - began;
		began = now();
		touch(at, length, 8);
		private_write += now() - began;
		expect(at, length, 8);
		unmap(at, length);

		at = fresh(MAP_SHARED, fd);
		began = now();
		expect(at, length, 7);
		shared_read += now() - began;
		unmap(at, length);
		at = fresh(MAP_SHARED, fd);
		began = now();
		touch(at, length, 7);
		shared_write += now() - began;
		unmap(at, length);
	}
	say("first-touch", first);
	say("zero-page", zero);
	say("zero-page-upgrade", upgrade);
	say("copy-on-write", copy);
	say("file-private-read", private_read);
	say("file-private-write", private_write);
	say("file-shared-read", shared_read);
	say("file-shared-write", shared_write);
	say("populate-write", populate);
	figure("fork", forking / rounds * 1e6, "us");
	puts("every page held what was stored");
	return 0;
}
