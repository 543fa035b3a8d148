/* Parent or child of a fork is killed at each step of it, and a process that wants more than the budget at each
 * step of the account, the pool, the swap file and the market, in a tree with other members that go on. The
 * processes that are left find every byte, and none waits for ever. fork returns the id of a child that
 * ends in sight, or an error.
 * When all is quiet the tree's accounts are the sums of its members', and after the last one they are 0
 * (the test that started this looks at that).
 *
 * The steps come from a build of the preload library that has them; without one this forks once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

enum { PAGE = 4096, PAGES = 1024, NEIGHBOURS = 2, SELF = 0, OTHER = 1, OTHER_FIRST = 2, DIED = 125, TWO_THREADS = 8 };

static const char* (*name_of)(unsigned step);
static void (*arm)(unsigned step, unsigned victims);
static void (*account_gaps)(int64_t* gaps);

static unsigned char* data;
/* Each process of a case holds an end of this pipe, and says in it what it saw. */
static int words[2];

static void write_all(unsigned mark) {
  for (int i = 0; i < PAGES; i++) {
    fill(data + i * PAGE, PAGE / 8, mark + i);
    memset(data + i * PAGE + PAGE / 8, (int)(mark + i), PAGE - PAGE / 8);
  }
}

static int all_right(unsigned mark) {
  for (int i = 0; i < PAGES; i++) {
    if (!is_filled(data + i * PAGE, PAGE / 8, mark + i)) return 0;
    for (int k = PAGE / 8; k < PAGE; k += 97)
      if (data[i * PAGE + k] != (unsigned char)(mark + i)) return 0;
  }
  return 1;
}

/* Other members of the tree: they change their copies when they are told to, and check them. */
static pid_t neighbours[NEIGHBOURS];
static int orders[NEIGHBOURS], answers[NEIGHBOURS];

static void be_neighbour(int order, int answer, unsigned mark) {
  char byte;
  for (unsigned round = 0; read(order, &byte, 1) == 1; round++) {
    byte = all_right(round == 0 ? 0 : mark + round) ? 'r' : 'w';
    write_all(mark + round + 1);
    CHECK(write(answer, &byte, 1) == 1);
  }
  _exit(0);
}

static void hire_neighbours(void) {
  for (int i = 0; i < NEIGHBOURS; i++) {
    int order[2], answer[2];
    CHECK(pipe2(order, 0) == 0 && pipe2(answer, 0) == 0);
    neighbours[i] = fork();
    CHECK(neighbours[i] >= 0);
    if (neighbours[i] == 0) {
      for (int other = 0; other < i; other++) close(orders[other]);
      close(order[1]);
      be_neighbour(order[0], answer[1], 100000 * (i + 1));
    }
    close(order[0]);
    close(answer[1]);
    orders[i] = order[1];
    answers[i] = answer[0];
  }
}

static void have_neighbours_work(void) {
  for (int i = 0; i < NEIGHBOURS; i++) CHECK(write(orders[i], "x", 1) == 1);
}

static void expect_neighbours_right(void) {
  for (int i = 0; i < NEIGHBOURS; i++) {
    char byte = 0;
    CHECK(read(answers[i], &byte, 1) == 1 && byte == 'r');
  }
}

static void say(char what) { CHECK(write(words[1], &what, 1) == 1); }

/* A case's child: right or wrong, once as it came and once changed. */
static void live(void) {
  int right = all_right(7000);
  write_all(9000);
  say(right && all_right(9000) ? 'c' : 'W');
  _exit(0);
}

static volatile int stop;
static void* write_beside(void* unused) {
  unsigned char* own = malloc(64 * PAGE);
  for (unsigned mark = 0; !stop; mark++) {
    fill(own, 64 * PAGE, mark);
    free(malloc(mark % 5000));
    if (!is_filled(own, 64 * PAGE, mark)) say('W');
  }
  return unused;
}

static int is_of_fork(unsigned step) {
  return !strncmp(name_of(step), "parent:", 7) || !strncmp(name_of(step), "child:", 6);
}

/* Whether the budget is less than one process wants. */
static int is_memory_short(void) {
  const char* budget = getenv("BUDGET");
  return budget && !strcmp(budget, "24M");
}

/* Half of the pages are noise, which only the swap file can hold. */
static void use_much(unsigned pages, unsigned rounds) {
  unsigned char* much = mmap(NULL, (size_t)pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(much != MAP_FAILED);
  for (unsigned mark = 0; mark < rounds; mark++) {
    for (unsigned i = 0; i < pages; i++) fill(much + (size_t)i * PAGE, i % 2 ? PAGE : PAGE / 8, mark + i);
    for (unsigned i = 0; i < pages; i++)
      if (!is_filled(much + (size_t)i * PAGE, i % 2 ? PAGE : PAGE / 8, mark + i)) say('W');
  }
}

/* A case's process where no fork is, beside a child that wants as much. */
static void want_much(unsigned step, unsigned victims) {
  pthread_t thread;
  pid_t self = getpid(), rival = fork();
  CHECK(rival >= 0);
  if (rival == 0) {
    CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) == 0);
    if (getppid() != self) _exit(0);
    use_much(6 * PAGES, 1000);
    _exit(0);
  }
  if (victims & TWO_THREADS) CHECK(pthread_create(&thread, NULL, write_beside, NULL) == 0);
  arm(step, SELF);
  use_much(6 * PAGES, is_memory_short() ? 40 : 1);
  CHECK(kill(rival, SIGKILL) == 0 && waitpid(rival, NULL, 0) == rival);
  say('p');
  _exit(0);
}

/* A case's parent. */
static void fork_with(unsigned step, unsigned victims) {
  pthread_t thread;
  write_all(7000);
  if (victims & TWO_THREADS) CHECK(pthread_create(&thread, NULL, write_beside, NULL) == 0);
  arm(step, victims & ~TWO_THREADS);
  pid_t child = fork();
  if (child == 0) live();
  arm(-1, SELF);
  if (child > 0) {
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
  } else {
    CHECK(errno == EAGAIN || errno == ENOMEM);
    say('e');
  }
  /* The one that is left can fork as ever. */
  child = fork();
  if (child == 0) live();
  CHECK(child > 0 && waitpid(child, NULL, 0) == child);
  stop = 1;
  if (victims & TWO_THREADS) pthread_join(thread, NULL);
  say(all_right(7000) ? 'p' : 'W');
  _exit(0);
}

static int is_quiet(void) {
  int64_t gaps[5];
  account_gaps(gaps);
  return !gaps[0] && !gaps[1] && !gaps[2] && !gaps[3] && !gaps[4];
}

static void expect_accounts_right(const char* name, unsigned victims) {
  for (int tries = 0; tries < 400; tries++) {
    if (is_quiet()) return;
    usleep(25000);
  }
  int64_t gaps[5];
  account_gaps(gaps);
  fprintf(stderr,
          "%s, %u: of no member: %ld pages held, %ld wanted; segments: %ld wrong, %ld left to nobody, %ld of no member\n",
          name, victims, gaps[0], gaps[1], gaps[2], gaps[3], gaps[4]);
  _exit(1);
}

static void run_case(unsigned step, unsigned victims) {
  char heard[64];
  size_t count = 0;
  ssize_t got;
  int kills = 0, is_parent_killed = 0, status;
  CHECK(pipe(words) == 0);
  have_neighbours_work();
  pid_t parent = fork();
  CHECK(parent >= 0);
  if (parent == 0) {
    for (int i = 0; i < NEIGHBOURS; i++) close(orders[i]);
    if (is_of_fork(step)) fork_with(step, victims);
    want_much(step, victims);
  }
  close(words[1]);
  while ((got = read(words[0], heard + count, sizeof heard - 1 - count)) > 0) count += got;
  heard[count] = 0;
  close(words[0]);
  /* Orphans become children of this process. A child whose parent died before the run knew the child ends by
   * itself, and says so. */
  for (int left = 1; left;) {
    pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid == 0) {
      usleep(1000);
      left = kill(parent, 0) == 0;
      continue;
    }
    CHECK(pid > 0);
    for (int i = 0; i < NEIGHBOURS; i++) CHECK(pid != neighbours[i]);
    kills += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    CHECK(status == 0 || WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) == DIED));
    CHECK(!WIFSIGNALED(status) || WTERMSIG(status) == SIGKILL);
    if (pid == parent) {
      left = 0;
      is_parent_killed = WIFSIGNALED(status);
    }
  }
  while (waitpid(-1, &status, WNOHANG) > 0) {
  }
  fprintf(stderr, "%-22s %s%s: %s\n", name_of(step), victims % 8 == SELF ? "itself" : victims % 8 == OTHER ? "the other" : "the other first",
          victims & TWO_THREADS ? ", 2 threads" : "", heard);
  CHECK(!strchr(heard, 'W') && !strchr(heard, 'w'));
  /* Each step is come to. */
  CHECK(is_of_fork(step) || !is_memory_short() || is_parent_killed);
  /* What lived: the parent with its second child, or, of a parent that died, nothing or a child. */
  CHECK(kills || strchr(heard, 'p'));
  expect_neighbours_right();
  expect_accounts_right(name_of(step), victims);
}

int main(void) {
  name_of = dlsym(RTLD_DEFAULT, "quire_failpoint_name");
  arm = dlsym(RTLD_DEFAULT, "quire_failpoint_arm");
  account_gaps = dlsym(RTLD_DEFAULT, "quire_account_gaps");
  data = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(data != MAP_FAILED);
  write_all(0);
  CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
  if (!name_of || !arm || !account_gaps) {
    int status;
    pid_t child = fork();
    if (child == 0) _exit(!all_right(0));
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    puts("ok");
    return 0;
  }
  hire_neighbours();
  for (unsigned step = 0; name_of(step); step++)
    for (unsigned victims = SELF; victims <= (is_of_fork(step) ? OTHER_FIRST : SELF); victims++)
      for (unsigned threads = 0; threads <= TWO_THREADS; threads += TWO_THREADS) run_case(step, victims | threads);
  CHECK(all_right(0));
  for (int i = 0; i < NEIGHBOURS; i++) {
    int status;
    close(orders[i]);
    CHECK(waitpid(neighbours[i], &status, 0) == neighbours[i] && status == 0);
  }
  expect_accounts_right("the end", 0);
  puts("ok");
  return 0;
}
