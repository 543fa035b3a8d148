/* Threads that allocate while others fork, and children that allocate: no child may find the heap in
 * the middle of another thread's change, nor hang on a lock that no thread holds any more. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

enum { ALLOCATING = 6, FORKING = 2, FORKS = 60, SHELF = 512 };
static atomic_int stop;
static _Atomic(unsigned char*) shelf[SHELF];

static void work(uint64_t* random, int rounds) {
  for (int i = 0; i < rounds; i++) {
    size_t size = 8 + next_random(random) % (next_random(random) % 32 == 0 ? 3 << 20 : 2000);
    if (next_random(random) % 2000 == 0) size = 33 << 20;
    unsigned char* p = malloc(size);
    CHECK(p != NULL);
    p[0] = p[size - 1] = 0x5a;
    if (size < 100000) p = realloc(p, size * 2);
    CHECK(p[0] == 0x5a && p[size - 1] == 0x5a);
    free(atomic_exchange(&shelf[next_random(random) % SHELF], p));
  }
}

static void* allocating(void* arg) {
  uint64_t random = 0x9E3779B97F4A7C15ull * ((uintptr_t)arg + 1);
  while (!atomic_load(&stop)) work(&random, 50);
  return NULL;
}

static void* in_child(void* arg) {
  uint64_t random = 77 + (uintptr_t)arg;
  work(&random, 200);
  return NULL;
}

static void* forking(void* arg) {
  for (uintptr_t i = 0; i < FORKS; i++) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(60);
      uint64_t random = 0xD1B54A32D192ED03ull * (i + 1) + (uintptr_t)arg;
      work(&random, 300);
      pthread_t id;
      CHECK(pthread_create(&id, NULL, in_child, (void*)i) == 0);
      work(&random, 100);
      pthread_join(id, NULL);
      if (i % 8 == 0) { /* and its child */
        pid_t grandchild = fork();
        CHECK(grandchild >= 0);
        if (grandchild == 0) {
          alarm(60);
          work(&random, 100);
          _exit(0);
        }
        int status;
        CHECK(waitpid(grandchild, &status, 0) == grandchild && status == 0);
      }
      _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  return NULL;
}

/* Fork handlers allocate. */
static __thread void* handlers_block;
static void before_fork(void) { free(handlers_block); handlers_block = malloc(12345); }
static void after_fork(void) { free(handlers_block); handlers_block = malloc(54321); }

int main(void) {
  alarm(240);
  pthread_atfork(before_fork, after_fork, after_fork);
  CHECK(fork() >= 0 || 0); /* the child runs all of it as well: it is one more program */
  static pthread_t ids[ALLOCATING + FORKING];
  for (uintptr_t i = 0; i < ALLOCATING; i++) CHECK(pthread_create(&ids[i], NULL, allocating, (void*)i) == 0);
  for (uintptr_t i = 0; i < FORKING; i++) CHECK(pthread_create(&ids[ALLOCATING + i], NULL, forking, (void*)i) == 0);
  for (int i = 0; i < FORKING; i++) pthread_join(ids[ALLOCATING + i], NULL);
  atomic_store(&stop, 1);
  for (int i = 0; i < ALLOCATING; i++) pthread_join(ids[i], NULL);
  int status = 0;
  if (wait(&status) > 0) {
    CHECK(status == 0);
    puts("ok");
  }
  return 0;
}
