/*
 * Small programs, each of which does one thing that a memory manager inside the process has to
 * survive, with more data than fits before, during and after it.
 *
 *     behaviour NAME
 */
#define _GNU_SOURCE
#include "behaviour.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCK_WORDS = (256 << 10) / 8, MEBIBYTES = 96 };

extern char **environ;
static const char *self;

static unsigned long word_of(size_t block, size_t word)
{
	unsigned long seed = (block + 1) * 0x9e3779b97f4a7c15u;
	return word & 3 ? seed : seed ^ word * 0xff51afd7ed558ccdu;
}

struct data *data_make(size_t mebibytes)
{
	size_t blocks = mebibytes * 4;
	struct data *data = malloc(sizeof(*data) + blocks * sizeof(data->block[0]));

	data->blocks = blocks;
	for (size_t i = 0; i < blocks; i++) {
		data->block[i] = malloc(BLOCK_WORDS * 8);
		for (size_t word = 0; word < BLOCK_WORDS; word++)
			data->block[i][word] = word_of(i, word);
	}
	return data;
}

size_t data_wrong(const struct data *data)
{
	size_t wrong = 0;

	for (size_t i = 0; i < data->blocks; i++) {
		size_t word = 0;
		while (word < BLOCK_WORDS && data->block[i][word] == word_of(i, word))
			word++;
		wrong += word < BLOCK_WORDS;
	}
	return wrong;
}

void data_report(const char *when, const struct data *data)
{
	size_t wrong = data_wrong(data);

	if (wrong)
		printf("%s: %zu blocks wrong\n", when, wrong);
	else
		printf("%s: whole\n", when);
	fflush(stdout);
}

void data_free(struct data *data)
{
	for (size_t i = 0; i < data->blocks; i++)
		free(data->block[i]);
	free(data);
}

void child_report(const char *what, int pid)
{
	int status = -1;

	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		printf("%s: %s\n", what, strerror(errno));
	else
		printf("%s: status %x\n", what, (unsigned)status);
	fflush(stdout);
}

static int only_data(void)
{
	struct data *data = data_make(MEBIBYTES);
	data_report("data", data);
	return 0;
}

/* A file opened afterwards gets a number that might have been the manager's. */
static int close_all(void)
{
	char path[] = "close-range.XXXXXX", back[64] = "";
	struct data *data = data_make(MEBIBYTES);

	printf("close_range %d\n", close_range(3, ~0u, 0));
	int fd = mkstemp(path);
	unlink(path);
	printf("fd %d, wrote %zd\n", fd, write(fd, "my own bytes", 12));
	data_report("after close_range", data);
	struct data *more = data_make(MEBIBYTES);
	data_report("more", more);
	data_report("again", data);
	printf("read %zd, size %ld\n", pread(fd, back, 64, 0), (long)lseek(fd, 0, SEEK_END));
	puts(back);
	return 0;
}

static void *outlive_main(void *argument)
{
	pthread_t *main_thread = argument;

	printf("join %d\n", pthread_join(*main_thread, NULL));
	struct data *data = data_make(MEBIBYTES);
	data_report("after main", data);
	pid_t pid = fork();
	if (pid == 0) {
		data_report("child after main", data);
		_exit(0);
	}
	child_report("child", pid);
	return NULL;
}

static int main_exits(void)
{
	static pthread_t main_thread, thread;

	main_thread = pthread_self();
	pthread_create(&thread, NULL, outlive_main, &main_thread);
	pthread_exit(NULL);
}

static struct data *handler_data;
static atomic_ulong handled, handler_wrong;

/* Reads a block that is most likely evicted, and writes it. */
static void on_signal(int signal)
{
	unsigned long turn = atomic_fetch_add(&handled, 1);
	size_t i = turn * 37 % handler_data->blocks;
	unsigned long *block = handler_data->block[i];

	(void)signal;
	for (size_t word = 0; word < BLOCK_WORDS; word += 512) {
		if (block[word] != word_of(i, word))
			atomic_fetch_add(&handler_wrong, 1);
		block[word] = word_of(i, word);
	}
}

/* The handlers' stack is malloc'd: the kernel itself writes signal frames to managed memory. */
static void take_signals(void)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_ONSTACK | SA_RESTART };
	stack_t stack = { .ss_size = 256 << 10 };

	handler_data = data_make(MEBIBYTES);
	stack.ss_sp = malloc(stack.ss_size);
	sigaltstack(&stack, NULL);
	sigaction(SIGUSR1, &action, NULL);
	sigaction(SIGALRM, &action, NULL);
}

static int signals(void)
{
	take_signals();
	for (int i = 0; i < 2000; i++)
		raise(SIGUSR1);
	printf("%lu handled, %lu wrong\n", handled, handler_wrong);
	data_report("data", handler_data);
	return 0;
}

static void *signal_main(void *argument)
{
	pthread_t *target = argument;

	for (int i = 0; i < 3000; i++) {
		pthread_kill(*target, SIGUSR1);
		kill(getpid(), SIGUSR1);
		usleep(200);
	}
	return NULL;
}

/* Signals arrive while faults wait, in user mode and inside calls. */
static int signal_storm(void)
{
	struct itimerval every = { { 0, 2000 }, { 0, 2000 } };
	pthread_t main_thread = pthread_self(), thread;
	int pipes[2], lost = 0;

	take_signals();
	struct data *data = data_make(MEBIBYTES);
	if (pipe(pipes))
		return 2;
	setitimer(ITIMER_REAL, &every, NULL);
	pthread_create(&thread, NULL, signal_main, &main_thread);
	for (size_t i = 0; i < 3 * data->blocks; i++) {
		/* A call reads managed memory, then writes it. */
		unsigned long *block = data->block[i * 7 % data->blocks], *other = data->block[0];
		ssize_t wrote = write(pipes[1], block + 512, 4096);
		ssize_t got = wrote == 4096 ? read(pipes[0], other + 1024, 4096) : 0;
		lost += wrote != 4096 || got != 4096 || memcmp(block + 512, other + 1024, 4096);
		for (size_t word = 1024; word < 1536; word++)
			other[word] = word_of(0, word);
	}
	data_report("data", data);
	pthread_join(thread, NULL);
	setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, NULL);
	printf("%d lost, %s, %lu wrong\n", lost, handled > 1000 ? "handled" : "not handled",
	       handler_wrong);
	data_report("handlers' data", handler_data);
	return 0;
}

static int vfork_child(void)
{
	struct data *data = data_make(MEBIBYTES);

	for (int i = 0; i < 8; i++) {
		pid_t pid = vfork();
		if (pid == 0) {
			execl(self, self, i % 2 ? "data" : "nothing", NULL);
			_exit(99);
		}
		child_report("vfork and exec", pid);
		pid = vfork();
		if (pid == 0)
			_exit(i);
		child_report("vfork", pid);
	}
	data_report("data", data);
	return 0;
}

static int spawn_child(void)
{
	struct data *data = data_make(MEBIBYTES);

	for (int i = 0; i < 6; i++) {
		pid_t pid;
		char *argv[] = { (char *)self, i % 2 ? "data" : "nothing", NULL };
		printf("spawn %d\n", posix_spawn(&pid, self, NULL, NULL, argv, environ));
		child_report("spawned", pid);
	}
	data_report("data", data);
	return 0;
}

static int system_child(void)
{
	struct data *data = data_make(MEBIBYTES);
	char command[4096];

	snprintf(command, sizeof(command), "%s data | cat; exit 5", self);
	printf("system %x\n", (unsigned)system(command));
	fflush(stdout);
	data_report("data", data);
	return 0;
}

static int popen_child(void)
{
	struct data *data = data_make(MEBIBYTES);
	char command[4096], line[256];
	size_t bytes = 0;

	snprintf(command, sizeof(command), "%s data", self);
	FILE *out = popen(command, "r");
	while (fgets(line, sizeof(line), out))
		printf("read: %s", line);
	printf("pclose %x\n", (unsigned)pclose(out));
	/* The other direction: a pipe fed from memory that is evicted. */
	fflush(stdout);
	FILE *in = popen("cksum", "w");
	for (size_t i = 0; i < data->blocks; i++)
		bytes += fwrite(data->block[i], 1, BLOCK_WORDS * 8, in);
	printf("wrote %zu, pclose %x\n", bytes, (unsigned)pclose(in));
	data_report("data", data);
	return 0;
}

static int exec_chain(void)
{
	const char *step = getenv("BEHAVIOUR_STEP");
	char next[16];
	int turn = step ? atoi(step) : 0;
	struct data *data = data_make(MEBIBYTES);

	data_report("before exec", data);
	if (turn == 5)
		return 0;
	snprintf(next, sizeof(next), "%d", turn + 1);
	setenv("BEHAVIOUR_STEP", next, 1);
	execl(self, self, "exec-chain", NULL);
	return 99;
}

static void *short_lived(void *argument)
{
	struct data *shared = argument;
	struct data *own = data_make(1);
	size_t wrong = data_wrong(own) + data_wrong(shared);

	data_free(own);
	return (void *)wrong;
}

/* Threads come and go: their stacks, and what the allocator keeps for each. */
static int thread_churn(void)
{
	struct data *data = data_make(MEBIBYTES), *shared = data_make(1);
	size_t wrong = 0;

	for (int round = 0; round < 40; round++) {
		pthread_t threads[8];
		for (int i = 0; i < 8; i++)
			pthread_create(&threads[i], NULL, short_lived, shared);
		for (int i = 0; i < 8; i++) {
			void *result;
			pthread_join(threads[i], &result);
			wrong += (size_t)result;
		}
	}
	printf("%zu wrong\n", wrong);
	data_report("data", data);
	return 0;
}

static void *fork_here(void *argument)
{
	struct data *data = argument;

	for (int i = 0; i < 6; i++) {
		pid_t pid = fork();
		if (pid == 0) {
			struct data *own = data_make(8);
			_exit(data_wrong(data) || data_wrong(own) ? 1 : 0);
		}
		int status = 1;
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
			return (void *)1;
	}
	return NULL;
}

/* Several threads fork at once while others allocate. */
static int fork_in_thread(void)
{
	struct data *data = data_make(MEBIBYTES);
	pthread_t threads[6];
	size_t wrong = 0;

	for (int i = 0; i < 6; i++)
		pthread_create(&threads[i], NULL, i % 2 ? fork_here : short_lived, data);
	for (int i = 0; i < 6; i++) {
		void *result;
		pthread_join(threads[i], &result);
		wrong += (size_t)result;
	}
	printf("%zu wrong\n", wrong);
	data_report("data", data);
	return 0;
}

enum { CLEAN_PAGES = 8192, PAGE_WORDS = 512 };

/* Pages of `memory` that are not as they should be: those that `is_over` says are turned over. */
static size_t pages_wrong(const unsigned long *memory, int is_over)
{
	size_t wrong = 0;

	for (size_t page = 0; page < CLEAN_PAGES; page++) {
		unsigned long mask = is_over && page % 3 == 0 ? ~0ul : 0;
		size_t word = 0;
		while (word < PAGE_WORDS &&
		       (memory[page * PAGE_WORDS + word] ^ mask) == word_of(page, word))
			word++;
		wrong += word < PAGE_WORDS;
	}
	return wrong;
}

/* Turns every third page over, pages all out, and looks at what comes back. */
static size_t turn_over(unsigned long *memory)
{
	for (size_t page = 0; page < CLEAN_PAGES; page += 3)
		for (size_t word = 0; word < PAGE_WORDS; word++)
			memory[page * PAGE_WORDS + word] ^= ~0ul;
	madvise(memory, CLEAN_PAGES * 4096ul, MADV_PAGEOUT);
	return pages_wrong(memory, 1);
}

/* As many pages as `turn_over` looks at, swapped out and read again. */
static unsigned long *clean_memory(void)
{
	unsigned long *memory = mmap(NULL, CLEAN_PAGES * 4096ul, PROT_READ | PROT_WRITE,
				     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	for (size_t page = 0; page < CLEAN_PAGES; page++)
		for (size_t word = 0; word < PAGE_WORDS; word++)
			memory[page * PAGE_WORDS + word] = word_of(page, word);
	madvise(memory, CLEAN_PAGES * 4096ul, MADV_PAGEOUT);
	printf("before: %zu wrong\n", pages_wrong(memory, 0));
	fflush(stdout);
	return memory;
}

/* Memory that was only read since it was swapped in, and so is known to be as it is in swap, is
 * written after a fork: by the child, by its own child, and by the parent. */
static int fork_of_clean(void)
{
	unsigned long *memory = clean_memory();
	pid_t pid = fork();

	if (pid == 0) {
		pid_t grandchild = fork();
		if (grandchild == 0)
			_exit(turn_over(memory) ? 1 : 0);
		child_report("grandchild", grandchild);
		_exit(turn_over(memory) ? 1 : 0);
	}
	child_report("child", pid);
	printf("parent: %zu wrong\n", turn_over(memory));
	return 0;
}

/* The same, and after a fork that came and went its rights change, it is freed, and it moves. */
static int clean_changes(void)
{
	size_t bytes = CLEAN_PAGES * 4096ul;
	unsigned long *memory = clean_memory();
	pid_t pid = fork();

	if (pid == 0)
		_exit(0);
	child_report("child", pid);
	mprotect(memory, bytes, PROT_READ);
	printf("read-only: %zu wrong\n", pages_wrong(memory, 0));
	mprotect(memory, bytes, PROT_READ | PROT_WRITE);
	madvise(memory, bytes, MADV_PAGEOUT);
	printf("writable: %zu wrong\n", pages_wrong(memory, 0));
	pid = fork();
	if (pid == 0)
		_exit(0);
	child_report("child", pid);
	unsigned long *moved = mmap(NULL, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	moved = mremap(memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, moved);
	printf("moved: %zu wrong\n", pages_wrong(moved, 0));
	printf("written there: %zu wrong\n", turn_over(moved));
	pid = fork();
	if (pid == 0)
		_exit(0);
	child_report("child", pid);
	madvise(moved, bytes, MADV_FREE);
	for (size_t word = 0; word < bytes / 8; word++)
		moved[word] = word_of(word / PAGE_WORDS, word % PAGE_WORDS);
	printf("freed and written: %zu wrong\n", turn_over(moved));
	return 0;
}

static void *free_them(void *argument)
{
	data_free(argument);
	return NULL;
}

/* What one thread allocated another frees; strdup, getline and aligned kinds among it. */
static int free_elsewhere(void)
{
	for (int round = 0; round < 4; round++) {
		pthread_t thread;
		struct data *data = data_make(MEBIBYTES / 2);
		printf("%zu wrong\n", data_wrong(data));
		pthread_create(&thread, NULL, free_them, data);
		pthread_join(thread, NULL);
	}
	char *line = NULL;
	size_t capacity = 0;
	FILE *file = fopen("/proc/self/comm", "r");
	printf("getline %zd %s", getline(&line, &capacity, file), line);
	fclose(file);
	free(line);
	char *copy = strdup("copied");
	void *aligned = NULL, *page = valloc(10000);
	int error = posix_memalign(&aligned, 1 << 16, 1 << 20);
	copy = realloc(copy, 8 << 20);
	memset(copy + 7, 1, (8 << 20) - 7);
	printf("%s %d %lu %lu\n", copy, error, (unsigned long)aligned % (1 << 16),
	       (unsigned long)page % 4096);
	free(copy);
	free(aligned);
	free(page);
	return 0;
}

static struct data *exit_data;

static void at_the_end(void)
{
	data_report("at exit", exit_data);
}

static int at_exit(void)
{
	atexit(at_the_end);
	exit_data = data_make(MEBIBYTES);
	return 7;
}

/* The parent goes first; the child goes on without a terminal, as a daemon does. */
static int daemon_child(void)
{
	struct data *data = data_make(MEBIBYTES);
	int done[2];
	char byte;

	if (pipe(done))
		return 2;
	pid_t pid = fork();
	if (pid == 0) {
		setsid();
		if (fork())
			_exit(0);
		data_report("daemon", data);
		_exit(write(done[1], "x", 1) != 1);
	}
	child_report("middle", pid);
	printf("read %zd\n", read(done[0], &byte, 1));
	data_report("data", data);
	return 0;
}

static int nothing(void)
{
	return 0;
}

static const struct {
	const char *name;
	int (*run)(void);
} programs[] = {
	{ "data", only_data },
	{ "nothing", nothing },
	{ "close-range", close_all },
	{ "main-exits", main_exits },
	{ "signals", signals },
	{ "signal-storm", signal_storm },
	{ "vfork", vfork_child },
	{ "spawn", spawn_child },
	{ "system", system_child },
	{ "popen", popen_child },
	{ "exec-chain", exec_chain },
	{ "thread-churn", thread_churn },
	{ "fork-in-thread", fork_in_thread },
	{ "fork-of-clean", fork_of_clean },
	{ "clean-changes", clean_changes },
	{ "free-elsewhere", free_elsewhere },
	{ "at-exit", at_exit },
	{ "daemon", daemon_child },
	{ "setuid", setuid_then_fork },
	{ "process-limit", process_limit },
	{ "lock-all", lock_all },
	{ "seccomp", seccomp_filter },
	{ "seccomp-all-threads", seccomp_all_threads },
	{ "address-limit", address_limit },
	{ "address-limit-refuses", address_limit_refuses },
	{ "data-limit", data_limit },
	{ "file-limit", file_limit },
};

int main(int argc, char **argv)
{
	self = argv[0];
	for (size_t i = 0; i < sizeof(programs) / sizeof(programs[0]); i++)
		if (argc > 1 && !strcmp(argv[1], programs[i].name))
			return programs[i].run();
	fprintf(stderr, "usage: behaviour NAME\n");
	return 2;
}
