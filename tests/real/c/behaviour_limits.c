/* The behaviour programs that give up rights or set themselves limits. */
#define _GNU_SOURCE
#include "behaviour.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MEBIBYTES = 96, NOBODY = 65534 };

static void fork_and_check(const char *what, struct data *data)
{
	pid_t pid = fork();

	if (pid == 0) {
		data_report(what, data);
		struct data *own = data_make(MEBIBYTES / 2);
		data_report("child's own", own);
		_exit(0);
	}
	child_report(what, pid);
}

static int become_nobody(void)
{
	int error = setgroups(0, NULL) || setgid(NOBODY) || setuid(NOBODY);

	printf("nobody: %d, uid %d\n", error, getuid());
	fflush(stdout);
	return error;
}

int setuid_then_fork(void)
{
	struct data *data = data_make(MEBIBYTES);

	if (become_nobody())
		return 1;
	data_report("as nobody", data);
	struct data *more = data_make(MEBIBYTES);
	fork_and_check("nobody's child", data);
	data_report("more", more);
	fork_and_check("second child", more);
	data_report("as nobody", data);
	return 0;
}

static void limit(int resource, const char *name, rlim_t value)
{
	struct rlimit both = { value, value };

	printf("%s: %d\n", name, setrlimit(resource, &both));
	fflush(stdout);
}

/* Root is not bound by it. */
int process_limit(void)
{
	struct data *data = data_make(MEBIBYTES);

	limit(RLIMIT_NPROC, "processes", 24);
	if (become_nobody())
		return 1;
	for (int i = 0; i < 4; i++)
		fork_and_check("child", data);
	data_report("data", data);
	return 0;
}

/* Locked memory stays; so only little of it is asked for. */
int lock_all(void)
{
	struct data *data = data_make(4);

	printf("mlockall %d\n", mlockall(MCL_CURRENT | MCL_FUTURE));
	data_report("locked", data);
	struct data *more = data_make(2);
	data_report("locked later", more);
	printf("munlockall %d\n", munlockall());
	void *part = aligned_alloc(4096, 1 << 20);
	memset(part, 7, 1 << 20);
	printf("mlock %d\n", mlock(part, 1 << 20));
	struct data *big = data_make(MEBIBYTES);
	data_report("unlocked", big);
	printf("munlock %d\n", munlock(part, 1 << 20));
	data_report("locked before", data);
	fork_and_check("child", big);
	return 0;
}

#define ALLOW(call)                                                                                \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1),                                     \
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define DENY(call)                                                                                 \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1),                                     \
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)

/* What a sandbox leaves a program that has opened all it needs; the rest ends the thread. */
int seccomp_filter(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(read), ALLOW(write), ALLOW(readv), ALLOW(writev), ALLOW(close), ALLOW(fstat),
		ALLOW(newfstatat), ALLOW(lseek), ALLOW(mmap), ALLOW(munmap), ALLOW(mremap),
		ALLOW(mprotect), ALLOW(madvise), ALLOW(brk), ALLOW(futex), ALLOW(exit),
		ALLOW(exit_group), ALLOW(rt_sigaction), ALLOW(rt_sigprocmask), ALLOW(rt_sigreturn),
		ALLOW(sigaltstack), ALLOW(getpid), ALLOW(gettid), ALLOW(sched_yield),
		ALLOW(clock_gettime), ALLOW(nanosleep), ALLOW(clock_nanosleep), ALLOW(getrandom),
		ALLOW(poll), ALLOW(ppoll), ALLOW(getcpu), ALLOW(sched_getaffinity), ALLOW(prctl),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { sizeof(filter) / sizeof(filter[0]), filter };
	struct data *data = data_make(MEBIBYTES);

	printf("no new privileges %d\n", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	fflush(stdout);
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		return 1;
	data_report("filtered", data);
	struct data *more = data_make(MEBIBYTES);
	data_report("more", more);
	data_free(data);
	data = data_make(MEBIBYTES);
	data_report("again", data);
	return 0;
}

static void *in_thread(void *argument)
{
	data_report("thread", argument);
	return NULL;
}

/* Denies, in every thread of the process, what containers deny. */
int seccomp_all_threads(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		DENY(userfaultfd), DENY(io_uring_setup), DENY(io_uring_enter), DENY(bpf),
		DENY(perf_event_open), DENY(ptrace), DENY(process_vm_readv),
		DENY(process_vm_writev), DENY(keyctl), DENY(mount), DENY(kcmp),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(filter) / sizeof(filter[0]), filter };
	struct data *data = data_make(MEBIBYTES);
	pthread_t thread;

	printf("no new privileges %d\n", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	printf("filter %ld\n", syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
				       SECCOMP_FILTER_FLAG_TSYNC, &program));
	fflush(stdout);
	data_report("filtered", data);
	pthread_create(&thread, NULL, in_thread, data);
	pthread_join(thread, NULL);
	fork_and_check("child", data);
	data_report("data", data);
	return 0;
}

int address_limit(void)
{
	struct data *data = data_make(MEBIBYTES);

	limit(RLIMIT_AS, "address space", (rlim_t)1 << 30);
	data_report("limited", data);
	struct data *more = data_make(MEBIBYTES);
	data_report("more", more);
	fork_and_check("child", data);
	return 0;
}

/* A program that counts on being refused is refused. */
int address_limit_refuses(void)
{
	limit(RLIMIT_AS, "address space", (rlim_t)1 << 30);
	void *much = malloc((size_t)4 << 30);
	printf("4 GiB from malloc: %s\n", much ? "given" : strerror(errno));
	void *mapped = mmap(NULL, (size_t)4 << 30, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	printf("4 GiB from mmap: %s\n", mapped == MAP_FAILED ? strerror(errno) : "given");
	struct data *data = data_make(MEBIBYTES);
	data_report("data", data);
	return 0;
}

int data_limit(void)
{
	struct data *data = data_make(MEBIBYTES);

	limit(RLIMIT_DATA, "data", (rlim_t)4 << 30);
	data_report("limited", data);
	struct data *more = data_make(MEBIBYTES);
	data_report("more", more);
	fork_and_check("child", data);
	return 0;
}

int file_limit(void)
{
	struct data *data = data_make(MEBIBYTES);
	int fds[8], opened = 0;

	limit(RLIMIT_NOFILE, "files", 6);
	while (opened < 8 && (fds[opened] = open("/dev/null", O_RDONLY)) >= 0)
		opened++;
	printf("%d opened, then %s\n", opened, strerror(errno));
	fflush(stdout);
	data_report("limited", data);
	fork_and_check("child", data);
	while (opened)
		close(fds[--opened]);
	fork_and_check("child", data);
	data_report("data", data);
	return 0;
}
