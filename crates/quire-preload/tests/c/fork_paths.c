// Forks in every way a C program can, and looks in each process whether memory is what it was.
// Prints "ok" and exits with 0, under `quire run` as without it.
// Usage: fork_paths [MIB of data, 32 by default]
// Build: cc -O1 -pthread fork_paths.c -o fork_paths
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/sched.h>
#include <pthread.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096
#define MANY_THREADS 8
#define FORKS_A_THREAD 6

static uint64_t *data;
static size_t pages;
static FILE *stream;
static const char *stage = "start";

static void fail(const char *what) {
  dprintf(2, "fork_paths: %s: %s (errno %d, pid %d)\n", stage, what, errno, getpid());
  _exit(1);
}
#define CHECK(condition) ((condition) ? (void)0 : fail(#condition))

static uint64_t word_of(size_t page, uint64_t salt) { return (page + 1) * 0x9e3779b97f4a7c15u ^ salt; }

static void write_pages(uint64_t salt, size_t step) {
  for (size_t i = 0; i < pages; i += step)
    for (size_t k = 0; k < PAGE / 8; k += 64) data[i * PAGE / 8 + k] = word_of(i, salt) + k;
}

static void check_pages(uint64_t salt, size_t step) {
  for (size_t i = 0; i < pages; i += step)
    for (size_t k = 0; k < PAGE / 8; k += 64)
      if (data[i * PAGE / 8 + k] != word_of(i, salt) + k) fail("a page lost its content");
}

// What a child does: looks at everything, writes its own, uses the heap and a stream of the parent's.
static void live_as_child(size_t step) {
  check_pages(0, step);
  write_pages(77, step);
  char *block = malloc(100000);
  memset(block, 1, 100000);
  CHECK(fprintf(stream, "child %d\n", getpid()) > 0);
  CHECK(fflush(stream) == 0);
  free(block);
  check_pages(77, step);
}

static void expect_success(pid_t child) {
  int status = -1;
  pid_t got;
  do got = waitpid(child, &status, __WALL);
  while (got < 0 && errno == EINTR);
  CHECK(got == child);
  if (status) dprintf(2, "child's status %#x\n", status);
  CHECK(status == 0);
}

static void finish(pid_t child) {
  CHECK(child > 0);
  expect_success(child);
  check_pages(0, 1);
}

// Where memory is short, fork may say so; then it must work a little later.
static pid_t fork_patiently(pid_t (*how)(void)) {
  for (int tries = 0;; tries++) {
    pid_t child = how();
    if (child >= 0 || (errno != ENOMEM && errno != EAGAIN) || tries == 500) return child;
    usleep(10000);
  }
}

static void plainly(pid_t (*how)(void)) {
  pid_t child = fork_patiently(how);
  if (child == 0) {
    live_as_child(1);
    _exit(0);
  }
  finish(child);
}

static pid_t by_syscall_clone(void) { return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }
static pid_t by_syscall_fork(void) { return syscall(SYS_fork); }

static void children_of_children(void) {
  pid_t child = fork_patiently(fork);
  if (child == 0) {
    pid_t grandchild = fork_patiently(fork);
    if (grandchild == 0) {
      pid_t last = fork_patiently(fork);
      if (last == 0) {
        live_as_child(1);
        exit(0);
      }
      expect_success(last);
      check_pages(0, 1);
      write_pages(5, 3);
      _exit(0);
    }
    write_pages(6, 2);
    expect_success(grandchild);
    check_pages(6, 2);
    _exit(0);
  }
  finish(child);
}

static void daemons(void) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  pid_t child = fork_patiently(fork);
  if (child == 0) {
    CHECK(daemon(1, 1) == 0);
    live_as_child(1);
    CHECK(write(ends[1], "x", 1) == 1);
    _exit(0);
  }
  finish(child);
  close(ends[1]);
  char answer;
  CHECK(read(ends[0], &answer, 1) == 1);
  close(ends[0]);
}

static int terminal;
static pid_t by_forkpty(void) { return forkpty(&terminal, NULL, NULL, NULL); }

static void terminals(void) {
  pid_t child = fork_patiently(by_forkpty);
  if (child == 0) {
    live_as_child(1);
    _exit(0);
  }
  finish(child);
  close(terminal);
}

static void programs_from_children(void) {
  pid_t child = fork_patiently(fork);
  if (child == 0) {
    CHECK(system("exit 7") == 7 << 8);
    FILE *output = popen("echo seven", "r");
    char line[32] = "";
    CHECK(fgets(line, sizeof line, output) && !strcmp(line, "seven\n"));
    CHECK(pclose(output) == 0);
    pid_t other;
    char *arguments[] = {"true", NULL};
    extern char **environ;
    CHECK(posix_spawnp(&other, "true", NULL, NULL, arguments, environ) == 0);
    expect_success(other);
    pid_t borrowed = vfork();
    if (borrowed == 0) _exit(0);
    expect_success(borrowed);
    check_pages(0, 1);
    _exit(0);
  }
  finish(child);
}

// ---- clone(2) and clone3(2), with every pointer on the heap

static int child_function(void *argument) {
  int *ids = argument;
  CHECK(ids[0] == getpid());
  live_as_child(1);
  return 0;
}

static void clones(void) {
  char *stack = malloc(1 << 20);
  int *ids = calloc(2, sizeof *ids);
  pid_t child;
  for (int tries = 0; tries < 500; tries++) {
    child = clone(child_function, stack + (1 << 20), CLONE_CHILD_SETTID | CLONE_PARENT_SETTID | SIGCHLD, ids,
                  &ids[1], NULL, &ids[0]);
    if (child >= 0 || (errno != ENOMEM && errno != EAGAIN)) break;
    usleep(10000);
  }
  CHECK(child > 0 && ids[1] == child && ids[0] == 0);
  finish(child);
  errno = 0;
  CHECK(clone(NULL, NULL, SIGCHLD, NULL) == -1 && errno == EINVAL);
  free(stack);

  struct clone_args *args = calloc(1, sizeof *args);
  int *pidfd = malloc(sizeof *pidfd);
  *pidfd = -1;
  ids[0] = ids[1] = 0;
  args->flags = CLONE_PIDFD | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID;
  args->pidfd = (uintptr_t)pidfd;
  args->parent_tid = (uintptr_t)&ids[0];
  args->child_tid = (uintptr_t)&ids[1];
  args->exit_signal = SIGCHLD;
  for (int tries = 0; tries < 500; tries++) {
    child = syscall(SYS_clone3, args, sizeof *args);
    if (child >= 0 || (errno != ENOMEM && errno != EAGAIN)) break;
    usleep(10000);
  }
  if (child == 0) {
    CHECK(ids[1] == getpid());
    live_as_child(1);
    _exit(0);
  }
  if (child < 0 && errno == ENOSYS) return;
  CHECK(child > 0 && ids[0] == child && *pidfd >= 0);
  finish(child);
  close(*pidfd);
  free(args);
  free(pidfd);
  free(ids);
}

static void refusals(void) {
  sigset_t before, after;
  sigprocmask(SIG_SETMASK, NULL, &before);
  for (int i = 0; i < 3; i++) {
    errno = 0;
    // A new mount namespace cannot share the old one's file system view.
    CHECK(syscall(SYS_clone, CLONE_NEWNS | CLONE_FS | SIGCHLD, 0, 0, 0, 0) == -1 && errno == EINVAL);
  }
  sigprocmask(SIG_SETMASK, NULL, &after);
  CHECK(!memcmp(&before, &after, 8));
  plainly(fork);
}

// ---- signals

static volatile sig_atomic_t handled, forked_in_handler;

static void forking_handler(int signal) {
  (void)signal;
  int saved = errno;
  pid_t child = fork_patiently(fork);
  if (child == 0) {
    check_pages(0, 7);
    _exit(0);
  }
  CHECK(child > 0);
  expect_success(child);
  forked_in_handler++;
  errno = saved;
}

static void forks_in_handlers(void) {
  struct sigaction action = {.sa_handler = forking_handler}, old;
  sigaction(SIGUSR1, &action, &old);
  raise(SIGUSR1);
  stack_t alternate = {.ss_sp = malloc(1 << 17), .ss_size = 1 << 17}, none = {.ss_flags = SS_DISABLE};
  CHECK(sigaltstack(&alternate, NULL) == 0);
  action.sa_flags = SA_ONSTACK;
  sigaction(SIGUSR1, &action, NULL);
  raise(SIGUSR1);
  CHECK(forked_in_handler == 2);
  sigaltstack(&none, NULL);
  sigaction(SIGUSR1, &old, NULL);
  free(alternate.ss_sp);
  check_pages(0, 1);
}

static void all_signals_blocked(void) {
  sigset_t all, old, now;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &old);
  sigprocmask(SIG_SETMASK, NULL, &all);
  pid_t child = fork_patiently(fork);
  sigprocmask(SIG_SETMASK, NULL, &now);
  CHECK(!memcmp(&all, &now, 8));
  if (child == 0) {
    live_as_child(1);
    _exit(0);
  }
  finish(child);
  sigprocmask(SIG_SETMASK, &old, NULL);
  child = fork_patiently(fork);
  sigprocmask(SIG_SETMASK, NULL, &now);
  CHECK(!memcmp(&old, &now, 8));
  if (child == 0) _exit(0);
  finish(child);
}

static void counting_handler(int signal) {
  (void)signal;
  handled++;
  data[0] = data[0];
}

static void alarms_while_forking(void) {
  struct sigaction action = {.sa_handler = counting_handler, .sa_flags = SA_RESTART}, old;
  sigaction(SIGALRM, &action, &old);
  struct itimerval every = {{0, 3000}, {0, 3000}}, never = {{0, 0}, {0, 0}};
  setitimer(ITIMER_REAL, &every, NULL);
  for (int i = 0; i < 20; i++) {
    pid_t child = fork_patiently(fork);
    if (child == 0) {
      check_pages(0, 16);
      _exit(0);
    }
    CHECK(child > 0);
    expect_success(child);
  }
  while (!handled) usleep(1000);
  setitimer(ITIMER_REAL, &never, NULL);
  sigaction(SIGALRM, &old, NULL);
  check_pages(0, 1);
}

static void programs_own_sigsys(void) {
  struct sigaction action = {.sa_handler = counting_handler}, old, now;
  sigset_t set;
  sigaction(SIGSYS, &action, &old);
  handled = 0;
  pid_t child = fork_patiently(fork);
  sigaction(SIGSYS, NULL, &now);
  CHECK(now.sa_handler == counting_handler);
  raise(SIGSYS);
  CHECK(handled == 1);
  if (child == 0) {
    live_as_child(1);
    _exit(0);
  }
  finish(child);
  // One that waits while it is blocked still waits after a fork, in the parent alone.
  sigemptyset(&set);
  sigaddset(&set, SIGSYS);
  sigprocmask(SIG_BLOCK, &set, NULL);
  raise(SIGSYS);
  child = fork_patiently(fork);
  CHECK(handled == 1);
  sigprocmask(SIG_UNBLOCK, &set, NULL);
  CHECK(handled == (child == 0 ? 1 : 2));
  if (child == 0) _exit(0);
  finish(child);
  sigaction(SIGSYS, &old, NULL);
}

// ---- handlers of pthread_atfork that make calls themselves

static int prepared, in_parent, in_child;
static void on_prepare(void) {
  sigset_t set, old;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &set, &old);
  CHECK(!sigismember(&old, SIGUSR2));
  prepared += getppid() > 0;
  free(malloc(50000));
}
static void on_either_side(int *counter) {
  sigset_t set, old;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  pthread_sigmask(SIG_UNBLOCK, &set, &old);
  CHECK(sigismember(&old, SIGUSR2));
  ++*counter;
}
static void on_parent(void) { on_either_side(&in_parent); }
static void on_child(void) { on_either_side(&in_child); }

// ---- threads

static void *many_forks(void *argument) {
  (void)argument;
  FILE *own = tmpfile();
  CHECK(own != NULL);
  for (int i = 0; i < FORKS_A_THREAD; i++) {
    CHECK(fprintf(own, "%d", i) > 0);
    pid_t child = fork_patiently(fork);
    if (child == 0) {
      live_as_child(61);
      CHECK(fprintf(own, "child") > 0 && fflush(own) == 0);
      if (i % 3 == 0) {
        pid_t grandchild = fork_patiently(fork);
        if (grandchild == 0) {
          check_pages(77, 61);
          _exit(0);
        }
        CHECK(grandchild > 0);
        expect_success(grandchild);
      }
      _exit(0);
    }
    CHECK(child > 0);
    expect_success(child);
    check_pages(0, 61);
  }
  fclose(own);
  return NULL;
}

static volatile int stop;
static void *busy(void *argument) {
  for (size_t i = (uintptr_t)argument; !stop; i += 13) {
    void *block = malloc(i % 3000);
    if (data[i % pages * (PAGE / 8)] != word_of(i % pages, 0)) fail("a thread beside read something else");
    free(block);
  }
  return NULL;
}

static void threads(void) {
  pthread_t forking[MANY_THREADS], beside;
  CHECK(pthread_create(&beside, NULL, busy, NULL) == 0);
  for (int i = 0; i < MANY_THREADS; i++) CHECK(pthread_create(&forking[i], NULL, many_forks, NULL) == 0);
  for (int i = 0; i < MANY_THREADS; i++) pthread_join(forking[i], NULL);
  stop = 1;
  pthread_join(beside, NULL);
  check_pages(0, 1);
}

// ---- stacks that are managed memory

static void *fork_here(void *argument) {
  plainly(fork);
  plainly(by_syscall_clone);
  return argument;
}

static ucontext_t back, coroutine;
static void coroutine_function(void) { fork_here(NULL); }

static void managed_stacks(void) {
  size_t bytes = 1 << 20;
  void *stack = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  CHECK(pthread_attr_setstack(&attributes, stack, bytes) == 0);
  pthread_t thread;
  CHECK(pthread_create(&thread, &attributes, fork_here, NULL) == 0);
  pthread_join(thread, NULL);
  getcontext(&coroutine);
  coroutine.uc_stack.ss_sp = stack;
  coroutine.uc_stack.ss_size = bytes;
  coroutine.uc_link = &back;
  makecontext(&coroutine, coroutine_function, 0);
  CHECK(swapcontext(&back, &coroutine) == 0);
  munmap(stack, bytes);
}

int main(int argc, char **argv) {
  size_t mib = argc > 1 ? strtoul(argv[1], NULL, 0) : 32;
  pages = (mib << 20) / PAGE;
  CHECK((data = malloc(pages * PAGE)) != NULL);
  CHECK((stream = tmpfile()) != NULL);
  CHECK(fprintf(stream, "parent\n") > 0);
  CHECK(fflush(stream) == 0);
  write_pages(0, 1);
  pid_t (*libc_fork)(void) = (pid_t (*)(void))dlsym(RTLD_DEFAULT, "__libc_fork");
  pid_t (*bare_fork)(void) = (pid_t (*)(void))dlsym(RTLD_DEFAULT, "_Fork");

  stage = "fork", plainly(fork);
  stage = "__libc_fork", libc_fork ? plainly(libc_fork) : (void)0;
  stage = "_Fork", bare_fork ? plainly(bare_fork) : (void)0;
  stage = "syscall(SYS_clone)", plainly(by_syscall_clone);
  stage = "syscall(SYS_fork)", plainly(by_syscall_fork);
  stage = "children of children", children_of_children();
  stage = "daemon", daemons();
  stage = "forkpty", terminals();
  stage = "system, popen, posix_spawn, vfork", programs_from_children();
  stage = "clone", clones();
  stage = "refused clones", refusals();
  stage = "fork in a signal handler", forks_in_handlers();
  stage = "all signals blocked", all_signals_blocked();
  stage = "alarms", alarms_while_forking();
  stage = "the program's own SIGSYS", programs_own_sigsys();
  stage = "8 threads", threads();
  stage = "managed stacks", managed_stacks();
  pthread_atfork(on_prepare, on_parent, on_child);
  stage = "atfork handlers", plainly(fork);
  CHECK(prepared == in_parent && prepared > 0 && in_child == 0);
  check_pages(0, 1);
  puts("ok");
  return 0;
}
