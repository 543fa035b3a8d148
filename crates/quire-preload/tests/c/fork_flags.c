/* clone with each flag that goes with memory of one's own, by libc's function and by the bare calls: the
 * child finds every byte, changes its copy, and forks once more. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

#ifndef CLONE_CLEAR_SIGHAND
#define CLONE_CLEAR_SIGHAND 0x100000000ull
#endif

enum { PAGE = 4096, PAGES = 1024, STACK = 1 << 20 };

static unsigned char* data;
static int ends[2];

static void check_all(unsigned mark) {
  for (int i = 0; i < PAGES; i++) CHECK(is_filled(data + i * PAGE, PAGE, mark + i));
}

static void expect_zero(pid_t child) {
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, __WALL) == child);
  CHECK(status == 0);
}

static pid_t patiently(pid_t (*how)(unsigned long long), unsigned long long flags) {
  for (int tries = 0;; tries++) {
    pid_t child = how(flags);
    if (child >= 0 || (errno != ENOMEM && errno != EAGAIN) || tries == 500) return child;
    usleep(10000);
  }
}

/* What a child does, whatever it shares with its parent. */
static int live(void* argument) {
  int forks = argument == NULL;
  check_all(0);
  for (int i = 0; i < PAGES; i++) fill(data + i * PAGE, PAGE, 5000 + i);
  free(memset(malloc(200000), 1, 200000));
  if (forks) {
    pid_t child = fork();
    if (child == 0) {
      check_all(5000);
      _exit(0);
    }
    expect_zero(child);
  }
  check_all(5000);
  return 0;
}

static int* ids;
static int pidfd;

static pid_t by_clone(unsigned long long flags) {
  static char* stack;
  if (!stack) stack = malloc(STACK);
  return clone(live, stack + STACK, (int)flags | SIGCHLD, NULL, flags & CLONE_PIDFD ? &pidfd : &ids[0], NULL, &ids[1]);
}

static pid_t by_syscall(unsigned long long flags) {
  return syscall(SYS_clone, flags | SIGCHLD, 0, flags & CLONE_PIDFD ? &pidfd : &ids[0], &ids[1], 0);
}

static pid_t by_clone3(unsigned long long flags) {
  struct clone_args args = {.flags = flags, .exit_signal = flags & CLONE_PARENT ? 0 : SIGCHLD, .pidfd = (uintptr_t)&pidfd,
                            .parent_tid = (uintptr_t)&ids[0], .child_tid = (uintptr_t)&ids[1]};
  return syscall(SYS_clone3, &args, sizeof args);
}

static void one(pid_t (*how)(unsigned long long), unsigned long long flags) {
  ids[0] = ids[1] = -1;
  pidfd = -1;
  pid_t child = patiently(how, flags);
  if (child == 0) _exit(live(NULL));
  if (child < 0 && errno == EPERM) return; /* a namespace that this user may not make */
  if (child < 0) fprintf(stderr, "flags %#llx\n", flags);
  CHECK(child > 0);
  if (flags & CLONE_PARENT_SETTID) CHECK(ids[0] == child);
  /* The child's copy alone. */
  CHECK(ids[1] == -1);
  if (flags & CLONE_PIDFD) {
    struct pollfd poll_for = {.fd = pidfd, .events = POLLIN};
    CHECK(pidfd >= 0 && poll(&poll_for, 1, 60000) == 1);
    close(pidfd);
  }
  expect_zero(child);
  check_all(0);
}

static const unsigned long long sets[] = {
    0,
    CLONE_FILES,
    CLONE_FS,
    CLONE_FILES | CLONE_FS,
    CLONE_SYSVSEM,
    CLONE_IO,
    CLONE_PTRACE,
    CLONE_UNTRACED,
    CLONE_VFORK,
    CLONE_PARENT_SETTID,
    CLONE_CHILD_SETTID,
    CLONE_CHILD_CLEARTID,
    CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | CLONE_PARENT_SETTID,
    CLONE_PIDFD,
    CLONE_PIDFD | CLONE_FILES,
    CLONE_NEWNS,
    CLONE_NEWUTS,
    CLONE_NEWIPC,
    CLONE_NEWCGROUP,
    CLONE_NEWPID,
    CLONE_NEWNET,
    CLONE_NEWUSER,
    CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET,
};

/* The child's parent is its maker's parent. */
static void of_the_parent(pid_t (*how)(unsigned long long)) {
  CHECK(pipe(ends) == 0);
  pid_t middle = fork();
  if (middle == 0) {
    pid_t sibling = patiently(how, CLONE_PARENT);
    if (sibling == 0) _exit(live(NULL));
    CHECK(sibling > 0 && write(ends[1], &sibling, sizeof sibling) == sizeof sibling);
    check_all(0);
    /* What the sibling does to its copy. */
    usleep(20000);
    check_all(0);
    _exit(0);
  }
  pid_t sibling;
  close(ends[1]);
  CHECK(read(ends[0], &sibling, sizeof sibling) == sizeof sibling);
  expect_zero(sibling);
  expect_zero(middle);
  close(ends[0]);
}

/* A descriptor that one side opens or closes is the other's as well. */
static void shared_files(void) {
  CHECK(pipe(ends) == 0);
  pid_t child = by_syscall(CLONE_FILES);
  if (child == 0) {
    check_all(0);
    int made = open("/dev/null", O_WRONLY);
    CHECK(made >= 0 && write(ends[1], &made, sizeof made) == sizeof made);
    close(ends[1]);
    _exit(0);
  }
  int made = -1;
  expect_zero(child);
  CHECK(read(ends[0], &made, sizeof made) == sizeof made);
  CHECK(fcntl(made, F_GETFD) >= 0 && fcntl(ends[1], F_GETFD) == -1 && errno == EBADF);
  close(made);
  close(ends[0]);
}

/* So is the working directory and the umask. */
static void shared_file_system(void) {
  char where[256];
  mode_t before = umask(022);
  pid_t child = by_syscall(CLONE_FS);
  if (child == 0) {
    check_all(0);
    umask(0137);
    _exit(chdir("/usr"));
  }
  expect_zero(child);
  CHECK(getcwd(where, sizeof where) && !strcmp(where, "/usr") && umask(before) == 0137);
}

static void ignore(int number) { (void)number; }

static void cleared_handlers(void) {
  struct sigaction now;
  signal(SIGUSR1, ignore);
  signal(SIGUSR2, SIG_IGN);
  pid_t child = by_clone3(CLONE_CLEAR_SIGHAND);
  if (child == 0) {
    CHECK(sigaction(SIGUSR1, NULL, &now) == 0 && now.sa_handler == SIG_DFL);
    CHECK(sigaction(SIGUSR2, NULL, &now) == 0 && now.sa_handler == SIG_IGN);
    CHECK(sigaction(SIGSYS, NULL, &now) == 0 && now.sa_handler == SIG_DFL);
    _exit(live(NULL));
  }
  if (child < 0 && (errno == ENOSYS || errno == EINVAL)) return;
  expect_zero(child);
  CHECK(sigaction(SIGUSR1, NULL, &now) == 0 && now.sa_handler == ignore);
}

/* What the kernel refuses it refuses here, and nothing is left armed. */
static void refusals(void) {
  CHECK(by_syscall(CLONE_SIGHAND) == -1 && errno == EINVAL);
  CHECK(by_syscall(CLONE_THREAD) == -1 && errno == EINVAL);
  CHECK(by_clone3(CLONE_NEWNS | CLONE_FS) == -1 && errno == EINVAL);
  CHECK(syscall(SYS_clone3, NULL, sizeof(struct clone_args)) == -1 && errno == EFAULT);
  struct clone_args args = {.exit_signal = SIGCHLD};
  CHECK(syscall(SYS_clone3, &args, 8) == -1 && errno == EINVAL);
  CHECK(syscall(SYS_clone3, &args, 1 << 20) == -1 && errno == E2BIG);
  one(by_syscall, 0);
}

int main(void) {
  alarm(200);
  data = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(data != MAP_FAILED);
  ids = malloc(2 * sizeof *ids);
  for (int i = 0; i < PAGES; i++) fill(data + i * PAGE, PAGE, i);
  for (unsigned i = 0; i < sizeof sets / sizeof *sets; i++) {
    one(by_clone, sets[i]);
    one(by_syscall, sets[i]);
    one(by_clone3, sets[i]);
  }
  of_the_parent(by_syscall);
  of_the_parent(by_clone3);
  shared_files();
  shared_file_system();
  cleared_handlers();
  refusals();
  check_all(0);
  puts("ok");
  return 0;
}
