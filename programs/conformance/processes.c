/* fork, vfork, clone, execve, wait4, waitid, exit. */
#include "check.h"
#include <sys/prctl.h>
#include <sys/syscall.h>

static int on_stack(void *with)
{
	*(int *)with += 1;
	return 9;
}

static void handler(int number)
{
	(void)number;
}

static void self(const char *what, char *const envp[])
{
	char *argv[] = { "again", "--again", (char *)what, NULL };
	execve("/proc/self/exe", argv, envp);
	printf("execve: %s\n", errno_name(errno));
}

int main(int argc, char **argv, char **envp)
{
	if (argc == 3 && !strcmp(argv[1], "--again")) {
		printf("again: %s, %s, %s\n", argv[0], argv[2], envp[0] ? envp[0] : "no environment");
		if (!strcmp(argv[2], "descriptors")) {
			IS(fcntl(100, F_GETFD) == 0);
			IS(fcntl(101, F_GETFD) == -1 && errno == EBADF);
		}
		if (!strcmp(argv[2], "signals")) {
			struct sigaction action;
			sigset_t set;
			sigaction(SIGUSR1, NULL, &action);
			IS(action.sa_handler == SIG_DFL);
			sigaction(SIGUSR2, NULL, &action);
			IS(action.sa_handler == SIG_IGN);
			sigprocmask(SIG_BLOCK, NULL, &set);
			IS(sigismember(&set, SIGTERM));
			sigpending(&set);
			IS(sigismember(&set, SIGTERM));
		}
		return 5;
	}
	int status, shared_value = 0;
	siginfo_t info;
	struct rusage usage;

	puts("# Nothing to wait for");
	R(wait(&status));
	R(waitpid(-1, &status, WNOHANG));
	R(waitpid(1 << 22, &status, 0));
	R(waitid(P_ALL, 0, &info, WEXITED));
	R(waitid(P_ALL, 0, &info, 0));
	R(waitid(99, 0, &info, WEXITED));
	R(wait4(-1, &status, 0xff00, &usage));

	puts("# Ends");
	IN_CHILD("exit 0", _exit(0));
	IN_CHILD("exit 255", _exit(255));
	IN_CHILD("exit 256", _exit(256));
	IN_CHILD("kill", kill(getpid(), SIGKILL));
	IN_CHILD("abort", abort());
	IN_CHILD("wild", *nowhere = 1);
	IN_CHILD("nowhere", ((void (*)(void))nowhere)());
	IN_CHILD("illegal", __asm__ volatile("ud2"));
	IN_CHILD("division", volatile int zero = 0; printf("%d\n", getpid() / zero));
	IN_CHILD("break", __asm__ volatile("int3"));
	IN_CHILD("privileged", __asm__ volatile("cli"));
	IN_CHILD("term", raise(SIGTERM));
	IN_CHILD("ignored", signal(SIGTERM, SIG_IGN); raise(SIGTERM));

	puts("# Identities");
	pid_t parent = getpid();
	IN_CHILD("child", {
		IS(getppid() == parent);
		IS(getpid() != parent);
		IS(syscall(SYS_gettid) == getpid());
		IS(getpgid(0) == getpgid(parent));
		R(setpgid(0, 0));
		IS(getpgid(0) == getpid());
	});
	IS(getuid() == geteuid() && getgid() == getegid());

	puts("# waitid and wait4");
	fflush(stdout);
	pid_t child = fork();
	if (child == 0)
		_exit(3);
	memset(&info, 0, sizeof info);
	R(waitid(P_PID, child, &info, WEXITED | WNOWAIT));
	IS(info.si_pid == child && info.si_code == CLD_EXITED && info.si_status == 3 && info.si_signo == SIGCHLD);
	R(waitid(P_PID, child, &info, WEXITED));
	R(waitid(P_PID, child, &info, WEXITED));
	child = fork();
	if (child == 0) {
		pause();
		_exit(0);
	}
	R(waitpid(child, &status, WNOHANG));
	memset(&info, 0, sizeof info);
	R(waitid(P_PID, child, &info, WEXITED | WNOHANG));
	IS(info.si_pid == 0);
	R(kill(child, 0));
	R(kill(child, SIGTERM));
	IS(wait4(child, &status, 0, &usage) == child);
	ended("child", status);
	R(kill(child, 0));

	puts("# Many");
	for (int i = 0; i < 20; i++)
		if (fork() == 0)
			_exit(i);
	int sum = 0, count = 0;
	while (wait(&status) > 0) {
		sum += WEXITSTATUS(status);
		count++;
	}
	IS(count == 20 && sum == 190);
	fflush(stdout);
	child = fork();
	if (child == 0) {
		/* An orphan: its parent must not wait for it. */
		if (fork() == 0) {
			pause_for(20);
			_exit(1);
		}
		_exit(0);
	}
	IS(waitpid(child, &status, 0) == child);
	IS(waitpid(-1, &status, 0) == -1 && errno == ECHILD);

	puts("# vfork and clone");
	volatile int seen_by_child = 0;
	child = vfork();
	if (child == 0) {
		seen_by_child = 1;
		_exit(7);
	}
	IS(seen_by_child == 1);
	IS(waitpid(child, &status, 0) == child);
	ended("vfork", status);
	char *stack = map(16 * PAGE, PROT_READ | PROT_WRITE);
	child = clone(on_stack, stack + 16 * PAGE, CLONE_VM | SIGCHLD, &shared_value);
	IS(waitpid(child, &status, 0) == child);
	ended("clone", status);
	IS(shared_value == 1);
	child = clone(on_stack, stack + 16 * PAGE, SIGCHLD, &shared_value);
	IS(waitpid(child, &status, 0) == child);
	IS(shared_value == 1);
	child = clone(on_stack, stack + 16 * PAGE, CLONE_VM | CLONE_VFORK | SIGCHLD, &shared_value);
	IS(shared_value == 2);
	IS(waitpid(child, &status, 0) == child);
	child = clone(on_stack, stack + 16 * PAGE, 0, &shared_value);
	R(waitpid(child, &status, 0));
	IS(waitpid(child, &status, __WALL) == child);
	R(syscall(SYS_clone, CLONE_THREAD, 0, 0, 0, 0));
	R(syscall(SYS_clone, CLONE_SIGHAND, 0, 0, 0, 0));
	R(syscall(SYS_clone, CLONE_THREAD | CLONE_SIGHAND, 0, 0, 0, 0));
	R(syscall(SYS_clone3, NULL, 64));
	R(syscall(SYS_clone3, stack, 8));

	puts("# execve");
	char *own[] = { "NAME=value", NULL }, *none[] = { NULL };
	IN_CHILD("with an environment", self("one", own));
	IN_CHILD("without", self("two", none));
	IN_CHILD("descriptors", {
		dup2(1, 100);
		dup2(1, 101);
		fcntl(101, F_SETFD, FD_CLOEXEC);
		self("descriptors", none);
	});
	IN_CHILD("signals", {
		sigset_t set;
		sigemptyset(&set);
		sigaddset(&set, SIGTERM);
		sigprocmask(SIG_BLOCK, &set, NULL);
		raise(SIGTERM);
		signal(SIGUSR1, handler);
		signal(SIGUSR2, SIG_IGN);
		self("signals", none);
	});
	char *arguments[] = { "x", NULL };
	R(execve("/no/such/program", arguments, none));
	R(execve("/tmp", arguments, none));
	R(execve("", arguments, none));
	char path[64];
	snprintf(path, sizeof path, "/tmp/terrane-exec-%d", (int)getpid());
	int fd = open(path, O_RDWR | O_CREAT, 0644);
	R(execve(path, arguments, none));
	R(fchmod(fd, 0755));
	R(write(fd, "hello, this is no program", 25));
	close(fd);
	R(execve(path, arguments, none));
	unlink(path);
	fflush(stdout);
	child = vfork();
	if (child == 0) {
		char *again[] = { "again", "--again", "vfork", NULL };
		execve("/proc/self/exe", again, none);
		_exit(1);
	}
	IS(waitpid(child, &status, 0) == child);
	ended("vfork and execve", status);

	puts("# Orphans");
	R(prctl(PR_SET_CHILD_SUBREAPER, 1));
	int adopts = 0;
	R(prctl(PR_GET_CHILD_SUBREAPER, &adopts));
	IS(adopts == 1);
	child = fork();
	if (child == 0) {
		if (fork() == 0) {
			pause_for(50);
			_exit(getppid() == 1 ? 1 : 42);
		}
		_exit(7);
	}
	IS(waitpid(child, &status, 0) == child);
	ended("parent", status);
	IS(waitpid(-1, &status, 0) > 0);
	ended("orphan", status);
	R(waitpid(-1, &status, 0));
	R(prctl(PR_SET_CHILD_SUBREAPER, 0));

	puts("# Copies");
	char *pages = map(256 * PAGE, PROT_READ | PROT_WRITE);
	for (int i = 0; i < 256; i++)
		pages[i * PAGE] = i;
	for (int i = 0; i < 8; i++) {
		if (fork() == 0) {
			touch(pages, 256 * PAGE, i);
			expect(pages, 256 * PAGE, i);
			_exit(0);
		}
	}
	while (wait(&status) > 0)
		if (status)
			wrong("a child ended with status %#x", status);
	int good = 0;
	for (int i = 0; i < 256; i++)
		good += pages[i * PAGE] == (char)i;
	IS(good == 256);
	return 0;
}
