/*
 * The first process of a Linux guest: mounts what programs expect, runs the program of /.terrane, reports how it ended on the
 * second serial port as Terrane's kernel does, and ends the emulator.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

static int report_port = -1;

__attribute__((format(printf, 1, 2))) static void report(const char *format, ...)
{
	char line[256];
	va_list arguments;
	va_start(arguments, format);
	int length = vsnprintf(line, sizeof line, format, arguments);
	va_end(arguments);
	if (write(report_port, line, length) != length)
		return;
}

/* Ends the emulator by the port that it has for that. */
static void end(void)
{
	tcdrain(report_port);
	if (!ioperm(0xf4, 4, 1))
		outl(0x10, 0xf4);
	sync();
	reboot(RB_AUTOBOOT);
	for (;;)
		pause();
}

static void give_up(const char *what)
{
	report("@panic %s: %s\n", what, strerror(errno));
	end();
}

/* A serial port that passes bytes as they are. */
static int port(const char *path)
{
	struct termios state;
	int fd = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return fd;
	if (!tcgetattr(fd, &state)) {
		cfmakeraw(&state);
		cfsetspeed(&state, B115200);
		state.c_cflag |= CLOCAL;
		tcsetattr(fd, TCSANOW, &state);
	}
	return fd;
}

/* The strings of a file, each ended by NUL. */
static char **strings(const char *path)
{
	struct stat kind;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &kind))
		give_up(path);
	char *text = malloc(kind.st_size + 1);
	if (!text || read(fd, text, kind.st_size) != kind.st_size)
		give_up(path);
	close(fd);
	size_t count = 0;
	for (off_t at = 0; at < kind.st_size; at++)
		count += text[at] == 0;
	char **all = calloc(count + 1, sizeof *all);
	if (!all)
		give_up(path);
	for (size_t i = 0; i < count; i++) {
		all[i] = text;
		text += strlen(text) + 1;
	}
	return all;
}

static void mounted(const char *kind, const char *at)
{
	mkdir(at, 0755);
	if (mount(kind, at, kind, 0, NULL) && errno != EBUSY)
		give_up(at);
}

int main(void)
{
	mounted("devtmpfs", "/dev");
	report_port = port("/dev/ttyS1");
	int out = port("/dev/ttyS0"), err = port("/dev/ttyS2"), nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (report_port < 0 || out < 0 || err < 0 || nothing < 0)
		give_up("the serial ports");
	mounted("proc", "/proc");
	mounted("sysfs", "/sys");
	mkdir("/tmp", 01777);
	mounted("tmpfs", "/dev/shm");
	char **argv = strings("/.terrane/argv"), **envp = strings("/.terrane/envp"), **path = strings("/.terrane/program");
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	report("@ready %lld\n", time.tv_sec * 1000000000ll + time.tv_nsec);
	pid_t child = fork();
	if (child < 0)
		give_up("fork");
	if (child == 0) {
		setsid();
		if (dup2(nothing, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0)
			_exit(126);
		execve(path[0], argv, envp);
		_exit(127);
	}
	int status;
	pid_t ended;
	/* The first process takes over what others leave behind. */
	do
		ended = wait(&status);
	while (ended != child && (ended > 0 || errno == EINTR));
	tcdrain(out);
	tcdrain(err);
	if (WIFSIGNALED(status))
		report("@signal %d\n", WTERMSIG(status));
	else
		report("@exit %d\n", WEXITSTATUS(status));
	end();
}
