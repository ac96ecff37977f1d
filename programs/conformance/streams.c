/* What goes into a program and comes out of it: for the tests of the command that starts it. */
#include "check.h"

extern char **environ;

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	const char *what = argv[1];
	long number = atol(argv[2]);
	if (!strcmp(what, "status")) {
		for (int i = 3; i < argc; i++)
			printf("argument ‘%s’\n", argv[i]);
		for (char **variable = environ; *variable; variable++)
			puts(*variable);
		fputs("on standard error\n", stderr);
		return number;
	}
	if (!strcmp(what, "signal"))
		raise(number);
	if (!strcmp(what, "copy")) {
		char buffer[500];
		ssize_t got;
		while ((got = read(0, buffer, sizeof buffer)) > 0)
			if (write(1, buffer, got) != got)
				return 1;
		return got != 0 || read(0, buffer, 1) != 0;
	}
	if (!strcmp(what, "file")) {
		char buffer[100];
		int fd = open(argv[2], O_RDONLY);
		ssize_t got = read(fd, buffer, sizeof buffer);
		if (got < 0)
			return 1;
		printf("%.*s\n", (int)got, buffer);
	}
	if (!strcmp(what, "wait"))
		for (;;)
			pause();
	if (!strcmp(what, "missing")) {
		for (int i = 0; i < 3; i++)
			if (syscall(400) != -1 || errno != ENOSYS)
				return 1;
	}
	return 0;
}
