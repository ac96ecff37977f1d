/*
 * What the programs of this folder share. Each is one file, made with
 *
 *     cc -O2 -static -pthread -o NAME NAME.c
 *
 * Standard output is the same on every kernel and with every number of processors; standard error has the figures, lines of
 * the form NAME VALUE UNIT. Exit status: 0 all bytes were right, 1 something is wrong, 2 wrong arguments.
 */
#ifndef TERRANE_H
#define TERRANE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define PAGE 4096ul
#define KIB 1024ul
#define MIB (1024 * KIB)

#define UNUSED __attribute__((unused))

/* Ends the program because something is not as it must be. */
UNUSED __attribute__((noreturn, format(printf, 1, 2))) static void wrong(const char *format, ...)
{
	va_list arguments;
	fflush(stdout);
	va_start(arguments, format);
	fputs("wrong: ", stderr);
	vfprintf(stderr, format, arguments);
	fputc('\n', stderr);
	va_end(arguments);
	_exit(1);
}

/* Ends the program because a call failed. */
UNUSED __attribute__((noreturn)) static void failed(const char *call)
{
	wrong("%s: %s", call, strerror(errno));
}

/* A figure, on standard error. */
UNUSED static void figure(const char *name, double value, const char *unit)
{
	fprintf(stderr, "%s %.6g %s\n", name, value, unit);
}

/* Seconds, of a clock that never goes back. */
UNUSED static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

/* Random numbers that are the same in every run. */
UNUSED static uint64_t next_random(uint64_t *state)
{
	uint64_t x = *state += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

/* Keeps the calling thread on one of the processors it may use, the number'th of them. */
UNUSED static void pin(int number)
{
	cpu_set_t all, one;
	CPU_ZERO(&all);
	if (sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) == 0)
		return;
	number %= CPU_COUNT(&all);
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (CPU_ISSET(cpu, &all) && number-- == 0) {
			CPU_ZERO(&one);
			CPU_SET(cpu, &one);
			sched_setaffinity(0, sizeof one, &one);
			return;
		}
	}
}

/* Private memory of its own. */
UNUSED static char *map(size_t length, int protection)
{
	char *at = mmap(NULL, length, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		failed("mmap");
	return at;
}

UNUSED static void unmap(void *at, size_t length)
{
	if (munmap(at, length))
		failed("munmap");
}

/* Moves the end of the heap; where it was. musl's sbrk refuses, as its malloc has the heap for itself. */
UNUSED static char *move_heap(intptr_t by)
{
#ifdef __GLIBC__
	char *was = sbrk(by);
	if (was == (char *)-1)
		failed("sbrk");
#else
	char *was = (char *)syscall(SYS_brk, 0);
	if ((char *)syscall(SYS_brk, was + by) != was + by)
		failed("brk");
#endif
	return was;
}

/* Stores to every page. */
UNUSED static void touch(char *at, size_t length, char byte)
{
	for (size_t page = 0; page < length; page += PAGE)
		*(volatile char *)(at + page) = byte;
}

/* Reads every page, each of which must hold this. */
UNUSED static void expect(const char *at, size_t length, char byte)
{
	for (size_t page = 0; page < length; page += PAGE)
		if (*(volatile const char *)(at + page) != byte)
			wrong("a byte of page %zu is %d, not %d", page / PAGE, at[page], byte);
}

/* Tells threads when their time is over. */
UNUSED static atomic_bool over;

/* Lets time pass, and then tells. */
UNUSED static void run_for(double seconds)
{
	struct timespec time = { (time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9) };
	while (nanosleep(&time, &time) && errno == EINTR)
		;
	atomic_store(&over, true);
}

UNUSED static pthread_t start(void *(*work)(void *), void *with)
{
	pthread_t thread;
	if ((errno = pthread_create(&thread, NULL, work, with)))
		failed("pthread_create");
	return thread;
}

UNUSED static void join(pthread_t thread)
{
	if ((errno = pthread_join(thread, NULL)))
		failed("pthread_join");
}

/* An option: -LETTER NUMBER, or -LETTER alone if most is 0. */
struct option_of {
	char letter;
	const char *about;
	double *value;
	double least, most;
};

/* Reads the command line; -h explains. Options end with one whose letter is 0. */
UNUSED static void options(int argc, char **argv, const char *about, const struct option_of *all)
{
	const char *slash = strrchr(argv[0], '/');
	const char *name = slash ? slash + 1 : argv[0];
	for (int i = 1; i < argc; i++) {
		const char *text = argv[i];
		const struct option_of *option = all;
		if (!strcmp(text, "-h") || !strcmp(text, "--help")) {
			printf("%s: %s\n\nOptions:\n", name, about);
			for (; option->letter; option++) {
				if (option->most > 0)
					printf("  -%c N  %s [default: %g]\n", option->letter, option->about, *option->value);
				else
					printf("  -%c    %s\n", option->letter, option->about);
			}
			printf("  -h    this help\n\nFigures go to standard error, as NAME VALUE UNIT.\n");
			exit(0);
		}
		while (option->letter && (text[0] != '-' || text[1] != option->letter))
			option++;
		if (!option->letter) {
			fprintf(stderr, "%s: there is no option %s (see %s -h)\n", name, text, name);
			exit(2);
		}
		if (option->most == 0) {
			*option->value = 1;
			continue;
		}
		const char *number = text[2] ? text + 2 : i + 1 < argc ? argv[++i] : "";
		char *end;
		double value = strtod(number, &end);
		if (end == number || *end || !(value >= option->least && value <= option->most)) {
			fprintf(stderr, "%s: -%c takes a number from %g to %g\n", name, option->letter, option->least, option->most);
			exit(2);
		}
		*option->value = value;
	}
}

#endif
