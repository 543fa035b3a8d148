/* What the C tests share. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <quire.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)
#define PAGE ((size_t)4096)

/* Without a right to a userfaultfd nothing can be tested; the caller of the program decides. */
#define EXIT_NO_RIGHT 77

#define CHECK(condition)                                                                     \
	do {                                                                                 \
		if (!(condition)) {                                                          \
			fprintf(stderr, "%s:%d: %s; errno is %d, quire says: %s\n", __FILE__, \
				__LINE__, #condition, errno, quire_last_error());            \
			exit(1);                                                             \
		}                                                                            \
	} while (0)

/* The call fails with that errno, and says something. */
#define FAILS(call, error)                                    \
	do {                                                  \
		errno = 0;                                    \
		CHECK((intptr_t)(call) <= 0);                 \
		CHECK(errno == (error));                      \
		CHECK(quire_last_error()[0]);                 \
	} while (0)

static struct quire_space *open_space(size_t memory)
{
	struct quire_space_options options = { .memory = memory };
	struct quire_space *space = quire_space_open(&options);

	if (!space && (errno == EPERM || errno == EACCES || errno == ENOSYS)) {
		fprintf(stderr, "%s\n", quire_last_error());
		exit(EXIT_NO_RIGHT);
	}
	CHECK(space);
	return space;
}

/* What the byte of a test file at an offset is. */
static inline unsigned char byte_at(uint64_t offset)
{
	uint64_t mixed = (offset / 8 + 1) * UINT64_C(0x9e3779b97f4a7c15);

	return (unsigned char)(mixed >> (8 * (offset % 8)));
}

/* Makes a file of so many such bytes. */
static inline void make_file(const char *path, size_t len)
{
	FILE *file = fopen(path, "w");

	CHECK(file);
	for (size_t i = 0; i < len; i++)
		putc_unlocked(byte_at(i), file);
	CHECK(!fclose(file));
}

#endif
