/* Signals: handlers, masks, queues, alternate stacks, and what a program learns of its own faults. */
#include "check.h"
#include <sys/syscall.h>
#include <ucontext.h>

static volatile sig_atomic_t got, depth, most, order[8], orders;
static volatile int last_code, last_pid_ok, last_value;
static char *volatile last_at;

static void count(int number)
{
	got++;
	order[orders++ % 8] = number;
}

static void nested(int number)
{
	depth++;
	if (depth > most)
		most = depth;
	if (++got < 3)
		raise(number);
	depth--;
}

static void informed(int number, siginfo_t *info, void *context)
{
	(void)context;
	(void)number;
	got++;
	last_code = info->si_code;
	last_pid_ok = info->si_pid == getpid();
	last_value = info->si_value.sival_int;
}

static void skip(int number, siginfo_t *info, void *context)
{
	ucontext_t *state = context;
	last_code = info->si_code;
	last_at = info->si_addr;
	got = number;
	/* The faulting instruction is two bytes long. */
	state->uc_mcontext.gregs[REG_RIP] += 2;
}

static void repair(int number, siginfo_t *info, void *context)
{
	(void)number;
	(void)context;
	got++;
	char *page = (char *)((uintptr_t)info->si_addr & -PAGE);
	if (mprotect(page, PAGE, PROT_READ | PROT_WRITE))
		_exit(99);
	page[1] = 77;
}

static void where(int number)
{
	char here;
	stack_t now_on;
	(void)number;
	sigaltstack(NULL, &now_on);
	got = (now_on.ss_flags & SS_ONSTACK) && &here >= (char *)now_on.ss_sp && &here < (char *)now_on.ss_sp + now_on.ss_size;
}

static void jump(int number)
{
	(void)number;
	siglongjmp(back, 1);
}

static int endless(int depth_)
{
	volatile char room[4096];
	room[0] = depth_;
	/* It never ends, but that is not to be seen. */
	return nowhere ? endless(depth_ + 1) + room[0] : 0;
}

static void handle(int number, void (*handler)(int), int flags)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
	if (sigaction(number, &action, NULL))
		failed("sigaction");
}

static void inform(int number, void (*handler)(int, siginfo_t *, void *), int flags)
{
	struct sigaction action = { .sa_sigaction = handler, .sa_flags = flags | SA_SIGINFO };
	if (sigaction(number, &action, NULL))
		failed("sigaction");
}

static void *tell(void *with)
{
	pause_for(20);
	pthread_kill(*(pthread_t *)with, SIGUSR1);
	return NULL;
}

int main(void)
{
	sigset_t set, old, empty;
	struct sigaction action;
	siginfo_t info;
	sigemptyset(&empty);

	puts("# Arguments");
	R(kill(getpid(), 0));
	R(kill(getpid(), 65));
	R(kill(1 << 22, SIGTERM));
	R(syscall(SYS_tgkill, getpid(), getpid(), 0));
	R(syscall(SYS_tgkill, getpid(), -1, SIGTERM));
	R(syscall(SYS_tgkill, getpid(), 1 << 22, 0));
	action.sa_handler = SIG_IGN;
	R(sigaction(SIGKILL, &action, NULL));
	R(sigaction(SIGSTOP, &action, NULL));
	R(sigaction(0, NULL, &action));
	R(sigaction(65, NULL, &action));
	R(syscall(SYS_rt_sigprocmask, 99, &set, NULL, 8));
	R(syscall(SYS_rt_sigprocmask, SIG_BLOCK, &set, NULL, 4));

	puts("# Handlers and masks");
	handle(SIGUSR1, count, 0);
	handle(SIGUSR2, count, 0);
	R(raise(SIGUSR1));
	IS(got == 1);
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigaddset(&set, SIGUSR2);
	R(sigprocmask(SIG_BLOCK, &set, &old));
	raise(SIGUSR1);
	raise(SIGUSR1);
	raise(SIGUSR2);
	IS(got == 1);
	sigpending(&set);
	IS(sigismember(&set, SIGUSR1) && sigismember(&set, SIGUSR2) && !sigismember(&set, SIGTERM));
	got = orders = 0;
	R(sigprocmask(SIG_SETMASK, &old, NULL));
	IS(got == 2);
	sigpending(&set);
	IS(!sigismember(&set, SIGUSR1));
	handle(SIGUSR1, count, SA_RESETHAND);
	raise(SIGUSR1);
	sigaction(SIGUSR1, NULL, &action);
	IS(action.sa_handler == SIG_DFL);
	handle(SIGUSR1, nested, SA_NODEFER);
	got = 0;
	raise(SIGUSR1);
	IS(most == 3);
	most = got = 0;
	handle(SIGUSR1, nested, 0);
	raise(SIGUSR1);
	IS(most == 1);

	puts("# Queued values");
	inform(SIGRTMIN, informed, 0);
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN);
	sigprocmask(SIG_BLOCK, &set, NULL);
	got = 0;
	for (int i = 1; i <= 3; i++)
		if (sigqueue(getpid(), SIGRTMIN, (union sigval){ .sival_int = i * 11 }))
			failed("sigqueue");
	sigprocmask(SIG_UNBLOCK, &set, NULL);
	IS(got == 3);
	IS(last_value == 33 && last_code == SI_QUEUE && last_pid_ok);
	kill(getpid(), SIGRTMIN);
	IS(last_code == SI_USER && last_pid_ok);
	syscall(SYS_tgkill, getpid(), getpid(), SIGRTMIN);
	IS(last_code == SI_TKILL);

	puts("# Waiting");
	sigprocmask(SIG_BLOCK, &set, NULL);
	sigqueue(getpid(), SIGRTMIN, (union sigval){ .sival_int = 5 });
	IS(sigtimedwait(&set, &info, &(struct timespec){ 1, 0 }) == SIGRTMIN && info.si_value.sival_int == 5);
	R(sigtimedwait(&set, &info, &(struct timespec){ 0, 1000000 }));
	sigprocmask(SIG_UNBLOCK, &set, NULL);
	handle(SIGUSR1, count, 0);
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, &old);
	got = 0;
	raise(SIGUSR1);
	R(sigsuspend(&empty));
	IS(got == 1);
	sigprocmask(SIG_SETMASK, &old, NULL);
	pthread_t me = pthread_self(), thread = start(tell, &me);
	R(pause());
	join(thread);
	int pipes[2];
	char byte;
	if (pipe(pipes))
		failed("pipe");
	thread = start(tell, &me);
	R(read(pipes[0], &byte, 1));
	join(thread);
	IN_CHILD("restart", {
		handle(SIGUSR1, count, SA_RESTART);
		pid_t parent = getpid();
		got = 0;
		if (fork() == 0) {
			pause_for(20);
			kill(parent, SIGUSR1);
			pause_for(20);
			if (write(pipes[1], "x", 1) != 1)
				_exit(1);
			_exit(0);
		}
		R(read(pipes[0], &byte, 1));
		IS(got == 1);
	});
	thread = start(tell, &me);
	struct timespec left, time = { 5, 0 };
	R(nanosleep(&time, &left));
	IS(left.tv_sec == 4);
	join(thread);

	puts("# Children");
	inform(SIGCHLD, informed, 0);
	got = 0;
	fflush(stdout);
	pid_t child = fork();
	if (child == 0)
		_exit(0);
	while (!got)
		pause_for(1);
	IS(last_code == CLD_EXITED);
	R(waitpid(child, NULL, WNOHANG) == child);
	handle(SIGCHLD, SIG_IGN, 0);
	child = fork();
	if (child == 0)
		_exit(0);
	R(waitpid(child, NULL, 0));
	handle(SIGCHLD, SIG_DFL, 0);
	child = fork();
	if (child == 0) {
		raise(SIGSTOP);
		_exit(4);
	}
	int status;
	IS(waitpid(child, &status, WUNTRACED) == child);
	ended("child", status);
	R(kill(child, SIGCONT));
	IS(waitpid(child, &status, 0) == child);
	ended("child", status);

	puts("# Faults of one's own");
	char *page = map(2 * PAGE, PROT_READ);
	inform(SIGSEGV, skip, 0);
	inform(SIGBUS, skip, 0);
	inform(SIGILL, skip, 0);
	inform(SIGFPE, skip, 0);
	/* mov byte [rax], al: two bytes. */
	__asm__ volatile(".byte 0x88, 0x00" : : "a"(page + 10) : "memory");
	printf("signal %d code %d %s\n", got, last_code, last_at == page + 10 ? "there" : "ELSEWHERE");
	munmap(page, 2 * PAGE);
	__asm__ volatile(".byte 0x88, 0x00" : : "a"(page + 5000) : "memory");
	printf("signal %d code %d %s\n", got, last_code, last_at == page + 5000 ? "there" : "ELSEWHERE");
	__asm__ volatile(".byte 0x8a, 0x00" : : "a"(0x123456789abcdef0ul) : "memory");
	printf("signal %d code %d %s\n", got, last_code, last_at == NULL ? "nowhere" : "SOMEWHERE");
	__asm__ volatile(".byte 0x0f, 0x0b");
	printf("signal %d code %d\n", got, last_code);
	__asm__ volatile("xor %%edx, %%edx; mov $1, %%eax; xor %%ecx, %%ecx; .byte 0xf7, 0xf1" : : : "eax", "ecx", "edx");
	printf("signal %d code %d\n", got, last_code);
	int fd = file_of(1);
	char *file = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	__asm__ volatile(".byte 0x88, 0x00" : : "a"(file + PAGE + 3) : "memory");
	printf("signal %d code %d %s\n", got, last_code, last_at == file + PAGE + 3 ? "there" : "ELSEWHERE");
	inform(SIGSEGV, repair, 0);
	char *guarded = map(8 * PAGE, PROT_NONE);
	got = 0;
	for (int i = 0; i < 8; i++)
		guarded[i * PAGE] = i;
	IS(got == 8);
	IS(guarded[3 * PAGE] == 3 && guarded[3 * PAGE + 1] == 77);

	puts("# Alternate stacks");
	stack_t stack = { .ss_sp = map(64 * PAGE, PROT_READ | PROT_WRITE), .ss_size = 64 * PAGE };
	R(sigaltstack(&stack, NULL));
	handle(SIGUSR1, where, SA_ONSTACK);
	got = 0;
	raise(SIGUSR1);
	IS(got == 1);
	handle(SIGUSR1, where, 0);
	raise(SIGUSR1);
	IS(got == 0);
	stack.ss_size = 100;
	R(sigaltstack(&stack, NULL));
	stack.ss_flags = 77;
	R(sigaltstack(&stack, NULL));
	IN_CHILD("overflow of the stack", {
		handle(SIGSEGV, jump, SA_ONSTACK);
		struct rlimit limit = { 1 * MIB, 1 * MIB };
		setrlimit(RLIMIT_STACK, &limit);
		if (sigsetjmp(back, 1) == 0)
			endless(0);
		else
			puts("caught");
	});
	IN_CHILD("no stack for a handler", {
		handle(SIGSEGV, jump, 0);
		struct rlimit limit = { 1 * MIB, 1 * MIB };
		setrlimit(RLIMIT_STACK, &limit);
		endless(0);
	});
	IN_CHILD("a fault while blocked", {
		handle(SIGSEGV, jump, 0);
		sigemptyset(&set);
		sigaddset(&set, SIGSEGV);
		sigprocmask(SIG_BLOCK, &set, NULL);
		*nowhere = 1;
	});
	IN_CHILD("a fault while ignored", signal(SIGSEGV, SIG_IGN); *nowhere = 1);

	puts("# What a handler leaves alone");
	handle(SIGUSR1, count, 0);
	double a = 1.5, b = 2.25;
	long r12 = 0x1234, r13 = 0x5678;
	uint64_t before = 0x1122334455667788, after;
	pid_t self = getpid();
	__asm__ volatile("movq %[before], %%xmm9; mov %[number], %%eax; mov %[self], %%edi; mov $10, %%esi; syscall; movq %%xmm9, %[after]"
			 : [after] "=r"(after)
			 : [before] "r"(before), [number] "i"(SYS_kill), [self] "r"(self)
			 : "rax", "rdi", "rsi", "rcx", "r11", "xmm9", "memory");
	IS(after == before);
	IS(a * b == 3.375 && r12 + r13 == 0x68ac);
	return 0;
}
