/* Descriptors of signals, pipes from and to memory and files, and what programs ask about privileges and scheduling. */
#include "check.h"
#include <linux/capability.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define RW (PROT_READ | PROT_WRITE)

static void *lock_it(void *mutex)
{
	pthread_mutex_lock(mutex);
	pthread_mutex_unlock(mutex);
	return NULL;
}

int main(void)
{
	puts("# Signals that are read");
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigaddset(&set, SIGUSR2);
	sigprocmask(SIG_BLOCK, &set, NULL);
	int fd = signalfd(-1, &set, SFD_NONBLOCK);
	struct signalfd_siginfo got[2];
	R(read(fd, got, sizeof got));
	struct pollfd one = { fd, POLLIN, 0 };
	R(poll(&one, 1, 0));
	kill(getpid(), SIGUSR2);
	kill(getpid(), SIGUSR1);
	R(poll(&one, 1, 0));
	R(read(fd, got, 10));
	R(read(fd, got, sizeof got));
	IS(got[0].ssi_signo == SIGUSR1 && got[1].ssi_signo == SIGUSR2 && got[0].ssi_pid == (uint32_t)getpid());
	pid_t parent = getpid();
	pid_t child = fork();
	if (child == 0) {
		usleep(100000);
		kill(parent, SIGUSR1);
		_exit(0);
	}
	R(poll(&one, 1, 10000));
	R(read(fd, got, sizeof got));
	waitpid(child, NULL, 0);
	R(write(fd, got, 8));
	close(fd);

	puts("# Pipes from and to memory and files");
	int a[2], b[2], file = file_of(2);
	if (pipe(a) || pipe(b))
		failed("pipe");
	char text[] = "0123456789", back[32] = "";
	struct iovec part = { text, 10 };
	R(vmsplice(a[1], &part, 1, 0));
	R(tee(a[0], b[1], 4, 0));
	R(read(b[0], back, 32));
	IS(!memcmp(back, "0123", 4));
	loff_t at = 5;
	R(splice(a[0], NULL, file, &at, 6, 0));
	IS(at == 11);
	R(pread(file, back, 6, 5));
	IS(!memcmp(back, "012345", 6));
	at = 5;
	R(splice(file, &at, b[1], NULL, 3, 0));
	R(read(b[0], back, 32));
	R(splice(a[0], NULL, b[1], NULL, 100, 0));
	R(splice(a[0], NULL, b[1], NULL, 100, SPLICE_F_NONBLOCK));
	R(splice(file, &at, file, &at, 3, 0));
	R(splice(a[0], &at, b[1], NULL, 3, 0));
	part.iov_base = back;
	part.iov_len = 32;
	R(vmsplice(b[0], &part, 1, 0));

	puts("# Pairs of sockets");
	int s[2];
	R(socketpair(AF_UNIX, SOCK_STREAM, 0, s));
	R(write(s[0], "hello", 5));
	R(read(s[1], back, 3));
	R(send(s[1], "back", 4, 0));
	R(recv(s[0], back, 32, 0));
	R(read(s[1], back, 32));
	one.fd = s[1];
	R(poll(&one, 1, 0));
	close(s[0]);
	R(read(s[1], back, 32));
	signal(SIGPIPE, SIG_IGN);
	R(write(s[1], "x", 1));
	R(socketpair(AF_UNIX, 77, 0, s));
	int kinds[] = { SOCK_DGRAM, SOCK_SEQPACKET };
	for (int i = 0; i < 2; i++) {
		R(socketpair(AF_UNIX, kinds[i], 0, s));
		R(write(s[0], "hello", 5));
		R(send(s[0], "you", 3, 0));
		R(recv(s[1], back, 32, MSG_PEEK));
		R(read(s[1], back, 2));
		R(read(s[1], back, 32));
		IS(!memcmp(back, "you", 3));
		R(recv(s[1], back, 32, MSG_DONTWAIT));
		one.fd = s[1];
		R(poll(&one, 1, 0));
		R(write(s[1], "back", 4));
		one.fd = s[0];
		R(poll(&one, 1, 0));
		R(read(s[0], back, 32));
		close(s[0]);
		if (kinds[i] == SOCK_SEQPACKET)
			R(read(s[1], back, 32));
		close(s[1]);
	}

	puts("# Privileges and scheduling");
	struct __user_cap_header_struct header = { 0, 0 };
	struct __user_cap_data_struct data[2];
	R(syscall(SYS_capget, &header, NULL));
	IS(header.version == _LINUX_CAPABILITY_VERSION_3);
	R(syscall(SYS_capget, &header, data));
	header.version = 1;
	R(syscall(SYS_capget, &header, data));
	R(setpriority(PRIO_PROCESS, 0, 5));
	R(getpriority(PRIO_PROCESS, 0));
	R(getpriority(7, 0));
	R(getpriority(PRIO_PROCESS, 999999));
	struct sched_param param = { 0 };
	R(sched_getparam(0, &param));
	/* musl has none of these. */
	R(syscall(SYS_sched_setscheduler, 0, SCHED_BATCH, &param));
	R(syscall(SYS_sched_getscheduler, 0));
	param.sched_priority = 100;
	R(syscall(SYS_sched_setscheduler, 0, SCHED_FIFO, &param));
	uint32_t attributes[14] = { 0 };
	R(syscall(SYS_sched_getattr, 0, attributes, 48, 0));
	IS(attributes[0] == 48 && attributes[1] == SCHED_BATCH && attributes[4] == 5);
	R(syscall(SYS_sched_getattr, 0, attributes, 8, 0));

	puts("# Locks that inherit priorities");
	pthread_mutexattr_t how;
	pthread_mutexattr_init(&how);
	R(pthread_mutexattr_setprotocol(&how, PTHREAD_PRIO_INHERIT));
	pthread_mutexattr_settype(&how, PTHREAD_MUTEX_ERRORCHECK);
	pthread_mutex_t mutex;
	R(pthread_mutex_init(&mutex, &how));
	R(pthread_mutex_lock(&mutex));
	R(pthread_mutex_lock(&mutex));
	pthread_t threads[3];
	for (int i = 0; i < 3; i++)
		pthread_create(&threads[i], NULL, lock_it, &mutex);
	usleep(100000);
	R(pthread_mutex_unlock(&mutex));
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	R(pthread_mutex_trylock(&mutex));
	R(pthread_mutex_unlock(&mutex));

	puts("# How many mappings");
	char *w = window(40);
	long limit = 0;
	FILE *setting = fopen("/proc/sys/vm/max_map_count", "r");
	IS(setting && fscanf(setting, "%ld", &limit) == 1 && limit >= 65530);
	if (setting)
		fclose(setting);
	if (limit <= 70000) {
		char *many = mmap(NULL, 140000 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		long done = 0;
		while (done < 70000 && !mprotect(many + 2 * done * PAGE, PAGE, PROT_READ))
			done++;
		IS(errno == ENOMEM && done > 32000 && 2 * done < limit);
		R(munmap(many + 100000 * PAGE, PAGE));
		R(munmap(many + 100000 * PAGE, 40000 * PAGE));
		R(munmap(many, 100000 * PAGE));
	}
	R(mprotect(w, PAGE, PROT_READ));
	return 0;
}
