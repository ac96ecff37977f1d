/* Threads: clone and its relatives as C libraries use them, thread-local storage, ends, locks. */
#include "check.h"
#include <sys/syscall.h>

static _Thread_local int own = 7;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static pthread_key_t key;
static atomic_int count, freed;
static long total;
static int turn;

static void *add(void *with)
{
	own += (int)(intptr_t)with;
	pthread_setspecific(key, with);
	for (int i = 0; i < 1000; i++) {
		pthread_mutex_lock(&lock);
		total++;
		pthread_mutex_unlock(&lock);
		if (i % 100 == 0)
			sched_yield();
	}
	atomic_fetch_add(&count, 1);
	return (void *)(intptr_t)own;
}

static void release(void *with)
{
	if (with)
		atomic_fetch_add(&freed, 1);
}

static void *ping(void *with)
{
	int mine = (int)(intptr_t)with;
	for (int i = 0; i < 200; i++) {
		pthread_mutex_lock(&lock);
		while (turn % 2 != mine)
			pthread_cond_wait(&condition, &lock);
		turn++;
		pthread_cond_broadcast(&condition);
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

static void *deep(void *with)
{
	volatile char room[200 * 1024];
	for (size_t at = 0; at < sizeof room; at += 4096)
		room[at] = 1;
	return with;
}

static void *leave(void *with)
{
	pthread_exit(with);
}

static void *end_all(void *with)
{
	(void)with;
	pause_for(10);
	exit(11);
}

static void *dies_holding(void *with)
{
	pthread_mutex_lock(with);
	return NULL;
}

static void *endless(void *with)
{
	for (;;)
		atomic_fetch_add((atomic_int *)with, 1);
	return NULL;
}

static void *cancelled(void *with)
{
	for (;;)
		pause_for(1000);
	return with;
}

int main(void)
{
	pthread_t threads[64];
	void *result;
	puts("# Sums");
	pthread_key_create(&key, release);
	for (int i = 0; i < 16; i++)
		threads[i] = start(add, (void *)(intptr_t)(i + 1));
	int right = 0;
	for (int i = 0; i < 16; i++) {
		pthread_join(threads[i], &result);
		right += (intptr_t)result == 7 + i + 1;
	}
	IS(right == 16);
	IS(total == 16000);
	IS(atomic_load(&count) == 16);
	IS(atomic_load(&freed) == 16);
	IS(own == 7);

	puts("# Turns");
	threads[0] = start(ping, (void *)0);
	threads[1] = start(ping, (void *)1);
	join(threads[0]);
	join(threads[1]);
	IS(turn == 400);

	puts("# Stacks and ends");
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	R(pthread_attr_setstacksize(&attributes, 512 * 1024));
	R(pthread_create(&threads[0], &attributes, deep, (void *)5));
	pthread_join(threads[0], &result);
	IS((intptr_t)result == 5);
	threads[0] = start(leave, (void *)6);
	pthread_join(threads[0], &result);
	IS((intptr_t)result == 6);
	for (int round = 0; round < 10; round++) {
		for (int i = 0; i < 64; i++)
			threads[i] = start(leave, NULL);
		for (int i = 0; i < 64; i++)
			join(threads[i]);
	}
	puts("640 threads came and went");
	threads[0] = start(cancelled, NULL);
	R(pthread_cancel(threads[0]));
	pthread_join(threads[0], &result);
	IS(result == PTHREAD_CANCELED);

	puts("# Identities");
	IS(syscall(SYS_gettid) == getpid());
	IN_CHILD("exit by a thread", start(end_all, NULL); for (;;) pause());
	atomic_int spins = 0;
	IN_CHILD("exit beside busy threads", start(endless, &spins); start(endless, &spins); start(endless, &spins);
		 while (atomic_load(&spins) < 1000) sched_yield(); exit(12));
	IN_CHILD("killed beside busy threads", start(endless, &spins); start(endless, &spins); kill(getpid(), SIGKILL));
	IN_CHILD("fork in a thread's company", start(cancelled, NULL); IN_CHILD("grandchild", IS(total == 16000)));

	puts("# A lock whose owner is gone");
	pthread_mutexattr_t kind;
	pthread_mutex_t robust;
	pthread_mutexattr_init(&kind);
	pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(&robust, &kind);
	join(start(dies_holding, &robust));
	IS(pthread_mutex_lock(&robust) == EOWNERDEAD);
	R(pthread_mutex_consistent(&robust));
	R(pthread_mutex_unlock(&robust));
	R(pthread_mutex_lock(&robust));
	struct timespec past = { 0, 0 };
	IS(pthread_mutex_timedlock(&lock, &past) == 0);
	IS(pthread_cond_timedwait(&condition, &lock, &past) == ETIMEDOUT);
	return 0;
}
