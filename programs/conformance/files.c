/* Files and folders. */
#include "check.h"
#include <dirent.h>
#include <sys/uio.h>
#include <sys/syscall.h>

static char *text(int fd, off_t from, size_t length)
{
	static char buffer[4096];
	ssize_t got = pread(fd, buffer, length, from);
	buffer[got > 0 ? got : 0] = 0;
	return buffer;
}

static int by_name(const void *one, const void *other)
{
	return strcmp(*(char *const *)one, *(char *const *)other);
}

static void names(const char *what, const char *path)
{
	char *all[64];
	int count = 0;
	DIR *folder = opendir(path);
	if (!folder) {
		printf("%s: %s\n", what, errno_name(errno));
		return;
	}
	for (struct dirent *entry; count < 64 && (entry = readdir(folder));) {
		char line[300];
		snprintf(line, sizeof line, "%s%s", entry->d_name, entry->d_type == DT_DIR ? "/" : entry->d_type == DT_LNK ? "@" : "");
		all[count++] = strdup(line);
	}
	closedir(folder);
	qsort(all, count, sizeof *all, by_name);
	printf("%s:", what);
	for (int i = 0; i < count; i++)
		printf(" %s", all[i]);
	putchar('\n');
}

int main(void)
{
	char base[64], here[128];
	static char buffer[10000];
	struct stat kind;
	snprintf(base, sizeof base, "/tmp/terrane-files-%d", (int)getpid());
	umask(022);
	puts("# Folders");
	R(mkdir(base, 0755));
	R(mkdir(base, 0755));
	R(chdir(base));
	IS(getcwd(here, sizeof here) && !strcmp(here, base));
	R(syscall(SYS_getcwd, here, 3));
	R(mkdir("a", 0700));
	R(mkdir("a/b", 0777));
	R(mkdir("no/such", 0777));
	R(stat("a/b", &kind));
	IS(S_ISDIR(kind.st_mode) && (kind.st_mode & 0777) == 0755);
	R(rmdir("a"));
	R(open("a", O_WRONLY));
	R(close(open("a", O_RDONLY | O_DIRECTORY)));
	R(unlink("a"));

	puts("# Files");
	R(open("none", O_RDONLY));
	R(open("", O_RDONLY));
	int fd = open("file", O_RDWR | O_CREAT | O_EXCL, 0666);
	IS(fd >= 0);
	R(open("file", O_RDWR | O_CREAT | O_EXCL, 0666));
	R(open("file/below", O_RDONLY));
	R(open("file", O_RDONLY | O_DIRECTORY));
	R(rmdir("file"));
	R(fstat(fd, &kind));
	IS(S_ISREG(kind.st_mode) && (kind.st_mode & 0777) == 0644 && kind.st_size == 0 && kind.st_nlink == 1);
	R(write(fd, "hello world", 11));
	R(lseek(fd, 0, SEEK_CUR));
	R(lseek(fd, -5, SEEK_END));
	R(read(fd, buffer, 100));
	R(read(fd, buffer, 100));
	R(lseek(fd, -100, SEEK_SET));
	R(lseek(fd, 0, 77));
	R(pwrite(fd, "HELLO", 5, 0));
	puts(text(fd, 0, 100));
	R(pread(fd, buffer, 10, -1));
	R(pwrite(fd, "x", 1, -1));
	R(lseek(fd, 9000, SEEK_SET));
	R(write(fd, "far", 3));
	R(pread(fd, buffer, 100, 8990));
	IS(buffer[0] == 0 && buffer[9] == 0 && !memcmp(buffer + 10, "far", 3));
	R(fstat(fd, &kind));
	IS(kind.st_size == 9003);
	R(ftruncate(fd, 5));
	R(ftruncate(fd, 20));
	R(pread(fd, buffer, 100, 0));
	IS(!memcmp(buffer, "HELLO\0\0\0", 8));
	R(ftruncate(fd, -1));
	R(truncate("file", 7));
	R(truncate("none", 7));
	R(fstat(fd, &kind));
	IS(kind.st_size == 7);
	struct iovec parts[2] = { { "ab", 2 }, { "cd", 2 } };
	R(lseek(fd, 0, SEEK_SET));
	R(writev(fd, parts, 2));
	puts(text(fd, 0, 4));
	R(pwritev(fd, parts, 2, 2));
	puts(text(fd, 0, 6));
	int appending = open("file", O_WRONLY | O_APPEND);
	R(write(appending, "END", 3));
	R(read(appending, buffer, 1));
	R(fstat(fd, &kind));
	IS(kind.st_size == 10);
	R(close(appending));
	int reading = open("file", O_RDONLY);
	R(write(reading, "x", 1));
	R(ftruncate(reading, 1));
	R(close(reading));
	int cut = open("file", O_RDWR | O_TRUNC);
	R(fstat(fd, &kind));
	IS(kind.st_size == 0);
	R(close(cut));
	int copy = dup(fd);
	R(lseek(fd, 3, SEEK_SET));
	R(lseek(copy, 0, SEEK_CUR));
	R(close(copy));
	R(read(fd, nowhere, 10));
	R(write(fd, "abc", 3));
	R(lseek(fd, 0, SEEK_SET));
	R(read(fd, nowhere, 10));
	R(write(fd, nowhere, 10));
	R(fsync(fd));
	R(fallocate(fd, 0, 0, 8192));
	R(fstat(fd, &kind));
	IS(kind.st_size == 8192);

	puts("# Names");
	R(access("file", F_OK));
	R(access("none", F_OK));
	R(rename("file", "other"));
	R(access("file", F_OK));
	R(rename("none", "more"));
	R(rename("other", "a/moved"));
	R(link("a/moved", "linked"));
	R(stat("linked", &kind));
	IS(kind.st_nlink == 2);
	R(unlink("linked"));
	R(symlink("a/moved", "soft"));
	R(stat("soft", &kind));
	IS(S_ISREG(kind.st_mode));
	R(lstat("soft", &kind));
	IS(S_ISLNK(kind.st_mode));
	memset(buffer, 0, 20);
	R(readlink("soft", buffer, 20));
	puts(buffer);
	names("folder", ".");
	names("below", "a");
	R(close(open("a/../a/./moved", O_RDONLY)));
	R(unlink("soft"));
	R(unlink("none"));
	R(unlink("a/moved"));
	R(pwrite(fd, "still", 5, 0));
	puts(text(fd, 0, 5));
	R(fstat(fd, &kind));
	IS(kind.st_nlink == 0);
	R(close(fd));
	memset(buffer, 'x', 300);
	buffer[300] = 0;
	R(open(buffer, O_RDONLY));
	R(rmdir("a/b"));
	R(rmdir("a"));
	int folder = open(".", O_RDONLY | O_DIRECTORY);
	int below = openat(folder, "by", O_RDWR | O_CREAT, 0600);
	R(write(below, "x", 1));
	R(close(below));
	R(fstatat(folder, "by", &kind, 0));
	IS(kind.st_size == 1);
	R(faccessat(folder, "by", R_OK, 0));
	R(unlinkat(folder, "by", AT_REMOVEDIR));
	R(unlinkat(folder, "by", 0));
	R(mkdirat(folder, "under", 0700));
	R(unlinkat(folder, "under", AT_REMOVEDIR));
	R(openat(999, "by", O_RDONLY));
	R(read(folder, buffer, 10));
	R(close(folder));
	for (int i = 0; i < 40; i++) {
		snprintf(here, sizeof here, "file%02d", i);
		close(open(here, O_WRONLY | O_CREAT, 0600));
	}
	names("many", base);
	for (int i = 0; i < 40; i++) {
		snprintf(here, sizeof here, "file%02d", i);
		unlink(here);
	}

	puts("# Devices");
	fd = open("/dev/null", O_RDWR);
	R(read(fd, buffer, 10));
	R(write(fd, buffer, 10));
	R(fstat(fd, &kind));
	IS(S_ISCHR(kind.st_mode));
	close(fd);
	fd = open("/dev/zero", O_RDWR);
	memset(buffer, 1, 10);
	R(read(fd, buffer, 10));
	IS(buffer[0] == 0 && buffer[9] == 0);
	R(write(fd, buffer, 10));
	close(fd);
	fd = open("/dev/shm/terrane-check", O_RDWR | O_CREAT, 0600);
	R(ftruncate(fd, 8192));
	char *shared = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	shared[5000] = 9;
	R(pread(fd, buffer, 1, 5000));
	IS(buffer[0] == 9);
	R(close(fd));
	R(unlink("/dev/shm/terrane-check"));
	fd = memfd_create("name", MFD_CLOEXEC);
	R(write(fd, "memory", 6));
	puts(text(fd, 0, 6));
	R(fcntl(fd, F_GETFD));
	R(close(fd));
	R(chdir("/"));
	R(rmdir(base));
	R(chdir(base));
	fd = open("/tmp", O_TMPFILE | O_RDWR, 0600);
	if (fd >= 0)
		close(fd);
	puts("# Another root");
	if (geteuid() == 0) {
		R(chroot("/proc/self/exe"));
		R(chroot("/none"));
		R(mkdir("/tmp/terrane-root", 0700) == 0 || errno == EEXIST);
		R(mkdir("/tmp/terrane-root/in", 0700) == 0 || errno == EEXIST);
		IN_CHILD("chroot", {
			char where[64] = "";
			R(chroot("/tmp/terrane-root"));
			R(chdir("/in"));
			OK(getcwd(where, sizeof where));
			puts(where);
			R(access("/in", F_OK));
			R(access("/../../in", F_OK));
			R(access("/tmp", F_OK));
			R(chdir("../../.."));
			OK(getcwd(where, sizeof where));
			puts(where);
		});
		R(rmdir("/tmp/terrane-root/in"));
		R(rmdir("/tmp/terrane-root"));
	}
	struct rlimit limit = { 20, 20 };
	R(setrlimit(RLIMIT_NOFILE, &limit));
	int opened = 0;
	while ((fd = open("/dev/null", O_RDONLY)) >= 0)
		opened++;
	printf("%s, %s\n", opened > 10 ? "some" : "FEW", errno_name(errno));
	return 0;
}
