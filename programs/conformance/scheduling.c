/* Affinity, yielding, and more threads than processors. */
#include "check.h"
#include <sys/syscall.h>

static atomic_int stop, ran[64], flag;
static cpu_set_t all;

static void *spin(void *with)
{
	while (!atomic_load(&stop))
		atomic_fetch_add(&ran[(intptr_t)with], 1);
	return NULL;
}

static void *set_flag(void *with)
{
	pin(0);
	atomic_store(&flag, 1);
	return with;
}

/* The number'th of the processors that the program may use. */
static int processor(int number)
{
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &all) && number-- == 0)
			return cpu;
	return -1;
}

static void *hop(void *with)
{
	int right = 0;
	for (int i = 0; i < 50; i++) {
		cpu_set_t one;
		int cpu = processor(i % CPU_COUNT(&all));
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		if (sched_setaffinity(0, sizeof one, &one))
			failed("sched_setaffinity");
		right += sched_getcpu() == cpu;
	}
	(void)with;
	return (void *)(intptr_t)(right == 50);
}

int main(void)
{
	pthread_t threads[64];
	cpu_set_t set, got;
	puts("# Affinity");
	IS(syscall(SYS_sched_getaffinity, 0, sizeof all, &all) > 0);
	CPU_ZERO(&all);
	R(sched_getaffinity(0, sizeof all, &all));
	IS(CPU_COUNT(&all) >= 1 && CPU_COUNT(&all) == sysconf(_SC_NPROCESSORS_ONLN));
	CPU_ZERO(&set);
	R(sched_setaffinity(0, sizeof set, &set));
	R(sched_setaffinity(1 << 22, sizeof set, &all));
	R(sched_getaffinity(1 << 22, sizeof set, &all));
	R(syscall(SYS_sched_getaffinity, 0, 1, &set));
	R(syscall(SYS_sched_getaffinity, 0, sizeof set, 1));
	R(syscall(SYS_sched_setaffinity, 0, sizeof set, 1));
	pin(0);
	R(sched_getaffinity(0, sizeof got, &got));
	IS(CPU_COUNT(&got) == 1);
	IS(CPU_ISSET(sched_getcpu(), &got));
	IN_CHILD("inherited", IS(sched_getaffinity(0, sizeof set, &set) == 0 && CPU_EQUAL(&set, &got)));
	R(sched_setaffinity(0, sizeof all, &all));
	void *result;
	pthread_join(start(hop, NULL), &result);
	IS(result == (void *)1);
	for (int i = 0; i < 8; i++)
		threads[i] = start(hop, NULL);
	int right = 0;
	for (int i = 0; i < 8; i++) {
		pthread_join(threads[i], &result);
		right += result == (void *)1;
	}
	IS(right == 8);

	puts("# Preemption");
	/* On one processor: the other thread only runs if this one is put aside. */
	pin(0);
	threads[0] = start(set_flag, NULL);
	while (!atomic_load(&flag))
		;
	puts("a spinning thread was put aside");
	join(threads[0]);
	R(sched_setaffinity(0, sizeof all, &all));
	for (int i = 0; i < 32; i++)
		threads[i] = start(spin, (void *)(intptr_t)i);
	int everyone = 0;
	for (int round = 0; round < 2000 && everyone < 32; round++) {
		pause_for(10);
		everyone = 0;
		for (int i = 0; i < 32; i++)
			everyone += atomic_load(&ran[i]) > 0;
	}
	IS(everyone == 32);
	atomic_store(&stop, 1);
	for (int i = 0; i < 32; i++)
		join(threads[i]);
	atomic_store(&stop, 0);
	pid_t busy[8];
	for (int i = 0; i < 8; i++)
		if ((busy[i] = fork()) == 0)
			for (;;)
				;
	pause_for(50);
	int killed = 0;
	for (int i = 0; i < 8; i++) {
		int status;
		kill(busy[i], SIGKILL);
		killed += waitpid(busy[i], &status, 0) == busy[i] && WIFSIGNALED(status);
	}
	IS(killed == 8);

	puts("# Priorities and policies");
	R(sched_yield());
	R(syscall(SYS_sched_getscheduler, 0));
	R(sched_get_priority_max(SCHED_FIFO));
	R(sched_get_priority_min(SCHED_OTHER));
	R(syscall(SYS_sched_getscheduler, 1 << 22));
	struct sched_param parameter;
	R(syscall(SYS_sched_getparam, 0, &parameter));
	IS(parameter.sched_priority == 0);
	R(getpriority(PRIO_PROCESS, 0));
	return 0;
}
