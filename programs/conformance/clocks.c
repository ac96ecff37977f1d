/* Clocks, sleeps, timers. */
#include "check.h"
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/times.h>

static volatile sig_atomic_t rings;

static void ring(int number)
{
	(void)number;
	rings++;
}

static double clock_at(clockid_t clock)
{
	struct timespec time;
	if (clock_gettime(clock, &time))
		failed("clock_gettime");
	return time.tv_sec + time.tv_nsec * 1e-9;
}

int main(void)
{
	struct timespec time, left;
	struct timeval day;
	struct itimerval timer, old;
	puts("# Clocks");
	R(clock_gettime(CLOCK_REALTIME, &time));
	R(clock_gettime(CLOCK_MONOTONIC, &time));
	R(clock_gettime(CLOCK_MONOTONIC_RAW, &time));
	R(clock_gettime(CLOCK_MONOTONIC_COARSE, &time));
	R(clock_gettime(CLOCK_REALTIME_COARSE, &time));
	R(clock_gettime(CLOCK_BOOTTIME, &time));
	R(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time));
	R(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time));
	R(clock_gettime(77, &time));
	R(syscall(SYS_clock_gettime, CLOCK_MONOTONIC, 1));
	R(clock_getres(CLOCK_MONOTONIC, &time));
	IS(time.tv_sec == 0 && time.tv_nsec >= 1);
	R(gettimeofday(&day, NULL));
	double real = clock_at(CLOCK_REALTIME);
	IS(real > 1.6e9 && real < 1e10);
	IS(real - (day.tv_sec + day.tv_usec * 1e-6) < 5);
	IS(labs(syscall(SYS_time, NULL) - (long)real) <= 5);
	double last = now();
	int backwards = 0;
	for (int i = 0; i < 10000; i++) {
		double next = now();
		backwards += next < last;
		last = next;
	}
	IS(backwards == 0);
	double cpu = clock_at(CLOCK_PROCESS_CPUTIME_ID), began = now();
	while (now() - began < 0.05)
		;
	IS(clock_at(CLOCK_PROCESS_CPUTIME_ID) > cpu);
	cpu = clock_at(CLOCK_THREAD_CPUTIME_ID);
	pause_for(50);
	IS(clock_at(CLOCK_THREAD_CPUTIME_ID) - cpu < 0.045);
	struct tms spent;
	IS(times(&spent) != -1);

	puts("# Sleeps");
	began = now();
	time = (struct timespec){ 0, 20000000 };
	R(nanosleep(&time, NULL));
	IS(now() - began >= 0.02 && now() - began < 5);
	R(nanosleep(&(struct timespec){ 0, -1 }, NULL));
	R(nanosleep(&(struct timespec){ 0, 1000000000 }, NULL));
	R(syscall(SYS_nanosleep, 1, NULL));
	R(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &(struct timespec){ 0, 0 }, NULL));
	clock_gettime(CLOCK_MONOTONIC, &time);
	time.tv_sec += (time.tv_nsec + 30000000) / 1000000000;
	time.tv_nsec = (time.tv_nsec + 30000000) % 1000000000;
	began = now();
	R(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL));
	IS(now() - began >= 0.029);
	R(usleep(1000));

	puts("# Timers");
	struct sigaction action = { .sa_handler = ring };
	sigaction(SIGALRM, &action, NULL);
	timer = (struct itimerval){ { 0, 10000 }, { 0, 10000 } };
	R(setitimer(ITIMER_REAL, &timer, NULL));
	while (rings < 3)
		pause();
	timer = (struct itimerval){ 0 };
	R(setitimer(ITIMER_REAL, &timer, &old));
	IS(old.it_interval.tv_usec == 10000);
	rings = 0;
	pause_for(30);
	IS(rings == 0);
	R(alarm(100));
	IS(alarm(0) >= 99);
	timer = (struct itimerval){ { 0, 0 }, { 50, 0 } };
	R(setitimer(ITIMER_REAL, &timer, NULL));
	R(getitimer(ITIMER_REAL, &timer));
	IS(timer.it_value.tv_sec >= 48 && timer.it_value.tv_sec <= 50);
	IN_CHILD("not inherited", getitimer(ITIMER_REAL, &timer); IS(timer.it_value.tv_sec == 0));
	timer = (struct itimerval){ 0 };
	setitimer(ITIMER_REAL, &timer, NULL);
	R(setitimer(99, &timer, NULL));
	timer = (struct itimerval){ { 0, 0 }, { 0, 30000 } };
	setitimer(ITIMER_REAL, &timer, NULL);
	rings = 0;
	time = (struct timespec){ 10, 0 };
	R(nanosleep(&time, &left));
	IS(left.tv_sec >= 8 && left.tv_sec < 10 && rings == 1);
	rings = 0;
	setitimer(ITIMER_REAL, &timer, NULL);
	/* A timer puts a spinning program aside. */
	while (!rings)
		;
	puts("rang while spinning");
	IN_CHILD("killed by an alarm", signal(SIGALRM, SIG_DFL); setitimer(ITIMER_REAL, &timer, NULL); for (;;));
	return 0;
}
