/* The texts of /proc: that they are there, have their form, and tell the truth. */
#include "check.h"
#include <ctype.h>

static char text[1 << 20];

static int read_all(const char *path)
{
	size_t length = 0;
	ssize_t got;
	int fd = open(path, O_RDONLY);
	if (fd < 0)
		return -1;
	/* In small pieces: a text must stay in one piece all the same. */
	while (length < sizeof text - 1 && (got = read(fd, text + length, 100)) > 0)
		length += got;
	close(fd);
	text[length] = 0;
	return length;
}

static int lines_like(const char *path, const char *start)
{
	int count = 0;
	if (read_all(path) < 0)
		return -1;
	for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
		count += !strncmp(line, start, strlen(start));
	return count;
}

/* The sum of a field over all mappings of smaps that touch the window. */
static long smaps(const char *at, const char *name)
{
	long sum = 0;
	bool in = false;
	if (read_all("/proc/self/smaps") < 0)
		return -1;
	for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
		unsigned long start, end;
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2 && strchr(line, '-'))
			in = start < (unsigned long)at + 64 * PAGE && end > (unsigned long)at;
		else if (in && !strncmp(line, name, strlen(name)))
			sum += atol(line + strlen(name));
	}
	return sum;
}

int main(void)
{
	puts("# maps");
	IS(read_all("/proc/self/maps") > 0);
	unsigned long last = 0;
	int good = 1, lines = 0, stack = 0, program = 0;
	for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
		unsigned long start, end, offset, inode;
		unsigned major, minor;
		char prot[8], name[256] = "";
		int fields = sscanf(line, "%lx-%lx %4s %lx %x:%x %lu %255s", &start, &end, prot, &offset, &major, &minor, &inode, name);
		good &= fields >= 7 && start < end && start >= last && start % PAGE == 0 && end % PAGE == 0 && strlen(prot) == 4;
		last = end;
		lines++;
		stack += !strcmp(name, "[stack]") && (unsigned long)&last >= start && (unsigned long)&last < end;
		program += (unsigned long)main >= start && (unsigned long)main < end && prot[2] == 'x';
	}
	IS(good);
	IS(lines >= 4);
	IS(stack == 1);
	IS(program == 1);

	puts("# smaps");
	char *w = window(64);
	map_at(w, 16, PROT_READ | PROT_WRITE);
	IS(smaps(w, "Size:") == 64);
	IS(smaps(w, "Rss:") == 0);
	touch(w, 8 * PAGE, 1);
	IS(smaps(w, "Rss:") == 32);
	IS(smaps(w, "Private_Dirty:") == 32);
	IS(smaps(w, "Anonymous:") == 32);
	IS(smaps(w, "KernelPageSize:") == 4);
	mlock(w, 2 * PAGE);
	IS(smaps(w, "Locked:") == 8);
	munlock(w, 2 * PAGE);
	IN_CHILD("child", IS(smaps(w, "Pss:") == 16); IS(smaps(w, "Private_Dirty:") == 0); IS(smaps(w, "Rss:") == 32));
	madvise(w, 8 * PAGE, MADV_DONTNEED);
	IS(smaps(w, "Rss:") == 0);
	IS(field("/proc/self/smaps_rollup", "Rss:") > 0);

	puts("# status");
	IS(field("/proc/self/status", "Pid:") == getpid());
	IS(field("/proc/self/status", "PPid:") == getppid());
	IS(field("/proc/self/status", "Threads:") == 1);
	long size = field("/proc/self/status", "VmSize:"), rss = field("/proc/self/status", "VmRSS:");
	IS(size > 0 && rss > 0 && rss <= size);
	char *more = map(256 * PAGE, PROT_READ | PROT_WRITE);
	IS(field("/proc/self/status", "VmSize:") == size + 1024);
	touch(more, 256 * PAGE, 1);
	long grown = field("/proc/self/status", "VmRSS:") - rss;
	IS(grown >= 900 && grown <= 1200);
	unmap(more, 256 * PAGE);
	IS(field("/proc/self/status", "VmSize:") == size);
	IS(field("/proc/self/status", "VmPeak:") >= size + 1024);
	IS(field("/proc/self/status", "VmHWM:") >= rss);

	puts("# Others");
	IS(lines_like("/proc/vmstat", "pgfault ") == 1);
	long before = field("/proc/vmstat", "pgfault");
	touch(w, 16 * PAGE, 1);
	IS(field("/proc/vmstat", "pgfault") >= before + 16);
	IS(lines_like("/proc/cpuinfo", "processor") == sysconf(_SC_NPROCESSORS_ONLN));
	IS(field("/proc/meminfo", "MemTotal:") > 1000);
	IS(field("/proc/meminfo", "MemFree:") > 0);
	char path[256] = { 0 };
	IS(readlink("/proc/self/exe", path, 255) > 0 && path[0] == '/' && access(path, X_OK) == 0);
	snprintf(path, sizeof path, "/proc/%d/maps", (int)getpid());
	IS(read_all(path) > 0);
	R(open("/proc/self/none", O_RDONLY));
	R(open("/proc/4000000/maps", O_RDONLY));
	int fd = open("/proc/self/maps", O_RDONLY);
	R(lseek(fd, 10, SEEK_SET));
	R(write(fd, "x", 1));
	close(fd);
	IS(read_all("/proc/self/cmdline") > 0);

	puts("# A long text");
	char *holes = map(512 * PAGE, PROT_READ | PROT_WRITE);
	for (int i = 0; i < 512; i += 2)
		if (madvise(holes + i * PAGE, PAGE, MADV_DONTFORK))
			failed("madvise");
	static char piece[1 << 16];
	fd = open("/proc/self/smaps", O_RDONLY);
	ssize_t got = read(fd, piece, sizeof piece), all = got;
	/* As much as fits into a page, and whole lines. */
	IS(got > 2000 && got <= 4096 && piece[got - 1] == '\n');
	got = read(fd, piece, 10);
	all += got;
	IS(got == 10);
	while ((got = read(fd, piece, 3000)) > 0)
		all += got;
	IS(all > 500 * 500);
	close(fd);
	fd = open("/proc/self/smaps", O_RDONLY);
	IS(pread(fd, piece, 10, 20) == 10);
	close(fd);
	return 0;
}
