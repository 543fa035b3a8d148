/* Most of this program's data is packed when it forks, so that a budget has room for it once.
 *
 * fork_pool MIB ROUNDS: in each round a child, and a child of that, check every byte, write to an
 * eighth of the pages, move some elsewhere, and check again, beside the parent, who does the same. */

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

static void check(const unsigned char *pages, const uint32_t *versions, size_t count, const char *who)
{
	static unsigned char expected[PAGE];
	for (size_t at = 0; at < count; at++) {
		fill(expected, at, versions[at]);
		if (memcmp(pages + at * PAGE, expected, PAGE) != 0) {
			fprintf(stderr, "%s: page %zu is wrong\n", who, at);
			_exit(3);
		}
	}
}

static unsigned char *work(unsigned char *pages, uint32_t *versions, size_t count, uint32_t version,
						   const char *who)
{
	check(pages, versions, count, who);
	for (size_t at = version % 8; at < count; at += 8) {
		versions[at] = version;
		fill(pages + at * PAGE, at, version);
	}
	/* All of it somewhere else: packed pages get other owners. */
	void *place = mmap(NULL, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	void *moved = mremap(pages, count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
	if (moved != place) {
		perror("mremap");
		_exit(4);
	}
	check(moved, versions, count, who);
	return moved;
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
	size_t count = (size_t)atoi(argv[1]) << 8;
	uint32_t version = 1;
	(void)argc;
	unsigned char *pages = mmap(NULL, count * PAGE, PROT_READ | PROT_WRITE,
								MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t *versions = calloc(count, sizeof *versions);
	for (size_t at = 0; at < count; at++)
		fill(pages + at * PAGE, at, 0);
	for (int round = 0; round < atoi(argv[2]); round++) {
		pid_t child = fork();
		if (child == 0) {
			pages = work(pages, versions, count, version, "child");
			pid_t grandchild = fork();
			if (grandchild == 0) {
				work(pages, versions, count, version + 1, "grandchild");
				_exit(0);
			}
			pages = work(pages, versions, count, version + 2, "child");
			wait_for(grandchild);
			check(pages, versions, count, "child");
			_exit(0);
		}
		pages = work(pages, versions, count, version + 3, "parent");
		wait_for(child);
		check(pages, versions, count, "parent");
		version += 4;
	}
	printf("right\n");
	return 0;
}
