/* Pipes, eventfd, poll and its relatives, and what descriptors are. */
#include "check.h"
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/uio.h>

static int ends[2];
static volatile int negative = -1, many = 2000;

static void *write_later(void *with)
{
	pause_for(20);
	if (write(ends[1], "later", 5) != 5)
		failed("write");
	return with;
}

static void *read_later(void *with)
{
	static char buffer[70000];
	size_t got = 0;
	pause_for(20);
	while (got < 100000) {
		ssize_t now_got = read(ends[0], buffer, sizeof buffer);
		if (now_got <= 0)
			failed("read");
		got += now_got;
	}
	return with;
}

int main(void)
{
	static char buffer[200000];
	puts("# Pipes");
	R(pipe((int *)nowhere));
	R(pipe2(ends, 12345));
	R(pipe(ends));
	R(write(ends[1], "hello", 5));
	R(read(ends[0], buffer, 3));
	R(read(ends[0], buffer, 100));
	R(write(ends[0], "x", 1));
	R(read(ends[1], buffer, 1));
	R(lseek(ends[0], 0, SEEK_SET));
	R(pread(ends[0], buffer, 1, 0));
	R(write(ends[1], buffer, 0));
	pthread_t thread = start(write_later, NULL);
	R(read(ends[0], buffer, 100));
	join(thread);
	R(fcntl(ends[1], F_SETFL, O_NONBLOCK));
	R(write(ends[1], buffer, 65536));
	R(write(ends[1], buffer, 1));
	int waiting = 0;
	R(ioctl(ends[0], FIONREAD, &waiting));
	IS(waiting == 65536);
	R(read(ends[0], buffer, 4096));
	R(write(ends[1], buffer, 4096));
	R(read(ends[0], buffer, 100000));
	R(fcntl(ends[0], F_SETFL, O_NONBLOCK));
	R(read(ends[0], buffer, 1));
	R(fcntl(ends[0], F_SETFL, 0));
	R(fcntl(ends[1], F_SETFL, 0));
	thread = start(read_later, NULL);
	R(write(ends[1], buffer, 100000));
	join(thread);
	struct iovec parts[3] = { { "one", 3 }, { "", 0 }, { "two", 3 } };
	R(writev(ends[1], parts, 3));
	char first[4] = { 0 }, second[4] = { 0 };
	struct iovec into[2] = { { first, 2 }, { second, 3 } };
	R(readv(ends[0], into, 2));
	printf("%s %s\n", first, second);
	R(readv(ends[0], into, negative));
	R(readv(ends[0], into, many));
	R(close(ends[1]));
	R(read(ends[0], buffer, 10));
	R(read(ends[0], buffer, 10));
	R(close(ends[0]));
	R(close(ends[0]));
	R(pipe(ends));
	R(close(ends[0]));
	IN_CHILD("nobody reads", write(ends[1], "x", 1));
	signal(SIGPIPE, SIG_IGN);
	R(write(ends[1], "x", 1));
	R(close(ends[1]));
	int numbers[4];
	R(pipe(ends));
	IN_CHILD("through a pipe", {
		for (int i = 0; i < 1000; i++) {
			numbers[0] = i;
			if (write(ends[1], numbers, 4) != 4)
				_exit(1);
		}
	});
	close(ends[1]);
	int right = 0;
	while (read(ends[0], numbers, 4) == 4)
		right += numbers[0] == right;
	IS(right == 1000);
	close(ends[0]);

	puts("# poll and select");
	R(pipe(ends));
	struct pollfd polled[3] = { { ends[0], POLLIN, 0 }, { ends[1], POLLOUT, 0 }, { -1, POLLIN, 0 } };
	R(poll(polled, 3, 0));
	IS(polled[0].revents == 0 && polled[1].revents == POLLOUT && polled[2].revents == 0);
	double began = now();
	R(poll(polled, 1, 20));
	IS(now() - began >= 0.02);
	thread = start(write_later, NULL);
	R(poll(polled, 1, 5000));
	IS(polled[0].revents == POLLIN);
	join(thread);
	polled[2].fd = 999;
	R(poll(polled, 3, 0));
	IS(polled[2].revents == POLLNVAL);
	struct timespec moment = { 0, 1000000 };
	R(ppoll(polled, 1, &moment, NULL));
	R(read(ends[0], buffer, 10));
	R(ppoll(polled, 1, &moment, NULL));
	fd_set reading, writing;
	FD_ZERO(&reading);
	FD_ZERO(&writing);
	FD_SET(ends[0], &reading);
	FD_SET(ends[1], &writing);
	struct timeval short_time = { 0, 1000 };
	R(select(ends[1] + 1, &reading, &writing, NULL, &short_time));
	IS(!FD_ISSET(ends[0], &reading) && FD_ISSET(ends[1], &writing));
	close(ends[1]);
	R(poll(polled, 1, 0));
	IS(polled[0].revents == POLLHUP);
	close(ends[0]);
	R(poll((struct pollfd *)nowhere, 1, 0));
	R(poll(NULL, 0, 1));

	puts("# eventfd");
	uint64_t value = 5;
	int event = eventfd(3, 0);
	IS(event >= 0);
	R(write(event, &value, 8));
	R(read(event, &value, 8));
	IS(value == 8);
	R(read(event, &value, 4));
	value = ~0ull;
	R(write(event, &value, 8));
	close(event);
	event = eventfd(2, EFD_SEMAPHORE | EFD_NONBLOCK);
	R(read(event, &value, 8));
	IS(value == 1);
	R(read(event, &value, 8));
	R(read(event, &value, 8));
	value = 0xfffffffffffffffe;
	R(write(event, &value, 8));
	value = 1;
	R(write(event, &value, 8));
	polled[0] = (struct pollfd){ event, POLLIN | POLLOUT, 0 };
	R(poll(polled, 1, 0));
	IS(polled[0].revents == POLLIN);
	close(event);
	R(eventfd(0, 12345));

	puts("# Descriptors");
	R(pipe(ends));
	int copy = dup(ends[0]);
	IS(copy > ends[1]);
	R(dup(999));
	R(dup2(ends[0], 200));
	R(dup2(ends[0], ends[0]));
	R(dup2(999, 999));
	R(dup2(ends[0], -1));
	R(dup3(ends[0], ends[0], 0));
	R(dup3(ends[0], 201, O_CLOEXEC));
	R(fcntl(201, F_GETFD));
	R(fcntl(200, F_GETFD));
	R(fcntl(200, F_SETFD, FD_CLOEXEC));
	R(fcntl(200, F_GETFD));
	R(fcntl(ends[0], F_DUPFD, 300));
	R(fcntl(ends[0], F_DUPFD_CLOEXEC, 300));
	R(fcntl(301, F_GETFD));
	IS((fcntl(ends[1], F_GETFL) & O_ACCMODE) == O_WRONLY);
	R(fcntl(999, F_GETFD));
	R(fcntl(ends[0], 9999));
	R(write(ends[1], "ab", 2));
	R(read(200, buffer, 1));
	R(read(copy, buffer, 1));
	R(close(-1));
	struct stat kind;
	R(fstat(ends[0], &kind));
	IS(S_ISFIFO(kind.st_mode));
	return 0;
}
