/*
 * Memory of kinds that not every machine has: secrets (memfd_secret), and pools of huge pages, of which there are none.
 */
#include "check.h"
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define MEMFD_SECRET 447
#define HUGE (MAP_PRIVATE | MAP_ANONYMOUS | 0x40000)
#define HUGE_FILE 4u
#define M2 (1 << 21)

static void secrets(void)
{
	puts("# Secrets");
	R(syscall(MEMFD_SECRET, 1));
	int fd = syscall(MEMFD_SECRET, O_CLOEXEC);
	if (fd < 0) {
		/* Linux can be told to have none. */
		exit(LACKING);
	}
	R(fcntl(fd, F_GETFD));
	R(ftruncate(fd, 2 * PAGE));
	R(ftruncate(fd, 3 * PAGE));
	R(write(fd, "x", 1));
	char byte = 'a';
	R(read(fd, &byte, 1));
	R(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED ? -1 : 0);
	char *secret = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (secret == MAP_FAILED)
		failed("mmap");
	strcpy(secret, "nobody knows");
	puts(secret);
	IS(field("/proc/self/status", "VmLck:") >= 8);
	char copy[16] = "";
	struct iovec here = { copy, 12 }, there = { secret, 12 };
	R(process_vm_readv(getpid(), &here, 1, &there, 1, 0));
	there.iov_base = &byte;
	there.iov_len = 1;
	R(process_vm_readv(getpid(), &here, 1, &there, 1, 0));
	int memory = open("/proc/self/mem", O_RDWR);
	R(pread(memory, copy, 12, (off_t)secret));
	R(pwrite(memory, copy, 12, (off_t)secret));
	close(memory);
	/* What the program gives away itself is no secret. */
	int pipes[2];
	R(pipe(pipes));
	R(write(pipes[1], secret, 12));
	IN_CHILD("a child", puts(secret));
	R(munmap(secret, 2 * PAGE));
	close(fd);
}

int main(void)
{
	puts("# Huge pages");
	R(mmap(NULL, M2, PROT_READ, HUGE, -1, 0) == MAP_FAILED ? -1 : 0);
	R(mmap(NULL, PAGE, PROT_READ, HUGE, -1, 0) == MAP_FAILED ? -1 : 0);
	R(mmap(NULL, 0, PROT_READ, HUGE, -1, 0) == MAP_FAILED ? -1 : 0);
	R(mmap(NULL, M2, PROT_READ, HUGE | 21 << 26, -1, 0) == MAP_FAILED ? -1 : 0);
	R(mmap(NULL, M2, PROT_READ, HUGE | 16 << 26, -1, 0) == MAP_FAILED ? -1 : 0);
	int fd = syscall(SYS_memfd_create, "huge", HUGE_FILE);
	IS(fd >= 0);
	R(ftruncate(fd, M2));
	R(ftruncate(fd, PAGE));
	R(mmap(NULL, M2, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0);
	R(mmap(NULL, M2, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED ? -1 : 0);
	R(write(fd, "x", 1));
	R(fallocate(fd, 0, 0, M2));
	close(fd);
	OK(close(syscall(SYS_memfd_create, "huge", HUGE_FILE | 21u << 26)));
	R(syscall(SYS_memfd_create, "huge", HUGE_FILE | 16u << 26));
	R(syscall(SYS_memfd_create, "huge", 16u << 26));
	R(shmget(IPC_PRIVATE, M2, 04000 | 0600));
	R(shmget(IPC_PRIVATE, M2, 04000 | 0600 | 16 << 26));
	fd = file_of(1);
	R(mmap(NULL, M2, PROT_READ, MAP_SHARED | 0x40000, fd, 0) == MAP_FAILED ? -1 : 0);
	secrets();
	return 0;
}
