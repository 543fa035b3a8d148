/* Every entry point of the malloc family: sizes, alignments, errno, contents, threads. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

/* What the compiler must not see through. */
static void* volatile sink;
static void* keep(void* p) { sink = p; return sink; }
static size_t volatile huge = SIZE_MAX;

static void sizes_and_alignment(void) {
  static const size_t sizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 24, 100, 1000, 4096, 65536, 131072, 1 << 20, 33 << 20, 70 << 20};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    void* p = keep(malloc(sizes[i]));
    CHECK(p != NULL);
    CHECK((uintptr_t)p % 16 == 0);
    CHECK(malloc_usable_size(p) >= sizes[i]);
    fill(p, malloc_usable_size(p), i);
    CHECK(is_filled(p, sizes[i], i));
    void* q = keep(malloc(sizes[i]));
    CHECK(p != q);
    free(q);
    free(p);
    p = keep(calloc(1, sizes[i]));
    CHECK(p != NULL && is_zero(p, sizes[i]));
    memset(p, 0xff, sizes[i]);
    free(p);
    p = keep(calloc(sizes[i], 1));
    CHECK(p != NULL && is_zero(p, sizes[i]));
    free(p);
  }
  free(NULL);
  CHECK(malloc_usable_size(NULL) == 0);
  errno = 4711;
  for (int i = 0; i < 1000; i++) free(keep(malloc(i * 977)));
  free(keep(malloc(64 << 20)));
  CHECK(errno == 4711);
}

static void too_much(void) {
  errno = 0; CHECK(keep(malloc(huge)) == NULL && errno == ENOMEM);
  errno = 0; CHECK(keep(malloc(huge / 2)) == NULL && errno == ENOMEM);
  errno = 0; CHECK(keep(calloc(huge / 2, 3)) == NULL && errno == ENOMEM);
  errno = 0; CHECK(keep(calloc(huge, 1)) == NULL && errno == ENOMEM);
  errno = 0; CHECK(keep(reallocarray(NULL, huge / 2, 3)) == NULL && errno == ENOMEM);
  errno = 0; CHECK(keep(memalign(64, huge - 100)) == NULL && errno == ENOMEM);
  errno = 0; CHECK(keep(valloc(huge - 100)) == NULL && errno == ENOMEM);
  errno = 0; CHECK(keep(pvalloc(huge - 100)) == NULL && errno == ENOMEM);
  char* p = malloc(100);
  fill(p, 100, 1);
  errno = 0; CHECK(keep(realloc(p, huge - 100)) == NULL && errno == ENOMEM);
  errno = 0; CHECK(keep(reallocarray(p, huge / 2, 3)) == NULL && errno == ENOMEM);
  CHECK(is_filled(p, 100, 1));
  free(p);
  p = malloc(40 << 20);
  fill(p, 100, 1);
  errno = 0; CHECK(keep(realloc(p, huge / 2 - 100)) == NULL && errno == ENOMEM);
  CHECK(is_filled(p, 100, 1));
  free(p);
}

static void aligned(void) {
  for (size_t alignment = 1; alignment <= 8 << 20; alignment *= 2) {
    for (size_t size = 1; size <= 3000000; size = size * 7 + 3) {
      void* p = keep(memalign(alignment, size));
      CHECK(p != NULL && (uintptr_t)p % alignment == 0 && malloc_usable_size(p) >= size);
      fill(p, size, 3);
      void* q = keep(aligned_alloc(alignment, size));
      CHECK(q != NULL && (uintptr_t)q % alignment == 0);
      fill(q, size, 4);
      p = realloc(p, size * 2);
      CHECK(p != NULL && is_filled(p, size, 3) && is_filled(q, size, 4));
      free(p);
      free(q);
      void* out = &out;
      errno = 77;
      int err = posix_memalign(&out, alignment, size);
      CHECK(errno == 77);
      if (alignment < sizeof(void*)) {
        CHECK(err == EINVAL && out == &out);
      } else {
        CHECK(err == 0 && (uintptr_t)out % alignment == 0);
        fill(out, size, 5);
        free(out);
      }
    }
  }
  void* out = NULL;
  CHECK(posix_memalign(&out, 24, 100) == EINVAL);
  CHECK(posix_memalign(&out, 0, 100) == EINVAL);
  CHECK(posix_memalign(&out, 4096, huge - 5000) == ENOMEM);
  CHECK(out == NULL);
  void* p = keep(memalign(4096, 40 << 20));
  CHECK((uintptr_t)p % 4096 == 0);
  free(p);
  p = keep(memalign(48, 100)); /* rounded up */
  CHECK((uintptr_t)p % 64 == 0);
  free(p);
  p = keep(valloc(100));
  CHECK((uintptr_t)p % 4096 == 0);
  free(p);
  p = keep(pvalloc(5000));
  CHECK((uintptr_t)p % 4096 == 0 && malloc_usable_size(p) >= 8192);
  free(p);
}

static void resized(void) {
  char* p = realloc(NULL, 10);
  CHECK(p != NULL);
  CHECK(keep(realloc(p, 0)) == NULL);
  /* Up and down through every way a block can be kept. */
  uint64_t random = 88172645463325252ull;
  size_t size = 1;
  p = malloc(size);
  fill(p, size, 9);
  for (int i = 0; i < 300; i++) {
    size_t bits = next_random(&random) % 27;
    size_t wanted = 1 + next_random(&random) % ((size_t)1 << bits);
    p = realloc(p, wanted);
    CHECK(p != NULL);
    CHECK(is_filled(p, size < wanted ? size : wanted, 9));
    fill(p, wanted, 9);
    size = wanted;
  }
  static const size_t steps[] = {31 << 20, 33 << 20, 34 << 20, 120 << 20, 40 << 20, (40 << 20) + 1, 31 << 20, 64 << 20, 5, 32 << 20, 1 << 20};
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
    p = reallocarray(p, steps[i], 1);
    CHECK(p != NULL && is_filled(p, size < steps[i] ? size : steps[i], 9));
    fill(p, steps[i], 9);
    size = steps[i];
  }
  free(p);
  /* Two blocks that grow side by side are in each other's way. */
  char* a = malloc(33 << 20);
  char* b = malloc(33 << 20);
  fill(a, 33 << 20, 1);
  fill(b, 33 << 20, 2);
  for (size_t mib = 36; mib <= 60; mib += 8) {
    a = realloc(a, mib << 20);
    b = realloc(b, mib << 20);
    CHECK(is_filled(a, 33 << 20, 1) && is_filled(b, 33 << 20, 2));
    memset(a + (33 << 20), 1, (mib - 33) << 20);
    memset(b + (33 << 20), 2, (mib - 33) << 20);
  }
  free(a);
  char* c = calloc(33 << 20, 1);
  CHECK(is_zero(c, 33 << 20));
  free(b);
  free(c);
}

/* Blocks of an allocator that is not in line: a second libc in a namespace of its own. */
static void foreign(void) {
  void* other = dlmopen(LM_ID_NEWLM, "libc.so.6", RTLD_NOW);
  if (other == NULL) return; /* no room for another static TLS block: nothing to test */
  char* (*other_strdup)(const char*) = (char* (*)(const char*))dlsym(other, "strdup");
  void (*other_free)(void*) = (void (*)(void*))dlsym(other, "free");
  CHECK(other_strdup != NULL && other_free != NULL);
  char* theirs = other_strdup("theirs");
  char* ours = strdup("ours");
  CHECK(strcmp(theirs, "theirs") == 0 && strcmp(ours, "ours") == 0);
  other_free(theirs);
  free(ours);
  dlclose(other);
}

/* Blocks of glibc's own allocator, given to the names that all code calls. */
static void from_glibc(void) {
  void* (*libc_malloc)(size_t) = (void* (*)(size_t))dlsym(RTLD_DEFAULT, "__libc_malloc");
  void* (*libc_memalign)(size_t, size_t) = (void* (*)(size_t, size_t))dlsym(RTLD_DEFAULT, "__libc_memalign");
  if (libc_malloc == NULL || libc_memalign == NULL) return;
  for (int round = 0; round < 3; round++) {
    char* p = libc_malloc(100);
    fill(p, 100, 6);
    CHECK(malloc_usable_size(p) >= 100);
    p = realloc(p, 100000);
    CHECK(is_filled(p, 100, 6));
    p = realloc(p, 50);
    CHECK(is_filled(p, 50, 6));
    free(p);
    free(libc_malloc(1 << 20));
    free(libc_memalign(4096, 5000));
  }
}

/* ---- Threads that free each other's blocks ---- */
enum { THREADS = 8, ROUNDS = 30000, SHELF = 4096 };
static _Atomic(unsigned char*) shelf[SHELF];

/* A block: its size, its mark, then the filling. */
static unsigned char* make(uint64_t* random) {
  size_t size = 16 + next_random(random) % (next_random(random) % 64 == 0 ? 200000 : 600);
  unsigned char* p = malloc(size);
  CHECK(p != NULL);
  unsigned mark = (unsigned)next_random(random);
  memcpy(p, &size, 8);
  memcpy(p + 8, &mark, 4);
  fill(p + 16, size - 16 < 64 ? size - 16 : 64, mark);
  return p;
}

static void check_block(unsigned char* p) {
  size_t size;
  unsigned mark;
  memcpy(&size, p, 8);
  memcpy(&mark, p + 8, 4);
  CHECK(is_filled(p + 16, size - 16 < 64 ? size - 16 : 64, mark));
}

static void* trader(void* arg) {
  uint64_t random = 0x9E3779B97F4A7C15ull * ((uintptr_t)arg + 1);
  for (int i = 0; i < ROUNDS; i++) {
    unsigned char* mine = make(&random);
    unsigned char* theirs = atomic_exchange(&shelf[next_random(&random) % SHELF], mine);
    if (theirs != NULL) {
      check_block(theirs);
      if (next_random(&random) % 4 == 0) {
        size_t size;
        memcpy(&size, theirs, 8);
        theirs = realloc(theirs, size * 2);
        CHECK(theirs != NULL);
        check_block(theirs);
      }
      free(theirs);
    }
  }
  return NULL;
}

static void* short_lived(void* arg) {
  char* p = malloc(1000);
  fill(p, 1000, (unsigned)(uintptr_t)arg);
  return p;
}

static void threads(void) {
  pthread_t ids[THREADS];
  for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&ids[i], NULL, trader, (void*)i) == 0);
  for (int i = 0; i < THREADS; i++) pthread_join(ids[i], NULL);
  for (int i = 0; i < SHELF; i++) {
    unsigned char* p = atomic_exchange(&shelf[i], NULL);
    if (p != NULL) check_block(p);
    free(p);
  }
  for (uintptr_t i = 0; i < 300; i++) {
    pthread_t id;
    void* p;
    CHECK(pthread_create(&id, NULL, short_lived, (void*)i) == 0);
    pthread_join(id, &p);
    CHECK(is_filled(p, 1000, (unsigned)i));
    free(p);
  }
}

static void statistics(void) {
  char* p = malloc(50 << 20);
  struct mallinfo2 info = mallinfo2();
  CHECK(info.hblkhd >= (50 << 20));
  CHECK(mallinfo().hblkhd >= (50 << 20));
  free(p);
  CHECK(mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1);
  CHECK(malloc_trim(0) == 0 || malloc_trim(0) == 1 || 1);
}

int main(void) {
  sizes_and_alignment();
  too_much();
  aligned();
  resized();
  foreign();
  from_glibc();
  threads();
  statistics();
  puts("ok");
  return 0;
}
