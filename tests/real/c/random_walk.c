/*
 * Maps, writes, unmaps, moves, protects and discards regions at random, from a seed, with a table
 * that says what every page must hold: in one process, with a fork now and then.
 *
 *     random_walk SEED STEPS
 */
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { REGIONS = 48, PAGES_MAX = 1024, PAGE = 4096 };

struct region {
	char *base;
	size_t pages;
	/* What each page was filled from; 0 is a page of zeros. */
	uint64_t *seeds;
	/* PROT_* of each page. */
	unsigned char *prot;
	/* The kernel may hold it as several mappings, which mremap does not take. */
	int split;
};

static struct region regions[REGIONS];
static uint64_t state, digest;
static sigjmp_buf segv_return;

static uint64_t pick(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % below;
}

static void note(uint64_t value)
{
	digest = (digest ^ value) * 0x100000001b3u;
}

static uint64_t word_of(uint64_t seed, size_t word)
{
	return seed == 0 ? 0 : word % 4 ? seed : seed + word;
}

static void fail(const char *what, struct region *region, size_t page)
{
	printf("%s: region %zu page %zu of %zu (%s)\n", what, (size_t)(region - regions), page,
	       region->pages, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static void on_segv(int signal)
{
	(void)signal;
	siglongjmp(segv_return, 1);
}

static void check_page(struct region *region, size_t page)
{
	volatile uint64_t *words = (uint64_t *)(region->base + page * PAGE);

	if (!(region->prot[page] & PROT_READ)) {
		if (sigsetjmp(segv_return, 1) == 0) {
			(void)words[0];
			fail("a protected page could be read", region, page);
		}
		return;
	}
	for (size_t word = 0; word < PAGE / 8; word++)
		if (words[word] != word_of(region->seeds[page], word))
			fail("wrong content", region, page);
	note(words[pick(512)]);
}

static void write_page(struct region *region, size_t page)
{
	uint64_t *words = (uint64_t *)(region->base + page * PAGE);
	uint64_t seed = pick(8) ? pick(1ull << 62) + 1 : 0;

	if (!(region->prot[page] & PROT_WRITE)) {
		if (sigsetjmp(segv_return, 1) == 0) {
			*(volatile uint64_t *)words = 1;
			fail("a protected page could be written", region, page);
		}
		return;
	}
	for (size_t word = 0; word < PAGE / 8; word++)
		words[word] = word_of(seed, word);
	region->seeds[page] = seed;
}

static void new_region(struct region *region)
{
	region->pages = pick(8) ? 1 + pick(PAGES_MAX) : 1 + pick(8);
	region->base = mmap(NULL, region->pages * PAGE, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | (pick(2) ? MAP_NORESERVE : 0), -1, 0);
	if (region->base == MAP_FAILED)
		fail("mmap", region, 0);
	region->seeds = calloc(region->pages, 8);
	region->prot = malloc(region->pages);
	memset(region->prot, PROT_READ | PROT_WRITE, region->pages);
}

static void drop_region(struct region *region)
{
	char *base = region->base;

	if (munmap(base, region->pages * PAGE))
		fail("munmap", region, 0);
	if (sigsetjmp(segv_return, 1) == 0) {
		(void)*(volatile char *)base;
		fail("an unmapped page could be read", region, 0);
	}
	free(region->seeds);
	free(region->prot);
	*region = (struct region){ 0 };
}

static void resize(struct region *region)
{
	size_t pages = 1 + pick(PAGES_MAX), old = region->pages;

	if (region->split)
		return;
	char *base = mremap(region->base, old * PAGE, pages * PAGE, MREMAP_MAYMOVE);
	if (base == MAP_FAILED)
		fail("mremap", region, pages);
	region->base = base;
	region->pages = pages;
	region->seeds = realloc(region->seeds, pages * 8);
	region->prot = realloc(region->prot, pages);
	memset(region->prot, PROT_READ | PROT_WRITE, pages);
	for (size_t page = old; page < pages; page++)
		region->seeds[page] = 0;
}

static void protect(struct region *region, size_t first, size_t count)
{
	static const int rights[] = { PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE };
	int prot = rights[pick(3)];

	if (mprotect(region->base + first * PAGE, count * PAGE, prot))
		fail("mprotect", region, first);
	memset(region->prot + first, prot, count);
	region->split = 1;
}

static void discard(struct region *region, size_t first, size_t count)
{
	if (madvise(region->base + first * PAGE, count * PAGE, MADV_DONTNEED))
		fail("madvise", region, first);
	memset(region->seeds + first, 0, count * 8);
}

/* Zeroes pages by a mapping put over them, as allocators that reset memory do. */
static void map_over(struct region *region, size_t first, size_t count)
{
	char *at = region->base + first * PAGE;

	if (mmap(at, count * PAGE, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at)
		fail("mmap over", region, first);
	memset(region->seeds + first, 0, count * 8);
	memset(region->prot + first, PROT_READ | PROT_WRITE, count);
	region->split = 1;
}

static void check_in_child(void)
{
	int status = 0;
	pid_t pid = fork();

	if (pid == 0) {
		for (size_t i = 0; i < REGIONS; i++)
			for (size_t page = 0; page < regions[i].pages; page++) {
				check_page(&regions[i], page);
				if (page % 3 == 0)
					write_page(&regions[i], page);
			}
		_exit(0);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
		fail("in a child", &regions[0], status);
}

static void step(void)
{
	struct region *region = &regions[pick(REGIONS)];

	if (!region->base) {
		new_region(region);
		return;
	}
	size_t first = pick(region->pages), count = 1 + pick(region->pages - first);
	unsigned choice = pick(100);
	if (choice < 40)
		for (size_t i = 0; i < count; i++)
			write_page(region, first + i);
	else if (choice < 75)
		for (size_t i = 0; i < count; i++)
			check_page(region, first + i);
	else if (choice < 82)
		protect(region, first, count);
	else if (choice < 88)
		discard(region, first, count);
	else if (choice < 93)
		resize(region);
	else if (choice < 96)
		map_over(region, first, count);
	else
		drop_region(region);
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_segv };
	size_t steps = argc > 2 ? strtoul(argv[2], NULL, 0) : 1000;

	state = (argc > 1 ? strtoull(argv[1], NULL, 0) : 1) * 0x9e3779b97f4a7c15u;
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	for (size_t i = 0; i < steps; i++) {
		step();
		if (i % (steps / 8) == steps / 16)
			check_in_child();
	}
	for (size_t i = 0; i < REGIONS; i++)
		for (size_t page = 0; page < regions[i].pages; page++)
			check_page(&regions[i], page);
	printf("%zu steps, digest %016lx\n", steps, digest);
	return 0;
}
