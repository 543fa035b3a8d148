/* Forks in handlers that interrupt malloc, free, mmap and munmap. Where one thread runs, the child goes
 * on with what was interrupted. Where many do, others fork at the same time: a fork may be refused with
 * EAGAIN, nothing may hang, and no byte may be wrong on either side. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

enum { PAGE = 4096, PAGES = 512, THREADS = 6, FORKS = 40 };

static unsigned char* data;
static _Atomic int forks, refused, stop;
static volatile sig_atomic_t depth, may_go_on;

static void check_some(unsigned from) {
  for (int i = from % 7; i < PAGES; i += 7) CHECK(is_filled(data + i * PAGE, PAGE, i));
}

static void expect_zero(pid_t child) {
  int status = -1;
  pid_t got;
  do got = waitpid(child, &status, 0);
  while (got < 0 && errno == EINTR);
  CHECK(got == child && status == 0);
}

/* One round of calls that a handler may come into. */
static void change(uint64_t* random) {
  size_t size = 16 + next_random(random) % 60000;
  unsigned char* block = malloc(size);
  CHECK(block != NULL);
  block[0] = block[size - 1] = 7;
  size_t bytes = PAGE * (1 + next_random(random) % 16);
  unsigned char* mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(mapped != MAP_FAILED && mapped[bytes - 1] == 0);
  mapped[0] = 1;
  block = realloc(block, size * 2);
  CHECK(block != NULL && block[0] == 7 && block[size - 1] == 7);
  CHECK(mprotect(mapped, PAGE, PROT_READ) == 0 && mapped[0] == 1);
  CHECK(munmap(mapped, bytes) == 0);
  free(block);
}

static void on_signal(int number) {
  int saved = errno;
  (void)number;
  pid_t child = _Fork();
  if (child == 0) {
    check_some(forks);
    data[0] = 99;
    if (may_go_on) {
      depth++;
      errno = saved;
      return;
    }
    _exit(data[0] != 99);
  }
  if (child > 0) {
    atomic_fetch_add(&forks, 1);
    expect_zero(child);
    CHECK(data[0] == expected(0, 0));
  } else {
    CHECK(errno == EAGAIN || errno == ENOMEM);
    atomic_fetch_add(&refused, 1);
  }
  errno = saved;
}

/* Once: with an interval shorter than a fork nothing but the handler would ever run. */
static void set_timer(void) {
  struct itimerval soon = {{0, 0}, {0, 300 + forks * 37 % 1500}};
  setitimer(ITIMER_REAL, &soon, NULL);
}

/* The child of a handler comes back from it in the middle of the call, and finishes that. */
static void one_thread(void) {
  uint64_t random = 12345;
  may_go_on = 1;
  for (int seen = -1; forks < FORKS || depth;) {
    if (forks + refused != seen) {
      seen = forks + refused;
      set_timer();
    }
    change(&random);
    if (depth) {
      for (int i = 0; i < 50; i++) change(&random);
      _exit(data[0] != 99);
    }
  }
  may_go_on = 0;
}

static void* changing(void* argument) {
  uint64_t random = 0x9E3779B97F4A7C15ull * ((uintptr_t)argument + 1);
  while (!stop) change(&random);
  return NULL;
}

/* Beside them forks that come from no handler. */
static void* forking(void* argument) {
  while (!stop) {
    pid_t child = _Fork();
    if (child == 0) {
      check_some((uintptr_t)argument);
      _exit(0);
    }
    if (child > 0) expect_zero(child);
    else CHECK(errno == EAGAIN || errno == ENOMEM);
  }
  return argument;
}

static void many_threads(void) {
  pthread_t ids[THREADS], fork_id;
  forks = 0;
  for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&ids[i], NULL, changing, (void*)i) == 0);
  CHECK(pthread_create(&fork_id, NULL, forking, NULL) == 0);
  for (int i = 0; forks < FORKS || i < 200; i++) {
    for (int k = 0; k < THREADS; k++) pthread_kill(ids[k], SIGUSR1);
    usleep(1000);
  }
  stop = 1;
  for (int i = 0; i < THREADS; i++) pthread_join(ids[i], NULL);
  pthread_join(fork_id, NULL);
}

int main(void) {
  data = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(data != MAP_FAILED);
  for (int i = 0; i < PAGES; i++) fill(data + i * PAGE, PAGE, i);
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &action, NULL);
  sigaction(SIGUSR1, &action, NULL);
  one_thread();
  many_threads();
  for (int i = 0; i < PAGES; i++) CHECK(is_filled(data + i * PAGE, PAGE, i));
  puts("ok");
  return 0;
}
