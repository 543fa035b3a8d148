/*
 * Sixteen threads fault every page of an array: each writes its slice, then all walk the whole
 * array together, so that many threads want the same page at the same time.
 *
 *     sixteen_threads MIB
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { THREADS = 16, WORDS = 512, STRETCH = 4096 };

static uint64_t *memory;
static size_t pages;
static pthread_barrier_t barrier;
static uint64_t wrong[THREADS], sums[THREADS];

static uint64_t value(size_t page)
{
	return (page + 1) * 0x9e3779b97f4a7c15u;
}

static void *walk(void *argument)
{
	size_t me = (size_t)argument, slice = pages / THREADS;

	for (size_t page = me * slice; page < (me + 1) * slice; page++) {
		memory[page * WORDS] = value(page);
		memory[page * WORDS + WORDS - 1] = page;
	}
	for (size_t page = 0; page < pages; page++) {
		if (page % STRETCH == 0)
			pthread_barrier_wait(&barrier);
		uint64_t got = memory[page * WORDS];
		wrong[me] += got != value(page) || memory[page * WORDS + WORDS - 1] != page;
		sums[me] += got;
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];
	uint64_t bad = 0;

	pages = (size_t)(argc > 1 ? atoi(argv[1]) : 256) << 8;
	memory = mmap(NULL, pages * WORDS * 8, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 2;
	pthread_barrier_init(&barrier, NULL, THREADS);
	for (size_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, walk, (void *)i);
	for (size_t i = 0; i < THREADS; i++) {
		pthread_join(threads[i], NULL);
		bad += wrong[i] + (sums[i] != sums[0]);
	}
	printf("%zu pages, sum %016lx, %lu wrong\n", pages, sums[0], bad);
	return bad != 0;
}
