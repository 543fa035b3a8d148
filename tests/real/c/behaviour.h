/* What the behaviour programs share: memory that does not fit, with a content that can be checked. */
#pragma once
#include <stddef.h>

struct data {
	size_t blocks;
	unsigned long *block[];
};

/* Blocks of 256 KiB from malloc, each filled from its number. */
struct data *data_make(size_t mebibytes);
/* Blocks that are not as they were filled. */
size_t data_wrong(const struct data *data);
/* Says on stdout whether the data is whole. */
void data_report(const char *when, const struct data *data);
void data_free(struct data *data);
/* Waits for a child and says how it ended. */
void child_report(const char *what, int pid);

/* In behaviour_limits.c: */
int setuid_then_fork(void);
int process_limit(void);
int lock_all(void);
int seccomp_filter(void);
int seccomp_all_threads(void);
int address_limit(void);
int address_limit_refuses(void);
int data_limit(void);
int file_limit(void);
