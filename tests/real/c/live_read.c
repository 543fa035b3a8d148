/*
 * The kernel reads a file into memory that is managed, past the page cache (O_DIRECT), while
 * another thread walks over more memory than fits, so that reclaim looks at the buffer all the time.
 * A page that was evicted while the device wrote to it would show old bytes.
 *
 *     live_read pread|uring|fixed FILE ROUNDS PRESSURE_MIB
 *
 * uring: io_uring with buffers named by address; fixed: buffers registered, pinned for long.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PIECE = 128 << 10, PIECES = 96, ENTRIES = 32 };

static atomic_int stop;
static size_t pressure_bytes;
static uint64_t pressure_wrong;
static int direct_flag = O_DIRECT;

struct ring {
	int fd;
	atomic_uint *sq_tail, *cq_head, *cq_tail;
	unsigned *sq_array, sq_mask, cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
};

static void fail(const char *what)
{
	printf("%s: %s\n", what, strerror(errno));
	fflush(stdout);
	_exit(2);
}

static uint64_t file_word(int generation, size_t word)
{
	return (word + 1) * 0x9e3779b97f4a7c15u ^ (uint64_t)generation << 48;
}

static void *press(void *unused)
{
	uint64_t *memory = mmap(NULL, pressure_bytes, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	size_t pages = pressure_bytes / 4096;

	(void)unused;
	if (memory == MAP_FAILED)
		fail("mmap");
	for (uint64_t round = 0; !atomic_load(&stop); round++)
		for (size_t page = 0; page < pages && !atomic_load(&stop); page++) {
			uint64_t *at = memory + page * 512;
			if (round && (at[3] != round - 1 || at[500] != page))
				pressure_wrong++;
			at[3] = round;
			at[500] = page;
		}
	return NULL;
}

static void write_file(const char *path, int generation)
{
	static uint64_t piece[PIECE / 8];
	int fd = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0600);

	if (fd < 0)
		fail("open");
	for (size_t i = 0; i < PIECES; i++) {
		for (size_t word = 0; word < PIECE / 8; word++)
			piece[word] = file_word(generation, i * (PIECE / 8) + word);
		if (write(fd, piece, PIECE) != PIECE)
			fail("write");
	}
	if (fsync(fd))
		fail("fsync");
	close(fd);
}

static void ring_open(struct ring *ring)
{
	struct io_uring_params params = { 0 };

	ring->fd = syscall(SYS_io_uring_setup, ENTRIES, &params);
	if (ring->fd < 0)
		fail("io_uring_setup");
	size_t sq_bytes = params.sq_off.array + params.sq_entries * 4;
	size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
	int prot = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
	char *sq = mmap(NULL, sq_bytes, prot, flags, ring->fd, IORING_OFF_SQ_RING);
	char *cq = mmap(NULL, cq_bytes, prot, flags, ring->fd, IORING_OFF_CQ_RING);
	ring->sqes = mmap(NULL, params.sq_entries * sizeof(struct io_uring_sqe), prot, flags,
			  ring->fd, IORING_OFF_SQES);
	if (sq == MAP_FAILED || cq == MAP_FAILED || (void *)ring->sqes == MAP_FAILED)
		fail("mmap of the ring");
	ring->sq_tail = (atomic_uint *)(sq + params.sq_off.tail);
	ring->sq_array = (unsigned *)(sq + params.sq_off.array);
	ring->sq_mask = *(unsigned *)(sq + params.sq_off.ring_mask);
	ring->cq_head = (atomic_uint *)(cq + params.cq_off.head);
	ring->cq_tail = (atomic_uint *)(cq + params.cq_off.tail);
	ring->cq_mask = *(unsigned *)(cq + params.cq_off.ring_mask);
	ring->cqes = (struct io_uring_cqe *)(cq + params.cq_off.cqes);
}

/* Reads all pieces, ENTRIES of them in flight at a time. */
static void ring_read(struct ring *ring, int fd, char *buffer, int fixed)
{
	for (size_t next = 0; next < PIECES; next += ENTRIES) {
		unsigned tail = atomic_load(ring->sq_tail);
		for (size_t i = 0; i < ENTRIES; i++, tail++) {
			unsigned slot = tail & ring->sq_mask;
			ring->sqes[slot] = (struct io_uring_sqe){
				.opcode = fixed ? IORING_OP_READ_FIXED : IORING_OP_READ,
				.fd = fd,
				.off = (next + i) * PIECE,
				.addr = (uintptr_t)(buffer + (next + i) * PIECE),
				.len = PIECE,
				.user_data = next + i,
			};
			ring->sq_array[slot] = slot;
		}
		atomic_store(ring->sq_tail, tail);
		for (unsigned submit = ENTRIES, done = 0; done < ENTRIES;) {
			int got = syscall(SYS_io_uring_enter, ring->fd, submit, 1,
					  IORING_ENTER_GETEVENTS, NULL, 0);
			if (got < 0 && errno != EINTR)
				fail("io_uring_enter");
			submit -= got > 0 ? got : 0;
			unsigned head = atomic_load(ring->cq_head);
			for (; head != atomic_load(ring->cq_tail); head++, done++) {
				struct io_uring_cqe *cqe = &ring->cqes[head & ring->cq_mask];
				if (cqe->res != PIECE) {
					errno = cqe->res < 0 ? -cqe->res : EIO;
					fail("a read");
				}
			}
			atomic_store(ring->cq_head, head);
		}
	}
}

static void direct_read(int fd, char *buffer)
{
	for (size_t i = 0; i < PIECES; i++)
		if (pread(fd, buffer + i * PIECE, PIECE, i * PIECE) != PIECE)
			fail("pread");
}

int main(int argc, char **argv)
{
	struct ring ring = { 0 };
	pthread_t thread;
	size_t bytes = (size_t)PIECE * PIECES, wrong = 0;

	if (argc < 5)
		return 2;
	int fixed = !strcmp(argv[1], "fixed"), uring = fixed || !strcmp(argv[1], "uring");
	int rounds = atoi(argv[3]);
	pressure_bytes = (size_t)atoi(argv[4]) << 20;
	char *buffer = aligned_alloc(4096, bytes);
	if (!buffer)
		return 2;
	memset(buffer, 0xee, bytes);
	if (uring)
		ring_open(&ring);
	if (fixed) {
		struct iovec whole = { buffer, bytes };
		if (syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &whole, 1))
			fail("io_uring_register");
	}
	pthread_create(&thread, NULL, press, NULL);
	for (int round = 0; round < rounds; round++) {
		write_file(argv[2], round);
		int fd = open(argv[2], O_RDONLY | direct_flag);
		if (fd < 0 && errno == EINVAL) {
			direct_flag = 0;
			fd = open(argv[2], O_RDONLY);
		}
		if (fd < 0)
			fail("open");
		for (int again = 0; again < 4; again++) {
			if (uring)
				ring_read(&ring, fd, buffer, fixed);
			else
				direct_read(fd, buffer);
			uint64_t *words = (uint64_t *)buffer;
			for (size_t word = 0; word < bytes / 8; word++)
				if (words[word] != file_word(round, word) && wrong++ < 5)
					fprintf(stderr, "round %d.%d word %zx: %016lx\n", round,
						again, word, words[word]);
			/* A page that the device's bytes do not reach will show. */
			memset(buffer, 0xee, bytes);
		}
		close(fd);
	}
	atomic_store(&stop, 1);
	pthread_join(thread, NULL);
	printf("%d rounds, %zu words wrong, %lu pages wrong\n", rounds, wrong, pressure_wrong);
	return wrong || pressure_wrong;
}
