/* Children that share their parent's memory and change its layout, on stacks that are managed memory
 * too: after vfork, after clone with CLONE_VM, with the parent asleep and beside it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

enum { PAGE = 4096, STACK = 1 << 20, ROUNDS = 60, PAGES = 64 };

static atomic_int stop;
static unsigned char* volatile left;

static void* memory(size_t bytes) {
  void* start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(start != MAP_FAILED);
  return start;
}

/* The whole stack goes, before each call: it comes back while the layout is being changed. */
static char* volatile stack_start;
static void drop_stack(void) {
  if (stack_start) (void)madvise(stack_start, STACK, MADV_PAGEOUT);
}

static void __attribute__((noinline)) change(unsigned mark) {
  /* Page boundaries come to lie anywhere in the frames below. */
  volatile char* room = __builtin_alloca(16 + mark * 176 % PAGE);
  room[0] = 1;
  unsigned char* block = memory(PAGES * PAGE);
  fill(block, PAGES * PAGE, mark);
  drop_stack();
  CHECK(mprotect(block, PAGES * PAGE, PROT_READ) == 0);
  drop_stack();
  CHECK(mprotect(block, PAGES * PAGE, PROT_READ | PROT_WRITE) == 0);
  drop_stack();
  unsigned char* moved = mremap(block, PAGES * PAGE, 2 * PAGES * PAGE, MREMAP_MAYMOVE);
  CHECK(moved != MAP_FAILED && is_filled(moved, PAGES * PAGE, mark));
  drop_stack();
  CHECK(munmap(moved + PAGES * PAGE, PAGES * PAGE) == 0);
  drop_stack();
  unsigned char* small = malloc(300000);
  CHECK(small != NULL);
  fill(small, 300000, mark);
  CHECK(is_filled(small, 300000, mark));
  drop_stack();
  free(small);
  CHECK(room[0] == 1);
  left = moved;
}

static void expect_zero(pid_t child) {
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, __WALL) == child);
  CHECK(status == 0);
}

/* What the child left is the parent's as well. */
static void take(unsigned mark) {
  CHECK(is_filled(left, PAGES * PAGE, mark));
  CHECK(munmap(left, PAGES * PAGE) == 0);
}

static void* vforks(void* argument) {
  for (volatile unsigned i = 0; i < ROUNDS; i++) {
    pid_t child = vfork();
    if (child == 0) {
      change(i);
      if (i % 8 == 1) execl("/bin/true", "true", NULL);
      _exit(0);
    }
    expect_zero(child);
    take(i);
    change(i + 1000);
    take(i + 1000);
  }
  return argument;
}

static int child_of_clone(void* argument) {
  change((uintptr_t)argument);
  return 0;
}

static void* clones(void* argument) {
  char* stack = stack_start = memory(STACK);
  for (uintptr_t i = 0; i < ROUNDS; i++) {
    pid_t child = clone(child_of_clone, stack + STACK, CLONE_VM | CLONE_VFORK | SIGCHLD, (void*)i);
    expect_zero(child);
    take(i);
  }
  stack_start = NULL;
  munmap(stack, STACK);
  return argument;
}

/* In the block that libc has of the thread, at the end of its stack: the kernel writes there too. */
static __thread unsigned mark_of_thread;

/* libc does not know the number of such a child's thread either. */
static void* raw_forks(void* argument) {
  for (unsigned i = 0; i < ROUNDS; i += 4) {
    mark_of_thread = i + 1;
    drop_stack();
    pid_t child = syscall(SYS_fork);
    if (child == 0) {
      CHECK(mark_of_thread == i + 1);
      for (unsigned k = 0; k < 24; k++) {
        change(i + k);
        take(i + k);
      }
      _exit(0);
    }
    expect_zero(child);
  }
  return argument;
}

/* The parent goes on meanwhile, in the same memory. */
static int child_beside(void* argument) {
  unsigned char* block = argument;
  for (unsigned i = 0; i < 200; i++) {
    for (int at = 0; at < PAGES; at++) block[at * PAGE] = at + i;
    syscall(SYS_madvise, block + PAGE, PAGE, MADV_WILLNEED);
    for (int at = 0; at < PAGES; at++)
      if (block[at * PAGE] != (unsigned char)(at + i)) return 1;
  }
  return 0;
}

static void beside(void) {
  char* stack = memory(STACK);
  unsigned char* block = memory(PAGES * PAGE);
  for (int i = 0; i < 20; i++) {
    pid_t child = clone(child_beside, stack + STACK, CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | SIGCHLD, block);
    CHECK(child > 0);
    for (unsigned k = 0; k < 20; k++) {
      (void)madvise(block, PAGES * PAGE, MADV_PAGEOUT);
      change(k);
      take(k);
    }
    expect_zero(child);
  }
  CHECK(munmap(stack, STACK) == 0 && munmap(block, PAGES * PAGE) == 0);
}

static void* noise(void* argument) {
  while (!stop) {
    unsigned char* block = memory(8 * PAGE);
    block[5 * PAGE] = 1;
    munmap(block, 8 * PAGE);
  }
  return argument;
}

static void on_managed_stack(void* (*run)(void*)) {
  void* stack = stack_start = memory(STACK);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  CHECK(pthread_attr_setstack(&attributes, stack, STACK) == 0);
  pthread_t thread;
  CHECK(pthread_create(&thread, &attributes, run, NULL) == 0);
  pthread_join(thread, NULL);
  stack_start = NULL;
  munmap(stack, STACK);
}

int main(void) {
  alarm(200);
  vforks(NULL);
  on_managed_stack(vforks);
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, noise, NULL) == 0);
  on_managed_stack(vforks);
  on_managed_stack(raw_forks);
  clones(NULL);
  beside();
  stop = 1;
  pthread_join(thread, NULL);
  puts("ok");
  return 0;
}
