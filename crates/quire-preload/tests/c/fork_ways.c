/* Functions of libc that make processes, with every pointer on the heap: system, popen, posix_spawn with file
 * actions and attributes, daemon; and fork while handlers of pthread_atfork allocate, spawn and fork, and
 * other threads allocate, map, fault and page out. Memory stays what it was in all. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif

enum { PAGE = 4096, PAGES = 1500, FORKS = 12, FORKING = 3 };

static unsigned char* data;
extern char** environ;

static int all_right(unsigned mark) {
  for (int i = 0; i < PAGES; i++)
    if (!is_filled(data + i * PAGE, PAGE, mark + i)) return 0;
  return 1;
}

static void page_out(void) { (void)madvise(data, PAGES * PAGE, MADV_PAGEOUT); }

static pid_t fork_patiently(void) {
  for (int tries = 0;; tries++) {
    pid_t child = fork();
    if (child >= 0 || (errno != ENOMEM && errno != EAGAIN) || tries == 500) return child;
    usleep(10000);
  }
}

static void expect_status(pid_t child, int expected_status) {
  int status = -1;
  CHECK(child > 0);
  while (waitpid(child, &status, 0) < 0) CHECK(errno == EINTR);
  CHECK(status == expected_status);
}

static void by_system(void) {
  char* command = strdup("test $((6 * 7)) -eq 42 && exit 9");
  page_out();
  CHECK(system(command) == 9 << 8);
  free(command);
  CHECK(system(NULL) != 0);
  CHECK(all_right(0));
}

static void by_popen(void) {
  FILE* streams[3];
  for (int i = 0; i < 3; i++) {
    char command[40];
    snprintf(command, sizeof command, i == 2 ? "cat >/dev/null" : "echo %d", i);
    page_out();
    CHECK((streams[i] = popen(command, i == 2 ? "w" : "r")) != NULL);
  }
  for (int i = 0; i < 2; i++) {
    char* line = calloc(1, 20);
    CHECK(fgets(line, 20, streams[i]) && atoi(line) == i);
    free(line);
  }
  CHECK(fprintf(streams[2], "%s", "word\n") > 0);
  for (int i = 2; i >= 0; i--) CHECK(pclose(streams[i]) == 0);
  CHECK(all_right(0));
}

static void by_spawn(void) {
  char* path = strdup(P_tmpdir "/quire-fork-ways-XXXXXX");
  int file = mkstemp(path);
  CHECK(file >= 0);
  posix_spawn_file_actions_t* actions = malloc(sizeof *actions);
  posix_spawnattr_t* attributes = malloc(sizeof *attributes);
  sigset_t* signals = malloc(sizeof *signals);
  pid_t* pid = malloc(sizeof *pid);
  /* The shell is the leader of a group, has USR1 blocked and USR2 by default, writes into the file, and
   * has no descriptor 9. */
  CHECK(posix_spawn_file_actions_init(actions) == 0);
  CHECK(posix_spawn_file_actions_addopen(actions, 1, path, O_WRONLY | O_TRUNC, 0600) == 0);
  CHECK(posix_spawn_file_actions_adddup2(actions, 1, 8) == 0);
  CHECK(posix_spawn_file_actions_addclose(actions, 9) == 0);
  CHECK(posix_spawnattr_init(attributes) == 0);
  short flags = POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_RESETIDS;
  CHECK(posix_spawnattr_setflags(attributes, flags) == 0);
  CHECK(posix_spawnattr_setpgroup(attributes, 0) == 0);
  sigemptyset(signals);
  sigaddset(signals, SIGUSR1);
  CHECK(posix_spawnattr_setsigmask(attributes, signals) == 0);
  sigemptyset(signals);
  sigaddset(signals, SIGUSR2);
  CHECK(posix_spawnattr_setsigdefault(attributes, signals) == 0);
  signal(SIGUSR2, SIG_IGN);
  char** arguments = calloc(4, sizeof *arguments);
  arguments[0] = strdup("sh");
  arguments[1] = strdup("-c");
  arguments[2] = strdup("kill -USR1 $$; echo first; echo second >&8; test -e /proc/self/fd/9 || echo third; kill -USR2 $$");
  CHECK(dup2(file, 9) == 9);
  page_out();
  CHECK(posix_spawn(pid, "/bin/sh", actions, attributes, arguments, environ) == 0);
  expect_status(*pid, SIGUSR2);
  signal(SIGUSR2, SIG_DFL);
  char* said = calloc(1, 64);
  CHECK(pread(file, said, 63, 0) > 0 && !strcmp(said, "first\nsecond\nthird\n"));
  CHECK(posix_spawn(pid, "/no/such/program", NULL, NULL, arguments, environ) == ENOENT);
  for (int i = 0; i < 3; i++) free(arguments[i]);
  free(arguments);
  posix_spawn_file_actions_destroy(actions);
  posix_spawnattr_destroy(attributes);
  free(actions), free(attributes), free(signals), free(pid), free(said);
  close(9), close(file), unlink(path), free(path);
  CHECK(all_right(0));
}

static void by_daemon(void) {
  int ends[2];
  char answer = 0;
  CHECK(pipe(ends) == 0);
  pid_t child = fork_patiently();
  if (child == 0) {
    close(ends[0]);
    page_out();
    CHECK(daemon(0, 1) == 0);
    answer = all_right(0) ? 'r' : 'w';
    memset(data, 7, PAGES * PAGE);
    CHECK(write(ends[1], &answer, 1) == 1);
    _exit(0);
  }
  close(ends[1]);
  expect_status(child, 0);
  CHECK(read(ends[0], &answer, 1) == 1 && answer == 'r');
  close(ends[0]);
  CHECK(all_right(0));
}

/* The kernel writes thread ids to memory that is paged out. */
static void with_thread_ids(void) {
  pid_t* ids = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  pid_t *parents = ids, *childs = ids + PAGE / sizeof *ids;
  *parents = *childs = 1;
  (void)madvise(ids, 2 * PAGE, MADV_PAGEOUT);
  long flags = CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD;
  pid_t child = syscall(SYS_clone, flags, 0, parents, childs, 0);
  if (child == 0) _exit(!(*childs == getpid() && all_right(0)));
  CHECK(*parents == child && *childs == 1);
  expect_status(child, 0);
  CHECK(*childs == 1);
  munmap(ids, 2 * PAGE);
}

/* Handlers that a program has for its forks. */
static __thread int depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void* kept;

static void before(void) {
  if (depth++) return;
  pthread_mutex_lock(&lock);
  free(kept);
  kept = memset(malloc(70000), 3, 70000);
  CHECK(system("exit 3") == 3 << 8);
}

static void after(int is_child) {
  if (depth > 1) {
    depth--;
    return;
  }
  CHECK(((char*)kept)[69999] == 3);
  free(memset(malloc(300000), 1, 300000));
  if (is_child) {
    /* A fork in a handler of a fork. */
    pid_t child = fork_patiently();
    if (child == 0) _exit(!all_right(0));
    expect_status(child, 0);
  }
  pthread_mutex_unlock(&lock);
  depth--;
}
static void after_in_parent(void) { after(0); }
static void after_in_child(void) { after(1); }

static volatile int stop;

static void* busy(void* unused) {
  uint64_t state = 88172645463325252u;
  while (!stop) {
    size_t bytes = next_random(&state) % 600000;
    unsigned char* own = malloc(bytes + 1);
    fill(own, bytes / 16, 11);
    unsigned char* mapped = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    fill(mapped, PAGE, 12);
    page_out();
    CHECK(is_filled(own, bytes / 16, 11) && is_filled(mapped, PAGE, 12) && mapped[63 * PAGE] == 0);
    int at = next_random(&state) % PAGES;
    CHECK(is_filled(data + at * PAGE, PAGE, at));
    free(own);
    munmap(mapped, 64 * PAGE);
  }
  return unused;
}

static void* forking(void* unused) {
  for (int i = 0; i < FORKS; i++) {
    pid_t child = fork_patiently();
    if (child == 0) {
      int right = all_right(0);
      memset(data, i, PAGES * PAGE);
      free(malloc(100000));
      _exit(!(right && data[PAGES * PAGE - 1] == i));
    }
    expect_status(child, 0);
  }
  return unused;
}

static void beside_others(void) {
  pthread_t threads[FORKING], beside[2];
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&beside[i], NULL, busy, NULL) == 0);
  for (int i = 0; i < FORKING; i++) CHECK(pthread_create(&threads[i], NULL, forking, NULL) == 0);
  for (int i = 0; i < FORKING; i++) pthread_join(threads[i], NULL);
  stop = 1;
  for (int i = 0; i < 2; i++) pthread_join(beside[i], NULL);
  CHECK(all_right(0));
}

int main(void) {
  CHECK((data = aligned_alloc(PAGE, PAGES * PAGE)) != NULL);
  for (int i = 0; i < PAGES; i++) fill(data + i * PAGE, PAGE, i);
  by_system();
  by_popen();
  by_spawn();
  by_daemon();
  with_thread_ids();
  beside_others();
  CHECK(pthread_atfork(before, after_in_parent, after_in_child) == 0);
  for (int i = 0; i < 3; i++) {
    pid_t child = fork_patiently();
    if (child == 0) _exit(!all_right(0));
    expect_status(child, 0);
  }
  puts("ok");
  return 0;
}
