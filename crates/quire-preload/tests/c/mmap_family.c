/* mmap, munmap, mremap, mprotect, madvise, mincore, mlock on private anonymous memory, with contents
 * checked, and with the kernel's answers for what is not there: SIGSEGV at the right address for the
 * program, EFAULT for its system calls. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

enum { P = 4096 };
enum { RW = PROT_READ | PROT_WRITE, ANON = MAP_PRIVATE | MAP_ANONYMOUS };

static char* map(size_t pages) {
  char* p = mmap(NULL, pages * P, RW, ANON, -1, 0);
  CHECK(p != MAP_FAILED && (uintptr_t)p % P == 0);
  return p;
}

/* ---- What is not there ---- */
static sigjmp_buf back;
static void* volatile fault_addr;
static volatile int fault_signal;

static void on_fault(int signal, siginfo_t* info, void* context) {
  (void)context;
  fault_signal = signal;
  fault_addr = info->si_addr;
  siglongjmp(back, 1);
}

/* 1 where reading (or writing) one byte at `p` is SIGSEGV with that address. */
static int faults(char* p, int writing) {
  fault_addr = NULL;
  if (sigsetjmp(back, 1) == 0) {
    if (writing) *(volatile char*)p = 1;
    else (void)*(volatile char*)p;
    return 0;
  }
  CHECK(fault_signal == SIGSEGV);
  CHECK(fault_addr == (void*)p);
  return 1;
}

static int zero_fd, pipes[2];

/* 1 where the kernel can read one byte at `p` for us. */
static int kernel_reads(const char* p) {
  char c;
  ssize_t n = write(pipes[1], p, 1);
  if (n < 0) { CHECK(errno == EFAULT); return 0; }
  CHECK(n == 1 && read(pipes[0], &c, 1) == 1);
  return 1;
}

static int kernel_writes(char* p) {
  ssize_t n = read(zero_fd, p, 1);
  if (n < 0) { CHECK(errno == EFAULT); return 0; }
  return 1;
}

static void check_gone(char* p) {
  CHECK(faults(p, 0) && faults(p + P - 1, 1) && !kernel_reads(p) && !kernel_writes(p + 100));
}

static void map_and_unmap(void) {
  char* p = map(64);
  CHECK(is_zero(p, 64 * P));
  fill(p, 64 * P, 1);
  CHECK(is_filled(p, 64 * P, 1));
  /* A hole in the middle, then from both ends. */
  CHECK(munmap(p + 10 * P, 5 * P) == 0);
  check_gone(p + 10 * P);
  check_gone(p + 14 * P);
  CHECK(is_filled(p, 10 * P, 1));
  for (int i = 15; i < 64; i++) CHECK((unsigned char)p[i * P + 5] == expected(1, i * P + 5));
  CHECK(munmap(p, P) == 0);
  CHECK(munmap(p + 63 * P, P) == 0);
  check_gone(p);
  check_gone(p + 63 * P);
  CHECK(munmap(p, 64 * P) == 0); /* holes are no error */
  for (int i = 0; i < 64; i += 7) check_gone(p + i * P);
  /* The addresses are used again, and are zero. */
  char* q = mmap(p, 64 * P, RW, ANON, -1, 0);
  CHECK(q != MAP_FAILED && is_zero(q, 64 * P));
  fill(q, 64 * P, 2);
  CHECK(is_filled(q, 64 * P, 2));
  CHECK(munmap(q, 64 * P - 100) == 0); /* a length in the middle of a page means the page */
  check_gone(q + 63 * P);
  for (int i = 0; i < 200; i++) {
    q = map(1 + i % 37);
    CHECK(is_zero(q, (1 + i % 37) * P));
    memset(q, 0xff, (1 + i % 37) * P);
    if (i % 3 == 0) CHECK(munmap(q, (1 + i % 37) * P) == 0);
  }
}

static void refusals(void) {
  char* p = map(4);
  errno = 0; CHECK(mmap(NULL, 0, RW, ANON, -1, 0) == MAP_FAILED && errno == EINVAL);
  errno = 0; CHECK(mmap(p + 1, P, RW, ANON | MAP_FIXED, -1, 0) == MAP_FAILED && errno == EINVAL);
  errno = 0; CHECK(mmap(NULL, P, RW, ANON, -1, 100) == MAP_FAILED && errno == EINVAL);
  errno = 0; CHECK(mmap(NULL, P, RW, MAP_PRIVATE, -1, 0) == MAP_FAILED && errno == EBADF);
  errno = 0; CHECK(mmap(NULL, (size_t)1 << 60, RW, ANON, -1, 0) == MAP_FAILED && errno == ENOMEM);
  errno = 0; CHECK(munmap(p + 1, P) == -1 && errno == EINVAL);
  errno = 0; CHECK(munmap(p, 0) == -1 && errno == EINVAL);
  errno = 0; CHECK(munmap(p, (size_t)1 << 62) == -1 && errno == EINVAL);
  errno = 0; CHECK(mprotect(p + 1, P, RW) == -1 && errno == EINVAL);
  errno = 0; CHECK(madvise(p + 1, P, MADV_DONTNEED) == -1 && errno == EINVAL);
  errno = 0; CHECK(madvise(p, P, 4711) == -1 && errno == EINVAL);
  errno = 0; CHECK(mremap(p + 1, P, P, 0) == MAP_FAILED && errno == EINVAL);
  errno = 0; CHECK(mremap(p, P, 0, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL);
  CHECK(mprotect(p, 0, PROT_NONE) == 0);
  CHECK(madvise(p, 0, MADV_DONTNEED) == 0);
  CHECK(munmap(p + P, P) == 0);
  unsigned char vec[4];
  errno = 0; CHECK(mprotect(p, 4 * P, RW) == -1 && errno == ENOMEM);
  errno = 0; CHECK(madvise(p, 4 * P, MADV_DONTNEED) == -1 && errno == ENOMEM);
  errno = 0; CHECK(mincore(p, 4 * P, vec) == -1 && errno == ENOMEM);
  errno = 0; CHECK(mincore(p + 1, P, vec) == -1 && errno == EINVAL);
  /* A vector that is nowhere, that may not be written, and that ends in the middle. */
  char* v = map(3);
  CHECK(mprotect(v, P, PROT_READ) == 0 && mprotect(v + 2 * P, P, PROT_NONE) == 0);
  char* bad[] = {NULL, (char*)8, (char*)-P, p + P, v, v + 2 * P};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    errno = 0; CHECK(mincore(p, P, (void*)bad[i]) == -1 && errno == EFAULT);
  }
  char* long_one = map(8);
  errno = 0; CHECK(mincore(long_one, 8 * P, (void*)(v + 2 * P - 4)) == -1 && errno == EFAULT);
  CHECK(mincore(long_one, 8 * P, (void*)(v + P)) == 0 && mincore(long_one, 0, NULL) == 0);
  /* What is refused leaves what is there. */
  fill(long_one, 8 * P, 5);
  errno = 0; CHECK(mmap(long_one, 8 * P, RW, MAP_SHARED | MAP_FIXED, -1, 0) == MAP_FAILED && errno == EBADF);
  errno = 0; CHECK(mmap(long_one, 8 * P, RW, MAP_SHARED | MAP_FIXED, zero_fd, 0) == MAP_FAILED && errno == EACCES);
  errno = 0; CHECK(mmap(long_one, 8 * P, RW, MAP_PRIVATE | MAP_FIXED, pipes[0], 0) == MAP_FAILED && errno == ENODEV);
  CHECK(is_filled(long_one, 8 * P, 5));
  CHECK(munmap(long_one, 8 * P) == 0 && munmap(v, 3 * P) == 0);
  errno = 0; CHECK(mlock(p + P, P) == -1 && errno == ENOMEM);
  errno = 0; CHECK(mremap(p, 2 * P, 4 * P, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT);
  CHECK(posix_madvise(p + 1, P, POSIX_MADV_WILLNEED) == EINVAL);
  CHECK(munmap(p, 4 * P) == 0);
}

static void protection(void) {
  char* p = map(16);
  fill(p, 16 * P, 3);
  CHECK(mprotect(p + 4 * P, 4 * P, PROT_NONE) == 0);
  check_gone(p + 4 * P);
  check_gone(p + 7 * P);
  CHECK(is_filled(p, 4 * P, 3));
  CHECK(mprotect(p + 8 * P, 4 * P, PROT_READ) == 0);
  CHECK(faults(p + 8 * P + 17, 1) && !kernel_writes(p + 11 * P) && kernel_reads(p + 11 * P));
  CHECK((unsigned char)p[8 * P + 17] == expected(3, 8 * P + 17));
  CHECK(mprotect(p, 16 * P, RW) == 0);
  CHECK(is_filled(p, 16 * P, 3));
  fill(p, 16 * P, 4);
  CHECK(is_filled(p, 16 * P, 4));
  /* A reservation that is opened piece by piece, as allocators do it. */
  char* r = mmap(NULL, 64 << 20, PROT_NONE, ANON | MAP_NORESERVE, -1, 0);
  CHECK(r != MAP_FAILED);
  check_gone(r);
  check_gone(r + (32 << 20));
  for (int i = 0; i < 8; i++) {
    CHECK(mprotect(r + ((size_t)i << 20), 1 << 20, RW) == 0);
    CHECK(is_zero(r + ((size_t)i << 20), 1 << 20));
    fill(r + ((size_t)i << 20), 1 << 20, i);
  }
  for (int i = 0; i < 8; i++) CHECK(is_filled(r + ((size_t)i << 20), 1 << 20, i));
  check_gone(r + (8 << 20));
  CHECK(munmap(r, 64 << 20) == 0);
  /* Guard pages at both ends of a stack-like block. */
  CHECK(mprotect(p, P, PROT_NONE) == 0 && mprotect(p + 15 * P, P, PROT_NONE) == 0);
  CHECK(faults(p + P - 1, 1) && faults(p + 15 * P, 1) && !faults(p + P, 1) && !faults(p + 15 * P - 1, 1));
  CHECK(munmap(p, 16 * P) == 0);
}

static void made_executable(void) {
  /* mov eax, 42; ret */
  static const unsigned char code[] = {0xb8, 42, 0, 0, 0, 0xc3};
  char* p = map(4);
  fill(p, 4 * P, 5);
  memcpy(p + P, code, sizeof code);
  CHECK(mprotect(p + P, P, PROT_READ | PROT_EXEC) == 0);
  int (*function)(void) = (int (*)(void))(uintptr_t)(p + P);
  CHECK(function() == 42);
  CHECK(faults(p + P, 1));
  CHECK(mprotect(p + P, P, RW) == 0);
  p[P + 1] = 43;
  CHECK(mprotect(p + P, P, PROT_READ | PROT_EXEC) == 0);
  CHECK(function() == 43);
  CHECK(is_filled(p, P, 5) && (unsigned char)p[2 * P] == expected(5, 2 * P));
  CHECK(munmap(p, 4 * P) == 0);
  check_gone(p + P);
  p = mmap(NULL, P, RW | PROT_EXEC, ANON, -1, 0);
  CHECK(p != MAP_FAILED);
  memcpy(p, code, sizeof code);
  function = (int (*)(void))(uintptr_t)p;
  CHECK(function() == 42);
  CHECK(munmap(p, P) == 0);
}

static void advice(void) {
  char* p = map(64);
  fill(p, 64 * P, 6);
  CHECK(madvise(p + 16 * P, 16 * P, MADV_DONTNEED) == 0);
  CHECK(is_filled(p, 16 * P, 6));
  CHECK(is_zero(p + 16 * P, 16 * P));
  CHECK((unsigned char)p[32 * P] == expected(6, 32 * P));
  fill(p, 64 * P, 7);
  CHECK(madvise(p, 64 * P, MADV_FREE) == 0);
  for (int i = 0; i < 64; i++) {
    /* The old page or zeros, and one of the two all over. */
    int old = (unsigned char)p[i * P] == expected(7, i * P) && expected(7, i * P) != 0;
    for (int j = 0; j < P; j++)
      CHECK((unsigned char)p[i * P + j] == (old ? expected(7, i * P + j) : 0) || expected(7, i * P) == 0);
  }
  /* What is written after MADV_FREE stays. */
  for (int i = 0; i < 64; i += 2) p[i * P + 9] = (char)(i + 1);
  char* noise = map(2048);
  memset(noise, 1, 2048 * P);
  CHECK(munmap(noise, 2048 * P) == 0);
  for (int i = 0; i < 64; i += 2) CHECK(p[i * P + 9] == (char)(i + 1));
  CHECK(madvise(p, 64 * P, MADV_WILLNEED) == 0);
  CHECK(madvise(p, 64 * P, MADV_SEQUENTIAL) == 0);
  CHECK(madvise(p, 64 * P, MADV_RANDOM) == 0);
  CHECK(madvise(p, 64 * P, MADV_NORMAL) == 0);
  fill(p, 64 * P, 8);
  CHECK(posix_madvise(p, 64 * P, POSIX_MADV_DONTNEED) == 0);
  CHECK(posix_madvise(p, 64 * P, POSIX_MADV_WILLNEED) == 0);
  CHECK(madvise(p, 64 * P, MADV_COLD) == 0);
  CHECK(madvise(p, 64 * P, MADV_PAGEOUT) == 0);
  CHECK(is_filled(p, 64 * P, 8));
  CHECK(munmap(p, 64 * P) == 0);
}

static void fixed(void) {
  char* p = map(32);
  fill(p, 32 * P, 9);
  /* Anonymous over anonymous: zeros there, the rest as it was. */
  CHECK(mmap(p + 8 * P, 8 * P, RW, ANON | MAP_FIXED, -1, 0) == p + 8 * P);
  CHECK(is_zero(p + 8 * P, 8 * P));
  CHECK(is_filled(p, 8 * P, 9) && (unsigned char)p[16 * P] == expected(9, 16 * P));
  CHECK(mmap(p + 8 * P, 2 * P, PROT_NONE, ANON | MAP_FIXED | MAP_NORESERVE, -1, 0) == p + 8 * P);
  check_gone(p + 9 * P);
  /* A hole is filled by MAP_FIXED. */
  CHECK(munmap(p + 10 * P, 2 * P) == 0);
  check_gone(p + 10 * P);
  CHECK(mmap(p + 8 * P, 4 * P, RW, ANON | MAP_FIXED, -1, 0) == p + 8 * P);
  CHECK(is_zero(p + 8 * P, 4 * P));
  errno = 0;
  CHECK(mmap(p + 8 * P, P, RW, ANON | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED && errno == EEXIST);
  /* A file, private and shared, into the middle. */
  char name[] = "/tmp/quire-mmap-XXXXXX";
  int fd = mkstemp(name);
  CHECK(fd >= 0 && unlink(name) == 0);
  static char content[8 * P];
  fill(content, sizeof content, 10);
  CHECK(write(fd, content, sizeof content) == sizeof content);
  CHECK(mmap(p + 20 * P, 4 * P, RW, MAP_PRIVATE | MAP_FIXED, fd, 2 * P) == p + 20 * P);
  CHECK(memcmp(p + 20 * P, content + 2 * P, 4 * P) == 0);
  p[20 * P] ^= 1;
  CHECK(mmap(p + 24 * P, 2 * P, RW, MAP_SHARED | MAP_FIXED, fd, 0) == p + 24 * P);
  CHECK(memcmp(p + 24 * P, content, 2 * P) == 0);
  p[24 * P + 1] = 77;
  char byte;
  CHECK(pread(fd, &byte, 1, 1) == 1 && byte == 77);
  CHECK((unsigned char)p[19 * P + 1] == expected(9, 19 * P + 1));
  CHECK((unsigned char)p[26 * P + 1] == expected(9, 26 * P + 1));
  CHECK(msync(p + 24 * P, 2 * P, MS_SYNC) == 0);
  /* And anonymous memory over the file, part of it. */
  CHECK(mmap(p + 22 * P, 3 * P, RW, ANON | MAP_FIXED, -1, 0) == p + 22 * P);
  CHECK(is_zero(p + 22 * P, 3 * P));
  fill(p + 22 * P, 3 * P, 11);
  CHECK((char)(p[20 * P] ^ 1) == content[2 * P] && memcmp(p + 25 * P, content + P, P) == 0);
  CHECK(is_filled(p + 22 * P, 3 * P, 11));
  CHECK(munmap(p + 20 * P, 6 * P) == 0);
  check_gone(p + 21 * P);
  check_gone(p + 23 * P);
  check_gone(p + 25 * P);
  CHECK(munmap(p, 32 * P) == 0);
  close(fd);
}

static void moved(void) {
  char* p = map(16);
  fill(p, 16 * P, 12);
  /* Smaller, then larger where it is or elsewhere. */
  CHECK(mremap(p, 16 * P, 8 * P, 0) == p);
  check_gone(p + 8 * P);
  CHECK(is_filled(p, 8 * P, 12));
  char* q = mremap(p, 8 * P, 4000 * P, MREMAP_MAYMOVE);
  CHECK(q != MAP_FAILED && is_filled(q, 8 * P, 12) && is_zero(q + 8 * P, 3992 * P));
  if (q != p) check_gone(p + P);
  fill(q, 4000 * P, 13);
  /* To an address, over what is there. */
  char* room = map(5000);
  fill(room, 5000 * P, 14);
  char* r = mremap(q, 4000 * P, 4000 * P, MREMAP_MAYMOVE | MREMAP_FIXED, room + 500 * P);
  CHECK(r == room + 500 * P && is_filled(r, 4000 * P, 13));
  CHECK(is_filled(room, 500 * P, 14) && (unsigned char)room[4500 * P] == expected(14, 4500 * P));
  check_gone(q);
  check_gone(q + 3999 * P);
  /* No room to grow in place. */
  errno = 0;
  CHECK(mremap(r, 4000 * P, 4100 * P, 0) == MAP_FAILED && errno == ENOMEM);
  CHECK(is_filled(r, 4000 * P, 13));
  /* Overlap. */
  errno = 0;
  CHECK(mremap(r, 10 * P, 10 * P, MREMAP_MAYMOVE | MREMAP_FIXED, r + 5 * P) == MAP_FAILED && errno == EINVAL);
  /* Part of a mapping, back and forth, with pages never touched. */
  char* s = map(600);
  for (int i = 0; i < 600; i += 3) fill(s + i * P, P, i);
  for (int round = 0; round < 6; round++) {
    char* t = mremap(s, 600 * P, (600 + round) * P, MREMAP_MAYMOVE);
    CHECK(t != MAP_FAILED);
    CHECK(mremap(t, (600 + round) * P, 600 * P, 0) == t);
    for (int i = 0; i < 600; i++) CHECK(i % 3 == 0 ? is_filled(t + i * P, P, i) : is_zero(t + i * P, P));
    s = t;
  }
  char* t = mremap(s, 600 * P, 600 * P, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
  if (t == MAP_FAILED) {
    CHECK(errno == EINVAL); /* as before Linux 5.7 */
    for (int i = 0; i < 600; i += 3) CHECK(is_filled(s + i * P, P, i));
  } else {
    CHECK(t != s && is_zero(s, 600 * P));
    for (int i = 0; i < 600; i += 3) CHECK(is_filled(t + i * P, P, i));
    CHECK(munmap(t, 600 * P) == 0);
  }
  CHECK(munmap(s, 600 * P) == 0 && munmap(room, 5000 * P) == 0);
}

static void residency(void) {
  char* p = map(64);
  unsigned char vec[64];
  memset(vec, 0xff, sizeof vec);
  CHECK(mincore(p, 64 * P, vec) == 0);
  memset(p + 8 * P, 1, 8 * P);
  CHECK(mlock(p + 8 * P + 5, 8 * P - 10) == 0);
  CHECK(mincore(p, 64 * P, vec) == 0);
  for (int i = 8; i < 16; i++) CHECK(vec[i] & 1);
  CHECK(mlock2(p + 32 * P, P, MLOCK_ONFAULT) == 0);
  errno = 0;
  CHECK(mlock2(p, P, 64) == -1 && errno == EINVAL);
  CHECK(munlock(p + 8 * P, 8 * P) == 0);
  CHECK(munlock(p, 64 * P) == 0);
  errno = 0;
  CHECK(mlockall(0) == -1 && errno == EINVAL);
  /* May be refused by RLIMIT_MEMLOCK; where it works, memory mapped after it works as well. */
  if (mlockall(MCL_CURRENT | MCL_FUTURE) == 0) {
    char* q = map(32);
    fill(q, 32 * P, 15);
    CHECK(is_filled(q, 32 * P, 15));
    CHECK(mprotect(q, P, PROT_NONE) == 0 && munmap(q, 32 * P) == 0);
    CHECK(munlockall() == 0);
  }
  CHECK(munmap(p, 64 * P) == 0);
  p = mmap(NULL, 16 * P, RW, ANON | MAP_POPULATE, -1, 0);
  CHECK(p != MAP_FAILED && is_zero(p, 16 * P));
  CHECK(munmap(p, 16 * P) == 0);
}

/* However much is asked to stay, a program goes on: no more is locked than leaves room for the rest. */
static void many_locks(void) {
  enum { PIECES = 64, PIECE = 256 * P };
  char* p = mmap(NULL, PIECES * PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(p != MAP_FAILED);
  for (int how = 0; how < 2; how++) {
    for (int i = 0; i < PIECES; i++) {
      char* piece = p + i * PIECE;
      int locked = how ? mlock2(piece, PIECE, MLOCK_ONFAULT) : mlock(piece, PIECE);
      CHECK(locked == 0 || errno == ENOMEM || errno == EAGAIN);
      for (int at = 0; at < PIECE; at += P) memset(piece + at, i + how + 1, P / 2 + at / P);
    }
    for (int i = 0; i < PIECES; i++)
      for (int at = 0; at < PIECE; at += P) CHECK(p[i * PIECE + at] == (char)(i + how + 1));
    CHECK(munlock(p, PIECES * PIECE) == 0);
  }
  CHECK(munmap(p, PIECES * PIECE) == 0);
}

/* What is locked stays, but not in a fork's child, to which no lock goes. */
static void locked_for_one(void) {
  char* p = map(16);
  fill(p, 16 * P, 21);
  CHECK(mlock(p, 16 * P) == 0);
  errno = 0;
  CHECK(madvise(p, P, MADV_DONTNEED) == -1 && errno == EINVAL);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) _exit(!(madvise(p, 16 * P, MADV_DONTNEED) == 0 && is_zero(p, 16 * P)));
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(is_filled(p, 16 * P, 21));
  CHECK(munlock(p, 16 * P) == 0 && madvise(p, P, MADV_DONTNEED) == 0 && is_zero(p, P));
  CHECK(munmap(p, 16 * P) == 0);
}

static void kinds(void) {
  char* shared = mmap(NULL, 4 * P, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  fill(shared, 4 * P, 16);
  char* moved = mremap(shared, 4 * P, 4 * P, MREMAP_MAYMOVE | MREMAP_FIXED, map(4));
  CHECK(moved != MAP_FAILED && is_filled(moved, 4 * P, 16));
  CHECK(munmap(moved, 4 * P) == 0);
  char* stack = mmap(NULL, 64 * P, RW, ANON | MAP_STACK | MAP_NORESERVE, -1, 0);
  CHECK(stack != MAP_FAILED);
  fill(stack, 64 * P, 17);
  CHECK(munmap(stack, 64 * P) == 0);
  char* low = mmap((void*)0x20000000, 4 * P, RW, ANON, -1, 0);
  CHECK(low != MAP_FAILED);
  fill(low, 4 * P, 18);
  CHECK(munmap(low, 4 * P) == 0);
  low = mmap(NULL, 4 * P, RW, ANON | MAP_32BIT, -1, 0);
  CHECK(low != MAP_FAILED && (uintptr_t)low < (uintptr_t)1 << 32);
  CHECK(munmap(low, 4 * P) == 0);
  low = mmap((void*)0x30000000, 4 * P, RW, ANON | MAP_FIXED, -1, 0);
  CHECK(low == (void*)0x30000000 && is_zero(low, 4 * P));
  CHECK(munmap(low, 4 * P) == 0);
}

/* A limit holds from the call on that sets it, and no longer. */
static void limits(void) {
  const size_t much = (size_t)2 << 30;
  struct rlimit before, low;
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  low = before;
  low.rlim_cur = (rlim_t)1 << 30;
  for (int round = 0; round < 4; round++) {
    char* p = mmap(NULL, much, RW, ANON | MAP_NORESERVE, -1, 0);
    CHECK(p != MAP_FAILED && munmap(p, much) == 0);
    CHECK((round % 2 ? setrlimit(RLIMIT_AS, &low) : prlimit(0, RLIMIT_AS, &low, NULL)) == 0);
    errno = 0;
    CHECK(mmap(NULL, much, RW, ANON | MAP_NORESERVE, -1, 0) == MAP_FAILED && errno == ENOMEM);
    struct rlimit now;
    CHECK((round % 2 ? prlimit(0, RLIMIT_AS, &before, &now) : setrlimit(RLIMIT_AS, &before)) == 0);
    CHECK(round % 2 == 0 || now.rlim_cur == low.rlim_cur);
  }
  /* Managed it is refused, for the reserved addresses are over the limit; nothing is lost then. */
  char* kept = map(4);
  fill(kept, 4 * P, 6);
  CHECK(setrlimit(RLIMIT_AS, &low) == 0);
  char* shared = mmap(kept, 4 * P, RW, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  CHECK(shared == kept || (errno == ENOMEM && is_filled(kept, 4 * P, 6)));
  CHECK(setrlimit(RLIMIT_AS, &before) == 0 && munmap(kept, 4 * P) == 0);
  errno = 0;
  low.rlim_cur = before.rlim_max;
  low.rlim_max = 0;
  CHECK(setrlimit(RLIMIT_AS, &low) == -1 && errno == EINVAL);
}

int main(int argc, char** argv) {
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
  CHECK(sigaction(SIGSEGV, &action, NULL) == 0 && sigaction(SIGBUS, &action, NULL) == 0);
  zero_fd = open("/dev/zero", O_RDONLY);
  CHECK(zero_fd >= 0 && pipe(pipes) == 0);
  static const struct { const char* name; void (*run)(void); } parts[] = {
    {"map_and_unmap", map_and_unmap}, {"refusals", refusals}, {"protection", protection},
    {"made_executable", made_executable}, {"advice", advice}, {"fixed", fixed}, {"moved", moved},
    {"residency", residency}, {"many_locks", many_locks},
    {"locked_for_one", locked_for_one}, {"kinds", kinds}, {"limits", limits},
  };
  /* All of them, or those that are named, in the order of their names. */
  if (argc < 2)
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) parts[i].run();
  for (int arg = 1; arg < argc; arg++)
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
      if (strcmp(parts[i].name, argv[arg]) == 0) parts[i].run();
  puts("ok");
  return 0;
}
