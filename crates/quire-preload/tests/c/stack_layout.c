/* Threads whose stacks are managed memory, and whose blocks are, change the layout while pages of both go: no
 * fault of theirs may wait for what they have locked themselves. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include "check.h"

enum { PAGE = 4096, STACK = 256 * 1024, PAGES = 48, STEP = 48 };

static atomic_int stop, handled;

static void* memory(size_t bytes) {
  void* start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(start != MAP_FAILED);
  return start;
}

/* The stack of the thread that calls, where it is not a coroutine. */
static __thread char* stack_start;
static ucontext_t back, coroutine;
static int is_coroutine, is_over;

/* All of the stack goes: the next call finds nothing below. */
static void drop_stack(void) {
  if (is_coroutine)
    CHECK(swapcontext(&coroutine, &back) == 0);
  else
    CHECK(madvise(stack_start, STACK, MADV_PAGEOUT) == 0);
}

/* Where libc has had the kernel write which CPU a thread runs on, the kernel does so still. */
static int is_told_its_cpu(void) {
  unsigned* size = dlsym(RTLD_DEFAULT, "__rseq_size");
  long* offset = dlsym(RTLD_DEFAULT, "__rseq_offset");
  if (!size || *size == 0) return 1;
  return ((volatile int*)((char*)__builtin_thread_pointer() + *offset))[1] >= 0;
}

/* A block with pages in every state: what does not pack goes to the file. */
static unsigned char* block_of(unsigned mark) {
  unsigned char* block = memory(PAGES * PAGE);
  uint64_t noise = mark + 1;
  for (int page = 0; page < PAGES; page++)
    for (int at = 0; at < PAGE / 8; at++)
      ((uint64_t*)(block + page * PAGE))[at] = page % 4 == 0 ? next_random(&noise) : mark + page;
  CHECK(madvise(block, PAGES / 2 * PAGE, mark % 3 == 0 ? MADV_PAGEOUT : MADV_FREE) == 0);
  if (mark % 2) CHECK(madvise(block + PAGES / 2 * PAGE, PAGES / 4 * PAGE, MADV_PAGEOUT) == 0);
  return block;
}

/* The boundary between what is left of the stack and what is gone comes to lie `mark` bytes further down. */
static void __attribute__((noinline)) change(unsigned mark) {
  volatile char* room = __builtin_alloca(16 + mark % PAGE);
  room[0] = 1;
  unsigned char* block = block_of(mark);
  drop_stack();
  CHECK(mprotect(block, PAGES / 2 * PAGE, PROT_READ) == 0);
  drop_stack();
  CHECK(mprotect(block, PAGES / 2 * PAGE, PROT_READ | PROT_WRITE) == 0);
  drop_stack();
  CHECK(madvise(block + 3 * PAGE, 6 * PAGE, MADV_DONTNEED) == 0);
  drop_stack();
  CHECK(madvise(block + 20 * PAGE, 6 * PAGE, MADV_FREE) == 0);
  drop_stack();
  CHECK(mlock(block, 2 * PAGE) == 0);
  drop_stack();
  CHECK(munlock(block, 2 * PAGE) == 0);
  drop_stack();
  CHECK(munmap(block + 30 * PAGE, 4 * PAGE) == 0);
  drop_stack();
  unsigned char* moved = mremap(block, 16 * PAGE, 24 * PAGE, MREMAP_MAYMOVE);
  CHECK(moved != MAP_FAILED && is_zero(moved + 16 * PAGE, 8 * PAGE));
  drop_stack();
  CHECK(munmap(moved, 24 * PAGE) == 0);
  drop_stack();
  CHECK(munmap(block + 16 * PAGE, (PAGES - 16) * PAGE) == 0);
  CHECK(room[0] == 1);
}

static void changes(void) {
  for (volatile unsigned mark = 0; mark < PAGE; mark += STEP) change(mark);
  CHECK(is_told_its_cpu());
}

/* The whole stack goes, with the thread's block at its end, whatever the thread is at. */
static void* drops(void* argument) {
  while (!stop) (void)madvise(argument, STACK, MADV_PAGEOUT);
  return NULL;
}

/* Faults and changes of other threads: of more memory than there may be. */
static void* noise(void* argument) {
  size_t pages = (uintptr_t)argument;
  unsigned char* block = memory(pages * PAGE);
  for (unsigned round = 0; !stop; round++) {
    for (size_t page = 0; page < pages && !stop; page++) ((unsigned*)(block + page * PAGE))[round % 1024] = round;
    munmap(memory(16 * PAGE), 16 * PAGE);
  }
  munmap(block, pages * PAGE);
  return NULL;
}

static void on_signal(int number) { handled += number == SIGUSR1; }

static pthread_t start(void* (*run)(void*), void* argument, void* stack) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  if (stack) CHECK(pthread_attr_setstack(&attributes, stack, STACK) == 0);
  pthread_t thread;
  CHECK(pthread_create(&thread, &attributes, run, argument) == 0);
  return thread;
}

/* The kernel notes in the block that the thread has ended, but brings no page in for that. */
static void* end(char* stack) {
  if (stack) CHECK(mlock(stack + STACK - 4 * PAGE, 4 * PAGE) == 0);
  return NULL;
}

static void* thread_on_its_stack(void* stack) {
  stack_start = stack;
  changes();
  return end(stack);
}

static void run_coroutine(void) {
  changes();
  is_over = 1;
}

/* On a thread whose own stack is the kernel's, or managed as well: it drops what the coroutine does not use. */
static void* coroutines(void* own) {
  char* stack = memory(STACK);
  CHECK(getcontext(&coroutine) == 0);
  coroutine.uc_stack.ss_sp = stack;
  coroutine.uc_stack.ss_size = STACK;
  coroutine.uc_link = &back;
  makecontext(&coroutine, run_coroutine, 0);
  is_over = 0;
  is_coroutine = 1;
  for (unsigned round = 0; !is_over; round++) {
    CHECK(swapcontext(&back, &coroutine) == 0);
    size_t unused = ((char*)coroutine.uc_mcontext.gregs[REG_RSP] - 128 - stack) & ~(size_t)(PAGE - 1);
    if (!is_over) CHECK(madvise(stack, unused, MADV_DONTNEED) == 0);
    if (round % 2) CHECK(madvise(stack, STACK, MADV_PAGEOUT) == 0);
  }
  is_coroutine = 0;
  CHECK(munmap(stack, STACK) == 0);
  return end(own);
}

/* A child's engine is new, and may have been made while another thread was in such a call. */
static void* forks(void* stack) {
  stack_start = stack;
  for (int i = 0; i < 12; i++) {
    drop_stack();
    pid_t child = fork();
    if (child == 0) {
      CHECK(is_told_its_cpu());
      for (unsigned mark = 0; mark < PAGE; mark += 8 * STEP) change(mark);
      _exit(0);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(is_told_its_cpu());
    change(i);
  }
  return end(stack);
}

/* Runs it with the stack going all the while, and signals coming. */
static void beside_drops(void* (*run)(void*)) {
  stop = 0;
  void* stack = memory(STACK);
  pthread_t others[2] = {start(noise, (void*)(uintptr_t)6000, NULL), start(drops, stack, NULL)};
  pthread_t thread = start(run, stack, stack);
  while (pthread_tryjoin_np(thread, NULL) != 0) {
    pthread_kill(others[0], SIGUSR1);
    usleep(500);
  }
  stop = 1;
  for (int i = 0; i < 2; i++) pthread_join(others[i], NULL);
  munmap(stack, STACK);
}

int main(void) {
  alarm(100);
  signal(SIGUSR1, on_signal);
  coroutines(NULL);
  void* stack = memory(STACK);
  pthread_join(start(thread_on_its_stack, stack, stack), NULL);
  munmap(stack, STACK);
  beside_drops(thread_on_its_stack);
  beside_drops(coroutines);
  beside_drops(forks);
  puts("ok");
  return 0;
}
