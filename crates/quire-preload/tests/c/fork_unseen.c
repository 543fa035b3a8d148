/* A clone by an instruction of the program's own, that the library does not notice: its child may die at the first touch
 * of managed memory, but must never read zeros where data was. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

enum { PAGE = 4096, PAGES = 256, RIGHT = 7, WRONG = 9 };

static long raw_call(long number, long first, long second) {
  long result;
  register long r10 __asm__("r10") = 0;
  register long r8 __asm__("r8") = 0;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(first), "S"(second), "d"(0L), "r"(r10), "r"(r8)
                   : "rcx", "r11", "memory");
  return result;
}

int main(void) {
  char* block = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(block != MAP_FAILED);
  for (int i = 0; i < PAGES; i++) fill(block + i * PAGE, PAGE, i);
  /* Bare, without swap, this does nothing. */
  (void)madvise(block, PAGES * PAGE, MADV_PAGEOUT);

  long child = raw_call(SYS_clone, SIGCHLD, 0);
  if (child == 0) {
    /* Nothing of libc's here: it may lie in managed memory. */
    int is_right = 1;
    for (int i = 0; i < PAGES; i++) is_right &= is_filled(block + i * PAGE, PAGE, i);
    raw_call(SYS_exit_group, is_right ? RIGHT : WRONG, 0);
  }
  CHECK(child > 0);
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == RIGHT) ||
        (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV));

  for (int i = 0; i < PAGES; i++) CHECK(is_filled(block + i * PAGE, PAGE, i));
  puts("ok");
  return 0;
}
