/* What the test programs share. Each prints "ok" and exits 0, with the preload library and without. */
#ifndef CHECK_H
#define CHECK_H
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      fprintf(stderr, "%s:%d: not so: %s (errno %d, %s)\n", __FILE__, __LINE__,   \
              #condition, errno, strerror(errno));                                \
      _exit(1);                                                                   \
    }                                                                             \
  } while (0)

/* What byte `i` of the block marked `mark` holds. */
static inline unsigned char expected(unsigned mark, size_t i) {
  return (unsigned char)((i * 2654435761u + mark * 40503u) >> 7);
}

static inline void fill(void* block, size_t size, unsigned mark) {
  unsigned char* p = block;
  for (size_t i = 0; i < size; i++) p[i] = expected(mark, i);
}

/* 1 where the first `size` bytes are what `fill` wrote. */
static inline int is_filled(const void* block, size_t size, unsigned mark) {
  const unsigned char* p = block;
  for (size_t i = 0; i < size; i++)
    if (p[i] != expected(mark, i)) return 0;
  return 1;
}

static inline int is_zero(const void* block, size_t size) {
  const unsigned char* p = block;
  for (size_t i = 0; i < size; i++)
    if (p[i] != 0) return 0;
  return 1;
}

static inline uint64_t next_random(uint64_t* state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}
#endif
