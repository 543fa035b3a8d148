/*
 * Processes that share a budget: which one gives memory to which. Every page is checked, word by word.
 *
 *     tree_market idle MIB_IDLE MIB_BUSY ROUNDS    one fills its memory and sleeps, one reads its own again
 *     tree_market stopped MIB_STOPPED MIB_BUSY     one is stopped when it has filled its memory, one goes on
 *     tree_market frozen MIB_FROZEN MIB_BUSY CGROUP  the same, by a freezer (version 1)
 *     tree_market all MIB_STOPPED MIB_BUSY         two are stopped, one has no memory, and is ended by 137
 *     tree_market many MEMBERS MIB ROUNDS          all write and read
 *     tree_market killed MIB_IDLE MIB_BUSY ROUNDS  a process is killed while it gives, and another comes
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 512, MEMBERS_MAX = 64 };

struct memory {
	volatile uint64_t *words;
	size_t pages;
	uint64_t seed;
};

/* Noise: what is written does not compress, so that memory must be had for it. */
static uint64_t noise(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

static struct memory fill(size_t mib, uint64_t seed)
{
	struct memory memory = { malloc(mib << 20), mib << 8, seed };

	if (!memory.words)
		exit(3);
	for (size_t at = 0; at < memory.pages * WORDS; at++)
		memory.words[at] = noise(seed << 40 ^ at);
	return memory;
}

static int is_right(struct memory memory)
{
	for (size_t at = 0; at < memory.pages * WORDS; at++)
		if (memory.words[at] != noise(memory.seed << 40 ^ at))
			return 0;
	return 1;
}

/* One word a page: as many faults as can be had. */
static int looks_right(struct memory memory, size_t word)
{
	for (size_t page = 0; page < memory.pages; page++) {
		size_t at = page * WORDS + word % WORDS;

		if (memory.words[at] != noise(memory.seed << 40 ^ at))
			return 0;
	}
	return 1;
}

static int pipes[2];

static void say_ready(void)
{
	if (write(pipes[1], "x", 1) != 1)
		exit(4);
}

static void wait_until_ready(void)
{
	char byte;

	if (read(pipes[0], &byte, 1) != 1)
		exit(4);
}

static int status_of(pid_t pid)
{
	int status;

	if (waitpid(pid, &status, 0) != pid)
		exit(5);
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static void pause_ms(long ms)
{
	struct timespec time = { ms / 1000, ms % 1000 * 1000000 };

	nanosleep(&time, NULL);
}

/* What a process does that has filled its memory, beside sleeping. */
enum end { NOTHING, SETTLES, STOPS };

/* Fills its memory, and sleeps until it is told to check it. */
static pid_t make_idle(size_t mib, uint64_t seed, enum end end)
{
	pid_t pid = fork();

	if (pid < 0)
		exit(6);
	if (pid == 0) {
		sigset_t set;
		int signal;
		struct memory memory;

		sigemptyset(&set);
		sigaddset(&set, SIGUSR1);
		sigprocmask(SIG_BLOCK, &set, NULL);
		memory = fill(mib, seed);
		/* A process that is stopped in the middle of it leaves nothing to others. */
		if (end != NOTHING)
			pause_ms(500);
		say_ready();
		if (end == STOPS)
			raise(SIGSTOP);
		sigwait(&set, &signal);
		_exit(!is_right(memory));
	}
	wait_until_ready();
	return pid;
}

static pid_t make_busy(size_t mib, uint64_t seed, size_t rounds)
{
	pid_t pid = fork();

	if (pid < 0)
		exit(6);
	if (pid == 0) {
		struct memory memory = fill(mib, seed);

		for (size_t round = 0; round < rounds; round++)
			if (!looks_right(memory, round * 7))
				_exit(1);
		_exit(!is_right(memory));
	}
	return pid;
}

static void wait_until_stopped(pid_t pid)
{
	int status;

	if (waitpid(pid, &status, WUNTRACED) != pid || !WIFSTOPPED(status))
		exit(5);
}

static int end_of_idle(pid_t pid)
{
	kill(pid, SIGUSR1);
	kill(pid, SIGCONT);
	return status_of(pid);
}

static int idle(size_t mib_idle, size_t mib_busy, size_t rounds)
{
	pid_t sleeper = make_idle(mib_idle, 1, NOTHING);
	int busy = status_of(make_busy(mib_busy, 2, rounds));

	printf("busy %d\n", busy);
	printf("idle %d\n", end_of_idle(sleeper));
	return 0;
}

static int stopped(size_t mib_stopped, size_t mib_busy)
{
	pid_t sleeper = make_idle(mib_stopped, 1, STOPS);
	int busy;

	wait_until_stopped(sleeper);
	busy = status_of(make_busy(mib_busy, 2, 2));
	printf("busy %d\n", busy);
	printf("stopped %d\n", end_of_idle(sleeper));
	return 0;
}

static void write_to(const char *cgroup, const char *name, const char *text)
{
	char path[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s/%s", cgroup, name);
	file = fopen(path, "w");
	if (!file || fputs(text, file) < 0 || fclose(file) != 0)
		exit(7);
}

static int frozen(size_t mib_frozen, size_t mib_busy, const char *cgroup)
{
	pid_t sleeper = make_idle(mib_frozen, 1, SETTLES);
	char pid[16];
	int busy;

	snprintf(pid, sizeof(pid), "%d", sleeper);
	write_to(cgroup, "cgroup.procs", pid);
	write_to(cgroup, "freezer.state", "FROZEN");
	busy = status_of(make_busy(mib_busy, 2, 2));
	write_to(cgroup, "freezer.state", "THAWED");
	printf("busy %d\n", busy);
	printf("frozen %d\n", end_of_idle(sleeper));
	return 0;
}

static int all_stopped(size_t mib_stopped, size_t mib_busy)
{
	pid_t sleepers[2];
	int busy;

	for (int i = 0; i < 2; i++) {
		sleepers[i] = make_idle(mib_stopped, i + 1, STOPS);
		wait_until_stopped(sleepers[i]);
	}
	busy = status_of(make_busy(mib_busy, 3, 1));
	printf("busy %d\n", busy);
	for (int i = 0; i < 2; i++)
		printf("stopped %d\n", end_of_idle(sleepers[i]));
	return 0;
}

static int many(size_t members, size_t mib, size_t rounds)
{
	pid_t pids[MEMBERS_MAX];
	int wrong = 0;

	for (size_t i = 0; i < members; i++)
		pids[i] = make_busy(mib, i + 1, rounds);
	for (size_t i = 0; i < members; i++)
		wrong += status_of(pids[i]) != 0;
	printf("%zu members, %d wrong\n", members, wrong);
	return 0;
}

static int killed(size_t mib_idle, size_t mib_busy, size_t rounds)
{
	pid_t busy;
	pid_t sleeper = make_idle(mib_idle, 1, NOTHING);
	int as_it_should = 1;

	busy = make_busy(mib_busy, 2, 8 * rounds);
	for (size_t round = 0; round < rounds; round++) {
		pause_ms(noise(round) % 50);
		kill(sleeper, SIGKILL);
		as_it_should &= status_of(sleeper) == 128 + SIGKILL;
		sleeper = make_idle(mib_idle, round + 3, NOTHING);
	}
	printf("killed %d\n", as_it_should);
	printf("busy %d\n", status_of(busy));
	printf("idle %d\n", end_of_idle(sleeper));
	return 0;
}

int main(int argc, char **argv)
{
	size_t numbers[3] = { 0 };

	for (int i = 0; i < 3 && i + 2 < argc; i++)
		numbers[i] = strtoul(argv[i + 2], NULL, 10);
	if (argc < 4 || pipe(pipes) < 0)
		return 2;
	if (!strcmp(argv[1], "idle"))
		return idle(numbers[0], numbers[1], numbers[2]);
	if (!strcmp(argv[1], "stopped"))
		return stopped(numbers[0], numbers[1]);
	if (!strcmp(argv[1], "frozen") && argc > 4)
		return frozen(numbers[0], numbers[1], argv[4]);
	if (!strcmp(argv[1], "all"))
		return all_stopped(numbers[0], numbers[1]);
	if (!strcmp(argv[1], "many") && numbers[0] <= MEMBERS_MAX)
		return many(numbers[0], numbers[1], numbers[2]);
	if (!strcmp(argv[1], "killed"))
		return killed(numbers[0], numbers[1], numbers[2]);
	return 2;
}
