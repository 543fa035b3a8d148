/* A program may map files over its memory, or leave holes in it, by system calls that no library
 * notices. The memory beside them stays right, in store and out of it, and in a fork's child. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define PAGE 4096ul
#define PAGES (12ul << 10)
#define PLACES 6
#define LENGTH 3

/* Where a file lies; each place is followed by a hole of as many pages. */
static const size_t places[PLACES] = {0, 513, 3000, 6144, 9000, PAGES - 2 * LENGTH};
static char* memory;
static char file[LENGTH * PAGE];

/* A system call by an instruction of the program's own. */
static long bare(long number, const void* at, size_t length, long prot, long flags, long descriptor) {
  register long r10 asm("r10") = flags;
  register long r8 asm("r8") = descriptor;
  register long r9 asm("r9") = 0;
  asm volatile("syscall"
               : "+a"(number)
               : "D"(at), "S"(length), "d"(prot), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  return number;
}

static int is_ours(size_t page) {
  for (int i = 0; i < PLACES; i++)
    if (page - places[i] < 2 * LENGTH) return 0;
  return 1;
}

static void check_all(int should_write) {
  for (size_t page = 0; page < PAGES; page++) {
    if (!is_ours(page)) continue;
    CHECK(is_filled(memory + page * PAGE, 64, page));
    if (should_write) fill(memory + page * PAGE, 64, page);
  }
  for (int i = 0; i < PLACES; i++)
    CHECK(memcmp(memory + places[i] * PAGE, file, sizeof file) == 0);
}

static void check_often(void) {
  for (int round = 0; round < 4; round++) check_all(round == 1);
}

int main(int argc, char** argv) {
  memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  for (size_t page = 0; page < PAGES; page++) fill(memory + page * PAGE, 64, page);
  int descriptor = open(argv[0], O_RDONLY);
  CHECK(read(descriptor, file, sizeof file) == sizeof file);
  /* Shared memory that can only be read is refused otherwise than a file is. */
  char name[64];
  int writable = memfd_create("bare", 0);
  CHECK(write(writable, file, sizeof file) == sizeof file);
  snprintf(name, sizeof name, "/proc/self/fd/%d", writable);
  int shared = open(name, O_RDONLY);
  CHECK(shared >= 0);
  for (int i = 0; i < PLACES; i++) {
    char* place = memory + places[i] * PAGE;
    int flags = MAP_FIXED | (i % 2 ? MAP_PRIVATE : MAP_SHARED);
    CHECK(bare(SYS_mmap, place, sizeof file, PROT_READ, flags, i == 4 ? shared : descriptor) == (long)place);
    CHECK(bare(SYS_munmap, place + sizeof file, sizeof file, 0, 0, 0) == 0);
  }
  check_often();
  pid_t child = fork();
  CHECK(child >= 0);
  check_often();
  if (child == 0) _exit(0);
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  puts("ok");
}
