/* Loads of eight bytes that lie in two pages, both of which pack, while noise fills what memory is left:
 * a load needs both pages at once. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, BLOCK = 512 * PAGE, PACKED = 64, LOADS = 2000, NOISE = 1 << 18 };

static uint64_t state = 88172645463325252;

static void fill(unsigned char *page, int bytes) {
    for (int at = 0; at < bytes; at += 8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memcpy(page + at, &state, 8);
    }
}

static unsigned char *map(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

int main(void) {
    unsigned char *noise = map((size_t)NOISE * PAGE), *packed = map(2 * BLOCK);
    packed += -(uintptr_t)packed % BLOCK;
    for (int page = 0; page < PACKED; page++)
        fill(packed + page * PAGE, PAGE / 2);
    volatile uint64_t *both = (void *)(packed + PACKED / 2 * PAGE - 4);
    uint64_t sum = 0;
    for (size_t page = 0; page < NOISE; page++) {
        fill(noise + page * PAGE, PAGE);
        for (int load = 0; load < LOADS; load++)
            sum += *both;
    }
    printf("%lu\n", sum);
}
