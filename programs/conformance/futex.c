/* futex: waits, wakes, requeues, bit sets, shared and private. */
#include "check.h"
#include <sys/syscall.h>
#include <sys/time.h>

/* As in linux/futex.h, which not every C library comes with. */
enum {
	FUTEX_WAIT = 0, FUTEX_WAKE = 1, FUTEX_CMP_REQUEUE = 4, FUTEX_WAIT_BITSET = 9, FUTEX_WAKE_BITSET = 10,
	FUTEX_PRIVATE_FLAG = 128, FUTEX_CLOCK_REALTIME = 256,
	FUTEX_WAIT_PRIVATE = FUTEX_WAIT | FUTEX_PRIVATE_FLAG,
	FUTEX_WAKE_PRIVATE = FUTEX_WAKE | FUTEX_PRIVATE_FLAG,
	FUTEX_CMP_REQUEUE_PRIVATE = FUTEX_CMP_REQUEUE | FUTEX_PRIVATE_FLAG,
	FUTEX_WAKE_BITSET_PRIVATE = FUTEX_WAKE_BITSET | FUTEX_PRIVATE_FLAG,
};
#define FUTEX_BITSET_MATCH_ANY 0xffffffffu

static _Atomic uint32_t word, other;
static atomic_int woken;

static long futex(void *at, int op, uint32_t value, const struct timespec *time, void *second, uint32_t third)
{
	return syscall(SYS_futex, at, op, value, time, second, third);
}

static void *wait_private(void *with)
{
	uint32_t bits = (uint32_t)(uintptr_t)with;
	if (futex(&word, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, 0, NULL, NULL, bits) == 0)
		atomic_fetch_add(&woken, 1);
	return NULL;
}

static void handler(int number)
{
	(void)number;
}

/* Wakes until so many were woken in all. */
static int wake(void *at, int op, int want, uint32_t bits)
{
	int got = 0;
	for (int i = 0; i < 5000 && got < want; i++) {
		long now_woken = futex(at, op, want - got, NULL, NULL, bits);
		if (now_woken < 0)
			return -1;
		got += now_woken;
		if (got < want)
			pause_for(1);
	}
	return got;
}

int main(void)
{
	struct timespec moment = { 0, 10000000 }, past = { 0, 1 }, invalid = { 0, -1 };
	pthread_t threads[8];
	puts("# Arguments");
	R(futex(&word, FUTEX_WAIT, 1, NULL, NULL, 0));
	R(futex(&word, FUTEX_WAIT, 0, &moment, NULL, 0));
	R(futex(&word, FUTEX_WAIT, 0, &invalid, NULL, 0));
	R(futex((char *)&word + 1, FUTEX_WAIT, 0, NULL, NULL, 0));
	R(futex(NULL, FUTEX_WAIT, 0, NULL, NULL, 0));
	R(futex(NULL, FUTEX_WAKE, 1, NULL, NULL, 0));
	R(futex((void *)-4096, FUTEX_WAIT, 0, NULL, NULL, 0));
	R(futex(&word, 99, 0, NULL, NULL, 0));
	R(futex(&word, FUTEX_WAKE, 1, NULL, NULL, 0));
	R(futex(&word, FUTEX_WAIT_BITSET, 0, &past, NULL, FUTEX_BITSET_MATCH_ANY));
	R(futex(&word, FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME, 0, &past, NULL, FUTEX_BITSET_MATCH_ANY));
	R(futex(&word, FUTEX_WAIT_BITSET, 0, NULL, NULL, 0));
	R(futex(&word, FUTEX_WAKE_BITSET, 1, NULL, NULL, 0));
	R(futex(&word, FUTEX_CMP_REQUEUE, 1, (void *)1, &other, 1));
	double began = now();
	R(futex(&word, FUTEX_WAIT_PRIVATE, 0, &moment, NULL, 0));
	IS(now() - began >= 0.01);

	puts("# Wakes");
	for (int i = 0; i < 4; i++)
		threads[i] = start(wait_private, (void *)(uintptr_t)~0u);
	IS(wake(&word, FUTEX_WAKE_PRIVATE, 1, 0) == 1);
	IS(wake(&word, FUTEX_WAKE_PRIVATE, 3, 0) == 3);
	for (int i = 0; i < 4; i++)
		join(threads[i]);
	IS(atomic_load(&woken) == 4);
	threads[0] = start(wait_private, (void *)1);
	threads[1] = start(wait_private, (void *)2);
	IS(wake(&word, FUTEX_WAKE_BITSET_PRIVATE, 1, 2) == 1);
	join(threads[1]);
	R(futex(&word, FUTEX_WAKE_BITSET_PRIVATE, 10, NULL, NULL, 2));
	IS(wake(&word, FUTEX_WAKE_BITSET_PRIVATE, 1, 1) == 1);
	join(threads[0]);

	puts("# Requeues");
	for (int i = 0; i < 4; i++)
		threads[i] = start(wait_private, (void *)(uintptr_t)~0u);
	int moved = 0;
	for (int i = 0; i < 5000 && moved < 4; i++) {
		long result = futex(&word, FUTEX_CMP_REQUEUE_PRIVATE, 0, (void *)10, &other, 0);
		moved += result > 0 ? result : 0;
		pause_for(1);
	}
	IS(moved == 4);
	R(futex(&word, FUTEX_WAKE_PRIVATE, 10, NULL, NULL, 0));
	IS(wake(&other, FUTEX_WAKE_PRIVATE, 4, 0) == 4);
	for (int i = 0; i < 4; i++)
		join(threads[i]);
	R(futex(&word, FUTEX_CMP_REQUEUE_PRIVATE, 0, (void *)10, &other, 5));

	puts("# Between processes");
	_Atomic uint32_t *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	fflush(stdout);
	pid_t child = fork();
	if (child == 0) {
		while (futex(shared, FUTEX_WAIT, 0, NULL, NULL, 0) && errno != EAGAIN)
			;
		_exit(atomic_load(shared));
	}
	pause_for(5);
	atomic_store(shared, 42);
	futex(shared, FUTEX_WAKE, 1, NULL, NULL, 0);
	int status;
	IS(waitpid(child, &status, 0) == child);
	ended("child", status);
	int fd = file_of(1);
	_Atomic uint32_t *one = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	_Atomic uint32_t *two = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	atomic_store(one, 0);
	child = fork();
	if (child == 0) {
		while (futex(two, FUTEX_WAIT, 0, NULL, NULL, 0) && errno != EAGAIN)
			;
		_exit(atomic_load(two));
	}
	IS(wake(one, FUTEX_WAKE, 1, 0) == 1);
	atomic_store(one, 43);
	futex(one, FUTEX_WAKE, 1, NULL, NULL, 0);
	IS(waitpid(child, &status, 0) == child);
	IS(WIFEXITED(status));

	puts("# Signals");
	struct sigaction action = { .sa_handler = handler };
	struct itimerval soon = { { 0, 0 }, { 0, 20000 } };
	sigaction(SIGALRM, &action, NULL);
	R(setitimer(ITIMER_REAL, &soon, NULL));
	R(futex(&word, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0));
	return 0;
}
