/* The memory of other processes, descriptors of processes, what /proc says of pages, shared memory of System V. */
#include "check.h"
#include <poll.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define RW (PROT_READ | PROT_WRITE)

static uint64_t page_of(int fd, const char *at)
{
	uint64_t word = 0;
	if (pread(fd, &word, 8, (uintptr_t)at / PAGE * 8) != 8)
		return ~0ul;
	return word >> 61;
}

int main(void)
{
	see_faults();
	puts("# Memory of another process");
	char *there = map(4 * PAGE, RW), *here = map(4 * PAGE, RW);
	memset(there, 'a', 4 * PAGE);
	unmap(there + 2 * PAGE, PAGE);
	int go[2];
	if (pipe(go))
		failed("pipe");
	pid_t child = fork();
	if (child == 0) {
		char c;
		memset(there, 'b', PAGE);
		there[PAGE] = 'c';
		c = read(go[0], &c, 1);
		_exit(there[5] == 'z' ? 7 : 8);
	}
	usleep(200000);
	struct iovec own[2] = { { here, 10 }, { here + PAGE, 3 * PAGE } };
	struct iovec other[2] = { { there, 10 }, { there + PAGE, 2 * PAGE } };
	R(process_vm_readv(child, own, 2, other, 2, 0));
	IS(here[0] == 'b' && here[9] == 'b' && here[PAGE] == 'c' && here[PAGE + 1] == 'a');
	strcpy(here, "xxxxxz");
	own[0].iov_len = 6;
	R(process_vm_writev(child, own, 1, other, 1, 0));
	R(process_vm_readv(child, own, 1, other, 1, 1));
	R(process_vm_readv(child, own, 2000, other, 1, 0));
	other[0].iov_base = there + 2 * PAGE;
	R(process_vm_readv(child, own, 1, other, 1, 0));
	R(process_vm_readv(child, own, 0, other, 1, 0));
	char name[64];
	snprintf(name, sizeof name, "/proc/%d/mem", child);
	int mem = open(name, O_RDWR);
	R(pread(mem, here, 6, (long)there));
	IS(!memcmp(here, "xxxxxz", 6));
	R(pread(mem, here, 6, (long)there + 2 * PAGE));
	R(pwrite(mem, "y", 1, (long)there + 4));
	close(mem);

	puts("# A descriptor of a process");
	int fd = syscall(SYS_pidfd_open, child, 0);
	IS(fd >= 0);
	struct pollfd one = { fd, POLLIN, 0 };
	R(poll(&one, 1, 0));
	R(syscall(SYS_pidfd_send_signal, fd, 0, NULL, 0));
	R(syscall(SYS_pidfd_open, child, 1));
	R(syscall(SYS_pidfd_open, -1, 0));
	R(write(go[1], "g", 1));
	R(poll(&one, 1, 10000));
	int status = 0;
	IS(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
	R(syscall(SYS_pidfd_send_signal, fd, 0, NULL, 0));
	other[0].iov_base = there;
	R(process_vm_readv(child, own, 1, other, 1, 0));
	close(fd);

	puts("# Pages");
	int pages = open("/proc/self/pagemap", O_RDONLY);
	char *fresh = map(4 * PAGE, RW);
	fresh[PAGE] = 1;
	IS(page_of(pages, fresh) == 0);
	IS(page_of(pages, fresh + PAGE) == 4);
	int file = file_of(2);
	char *shared = mmap(NULL, 2 * PAGE, RW, MAP_SHARED, file, 0);
	shared[0] = 1;
	IS(page_of(pages, shared) == 5);
	uint64_t words[4];
	R(pread(pages, words, 32, (uintptr_t)fresh / PAGE * 8));
	R(pread(pages, words, 7, 0));
	R(pread(pages, words, 8, 1));
	R(write(pages, words, 8));

	puts("# Segments");
	int id = shmget(IPC_PRIVATE, 3 * PAGE - 5, IPC_CREAT | 0600);
	IS(id >= 0);
	char *first = shmat(id, NULL, 0), *second = shmat(id, NULL, SHM_RDONLY);
	IS(first != (void *)-1 && second != (void *)-1);
	first[2 * PAGE] = 'q';
	IS(second[2 * PAGE] == 'q');
	STORE(second, 1);
	struct shmid_ds about;
	R(shmctl(id, IPC_STAT, &about));
	IS(about.shm_segsz == 3 * PAGE - 5 && about.shm_nattch == 2 && about.shm_cpid == getpid());
	IN_CHILD("child", IS(first[2 * PAGE] == 'q'); first[1] = 'r'; R(shmdt(first)); R(shmdt(first)));
	IS(second[1] == 'r');
	R((long)shmat(id, first + 1, 0) == -1 ? -1 : 0);
	R(shmdt(second + PAGE));
	R(shmctl(id, IPC_RMID, NULL));
	R(shmctl(id, IPC_STAT, &about));
	IS((about.shm_perm.mode & 01000) != 0);
	R(shmdt(second));
	R(shmdt(first));
	R(shmctl(id, IPC_STAT, &about));
	LOAD(first);
	R(shmget(0x5eed1234, PAGE, 0));
	id = shmget(0x5eed1234, PAGE, IPC_CREAT | IPC_EXCL | 0600);
	IS(id >= 0 && shmget(0x5eed1234, PAGE, 0) == id);
	R(shmget(0x5eed1234, PAGE, IPC_CREAT | IPC_EXCL));
	R(shmget(0x5eed1234, 2 * PAGE, 0));
	R(shmget(IPC_PRIVATE, 0, 0600));
	R(shmctl(id, IPC_RMID, NULL));
	R(shmdt(NULL));
	R(shmdt((void *)-4096L));

	puts("# Parts of a file elsewhere");
	char *parts = mmap(NULL, 2 * PAGE, RW, MAP_SHARED, file, 0);
	parts[0] = '0';
	parts[PAGE] = '1';
	R(syscall(SYS_remap_file_pages, parts, PAGE, 0, 1, 0));
	IS(parts[0] == '1' && parts[PAGE] == '1');
	R(syscall(SYS_remap_file_pages, parts, PAGE, PROT_READ, 1, 0));
	R(syscall(SYS_remap_file_pages, fresh, PAGE, 0, 1, 0));
	return 0;
}
