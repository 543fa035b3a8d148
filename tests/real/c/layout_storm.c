/*
 * Sixteen threads read and write while four others map, unmap, protect, move and drop neighbours
 * of what they use, and the very ranges, and the first thread forks every second. Every word that
 * a thread reads is checked: it is what was written to this page since its range was last fresh, or
 * it is zero. One of the four runs on a stack that lies in a mapping, which may be swapped out.
 *
 *     layout_storm SECONDS
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum {
	FAULTERS = 16,
	CHANGERS = 4,
	REGIONS = 48,
	PAGES = 256,
	WORDS = 512,
	STACK = 256 << 10,
};

#define PAGE ((size_t)4096)
#define BYTES (PAGES * PAGE)

struct region {
	uint64_t *start;
	/* Odd while it is being changed. */
	_Atomic uint64_t changes;
	/* Counts how often it was fresh: what was written before must not be seen again. */
	_Atomic uint64_t generation;
	/* Threads that write to it just now. */
	_Atomic uint64_t writers;
};

static struct region regions[REGIONS];
static uint64_t *spare[CHANGERS];
static _Atomic int is_over;
static _Atomic uint64_t wrong, read_words, written_words, changes, strays;

static __thread sigjmp_buf back;
static __thread volatile int may_fail;

static void on_segv(int signal)
{
	if (may_fail)
		siglongjmp(back, 1);
	(void)!write(2, "an access failed that must not\n", 31);
	_exit(signal == SIGSEGV ? 3 : 4);
}

static uint64_t next(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static uint64_t stamp(size_t region, size_t page, uint64_t generation)
{
	uint64_t state = region << 40 | page << 20 | generation;

	return next(&state) | 1;
}

/* Whether a word may be there that was read while the generation went from `first` to `last`. */
static int may_be(uint64_t word, size_t region, size_t page, uint64_t first, uint64_t last)
{
	if (word == 0)
		return 1;
	for (uint64_t generation = first; generation <= last; generation++)
		if (word == stamp(region, page, generation))
			return 1;
	return 0;
}

static void complain(const char *what, size_t region, size_t page, uint64_t word)
{
	if (atomic_fetch_add(&wrong, 1) < 5)
		fprintf(stderr, "%s: region %zu page %zu holds %016lx\n", what, region, page,
			(unsigned long)word);
}

static void read_one(size_t number, size_t page, size_t at)
{
	struct region *region = &regions[number];
	uint64_t before = atomic_load(&region->changes);
	uint64_t first = atomic_load(&region->generation);
	volatile uint64_t word = 0;
	volatile int failed = 1;

	if (sigsetjmp(back, 1) == 0) {
		may_fail = 1;
		word = *(volatile uint64_t *)&region->start[page * WORDS + at];
		failed = 0;
	}
	may_fail = 0;
	atomic_thread_fence(memory_order_seq_cst);
	uint64_t last = atomic_load(&region->generation);
	int is_quiet = before % 2 == 0 && atomic_load(&region->changes) == before;

	if (failed) {
		atomic_fetch_add(&strays, 1);
		if (is_quiet)
			complain("an access failed", number, page, 0);
	} else if (!may_be(word, number, page, is_quiet ? first : first - 1, last)) {
		/* In a change the number comes first, and what was there goes afterwards. */
		complain("read", number, page, word);
	}
	atomic_fetch_add_explicit(&read_words, 1, memory_order_relaxed);
}

static void write_one(size_t number, size_t page, size_t at)
{
	struct region *region = &regions[number];

	/* Its range stays as it is meanwhile; its neighbours do not. */
	atomic_fetch_add(&region->writers, 1);
	if (atomic_load(&region->changes) % 2 == 0) {
		uint64_t generation = atomic_load(&region->generation);
		uint64_t *word = &region->start[page * WORDS + at];
		uint64_t found = *(volatile uint64_t *)word;

		if (!may_be(found, number, page, generation, generation))
			complain("found", number, page, found);
		*(volatile uint64_t *)word = stamp(number, page, generation);
		atomic_fetch_add_explicit(&written_words, 1, memory_order_relaxed);
	}
	atomic_fetch_sub(&region->writers, 1);
}

static void *fault(void *argument)
{
	uint64_t state = (uint64_t)(size_t)argument;

	while (!atomic_load(&is_over)) {
		size_t number = next(&state) % REGIONS, at = next(&state) % WORDS;
		size_t page = next(&state) % PAGES, run = next(&state) % 32;

		for (size_t i = 0; i < run && page + i < PAGES; i++) {
			if (next(&state) % 3 == 0)
				write_one(number, page + i, at);
			else
				read_one(number, page + i, at);
		}
	}
	return NULL;
}

static void must(int is_so, const char *what)
{
	if (!is_so) {
		perror(what);
		_exit(5);
	}
}

static void change_one(size_t me, uint64_t *state)
{
	size_t number = next(state) % (REGIONS / CHANGERS) * CHANGERS + me;
	struct region *region = &regions[number];
	uint64_t *start = region->start;
	const int all = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
	size_t part = next(state) % PAGES;

	atomic_fetch_add(&region->changes, 1);
	while (atomic_load(&region->writers) > 0)
		sched_yield();
	switch (next(state) % 6) {
	case 0:
		atomic_fetch_add(&region->generation, 1);
		must(munmap(start, BYTES) == 0, "munmap");
		if (next(state) % 2 == 0)
			usleep(next(state) % 300);
		must(mmap(start, BYTES, all, flags | MAP_FIXED, -1, 0) == start, "mmap");
		break;
	case 1:
		atomic_fetch_add(&region->generation, 1);
		must(mmap(start, BYTES, all, flags | MAP_FIXED, -1, 0) == start, "mmap over");
		break;
	case 2:
		must(mprotect(start, BYTES, PROT_NONE) == 0, "mprotect none");
		must(mprotect(start, BYTES, all) == 0, "mprotect all");
		break;
	case 3:
		must(mprotect(&start[part * WORDS], (PAGES - part) * PAGE, PROT_READ) == 0, "mprotect");
		must(mprotect(start, BYTES, all) == 0, "mprotect all");
		break;
	case 4:
		must(mremap(start, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, spare[me]) == spare[me],
		     "mremap away");
		must(mremap(spare[me], BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, start) == start,
		     "mremap back");
		break;
	default:
		atomic_fetch_add(&region->generation, 1);
		must(madvise(start, BYTES, MADV_DONTNEED) == 0, "madvise");
	}
	atomic_fetch_add(&region->changes, 1);
	atomic_fetch_add(&changes, 1);
}

static void change_until_the_end(size_t me)
{
	uint64_t state = 1000 + me;

	while (!atomic_load(&is_over)) {
		change_one(me, &state);
		usleep(next(&state) % 500);
	}
}

static ucontext_t outside[CHANGERS], inside[CHANGERS];

static void on_mapped_stack(void)
{
	change_until_the_end(0);
}

static void *change(void *argument)
{
	size_t me = (size_t)argument;

	if (me > 0) {
		change_until_the_end(me);
		return NULL;
	}
	void *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	must(stack != MAP_FAILED && getcontext(&inside[me]) == 0, "a stack");
	inside[me].uc_stack.ss_sp = stack;
	inside[me].uc_stack.ss_size = STACK;
	inside[me].uc_link = &outside[me];
	makecontext(&inside[me], on_mapped_stack, 0);
	must(swapcontext(&outside[me], &inside[me]) == 0, "swapcontext");
	return NULL;
}

/* In a child, where no other thread runs: what is not being changed is whole. */
static int check_all(void)
{
	for (size_t number = 0; number < REGIONS; number++) {
		struct region *region = &regions[number];
		uint64_t generation = region->generation;

		if (region->changes % 2 != 0)
			continue;
		for (size_t page = 0; page < PAGES; page++)
			for (size_t at = 0; at < WORDS; at += 37)
				if (!may_be(region->start[page * WORDS + at], number, page, generation,
					    generation)) {
					complain("child", number, page,
						 region->start[page * WORDS + at]);
					return 1;
				}
	}
	return 0;
}

int main(int argc, char **argv)
{
	int seconds = argc > 1 ? atoi(argv[1]) : 60;
	pthread_t threads[FAULTERS + CHANGERS];
	struct sigaction action = { .sa_handler = on_segv, .sa_flags = SA_NODEFER };

	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	uint64_t *whole = mmap(NULL, (REGIONS + CHANGERS) * BYTES, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(whole != MAP_FAILED, "mmap");
	for (size_t i = 0; i < REGIONS + CHANGERS; i++) {
		uint64_t *start = whole + i * (BYTES / sizeof *whole);

		if (i < REGIONS)
			regions[i] = (struct region){ .start = start, .generation = 1 };
		else
			spare[i - REGIONS] = start;
	}
	for (size_t i = 0; i < FAULTERS + CHANGERS; i++)
		must(pthread_create(&threads[i], NULL, i < FAULTERS ? fault : change,
				    (void *)(i < FAULTERS ? i + 1 : i - FAULTERS)) == 0,
		     "pthread_create");
	time_t end = time(NULL) + seconds;
	int forks = 0;

	while (time(NULL) < end) {
		sleep(1);
		pid_t pid = fork();

		must(pid >= 0, "fork");
		if (pid == 0)
			_exit(check_all());
		int status = 0;

		must(waitpid(pid, &status, 0) == pid, "waitpid");
		if (status != 0)
			atomic_fetch_add(&wrong, 1);
		forks++;
	}
	atomic_store(&is_over, 1);
	for (size_t i = 0; i < FAULTERS + CHANGERS; i++)
		pthread_join(threads[i], NULL);
	fprintf(stderr, "%lu read, %lu written, %lu changes, %lu strays, %d forks\n",
		(unsigned long)read_words, (unsigned long)written_words, (unsigned long)changes,
		(unsigned long)strays, forks);
	printf("%lu wrong\n", (unsigned long)wrong);
	return wrong != 0;
}
