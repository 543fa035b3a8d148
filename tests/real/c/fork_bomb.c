/*
 * Every process forks at each of LEVELS levels, and so does every child from its own level on: 2^LEVELS
 * processes, unless fork says EAGAIN or ENOMEM. Each finds the data that it inherited, changes its copy, and
 * waits for its children. Prints how many forks were refused, which differs from run to run, to stderr, and
 * whether all was right to stdout.
 *
 *     fork_bomb LEVELS
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 96 << 10 };

struct shared { unsigned made, refused, wrong; };

static unsigned char byte_of(unsigned mark, size_t at)
{
	return (unsigned char)((at * 2654435761u + mark * 40503u) >> 7);
}

static void fill(unsigned char *data, unsigned mark)
{
	for (size_t at = 0; at < BYTES; at++)
		data[at] = byte_of(mark, at);
}

static int is_filled(const unsigned char *data, unsigned mark)
{
	for (size_t at = 0; at < BYTES; at++)
		if (data[at] != byte_of(mark, at))
			return 0;
	return 1;
}

int main(int count, char **words)
{
	int levels = count > 1 ? atoi(words[1]) : 8, status, is_root = 1;
	struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
				     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	unsigned char *data = malloc(BYTES);
	unsigned mark = 1;

	if (shared == MAP_FAILED || !data)
		return 2;
	alarm(200);
	fill(data, mark);
	for (int level = 0; level < levels; level++) {
		pid_t child = fork();

		if (child < 0) {
			if (errno != EAGAIN && errno != ENOMEM) {
				perror("fork");
				__atomic_fetch_add(&shared->wrong, 1, __ATOMIC_RELAXED);
			}
			__atomic_fetch_add(&shared->refused, 1, __ATOMIC_RELAXED);
			continue;
		}
		if (!is_filled(data, mark))
			__atomic_fetch_add(&shared->wrong, 1, __ATOMIC_RELAXED);
		if (child == 0) {
			is_root = 0;
			__atomic_fetch_add(&shared->made, 1, __ATOMIC_RELAXED);
			mark = mark * 31 + (unsigned)level + 7;
			fill(data, mark);
		}
	}
	while (wait(&status) > 0)
		if (status != 0)
			__atomic_fetch_add(&shared->wrong, 1, __ATOMIC_RELAXED);
	if (!is_filled(data, mark))
		__atomic_fetch_add(&shared->wrong, 1, __ATOMIC_RELAXED);
	if (!is_root)
		return 0;
	fprintf(stderr, "%u forks, %u refused\n", shared->made, shared->refused);
	printf("%s\n", shared->wrong ? "wrong" : "right");
	return shared->wrong != 0;
}
