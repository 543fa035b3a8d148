/* Three generations have the same pages since their forks; each writes its own words of them while it, and
 * the others, page them out. No process finds a byte of another's, or loses one of its own. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "check.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif

enum { PAGE = 4096, PAGES = 768, WORDS = PAGE / 8, GENERATIONS = 3, ROUNDS = 12, TREES = 4 };

static volatile uint64_t* data;
static volatile int stop;

/* Word `at` of a page as generation `generation` writes it in its round; half of a page is the same in all. */
static uint64_t word_of(int page, int at, int generation, unsigned round) {
  uint64_t seed = (uint64_t)(page + 1) * 0x9e3779b97f4a7c15u;
  return at % 8 < 4 ? seed : seed ^ ((uint64_t)generation << 32 | round) ^ (uint64_t)at << 52;
}

static void write_page(int page, int generation, unsigned round) {
  for (int at = 0; at < WORDS; at++) data[page * WORDS + at] = word_of(page, at, generation, round);
}

static void expect_page(int page, int generation, unsigned round) {
  for (int at = 0; at < WORDS; at++)
    if (data[page * WORDS + at] != word_of(page, at, generation, round)) {
      fprintf(stderr, "generation %d, round %u: page %d word %d is %016lx\n", generation, round, page, at,
              (long)data[page * WORDS + at]);
      _exit(1);
    }
}

static void* page_out(void* unused) {
  while (!stop) {
    (void)madvise((void*)data, PAGES * PAGE, MADV_PAGEOUT);
    usleep(500);
  }
  return unused;
}

static pid_t fork_patiently(void) {
  for (int tries = 0;; tries++) {
    pid_t child = fork();
    if (child >= 0 || (errno != ENOMEM && errno != EAGAIN) || tries == 500) return child;
    usleep(10000);
  }
}

/* A generation: finds what the one before had, then changes a third of the pages at a time. */
static void live(int generation, int before, unsigned round_before) {
  pthread_t thread;
  pid_t child = -1;
  for (int page = 0; page < PAGES; page++) expect_page(page, before, round_before);
  for (int page = 0; page < PAGES; page++) write_page(page, generation, 0);
  if (generation < GENERATIONS) {
    child = fork_patiently();
    CHECK(child >= 0);
    if (child == 0) {
      live(generation + 1, generation, 0);
      _exit(0);
    }
  }
  stop = 0;
  CHECK(pthread_create(&thread, NULL, page_out, NULL) == 0);
  for (unsigned round = 1; round <= ROUNDS; round++)
    for (int page = round % 3; page < PAGES; page += 3) {
      expect_page(page, generation, round > 3 ? round - 3 : 0);
      write_page(page, generation, round);
    }
  for (unsigned round = ROUNDS - 2; round <= ROUNDS; round++)
    for (int page = round % 3; page < PAGES; page += 3) expect_page(page, generation, round);
  stop = 1;
  pthread_join(thread, NULL);
  if (child > 0) {
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
}

int main(void) {
  data = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(data != MAP_FAILED);
  for (int tree = 0; tree < TREES; tree++) {
    for (int page = 0; page < PAGES; page++) write_page(page, 0, tree);
    live(1, 0, tree);
  }
  puts("ok");
  return 0;
}
