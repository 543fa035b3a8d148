/* Fills MIB of memory, says "ready", waits for a line, then reads and writes pages at random for SECONDS, and reads
 * all of them at last. A page that is lost (SIGBUS) is counted and left alone from then on. Prints how many were
 * right, lost and wrong; ends with 1 if any was wrong.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PAGE = 4096, WORDS = PAGE / 8, LOST = 255 };

static sigjmp_buf lost;

static void on_bus(int signal) {
	(void)signal;
	siglongjmp(lost, 1);
}

static uint64_t mix(uint64_t x) {
	x ^= x >> 31;
	x *= 0x7fb5d329728ea185;
	x ^= x >> 27;
	x *= 0x81dadef4bc2dd44d;
	return x ^ x >> 33;
}

/* Every second page does not pack; the others do, to a half. */
static uint64_t word_of(size_t page, unsigned version, size_t at) {
	size_t seed = page % 2 || at % 2 ? at : 0;
	return mix(page << 24 | (uint64_t)version << 16 | seed);
}

static void fill(uint64_t *words, size_t page, unsigned version) {
	for (size_t at = 0; at < WORDS; at++)
		words[at] = word_of(page, version, at);
}

static int is_right(const uint64_t *words, size_t page, unsigned version) {
	for (size_t at = 0; at < WORDS; at++)
		if (words[at] != word_of(page, version, at))
			return 0;
	return 1;
}

int main(int count, char **arguments) {
	size_t pages = (count > 1 ? atol(arguments[1]) : 64) * 256;
	long seconds = count > 2 ? atol(arguments[2]) : 0;
	char *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	/* It must not be lost itself. */
	static unsigned char versions[1 << 20];
	if (memory == MAP_FAILED || pages > sizeof versions || mlock(versions, pages) != 0)
		return 2;
	signal(SIGBUS, on_bus);
	for (size_t page = 0; page < pages; page++)
		fill((uint64_t *)(memory + page * PAGE), page, 0);
	puts("ready");
	fflush(stdout);
	char line[16];
	if (!fgets(line, sizeof line, stdin))
		return 2;
	static volatile size_t wrong, gone, right, page, step;
	time_t end = time(NULL) + seconds;
	while (time(NULL) < end) {
		step = step + 1;
		page = mix(step) % pages;
		uint64_t *words = (uint64_t *)(memory + page * PAGE);
		if (versions[page] == LOST)
			continue;
		if (sigsetjmp(lost, 1)) {
			versions[page] = LOST;
			continue;
		}
		if (!is_right(words, page, versions[page])) {
			wrong = wrong + 1;
			printf("page %zu is wrong in step %zu\n", page, step);
		}
		if (step % 4 == 0) {
			fill(words, page, (versions[page] + 1) % LOST);
			versions[page] = (versions[page] + 1) % LOST;
		}
	}
	for (page = 0; page < pages; page = page + 1) {
		if (versions[page] == LOST || sigsetjmp(lost, 1)) {
			gone = gone + 1;
			continue;
		}
		if (is_right((uint64_t *)(memory + page * PAGE), page, versions[page]))
			right = right + 1;
		else
			wrong = wrong + 1;
	}
	printf("right %zu lost %zu wrong %zu\n", right, gone, wrong);
	return wrong != 0;
}
