/* Random calls about files, by a fixed sequence: names, descriptors, bytes, mappings. Each says what it answered, and a sum of what it read. */
#include "check.h"
#include <dirent.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/uio.h>

static unsigned long state = 20240607;

static unsigned below(unsigned limit)
{
	state = state * 6364136223846793005UL + 1442695040888963407UL;
	return (unsigned)(state >> 33) % limit;
}

static unsigned sum(const char *bytes, long count)
{
	unsigned sum = 1;
	for (long i = 0; i < count; i++)
		sum = sum * 31 + (unsigned char)bytes[i];
	return sum;
}

/* Files, folders, links that may and may not be there, and paths that lead through what is none. */
static const char *const names[] = { "a", "b", "c", "d", "d/a", "d/b", "e", "e/a", "d/e", "d/e/f", "./a", "../storm/b",
				     "d/../c", "e/", "a/", "d/.", "l", "l/a", "", "nope/x", "m" };
static const int ways[] = { O_RDONLY, O_WRONLY, O_RDWR, O_RDWR | O_CREAT, O_RDWR | O_CREAT | O_EXCL, O_RDWR | O_CREAT | O_TRUNC,
			    O_WRONLY | O_APPEND | O_CREAT, O_RDONLY | O_DIRECTORY, O_PATH, O_RDONLY | O_NOFOLLOW,
			    O_PATH | O_NOFOLLOW, O_RDONLY | O_TRUNC };
#define COUNT(array) (sizeof array / sizeof *array)

static char given[70000], got[70000];
static int files[12];

static int by_name(const void *one, const void *other)
{
	return strcmp(*(char *const *)one, *(char *const *)other);
}

static void list_names(const char *path)
{
	char *all[64];
	int count = 0;
	DIR *folder = opendir(path);
	if (!folder) {
		printf(" %s", errno_name(errno));
		return;
	}
	for (struct dirent *entry; count < 64 && (entry = readdir(folder));)
		all[count++] = strdup(entry->d_name);
	closedir(folder);
	qsort(all, count, sizeof *all, by_name);
	for (int i = 0; i < count; i++) {
		printf(" %s", all[i]);
		free(all[i]);
	}
}

static void describe(const struct stat *found)
{
	int folder = S_ISDIR(found->st_mode);
	printf(" %o %ld %ld", found->st_mode & (S_IFMT | 0777), folder ? 0 : (long)found->st_size, folder ? 0 : (long)found->st_nlink);
}

/* The length of a regular file that is not empty, or 0. */
static long length_of(int file)
{
	struct stat found;
	return fstat(file, &found) == 0 && S_ISREG(found.st_mode) ? found.st_size : 0;
}

static long map_and(int file, int private, int store)
{
	long length = length_of(file);
	if (!length)
		return 0;
	int protection = store ? PROT_READ | PROT_WRITE : PROT_READ;
	char *at = mmap(NULL, length, protection, private ? MAP_PRIVATE : MAP_SHARED, file, 0);
	if (at == MAP_FAILED)
		return -1;
	for (int i = 0; store && i < 20; i++)
		at[below(length)] = below(256);
	printf(" %u", sum(at, length));
	return munmap(at, length);
}

static long step(int kind, const char *one, const char *other, int place)
{
	struct stat found;
	char target[64];
	int file = files[place];
	long result;
	switch (kind) {
	case 0: case 1: case 2:
		if (file >= 0)
			close(file);
		files[place] = open(one, ways[below(COUNT(ways))], 0644);
		return files[place] < 0 ? -1 : 0;
	case 3: return mkdir(one, 0755);
	case 4: return rmdir(one);
	case 5: return unlink(one);
	case 6: return rename(one, other);
	case 7: return link(one, other);
	case 8: return symlink(below(2) ? "d" : below(2) ? "a" : "m", other);
	case 9: case 10: case 11:
		result = kind == 9 ? stat(one, &found) : kind == 10 ? lstat(one, &found) : fstat(file, &found);
		if (result == 0)
			describe(&found);
		return result;
	case 12: case 13: return write(file, given + below(1000), below(below(2) ? 9000 : 60000));
	case 14: case 15:
		result = read(file, got, below(below(2) ? 9000 : 60000));
		if (result > 0)
			printf(" %u", sum(got, result));
		return result;
	case 16: return pwrite(file, given + below(1000), below(9000), (long)below(100000) - (below(40) ? 0 : 100001));
	case 17:
		result = pread(file, got, below(9000), below(100000));
		if (result > 0)
			printf(" %u", sum(got, result));
		return result;
	case 18: return length_of(file) ? lseek(file, (long)below(50000) - below(3) * 1000, below(3)) : 0;
	case 19: return ftruncate(file, (long)below(60000) - (below(30) ? 0 : 60001));
	case 20: return truncate(one, below(30000));
	case 21: list_names(below(2) ? "." : "d"); return 0;
	case 22:
		result = readlink(one, target, sizeof target - 1);
		if (result > 0)
			printf(" %.*s", (int)result, target);
		return result;
	case 23: {
		struct iovec parts[] = { { got, below(100) }, { got + 200, below(5000) }, { got + 9000, below(100) } };
		memset(got, 0, 10000);
		result = readv(file, parts, 3);
		if (result > 0)
			printf(" %u", sum(got, 10000));
		return result;
	}
	case 24: {
		struct iovec parts[] = { { given + below(50), below(100) }, { given + 200, below(9000) } };
		return writev(file, parts, 2);
	}
	case 25: return map_and(file, below(3) == 0, 0);
	case 26: return map_and(file, 0, 1);
	case 27: return map_and(file, 1, 1);
	case 28: {
		off_t at = below(5000);
		return sendfile(file, files[below(12)], below(2) ? &at : NULL, below(20000));
	}
	case 29: {
		int copy = dup(file), to = below(12);
		if (copy < 0)
			return -1;
		if (files[to] >= 0)
			close(files[to]);
		files[to] = copy;
		return 0;
	}
	default: return syscall(SYS_renameat2, AT_FDCWD, one, AT_FDCWD, other, 1 /* RENAME_NOREPLACE */);
	}
}

int main(void)
{
	char base[] = "/tmp/terrane-storm-XXXXXX";
	if (!mkdtemp(base) || chdir(base) || mkdir("storm", 0755) || chdir("storm"))
		failed("a folder");
	umask(022);
	for (size_t i = 0; i < sizeof given; i++)
		given[i] = below(256);
	for (size_t i = 0; i < COUNT(files); i++)
		files[i] = -1;
	for (int i = 0; i < 3000; i++) {
		const char *one = names[below(COUNT(names))], *other = names[below(COUNT(names))];
		int kind = below(31), place = below(COUNT(files));
		printf("%d: %d %s %s %d:", i, kind, one, other, place);
		errno = 0;
		long result = step(kind, one, other, place);
		if (result < 0)
			printf(" %s\n", errno_name(errno));
		else
			printf(" %ld\n", result);
	}
	if (chdir("/"))
		failed("chdir");
	return 0;
}
