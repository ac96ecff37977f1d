/* userfaultfd: a program resolves its own faults. Left out where the kernel has not got it, or does not let it be used. */
#include "check.h"
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#define RW (PROT_READ | PROT_WRITE)

static int uffd;
static char *page;
static volatile char *w;
static volatile int handled;

static void *handle(void *unused)
{
	(void)unused;
	for (;;) {
		struct pollfd one = { uffd, POLLIN, 0 };
		if (poll(&one, 1, -1) != 1)
			continue;
		struct uffd_msg message;
		if (read(uffd, &message, sizeof message) != sizeof message)
			continue;
		if (message.event != UFFD_EVENT_PAGEFAULT)
			continue;
		unsigned long at = message.arg.pagefault.address & -PAGE;
		if ((volatile char *)at == w + 15 * PAGE)
			return NULL;
		handled++;
		if (message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) {
			struct uffdio_writeprotect wp = { { at, PAGE }, 0 };
			ioctl(uffd, UFFDIO_WRITEPROTECT, &wp);
		} else if ((at - (unsigned long)w) / PAGE % 2) {
			struct uffdio_zeropage zero = { { at, PAGE }, 0, 0 };
			ioctl(uffd, UFFDIO_ZEROPAGE, &zero);
		} else {
			memset(page, 'A' + (at - (unsigned long)w) / PAGE, PAGE);
			struct uffdio_copy copy = { at, (unsigned long)page, PAGE, 0, 0 };
			ioctl(uffd, UFFDIO_COPY, &copy);
		}
	}
}

int main(void)
{
	uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	if (uffd < 0)
		return LACKING;
	see_faults();
	w = map(16 * PAGE, RW);
	page = map(PAGE, RW);
	page[0] = 0;
	struct uffdio_api api = { .api = UFFD_API, .features = 1ul << 60 };
	struct uffdio_register part = { { (unsigned long)w, 8 * PAGE }, UFFDIO_REGISTER_MODE_MISSING, 0 };
	puts("# Before the features are told");
	R(ioctl(uffd, UFFDIO_REGISTER, &part));
	char message[32];
	R(read(uffd, message, 32));
	R(ioctl(uffd, UFFDIO_API, &api));
	api = (struct uffdio_api){ .api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP };
	R(ioctl(uffd, UFFDIO_API, &api));
	R(ioctl(uffd, UFFDIO_API, &api));
	puts("# Registering");
	R(ioctl(uffd, UFFDIO_REGISTER, &part));
	IS((part.ioctls & 1 << _UFFDIO_COPY) && (part.ioctls & 1 << _UFFDIO_ZEROPAGE));
	part.mode = 0;
	R(ioctl(uffd, UFFDIO_REGISTER, &part));
	part.mode = UFFDIO_REGISTER_MODE_MISSING;
	part.range.start++;
	R(ioctl(uffd, UFFDIO_REGISTER, &part));
	R(read(uffd, message, 32));
	R(read(uffd, message, 8));
	puts("# Faults");
	pthread_t thread;
	pthread_create(&thread, NULL, handle, NULL);
	IS(w[0] == 'A' && w[PAGE] == 0 && w[2 * PAGE] == 'C');
	w[4 * PAGE + 5] = 1;
	IS(w[4 * PAGE] == 'E' && w[4 * PAGE + 5] == 1);
	IS(w[9 * PAGE] == 0);
	IS(handled == 4);
	puts("# By a call of the kernel's");
	int zero = open("/dev/zero", O_RDONLY);
	R(read(zero, (char *)w + 6 * PAGE, 10));
	IS(w[6 * PAGE + 9] == 0 && w[6 * PAGE + 10] == 'G');
	puts("# What is there");
	struct uffdio_copy copy = { (unsigned long)w, (unsigned long)page, PAGE, 0, 0 };
	R(ioctl(uffd, UFFDIO_COPY, &copy));
	IS(copy.copy == -EEXIST);
	copy.dst = (unsigned long)w + 9 * PAGE;
	R(ioctl(uffd, UFFDIO_COPY, &copy));
	copy.dst = (unsigned long)w + 7 * PAGE;
	copy.src = 16;
	R(ioctl(uffd, UFFDIO_COPY, &copy));
	R(madvise((char *)w, PAGE, MADV_DONTNEED));
	IS(w[0] == 'A');
	puts("# Write protection");
	struct uffdio_register both = { { (unsigned long)w, 8 * PAGE },
		UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP, 0 };
	R(ioctl(uffd, UFFDIO_REGISTER, &both));
	struct uffdio_writeprotect wp = { { (unsigned long)w, PAGE }, UFFDIO_WRITEPROTECT_MODE_WP };
	R(ioctl(uffd, UFFDIO_WRITEPROTECT, &wp));
	int before = handled;
	IS(w[0] == 'A' && handled == before);
	w[0] = 'Z';
	IS(handled == before + 1 && w[0] == 'Z');
	puts("# The end");
	struct uffdio_range range = { (unsigned long)w, 8 * PAGE };
	R(ioctl(uffd, UFFDIO_UNREGISTER, &range));
	IS(w[5 * PAGE] == 0 && handled == before + 1);
	part = (struct uffdio_register){ { (unsigned long)w + 14 * PAGE, 2 * PAGE }, UFFDIO_REGISTER_MODE_MISSING, 0 };
	R(ioctl(uffd, UFFDIO_REGISTER, &part));
	fflush(stdout);
	pid_t child = fork();
	if (child == 0) {
		/* Of its parent's handlers a child has none. */
		IS(w[15 * PAGE] == 0);
		fflush(stdout);
		/* A fault that nobody resolves does not keep its process from being killed. */
		int own = syscall(SYS_userfaultfd, 0);
		api = (struct uffdio_api){ .api = UFFD_API };
		ioctl(own, UFFDIO_API, &api);
		part = (struct uffdio_register){ { (unsigned long)w + 8 * PAGE, PAGE }, UFFDIO_REGISTER_MODE_MISSING, 0 };
		ioctl(own, UFFDIO_REGISTER, &part);
		w[8 * PAGE] = 1;
		_exit(1);
	}
	usleep(500000);
	int status;
	R(kill(child, SIGKILL));
	IS(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
	return 0;
}
