/*
 * A tree of processes at a small budget. Eight threads write without pause; main forks children that check
 * every byte, change their copy, check it and fork once more, down to a depth; each level does the same.
 * No process may ever see a byte of another, or lose one of its own.
 *
 * A page is a header word and words that follow from it, written in order: a snapshot at any moment shows
 * words of one generation followed by words of the one before.
 *
 *     fork_tree tree SECONDS MIB [DEPTH]     the tree above
 *     fork_tree server SECONDS MIB WORKERS   a master forks workers, goes on, and replaces them
 *     fork_tree killed SECONDS MIB MEMBERS   members are killed at random, the others must be right
 *
 * After `killed` it says so on stderr and reads a byte: the test looks at the accounts meanwhile. Then
 * it becomes a program without an environment, which is unmanaged, and waits for the end of its input:
 * what is on the accounts now is no member's.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 8, WORDS = 512, MEMBERS_MAX = 64, CHILD = 1 << 20 };

static volatile uint64_t *memory;
static size_t pages;
static atomic_int stop;
static time_t end;

static uint64_t seed_of(size_t page, uint64_t generation)
{
	return page * 0x9e3779b97f4a7c15u ^ generation << 40;
}

static uint64_t word_of(size_t page, uint64_t generation, size_t word)
{
	uint64_t seed = seed_of(page, generation);

	/* Half of it repeats, so that it compresses and yet tells every page and word apart. */
	return word & 1 ? seed : seed ^ word * 0xff51afd7ed558ccdu;
}

static void write_page(size_t page, uint64_t generation)
{
	for (size_t word = 0; word < WORDS; word++)
		memory[page * WORDS + word] = word_of(page, generation, word);
}

static int page_is_whole(size_t page)
{
	volatile uint64_t *at = memory + page * WORDS;
	uint64_t older = (at[WORDS - 1] ^ seed_of(page, 0)) >> 40;
	size_t word = 0;

	while (word < WORDS && at[word] == word_of(page, older + 1, word))
		word++;
	while (word < WORDS && at[word] == word_of(page, older, word))
		word++;
	if (word == WORDS)
		return 1;
	fprintf(stderr, "pid %d page %zu word %zu is %016lx, of generation %lu\n", getpid(), page, word,
		at[word], older);
	return 0;
}

static size_t wrong_pages(void)
{
	size_t wrong = 0;

	for (size_t page = 0; page < pages; page++)
		wrong += !page_is_whole(page);
	return wrong;
}

/* The same, and each page is of this very generation. */
static size_t others_than(uint64_t generation, size_t first, size_t step)
{
	size_t wrong = 0;

	for (size_t page = first; page < pages; page += step)
		for (size_t word = 0; word < WORDS; word++)
			if (memory[page * WORDS + word] != word_of(page, generation, word)) {
				fprintf(stderr, "pid %d page %zu word %zu\n", getpid(), page, word);
				wrong++;
				break;
			}
	return wrong;
}

static void write_all(uint64_t generation, size_t first, size_t step)
{
	for (size_t page = first; page < pages; page += step)
		write_page(page, generation);
}

/* Memory may be short for a moment; a fork that is refused is tried again. */
static pid_t fork_patiently(void)
{
	for (int tries = 0;; tries++) {
		pid_t pid = fork();
		if (pid >= 0 || (errno != ENOMEM && errno != EAGAIN) || tries == 600)
			return pid;
		fprintf(stderr, "pid %d: fork was refused: %s\n", getpid(), strerror(errno));
		usleep(50000);
	}
}

/* 0 where the child ended well, 1 where not. */
static int ended_badly(pid_t pid)
{
	int status = -1;

	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	if (status)
		fprintf(stderr, "pid %d ended with status %x\n", pid, status);
	return status != 0;
}

/* Levels of the tree */

static size_t live(int depth)
{
	uint64_t generation = CHILD + (unsigned)getpid() % 1024 * 8 + depth;
	size_t wrong = wrong_pages();
	pid_t child = -1;

	write_all(generation, 0, 1);
	wrong += others_than(generation, 0, 1);
	if (depth > 1) {
		child = fork_patiently();
		if (child == 0)
			_exit(live(depth - 1) ? 4 : 0);
		if (child < 0)
			perror("a child's fork");
		/* Written beside the child, which reads the same frames. */
		write_all(generation + 1, 0, 2);
		wrong += child < 0 || ended_badly(child);
		wrong += others_than(generation + 1, 0, 2) + others_than(generation, 1, 2);
	}
	return wrong;
}

static void *writer(void *argument)
{
	size_t slice = pages / THREADS, first = (size_t)argument * slice;

	for (uint64_t generation = 1; !atomic_load(&stop); generation++)
		for (size_t i = 0; i < slice; i++) {
			if (generation % 4 == 0 && !page_is_whole(first + i))
				_exit(3);
			write_page(first + i, generation);
		}
	return NULL;
}

static size_t tree(int depth)
{
	pthread_t threads[THREADS];
	size_t wrong = 0, forks = 0;

	for (size_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, writer, (void *)i);
	while (!wrong && (time(NULL) < end || !forks)) {
		pid_t pid = fork_patiently();
		if (pid == 0)
			_exit(live(depth) ? 4 : 0);
		if (pid < 0)
			perror("fork");
		wrong += pid < 0 || ended_badly(pid);
		forks++;
	}
	atomic_store(&stop, 1);
	for (size_t i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	fprintf(stderr, "%zu trees\n", forks);
	return wrong + wrong_pages();
}

/* A master and its workers */

static void work(size_t number, size_t workers, uint64_t generation)
{
	size_t wrong = others_than(generation, 0, 1);

	write_all(CHILD + number, number, workers);
	wrong += others_than(CHILD + number, number, workers);
	for (size_t other = 0; other < workers; other++)
		if (other != number)
			wrong += others_than(generation, other, workers);
	_exit(wrong ? 4 : 0);
}

static pid_t hire(size_t number, size_t workers, uint64_t generation)
{
	pid_t pid = fork_patiently();

	if (pid == 0)
		work(number, workers, generation);
	if (pid < 0)
		perror("a worker's fork");
	return pid;
}

static size_t serve(size_t workers)
{
	pid_t pids[MEMBERS_MAX];
	size_t wrong = 0, hired = 0;
	uint64_t generation = 0;

	for (size_t i = 0; i < workers; i++, hired++)
		wrong += (pids[i] = hire(i, workers, generation)) < 0;
	/* All have been replaced at least once. */
	for (size_t round = 0; !wrong && (time(NULL) < end || round < workers); round++) {
		size_t number = round % workers;
		wrong += ended_badly(pids[number]);
		write_all(++generation, 0, 1);
		wrong += (pids[number] = hire(number, workers, generation)) < 0;
		hired++;
	}
	for (size_t i = 0; i < workers; i++)
		wrong += pids[i] > 0 && ended_badly(pids[i]);
	fprintf(stderr, "%zu workers\n", hired);
	return wrong + others_than(generation, 0, 1);
}

/* Members that are killed */

/* Changes its copy until it is killed or its parent is gone, perhaps already. */
static void change_until_killed(pid_t parent, uint64_t generation, void (*between)(uint64_t))
{
	size_t wrong = others_than(generation, 0, 1);

	for (uint64_t own = generation + CHILD; !wrong && getppid() == parent; own++) {
		write_all(own, 0, 1);
		wrong = others_than(own, 0, 1);
		if (between)
			between(own);
	}
	_exit(wrong ? 4 : 0);
}

/* Has a child of its own for a moment, which dies in the middle of what it does. */
static void fork_and_kill(uint64_t generation)
{
	pid_t self = getpid(), child = fork();

	if (child == 0)
		change_until_killed(self, generation, NULL);
	usleep(50000);
	if (child > 0) {
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
	}
}

static size_t killed(size_t members)
{
	pid_t pids[MEMBERS_MAX];
	size_t wrong = 0, kills = 0;
	pid_t self = getpid();

	srandom(7);
	for (size_t i = 0; i < members; i++)
		pids[i] = 0;
	while (!wrong && time(NULL) < end) {
		for (size_t i = 0; i < members && !wrong; i++) {
			if (pids[i] > 0)
				continue;
			pids[i] = fork_patiently();
			if (pids[i] == 0)
				change_until_killed(self, 0, i % 2 ? fork_and_kill : NULL);
			if (pids[i] < 0)
				perror("fork");
			wrong += pids[i] < 0;
		}
		size_t victim = random() % members;
		int status = 0;
		usleep(100000);
		kill(pids[victim], SIGKILL);
		waitpid(pids[victim], &status, 0);
		if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
			fprintf(stderr, "pid %d ended with status %x\n", pids[victim], status);
			wrong++;
		}
		pids[victim] = 0;
		kills++;
		wrong += others_than(0, random() % 16, 16);
	}
	for (size_t i = 0; i < members; i++)
		if (pids[i] > 0) {
			kill(pids[i], SIGKILL);
			waitpid(pids[i], NULL, 0);
		}
	fprintf(stderr, "%zu kills\n", kills);
	return wrong + others_than(0, 0, 1);
}

/* With input that is at its end at once, as a bare run's, nothing waits. */
static void show_accounts(int status)
{
	char *nothing[] = {NULL}, byte;
	char *shell[] = {"sh", "-c", status ? "read end; exit 1" : "read end; exit 0", NULL};

	/* Freed it might be kept for later. */
	madvise((void *)memory, pages * WORDS * 8, MADV_DONTNEED);
	fputs("settled\n", stderr);
	if (read(0, &byte, 1) >= 0)
		execve("/bin/sh", shell, nothing);
	perror("sh");
}

int main(int argc, char **argv)
{
	size_t wrong = 1, count = argc > 4 ? (size_t)atoi(argv[4]) : 2;

	if (argc < 4 || count > MEMBERS_MAX)
		return 2;
	end = time(NULL) + atoi(argv[2]);
	pages = (size_t)atoi(argv[3]) << 8;
	memory = aligned_alloc(4096, pages * WORDS * 8);
	if (!memory)
		return 2;
	write_all(0, 0, 1);
	if (!strcmp(argv[1], "tree"))
		wrong = tree((int)count);
	else if (!strcmp(argv[1], "server"))
		wrong = serve(count);
	else if (!strcmp(argv[1], "killed"))
		wrong = killed(count);
	puts(wrong ? "wrong" : "right");
	fflush(stdout);
	if (!strcmp(argv[1], "killed"))
		show_accounts(wrong != 0);
	return wrong != 0;
}
