/*
 * Calls of mmap's family with every sort of argument, good and bad, on one range, from a seed. Each call's result and
 * what may be done with each page afterwards is printed, so that a bare run can be held against a managed one.
 *
 *     odd_calls SEED STEPS [by-number]
 *
 * By number the calls are made with `syscall`.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 64, GUARD = 16, BLOCK = 2 << 20 };

static char *base;
static uint64_t state;
static int pipe_in, pipe_out, file, read_only_file;
/* Whether the range may have more than private anonymous memory, or mappings that the kernel cannot join and Quire can,
 * for it has less to tell them by: only single pages are moved then. */
static int is_mixed;
static int is_by_number;

#define CALL(name, ...) (is_by_number ? syscall(SYS_##name, __VA_ARGS__) : (long)name(__VA_ARGS__))

static uint64_t pick(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % below;
}

#define ONE_OF(...) pick_of((const long[]){__VA_ARGS__}, sizeof((const long[]){__VA_ARGS__}) / sizeof(long))
static long pick_of(const long *list, size_t count)
{
	return list[pick(count)];
}

/* As a rule inside of the range, and at a page's begin. */
static char *some_place(void)
{
	if (pick(32) == 0) return (char *)ONE_OF(0, 1, PAGE, -PAGE, 1L << 46, (1L << 47) - PAGE, 1L << 62);
	return base + pick(PAGES) * PAGE + (pick(24) ? 0 : 1 + pick(PAGE - 1));
}

static size_t some_length(void)
{
	if (pick(32) == 0) return (size_t)ONE_OF(0, -1, -PAGE, 1L << 46, 1L << 47, 1L << 62);
	return 1 + pick(12) * PAGE + (pick(4) ? PAGE - 1 : pick(PAGE));
}

/* Keeps calls that do something inside of the range: they end there, or behind the end of all addresses, or are far
 * below all programs or above them. */
static int may_do(char *at, size_t length)
{
	uintptr_t start = (uintptr_t)at, end = start + length;
	if (end <= start || end <= 0x500000000000 || start >= 1UL << 47) return 1;
	return at >= base && at + length <= base + PAGES * PAGE;
}

static void *some_vector(void)
{
	static unsigned char vector[PAGES + 64];
	switch (pick(6)) {
	case 0: return (void *)ONE_OF(0, 1, -1, 1L << 62);
	case 1: return (void *)(uintptr_t)"read only";
	case 2: return base + (PAGES + GUARD / 2) * PAGE;
	default: return vector;
	}
}

/* A place by its distance, where that is the same in every run. */
static const char *name_of(const char *at)
{
	static char names[2][32];
	static int next;
	char *name = names[next++ % 2];
	int is_near = at > base - (1L << 30) && at < base + (1L << 30);
	snprintf(name, sizeof *names, is_near ? "%+ld" : "%#lx", is_near ? (long)(at - base) : (long)at);
	return name;
}

static void show(long result, int error)
{
	char *where = (char *)result;
	if (result == -1) printf(" = %s |", strerrorname_np(error));
	else if (where >= base && where < base + PAGES * PAGE) printf(" = %s |", name_of(where));
	else printf(" = %s |", result ? "elsewhere" : "0");
}

/* What can be done with each page: nothing, read, write; and what its first bytes are. */
static void show_pages(void)
{
	uint64_t digest = 0;
	char what[PAGES + 1] = {0};
	for (int page = 0; page < PAGES; page++) {
		char *at = base + page * PAGE, bytes[8];
		what[page] = '-';
		if (write(pipe_out, at, sizeof bytes) == sizeof bytes) {
			if (read(pipe_in, bytes, sizeof bytes) != sizeof bytes) abort();
			what[page] = 'r';
			uint64_t word;
			memcpy(&word, bytes, sizeof word);
			digest = (digest ^ word ^ (uint64_t)page) * 0x100000001b3u;
			if (write(pipe_out, bytes, sizeof bytes) != sizeof bytes) abort();
			if (read(pipe_in, at, sizeof bytes) == sizeof bytes) what[page] = 'w';
			else if (read(pipe_in, bytes, sizeof bytes) != sizeof bytes) abort();
		} else if (errno != EFAULT) abort();
	}
	printf(" %s %016lx\n", what, (unsigned long)digest);
}

/* Fills what may be written, by the kernel. */
static void fill(void)
{
	for (int times = 0; times < 6; times++) {
		uint64_t value = pick(-1UL);
		char *at = base + pick(PAGES) * PAGE, left[8];
		if (write(pipe_out, &value, sizeof value) != sizeof value) abort();
		if (read(pipe_in, at, sizeof value) != sizeof value && read(pipe_in, left, sizeof left) != sizeof left) abort();
	}
}

static void map_some(void)
{
	char *at = some_place();
	size_t length = some_length();
	int prot = (int)ONE_OF(0, 1, 2, 3, 3, 3, 3, 7, 5, 16, 1 << 20);
	int flags = (int)ONE_OF(MAP_PRIVATE, MAP_PRIVATE, MAP_PRIVATE, MAP_PRIVATE, MAP_SHARED, MAP_SHARED_VALIDATE, 0, MAP_PRIVATE | MAP_SHARED);
	flags |= flags == MAP_SHARED_VALIDATE ? MAP_FIXED : (int)ONE_OF(MAP_FIXED, MAP_FIXED, MAP_FIXED, MAP_FIXED_NOREPLACE);
	flags |= (int)ONE_OF(MAP_ANONYMOUS, MAP_ANONYMOUS, MAP_ANONYMOUS, 0);
	flags |= (int)ONE_OF(0, 0, MAP_NORESERVE, MAP_POPULATE, MAP_STACK, MAP_NONBLOCK, MAP_LOCKED);
	/* To move one of the pages that Quire does not manage unlocks its neighbours. */
	if (!(flags & MAP_ANONYMOUS) || !(flags & MAP_PRIVATE) || prot & PROT_EXEC) flags &= ~MAP_LOCKED;
	int fd = flags & MAP_ANONYMOUS ? (int)ONE_OF(-1, -1, file, 1000) : (int)ONE_OF(file, read_only_file, -1, 1000, pipe_in);
	long offset = ONE_OF(0, 0, 0, PAGE, 1, 1L << 62, -PAGE);
	if (!may_do(at, length)) return;
	errno = 0;
	long made = CALL(mmap, at, length, prot, flags, fd, offset);
	if (made != -1 && (!(flags & MAP_ANONYMOUS) || !(flags & MAP_PRIVATE) || flags & MAP_STACK || prot & PROT_EXEC || flags & MAP_NORESERVE)) is_mixed = 1;
	printf("mmap(%s, %zx, %x, %x, %d, %lx)", name_of(at), length, prot, flags, fd, offset);
	show(made, errno);
}

static void move_some(void)
{
	char *at = base + pick(PAGES) * PAGE + (pick(24) ? 0 : 1), *to = base + pick(PAGES) * PAGE + (pick(24) ? 0 : 1 + pick(PAGE - 1));
	size_t old = pick(8) ? 1 + pick(8 * PAGE) : 0, length = pick(16) ? 1 + pick(8 * PAGE) : 0;
	int flags = (int)ONE_OF(0, MREMAP_MAYMOVE, MREMAP_MAYMOVE | MREMAP_FIXED, MREMAP_MAYMOVE | MREMAP_FIXED, MREMAP_FIXED, 64);
	int is_fixed = flags & MREMAP_FIXED;
	/* The newest kernels move several mappings at once. */
	if (is_mixed || (is_fixed && old / PAGE == length / PAGE)) old = length = PAGE;
	if (at < base || !may_do(at, old) || !may_do(is_fixed ? to : at, length)) return;
	errno = 0;
	char *made = (char *)CALL(mremap, at, old, length, flags, to);
	int error = errno;
	printf("mremap(%s, %zx, %zx, %x, %s)", name_of(at), old, length, flags, name_of(to));
	/* Where there is no room in its place it goes where the kernel likes. */
	int is_moved = made != MAP_FAILED && !is_fixed && made != at;
	is_mixed |= made != MAP_FAILED && (made != at || length > old);
	show(is_moved ? 1 : (long)made, error);
	if (is_moved && munmap(made, length) != 0) abort();
	/* The kernel may have unmapped the target before it refused. */
	if (made == MAP_FAILED && is_fixed) munmap((char *)((uintptr_t)to & -PAGE), length);
}

static void advise_some(void)
{
	char *at = some_place();
	size_t length = some_length();
	int advice = (int)ONE_OF(MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_WILLNEED, MADV_DONTNEED, MADV_DONTNEED, MADV_COLD, MADV_PAGEOUT, MADV_PAGEOUT,
	                         MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTDUMP, MADV_DODUMP, MADV_DOFORK, MADV_KEEPONFORK, MADV_POPULATE_READ,
	                         MADV_POPULATE_WRITE, MADV_REMOVE, -1, 5, 1000);
	if (!may_do(at, length)) return;
	errno = 0;
	long result = CALL(madvise, at, length, advice);
	is_mixed |= advice == MADV_HUGEPAGE || advice == MADV_NOHUGEPAGE || advice == MADV_DONTDUMP || advice == MADV_DODUMP;
	printf("madvise(%s, %zx, %d)", name_of(at), length, advice);
	show(result, errno);
}

static void call_some(void)
{
	char *at = some_place();
	size_t length = some_length();
	long result;
	int how = (int)pick(8);
	if (!may_do(at, length)) return;
	errno = 0;
	switch (how) {
	case 0: {
		result = CALL(munmap, at, length);
		printf("munmap(%s, %zx)", name_of(at), length);
		break;
	}
	case 1:
	case 2: {
		int prot = (int)ONE_OF(0, 1, 2, 3, 3, 3, 5, 16, PROT_GROWSDOWN | 3, PROT_GROWSDOWN | PROT_GROWSUP, 1 << 20);
		result = CALL(mprotect, at, length, prot);
		is_mixed |= (prot & PROT_EXEC) != 0;
		printf("mprotect(%s, %zx, %x)", name_of(at), length, prot);
		break;
	}
	case 3: {
		void *vector = some_vector();
		result = CALL(mincore, at, length, vector);
		printf("mincore(%s, %zx)", name_of(at), length);
		break;
	}
	case 4: {
		int flags = (int)ONE_OF(MS_SYNC, MS_ASYNC, MS_INVALIDATE, MS_SYNC | MS_ASYNC, 0, 64);
		result = CALL(msync, at, length, flags);
		printf("msync(%s, %zx, %x)", name_of(at), length, flags);
		break;
	}
	case 5: {
		result = CALL(mlock, at, length);
		printf("mlock(%s, %zx)", name_of(at), length);
		break;
	}
	case 6: {
		result = CALL(munlock, at, length);
		printf("munlock(%s, %zx)", name_of(at), length);
		break;
	}
	default: {
		int flags = (int)ONE_OF(0, MLOCK_ONFAULT, 2);
		result = CALL(mlock2, at, length, flags);
		is_mixed |= flags == MLOCK_ONFAULT;
		printf("mlock2(%s, %zx, %x)", name_of(at), length, flags);
	}
	}
	show(result, errno);
}

int main(int count, char **words)
{
	int ends[2];
	static const char name[] = "odd_calls.file";
	is_by_number = count == 4 && strcmp(words[3], "by-number") == 0;
	if (count != 3 + is_by_number || pipe(ends) != 0 || (file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600)) < 0) return 2;
	pipe_in = ends[0];
	pipe_out = ends[1];
	if (ftruncate(file, 16 * PAGE) != 0 || (read_only_file = open(name, O_RDONLY)) < 0 || unlink(name) != 0) return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	state = strtoull(words[1], NULL, 0) * 0x9e3779b97f4a7c15u + 1;
	/* With a page table's end in its middle, and guards around it, so that a mapping that grows meets the same
	 * neighbours everywhere. */
	char *whole = mmap(NULL, 3 * BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (whole == MAP_FAILED) return 2;
	base = (char *)(((uintptr_t)whole + BLOCK) & -BLOCK) + BLOCK - PAGES / 2 * PAGE;
	for (long step = 0, steps = atol(words[2]); step < steps; step++) {
		printf("%ld ", step);
		if (pick(12) == 0) {
			if (mmap(base, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != base) abort();
			printf("anew ");
			is_mixed = 0;
		}
		switch (pick(6)) {
		case 0: map_some(); break;
		case 1: move_some(); break;
		case 2: advise_some(); break;
		default: call_some();
		}
		fill();
		show_pages();
	}
	return 0;
}
