/* An access to unmapped memory is a SIGSEGV, or EFAULT in a system call, wherever it is and whatever was
 * there before; and the next mapping there is zeros. */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define PAGE 4096ul
#define CHUNK (512ul << 10)
#define READ_WRITE (PROT_READ | PROT_WRITE)
#define PRIVATE (MAP_PRIVATE | MAP_ANONYMOUS)

static __thread sigjmp_buf back;
static __thread char* volatile trapped_at;

static void on_segv(int signal, siginfo_t* info, void* context) {
  trapped_at = info->si_addr;
  siglongjmp(back, 1);
}

/* 1 where an access to `p` is a SIGSEGV, with its address. */
static int traps(char* p, int writes) {
  trapped_at = NULL;
  if (sigsetjmp(back, 1) == 0) {
    if (writes)
      *(volatile char*)p = 1;
    else
      (void)*(volatile char*)p;
    return 0;
  }
  CHECK(trapped_at == p);
  return 1;
}

static char* map_at(char* p, size_t size, int prot, int flags) {
  char* got = mmap(p, size, prot, PRIVATE | flags, -1, 0);
  CHECK(got != MAP_FAILED);
  CHECK(!(flags & (MAP_FIXED | MAP_FIXED_NOREPLACE)) || got == p);
  return got;
}

static char* map(size_t size) { return map_at(NULL, size, READ_WRITE, 0); }

static void unmap(char* p, size_t size) { CHECK(munmap(p, size) == 0); }

/* A hole of `size` between pages that stay, so that no other mapping is given its addresses. */
static char* make_hole(size_t size) {
  char* p = map(size + 2 * PAGE);
  memset(p, 0x5a, size + 2 * PAGE);
  unmap(p + PAGE, size);
  return p + PAGE;
}

static void is_hole(char* p, size_t size) {
  for (size_t at = 0; at < size; at += PAGE) CHECK(traps(p + at + at / PAGE % PAGE, at / PAGE & 1));
  CHECK(p[-1] == 0x5a && p[size] == 0x5a);
}

static void accesses_trap(void) {
  char* hole = make_hole(16 * PAGE);
  for (int round = 0; round < 20; round++) {
    is_hole(hole, 16 * PAGE);
    map_at(hole, 16 * PAGE, READ_WRITE, MAP_FIXED_NOREPLACE);
    CHECK(is_zero(hole, 16 * PAGE));
    fill(hole, 16 * PAGE, round);
    /* In two pieces, the second of which is touched while the first is there. */
    unmap(hole + 8 * PAGE, 8 * PAGE);
    CHECK(traps(hole + 9 * PAGE, round & 1));
    CHECK(is_filled(hole, 8 * PAGE, round));
    unmap(hole, 8 * PAGE);
  }
  is_hole(hole, 16 * PAGE);
}

static void system_calls_fail(void) {
  char* hole = make_hole(4 * PAGE);
  int ends[2];
  CHECK(pipe(ends) == 0);
  for (int round = 0; round < 4; round++) {
    errno = 0;
    CHECK(write(ends[1], hole + round % 2 * PAGE, 1) == -1 && errno == EFAULT);
    CHECK(write(ends[1], "x", 1) == 1);
    errno = 0;
    CHECK(read(ends[0], hole + PAGE, 1) == -1 && errno == EFAULT);
    map_at(hole, 4 * PAGE, READ_WRITE, MAP_FIXED);
    CHECK(write(ends[1], "y", 1) == 1);
    CHECK(read(ends[0], hole + 3 * PAGE, 1) == 1);
    unmap(hole, 4 * PAGE);
  }
  close(ends[0]);
  close(ends[1]);
}

static void other_mappings_come_there(void) {
  char* hole = make_hole(8 * PAGE);
  unsigned char resident[8];
  errno = 0;
  CHECK(madvise(hole, 8 * PAGE, MADV_DONTNEED) == -1 && errno == ENOMEM);
  CHECK(mprotect(hole, 8 * PAGE, READ_WRITE) == -1 && errno == ENOMEM);
  CHECK(mincore(hole, 8 * PAGE, resident) == -1 && errno == ENOMEM);
  CHECK(mremap(hole, PAGE, 2 * PAGE, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT);
  /* None of that has opened anything. */
  is_hole(hole, 8 * PAGE);

  map_at(hole, 8 * PAGE, READ_WRITE, MAP_FIXED);
  memset(hole, 1, 8 * PAGE);
  unmap(hole, 8 * PAGE);
  map_at(hole, 8 * PAGE, PROT_NONE, MAP_FIXED_NOREPLACE);
  is_hole(hole, 8 * PAGE);
  CHECK(mprotect(hole + 2 * PAGE, 2 * PAGE, READ_WRITE) == 0);
  CHECK(is_zero(hole + 2 * PAGE, 2 * PAGE));
  CHECK(traps(hole + PAGE, 1) && traps(hole + 4 * PAGE, 0));
  unmap(hole, 8 * PAGE);

  map_at(hole, 8 * PAGE, READ_WRITE, MAP_FIXED);
  memset(hole, 2, 8 * PAGE);
  unmap(hole, 8 * PAGE);
  map_at(hole, 8 * PAGE, PROT_READ, MAP_FIXED);
  CHECK(is_zero(hole, 8 * PAGE));
  CHECK(traps(hole, 1) && traps(hole + 5 * PAGE, 1));
  unmap(hole, 8 * PAGE);
  is_hole(hole, 8 * PAGE);

  map_at(hole, 8 * PAGE, READ_WRITE, MAP_FIXED);
  unmap(hole, 8 * PAGE);
  int file = memfd_create("over it", 0);
  CHECK(file >= 0 && ftruncate(file, 8 * PAGE) == 0 && pwrite(file, "file", 4, 0) == 4);
  char* shared = mmap(hole, 8 * PAGE, READ_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  CHECK(shared == hole && memcmp(hole, "file", 4) == 0);
  unmap(hole, 8 * PAGE);
  is_hole(hole, 8 * PAGE);
  close(file);
}

static void moved_mappings_leave_a_hole(void) {
  char* p = map(8 * PAGE);
  memset(p, 0x5a, 8 * PAGE);
  char* place = map(2 * PAGE);
  char* moved = mremap(p + PAGE, 2 * PAGE, 2 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
  CHECK(moved == place && moved[0] == 0x5a && moved[2 * PAGE - 1] == 0x5a);
  is_hole(p + PAGE, 2 * PAGE);
  CHECK(mremap(p + 3 * PAGE, 5 * PAGE, PAGE, 0) == p + 3 * PAGE);
  for (int at = 4; at < 8; at++) CHECK(traps(p + at * PAGE, at & 1));
}

static int count_mappings(void) {
  FILE* maps = fopen("/proc/self/maps", "r");
  CHECK(maps);
  int lines = 0;
  for (int c; (c = getc(maps)) != EOF;) lines += c == '\n';
  fclose(maps);
  return lines;
}

static void chunks_come_and_go_without_a_trace(void) {
  char* kept[8];
  for (int at = 0; at < 8; at++) kept[at] = map(CHUNK);
  int before = count_mappings();
  for (int round = 0; round < 2000; round++) {
    char* p = map(CHUNK);
    CHECK(p[round % CHUNK] == 0);
    p[round % CHUNK] = 1;
    int at = round % 8;
    unmap(kept[at], CHUNK);
    kept[at] = p;
  }
  CHECK(count_mappings() <= before + 8);
  for (int at = 0; at < 8; at++) unmap(kept[at], CHUNK);
}

static volatile int is_over;

/* Chunks that are mapped and unmapped all the time; never as small as a hole. */
static void* churn(void* argument) {
  unsigned mark = (unsigned)(uintptr_t)argument;
  char* chunks[4] = {NULL};
  for (unsigned round = 0; !is_over; round++) {
    char** chunk = &chunks[round % 4];
    size_t size = CHUNK + round % 3 * PAGE;
    if (*chunk) {
      CHECK(is_filled(*chunk, 2 * PAGE, mark) && (*chunk)[CHUNK - 1] == (char)mark);
      unmap(*chunk, CHUNK + (round - 4) % 3 * PAGE);
    }
    *chunk = map(size);
    CHECK(is_zero(*chunk, 2 * PAGE) && is_zero(*chunk + CHUNK - PAGE, PAGE));
    fill(*chunk, 2 * PAGE, mark);
    (*chunk)[CHUNK - 1] = (char)mark;
  }
  return NULL;
}

/* A hole that is touched, filled and emptied again meanwhile. */
static void* stray(void* argument) {
  char* hole = argument;
  while (!is_over) {
    is_hole(hole, 4 * PAGE);
    map_at(hole, 4 * PAGE, READ_WRITE, MAP_FIXED_NOREPLACE);
    CHECK(is_zero(hole, 4 * PAGE));
    memset(hole, 0x77, 4 * PAGE);
    unmap(hole, 4 * PAGE);
  }
  return NULL;
}

/* A hole that several threads touch at once. */
static void* probe(void* argument) {
  char* hole = argument;
  for (unsigned at = 0; !is_over; at++) CHECK(traps(hole + at % 64 * PAGE, at & 1));
  return NULL;
}

static void threads_touch_holes_while_others_map(void) {
  pthread_t threads[6];
  void* (*mains[6])(void*) = {churn, churn, stray, stray, probe, probe};
  /* Small holes first, and all before the threads: nothing is mapped later that fits into one. */
  char* small[2] = {make_hole(4 * PAGE), make_hole(4 * PAGE)};
  char* common = make_hole(64 * PAGE);
  void* arguments[6] = {(void*)1, (void*)2, small[0], small[1], common, common};
  is_over = 0;
  for (int at = 0; at < 6; at++)
    CHECK(pthread_create(&threads[at], NULL, mains[at], arguments[at]) == 0);
  struct timespec time = {2, 0};
  nanosleep(&time, NULL);
  is_over = 1;
  for (int at = 0; at < 6; at++) CHECK(pthread_join(threads[at], NULL) == 0);
}

static void children_have_the_same_holes(void) {
  char* touched = make_hole(8 * PAGE);
  char* untouched = make_hole(8 * PAGE);
  CHECK(traps(touched + PAGE, 1));
  pid_t child = fork();
  CHECK(child >= 0);
  for (int round = 0; round < 3; round++) {
    is_hole(untouched, 8 * PAGE);
    is_hole(touched, 8 * PAGE);
    map_at(untouched, 8 * PAGE, READ_WRITE, MAP_FIXED_NOREPLACE);
    CHECK(is_zero(untouched, 8 * PAGE));
    memset(untouched, child ? 3 : 4, 8 * PAGE);
    char* chunk = map(CHUNK);
    CHECK(is_zero(chunk, CHUNK));
    memset(chunk, 9, CHUNK);
    unmap(untouched, 8 * PAGE);
    unmap(chunk, CHUNK);
  }
  if (child == 0) _exit(0);
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(void) {
  struct sigaction action = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
  CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
  accesses_trap();
  system_calls_fail();
  other_mappings_come_there();
  moved_mappings_leave_a_hole();
  chunks_come_and_go_without_a_trace();
  threads_touch_holes_while_others_map();
  children_have_the_same_holes();
  puts("ok");
  return 0;
}
