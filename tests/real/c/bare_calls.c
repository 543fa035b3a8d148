/*
 * A program that drops pages by an instruction of its own, not by a function of libc's: pages in memory that are to
 * go to swap afterwards, also those that may not be written, that a child has as well, or that move elsewhere.
 *
 *     bare_calls
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 1024, PRESSURE = 12288, WORDS = PAGE / 8 };

static void must(int is_so, const char *what)
{
	if (is_so) return;
	perror(what);
	exit(2);
}

static long drop(void *at, long bytes)
{
	long result = SYS_madvise;
	asm volatile("syscall" : "+a"(result) : "D"(at), "S"(bytes), "d"((long)MADV_DONTNEED) : "rcx", "r11", "memory");
	return result;
}

static volatile uint64_t *region(int pages)
{
	void *at = mmap(NULL, (size_t)pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(at != MAP_FAILED, "mmap");
	return at;
}

static void fill(volatile uint64_t *at, int pages)
{
	for (long word = 0; word < (long)pages * WORDS; word++) at[word] = word % WORDS < 128 ? (uint64_t)word * 0x9e3779b97f4a7c15u : 7;
}

/* How many pages are zeros, as they were filled, and neither. */
static void show(const char *name, volatile uint64_t *at, int pages)
{
	int zeros = 0, filled = 0;
	for (long page = 0; page < pages; page++) {
		int are_zeros = 1, are_filled = 1;
		for (long word = page * WORDS; word < (page + 1) * WORDS; word++) {
			are_zeros &= at[word] == 0;
			are_filled &= at[word] == (word % WORDS < 128 ? (uint64_t)word * 0x9e3779b97f4a7c15u : 7);
		}
		zeros += are_zeros;
		filled += are_filled;
	}
	printf("%s: %d zeros, %d as before, %d others\n", name, zeros, filled, pages - zeros - filled);
	fflush(stdout);
}

static void drop_some(volatile uint64_t *at)
{
	for (int page = 0; page < PAGES; page += 3) must(drop((char *)at + page * PAGE, PAGE) == 0, "drop");
}

/* Has everything else go to swap, where it can; there is room again afterwards. */
static void press(void)
{
	volatile uint64_t *all = region(PRESSURE);
	for (int times = 0; times < 2; times++) fill(all, PRESSURE);
	must(munmap((void *)all, (size_t)PRESSURE * PAGE) == 0, "munmap");
}

int main(void)
{
	volatile uint64_t *plain = region(PAGES);
	fill(plain, PAGES);
	drop_some(plain);
	press();
	show("plain", plain, PAGES);

	volatile uint64_t *read_only = region(PAGES);
	fill(read_only, PAGES);
	must(mprotect((void *)read_only, PAGES * PAGE, PROT_READ) == 0, "mprotect");
	/* They are in memory again. */
	show("not yet dropped", read_only, PAGES);
	drop_some(read_only);
	press();
	show("read-only", read_only, PAGES);

	volatile uint64_t *moved = region(PAGES), *target = region(PAGES);
	fill(moved, PAGES);
	drop_some(moved);
	moved = mremap((void *)moved, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)target);
	must(moved != MAP_FAILED, "mremap");
	press();
	show("moved", moved, PAGES);

	/* Or the fork would make room. */
	volatile uint64_t *before[] = {plain, read_only, moved};
	for (int at = 0; at < 3; at++) must(munmap((void *)before[at], PAGES * PAGE) == 0, "munmap");
	int ends[2];
	must(pipe(ends) == 0, "pipe");
	volatile uint64_t *shared = region(PAGES);
	fill(shared, PAGES);
	pid_t child = fork();
	must(child >= 0, "fork");
	if (child == 0) {
		char byte;
		close(ends[1]);
		must(read(ends[0], &byte, 1) == 0, "read");
		show("the child's", shared, PAGES);
		return 0;
	}
	drop_some(shared);
	press();
	show("shared with a child", shared, PAGES);
	close(ends[1]);
	int status;
	must(waitpid(child, &status, 0) == child, "waitpid");
	printf("the child ended with %d\n", status);
	return 0;
}
