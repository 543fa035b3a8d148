/*
 * Threads write patterns without pause while main forks children. A child checks every byte that
 * it inherited, changes all of it, checks again, and some fork a grandchild that does the same.
 * The parent's pages must never show what a child wrote, nor a page the bytes of another.
 *
 * A page's words are written in order, so a snapshot taken at any moment shows a page as some words
 * of generation g + 1 followed by words of generation g, and nothing else.
 *
 *     fork_storm SECONDS MIB
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 8, WORDS = 512, CHILD = 1 << 20 };

static volatile uint64_t *memory;
static size_t pages;
static atomic_int stop;

static uint64_t word_of(size_t page, uint64_t generation, size_t word)
{
	/* Half of it repeats, so that it compresses and yet tells every page and word apart. */
	uint64_t seed = page * 0x9e3779b97f4a7c15u ^ generation << 40;
	return word & 1 ? seed : seed ^ word * 0xff51afd7ed558ccdu;
}

static void write_page(size_t page, uint64_t generation)
{
	for (size_t word = 0; word < WORDS; word++)
		memory[page * WORDS + word] = word_of(page, generation, word);
}

/* Generations of a page: the odd word at the end carries it. */
static int page_is_whole(size_t page)
{
	volatile uint64_t *at = memory + page * WORDS;
	uint64_t older = (at[WORDS - 1] ^ page * 0x9e3779b97f4a7c15u) >> 40;
	size_t word = 0;

	while (word < WORDS && at[word] == word_of(page, older + 1, word))
		word++;
	while (word < WORDS && at[word] == word_of(page, older, word))
		word++;
	if (word == WORDS)
		return 1;
	fprintf(stderr, "pid %d page %zu word %zu is %016lx, generation %lu expected %016lx\n",
		getpid(), page, word, at[word], older, word_of(page, older, word));
	return 0;
}

static size_t wrong_pages(void)
{
	size_t wrong = 0;

	for (size_t page = 0; page < pages; page++)
		wrong += !page_is_whole(page);
	return wrong;
}

static void *writer(void *argument)
{
	size_t slice = pages / THREADS, first = (size_t)argument * slice;
	uint64_t generation = 1;

	while (!atomic_load(&stop)) {
		for (size_t i = 0; i < slice && !atomic_load(&stop); i++) {
			if (generation % 4 == 0 && !page_is_whole(first + i))
				_exit(3);
			/* The generation goes up by one a page and round, whatever stopped us. */
			write_page(first + i, generation);
		}
		generation++;
	}
	return NULL;
}

static size_t check_change_check(uint64_t generation)
{
	size_t wrong = wrong_pages();

	for (size_t page = 0; page < pages; page++)
		write_page(page, generation);
	return wrong + wrong_pages();
}

static void child(void)
{
	uint64_t generation = CHILD + (unsigned)getpid() % 1024 * 4;
	size_t wrong = check_change_check(generation);
	int status = 0;
	pid_t grandchild = fork();

	if (grandchild == 0)
		_exit(check_change_check(generation + 2) ? 4 : 0);
	if (grandchild < 0)
		perror("a child's fork");
	if (grandchild < 0 || waitpid(grandchild, &status, 0) < 0 || status != 0)
		wrong++;
	wrong += wrong_pages();
	_exit(wrong ? 4 : 0);
}

static int reap(int flags, int *bad)
{
	int status, ended = 0;

	while (waitpid(-1, &status, flags) > 0) {
		if (status != 0) {
			fprintf(stderr, "a child ended with status %x\n", status);
			*bad = 1;
		}
		ended++;
	}
	return ended;
}

int main(int argc, char **argv)
{
	time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 5);
	pthread_t threads[THREADS];
	int bad = 0, running = 0;

	pages = (size_t)(argc > 2 ? atoi(argv[2]) : 64) << 8;
	memory = aligned_alloc(4096, pages * WORDS * 8);
	if (!memory)
		return 2;
	for (size_t page = 0; page < pages; page++)
		write_page(page, 0);
	for (size_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, writer, (void *)i);
	while (time(NULL) < end && !bad) {
		pid_t pid = fork();
		if (pid == 0)
			child();
		if (pid < 0) {
			perror("fork");
			bad = 1;
			break;
		}
		running++;
		/* Mostly one child, now and then two at once. */
		running -= reap(running > 1 ? 0 : WNOHANG, &bad);
	}
	atomic_store(&stop, 1);
	for (size_t i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	reap(0, &bad);
	bad |= wrong_pages() != 0;
	puts(bad ? "wrong" : "right");
	return bad;
}
