/* More children at a time than a run has places for: fork fails then, and every child that was made finds
 * what its parent had. Those that were refused leave no trace. */
#define _GNU_SOURCE
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

enum { CHILDREN = 260, FEWEST = 200, BYTES = 300000 };

int main(void) {
  int ends[2], made = 0, reaped = 0, status;
  unsigned char* data = malloc(BYTES);
  alarm(200);
  CHECK(pipe(ends) == 0);
  fill(data, BYTES, 3);
  for (int i = 0; i < CHILDREN; i++) {
    pid_t child = fork();
    if (child == 0) {
      char end;
      close(ends[1]);
      CHECK(read(ends[0], &end, 1) == 0);
      CHECK(is_filled(data, BYTES, 3));
      _exit(0);
    }
    CHECK(child > 0 || errno == EAGAIN);
    made += child > 0;
  }
  CHECK(made >= FEWEST);
  close(ends[1]);
  while (wait(&status) > 0) {
    CHECK(status == 0);
    reaped++;
  }
  CHECK(reaped == made);
  /* There is room again. */
  pid_t child = fork();
  if (child == 0) _exit(!is_filled(data, BYTES, 3));
  CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
  puts("ok");
  return 0;
}
