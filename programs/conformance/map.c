/* mmap and munmap: where, what, what not, and what is there then. */
#include "check.h"

#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)
#define RW (PROT_READ | PROT_WRITE)

int main(void)
{
	see_faults();
	char *w = window(64);

	puts("# Arguments");
	R(mmap(NULL, 0, RW, ANON, -1, 0));
	R(mmap(NULL, -1, RW, ANON, -1, 0));
	R(mmap(NULL, PAGE, RW, MAP_ANONYMOUS, -1, 0));
	R(mmap(NULL, PAGE, RW, MAP_PRIVATE | MAP_SHARED | MAP_ANONYMOUS | 4, -1, 0));
	R(mmap(NULL, PAGE, RW, MAP_PRIVATE, -1, 0));
	R(mmap(NULL, PAGE, RW, MAP_PRIVATE, 77, 0));
	R(mmap(w + 1, PAGE, RW, ANON | MAP_FIXED, -1, 0));
	R(mmap((void *)-PAGE, PAGE, RW, ANON | MAP_FIXED, -1, 0));
	R(mmap((void *)0x7ffffffff000, PAGE, RW, ANON | MAP_FIXED, -1, 0));
	R(munmap(w + 1, PAGE));
	R(munmap(w, 0));
	R(munmap(w, -1));
	R(munmap((void *)-PAGE, PAGE));
	R(munmap(w, 4 * PAGE));

	puts("# Places");
	IS(mmap(w, PAGE, RW, ANON, -1, 0) == w);
	IS(mmap(w, PAGE, RW, ANON, -1, 0) != w);
	R(mmap(w, PAGE, RW, ANON | MAP_FIXED_NOREPLACE, -1, 0));
	*w = 7;
	IS(mmap(w, PAGE, RW, ANON | MAP_FIXED, -1, 0) == w);
	LOAD(w);
	char *low = mmap(NULL, PAGE, RW, ANON | MAP_32BIT, -1, 0);
	IS((uintptr_t)low < 0x80000000ul);
	char *one = map(PAGE, RW), *two = map(PAGE, RW);
	IS(two == one - PAGE);
	IS(((uintptr_t)map(4 * MIB, RW) & (PAGE - 1)) == 0);

	puts("# Splits and merges");
	R(munmap(w, 64 * PAGE));
	map_at(w, 16, RW);
	list("sixteen", w, 64);
	R(munmap(w + 4 * PAGE, 4 * PAGE));
	list("a hole", w, 64);
	map_at(w + 4 * PAGE, 4, RW);
	list("filled", w, 64);
	map_at(w + 16 * PAGE, 4, PROT_READ);
	map_at(w + 20 * PAGE, 4, RW);
	map_at(w + 24 * PAGE, 4, RW | PROT_EXEC);
	map_at(w + 28 * PAGE, 4, PROT_NONE);
	list("all sorts", w, 64);
	R(munmap(w + 14 * PAGE, 12 * PAGE));
	list("across", w, 64);
	R(munmap(w, 64 * PAGE));
	list("nothing", w, 64);

	puts("# Faults");
	LOAD(w);
	STORE(w, 1);
	map_at(w, 4, RW);
	map_at(w + 4 * PAGE, 4, PROT_READ);
	map_at(w + 8 * PAGE, 4, PROT_NONE);
	LOAD(w + 5);
	STORE(w + 5, 9);
	LOAD(w + 5);
	LOAD(w + 4 * PAGE + 5);
	STORE(w + 4 * PAGE + 5, 9);
	LOAD(w + 8 * PAGE + 5);
	STORE(w + 8 * PAGE + 5, 9);
	LOAD(w + 12 * PAGE);
	LOAD(NULL);
	LOAD(8);
	STORE(0xffffffff80000000, 1);
	LOAD(0x7ffffffff000);
	R(munmap(w, 64 * PAGE));

	puts("# Files");
	int fd = file_of(3);
	R(ftruncate(fd, 2 * PAGE + 100));
	char *shared = mmap(w, 8 * PAGE, RW, MAP_SHARED | MAP_FIXED, fd, 0);
	char *private = mmap(w + 16 * PAGE, 8 * PAGE, RW, MAP_PRIVATE | MAP_FIXED, fd, 0);
	list("files", w, 64);
	LOAD(shared);
	LOAD(private + PAGE);
	LOAD(shared + 2 * PAGE + 99);
	LOAD(shared + 2 * PAGE + 100);
	LOAD(shared + 2 * PAGE + 4095);
	LOAD(shared + 3 * PAGE);
	STORE(private + 3 * PAGE, 1);
	STORE(shared + 5, 42);
	LOAD(private + 5);
	STORE(private + 5, 43);
	LOAD(shared + 5);
	char byte;
	R(pread(fd, &byte, 1, 5));
	IS(byte == 42);
	byte = 44;
	R(pwrite(fd, &byte, 1, 6));
	LOAD(shared + 6);
	LOAD(private + 6);
	R(ftruncate(fd, PAGE));
	LOAD(shared + PAGE);
	LOAD(private + PAGE);
	LOAD(private + 5);
	R(ftruncate(fd, 3 * PAGE));
	LOAD(shared + PAGE);
	LOAD(private + PAGE);
	char *second = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 2 * PAGE);
	LOAD(second);
	R(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 100));
	R(close(fd));
	LOAD(shared + 5);
	int pipes[2];
	R(pipe(pipes));
	R(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, pipes[0], 0));
	fd = open("/dev/zero", O_RDWR);
	char *zero = mmap(NULL, PAGE, RW, MAP_PRIVATE, fd, 0);
	STORE(zero, 3);
	LOAD(zero);
	close(fd);
	fd = open("/tmp", O_RDONLY);
	R(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0));
	close(fd);
	char path[64];
	snprintf(path, sizeof path, "/tmp/terrane-map-%d", (int)getpid());
	fd = open(path, O_RDWR | O_CREAT, 0600);
	R(write(fd, path, 10));
	close(fd);
	fd = open(path, O_RDONLY);
	R(mmap(NULL, PAGE, RW, MAP_SHARED, fd, 0));
	OK(mmap(NULL, PAGE, RW, MAP_PRIVATE, fd, 0));
	char *reading = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
	R(mprotect(reading, PAGE, RW));
	close(fd);
	fd = open(path, O_WRONLY);
	R(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0));
	close(fd);
	unlink(path);

	puts("# Shared with a child");
	char *both = mmap(NULL, 2 * PAGE, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	char *own = map(2 * PAGE, RW);
	both[0] = own[0] = 1;
	IN_CHILD("child", both[0] = own[0] = 2; both[PAGE] = own[PAGE] = 3);
	LOAD(both);
	LOAD(both + PAGE);
	LOAD(own);
	LOAD(own + PAGE);

	puts("# Populate, large and small");
	char *populated = mmap(NULL, 64 * PAGE, RW, ANON | MAP_POPULATE, -1, 0);
	unsigned char there[64] = { 0 };
	R(mincore(populated, 64 * PAGE, there));
	int count = 0;
	for (int i = 0; i < 64; i++)
		count += there[i] & 1;
	IS(count == 64);
	char *large = mmap(NULL, 1ul << 40, RW, ANON | MAP_NORESERVE, -1, 0);
	IS(large != MAP_FAILED);
	large[1ul << 39] = 5;
	LOAD(large + (1ul << 39));
	R(munmap(large, 1ul << 40));
	R(mmap(NULL, 1ul << 47, RW, ANON | MAP_NORESERVE, -1, 0));
	return 0;
}
