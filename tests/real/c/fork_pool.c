/* Most of this program's data is packed when it forks, so that a budget has room for it once.
 *
 * fork_pool MIB ROUNDS: in each round a child, and a child of that, check every byte, write to a
 * sixteenth of the pages, move as many elsewhere, and check again, beside the parent, which does the
 * same. */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096
/* Bytes of a page that do not pack. */
#define DENSE 1000

static uint64_t mix(uint64_t x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdULL;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ULL;
	return x ^ x >> 33;
}

static void fill(unsigned char *page, uint64_t number, uint64_t version)
{
	uint64_t *words = (uint64_t *)page;
	for (size_t at = 0; at < DENSE / 8; at++)
		words[at] = mix(number * 4096 + at + (version << 40));
	memset(page + DENSE, (int)(number % 251), PAGE - DENSE);
}

/* The first pages are in a mapping that moves, the others in one that stays. */
static unsigned char *moving, *staying;
static size_t count, moving_count;

static unsigned char *page_at(size_t at)
{
	return at < moving_count ? moving + at * PAGE : staying + (at - moving_count) * PAGE;
}

static void check(const uint32_t *versions, const char *process)
{
	static unsigned char expected[PAGE];
	for (size_t at = 0; at < count; at++) {
		fill(expected, at, versions[at]);
		if (memcmp(page_at(at), expected, PAGE) != 0) {
			fprintf(stderr, "%s: page %zu is wrong\n", process, at);
			_exit(3);
		}
	}
}

static unsigned char *map(size_t pages)
{
	void *place = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (place == MAP_FAILED) {
		perror("mmap");
		_exit(4);
	}
	return place;
}

static void work(uint32_t *versions, uint32_t version, const char *process)
{
	check(versions, process);
	for (size_t at = version % 16; at < count; at += 16) {
		versions[at] = version;
		fill(page_at(at), at, version);
	}
	/* Packed pages get other owners. */
	unsigned char *place = map(moving_count);
	if (mremap(moving, moving_count * PAGE, moving_count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place) != place) {
		perror("mremap");
		_exit(4);
	}
	moving = place;
	check(versions, process);
}

static void wait_for(pid_t child)
{
	int status;
	if (child < 0) {
		perror("fork");
		_exit(5);
	}
	if (waitpid(child, &status, 0) != child || status != 0) {
		fprintf(stderr, "a child ended with status %#x\n", status);
		_exit(6);
	}
}

int main(int argc, char **argv)
{
	uint32_t version = 1;
	if (argc != 3)
		return 2;
	count = (size_t)atoi(argv[1]) << 8;
	moving_count = count / 16;
	moving = map(moving_count);
	staying = map(count - moving_count);
	uint32_t *versions = calloc(count, sizeof *versions);
	for (size_t at = 0; at < count; at++)
		fill(page_at(at), at, 0);
	for (int round = 0; round < atoi(argv[2]); round++) {
		pid_t child = fork();
		if (child == 0) {
			work(versions, version, "child");
			pid_t grandchild = fork();
			if (grandchild == 0) {
				work(versions, version + 1, "grandchild");
				_exit(0);
			}
			wait_for(grandchild);
			check(versions, "child");
			_exit(0);
		}
		work(versions, version + 2, "parent");
		wait_for(child);
		check(versions, "parent");
		version += 3;
	}
	printf("right\n");
	return 0;
}
