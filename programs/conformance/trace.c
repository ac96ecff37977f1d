/* A parent that looks at a child of its own by ptrace: signals, system calls, memory, registers. */
#include "check.h"
#include <stddef.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>

static volatile long shared_word = 1234;
static volatile int handled;

static void handle(int number)
{
	handled = number;
}

/* Waits for the child, and says how it is. */
static int news(pid_t child)
{
	int status = 0;
	if (waitpid(child, &status, 0) != child)
		failed("waitpid");
	ended("child", status);
	return status;
}

static pid_t traced(void (*act)(void))
{
	pid_t child = fork();
	if (child == 0) {
		if (ptrace(PTRACE_TRACEME, 0, NULL, NULL)) {
			/* Somebody traces this program: then nothing here can be known. */
			_exit(LACKING);
		}
		raise(SIGSTOP);
		act();
		_exit(handled);
	}
	int status;
	if (waitpid(child, &status, 0) != child)
		failed("waitpid");
	if (WIFEXITED(status))
		exit(LACKING);
	ended("child", status);
	return child;
}

static void nothing(void) {}

static void signals(void)
{
	signal(SIGUSR1, handle);
	raise(SIGUSR1);
	raise(SIGUSR1);
	signal(SIGUSR2, SIG_IGN);
	raise(SIGUSR2);
	raise(SIGTERM);
}

static void calls(void)
{
	if (syscall(SYS_getppid) == 77)
		handled = 5;
	syscall(SYS_close, 12345);
}

static void dies(void)
{
	*(volatile char *)nowhere = 1;
}

static void again(void)
{
	execl("/proc/self/exe", "trace", "again", NULL);
}

int main(int count, char **arguments)
{
	int status;
	(void)arguments;
	if (count > 1)
		return 9;
	puts("# Nobody");
	R(ptrace(PTRACE_CONT, 4000000, NULL, NULL));
	R(ptrace(PTRACE_PEEKDATA, getpid(), NULL, NULL));

	puts("# Going on");
	pid_t child = traced(nothing);
	R(ptrace(PTRACE_CONT, child, NULL, NULL));
	news(child);

	puts("# Memory and registers");
	child = traced(nothing);
	R(ptrace(PTRACE_PEEKDATA, child, &shared_word, NULL));
	R(ptrace(PTRACE_POKEDATA, child, &shared_word, 99L));
	R(ptrace(PTRACE_PEEKDATA, child, &shared_word, NULL));
	IS(shared_word == 1234);
	R(ptrace(PTRACE_PEEKDATA, child, nowhere, NULL));
	R(ptrace(PTRACE_PEEKUSER, child, 3L, NULL));
	struct user_regs_struct registers;
	R(ptrace(PTRACE_GETREGS, child, NULL, &registers));
	IS(registers.rsp > 4096 && registers.rip > 4096);
	IS((unsigned long)ptrace(PTRACE_PEEKUSER, child, offsetof(struct user, regs.rsp), NULL) == registers.rsp);
	R(ptrace(PTRACE_SETREGS, child, NULL, &registers));
	siginfo_t info;
	R(ptrace(PTRACE_GETSIGINFO, child, NULL, &info));
	IS(info.si_signo == SIGSTOP);
	R(ptrace(PTRACE_GETREGS, child, NULL, nowhere));
	R(ptrace(PTRACE_SETOPTIONS, child, NULL, 1L << 40));
	R(ptrace(PTRACE_KILL, child, NULL, NULL));
	news(child);

	puts("# Signals");
	child = traced(signals);
	R(ptrace(PTRACE_CONT, child, NULL, NULL));
	news(child);
	R(waitpid(child, &status, WNOHANG));
	/* The first is kept from it, the second is not. */
	R(ptrace(PTRACE_CONT, child, NULL, NULL));
	news(child);
	R(ptrace(PTRACE_CONT, child, NULL, (long)SIGUSR1));
	news(child);
	R(ptrace(PTRACE_CONT, child, NULL, (long)SIGUSR2));
	news(child);
	R(ptrace(PTRACE_CONT, child, NULL, 1000L));
	R(ptrace(PTRACE_CONT, child, NULL, NULL));
	news(child);

	puts("# System calls");
	child = traced(calls);
	R(ptrace(PTRACE_SETOPTIONS, child, NULL, (long)PTRACE_O_TRACESYSGOOD));
	bool answered = false;
	for (;;) {
		if (ptrace(PTRACE_SYSCALL, child, NULL, NULL))
			failed("PTRACE_SYSCALL");
		if (waitpid(child, &status, 0) != child)
			failed("waitpid");
		if (!WIFSTOPPED(status))
			break;
		ptrace(PTRACE_GETREGS, child, NULL, &registers);
		if (registers.orig_rax == SYS_getppid && !answered) {
			printf("before: %#x, %ld\n", WSTOPSIG(status), (long)registers.rax);
			ptrace(PTRACE_SYSCALL, child, NULL, NULL);
			news(child);
			ptrace(PTRACE_GETREGS, child, NULL, &registers);
			IS(registers.rax == (unsigned long)getpid());
			registers.rax = 77;
			R(ptrace(PTRACE_SETREGS, child, NULL, &registers));
			answered = true;
		} else if (registers.orig_rax == SYS_close) {
			printf("close: %ld, %ld\n", (long)registers.rdi, (long)registers.rax);
		}
	}
	ended("child", status);

	puts("# Ends");
	child = traced(dies);
	R(ptrace(PTRACE_CONT, child, NULL, NULL));
	news(child);
	R(ptrace(PTRACE_CONT, child, NULL, (long)SIGSEGV));
	news(child);
	child = traced(again);
	R(ptrace(PTRACE_CONT, child, NULL, NULL));
	news(child);
	R(ptrace(PTRACE_DETACH, child, NULL, NULL));
	news(child);
	R(ptrace(PTRACE_CONT, child, NULL, NULL));
	child = fork();
	if (child == 0) {
		/* A parent that goes: the child goes on without. */
		int pipes[2];
		R(pipe(pipes));
		pid_t inner = fork();
		if (inner == 0) {
			ptrace(PTRACE_TRACEME, 0, NULL, NULL);
			close(pipes[0]);
			raise(SIGSTOP);
			_exit(0);
		}
		waitpid(inner, &status, 0);
		ended("inner", status);
		R(ptrace(PTRACE_SETOPTIONS, inner, NULL, 1L << 20));
		_exit(0);
	}
	news(child);
	return 0;
}
