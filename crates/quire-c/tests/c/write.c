/* What is written to a mapping is in the file once it is flushed, when the barrier allows it. */
#include "check.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <unistd.h>

static unsigned char in_file(const char *path, off_t offset)
{
	unsigned char byte;
	int file = open(path, O_RDONLY);

	CHECK(file >= 0);
	CHECK(lseek(file, offset, SEEK_SET) == offset);
	CHECK(read(file, &byte, 1) == 1);
	CHECK(!close(file));
	return byte;
}

struct gate {
	atomic_int is_open, asked;
};

static int may_write(uint64_t offset, size_t len, void *user)
{
	struct gate *gate = user;

	CHECK(offset % PAGE == 0 && len > 0);
	atomic_fetch_add(&gate->asked, 1);
	return atomic_load(&gate->is_open);
}

static void flushed(struct quire_object *object, struct quire_mapping *map, const char *path)
{
	unsigned char *base = quire_base(map);
	const size_t pages = 16 * MIB / PAGE;

	/* Eight times the memory. */
	for (size_t page = 0; page < pages; page++)
		base[page * PAGE + page % PAGE] = (unsigned char)~byte_at(page * PAGE + page % PAGE);
	CHECK(!quire_flush_mapping(map, 0, QUIRE_TO_END));
	for (size_t page = 0; page < pages; page += 7) {
		off_t at = (off_t)(page * PAGE + page % PAGE);

		CHECK(in_file(path, at) == (unsigned char)~byte_at((uint64_t)at));
	}
	base[5 * PAGE] = 1;
	base[9 * PAGE] = 2;
	CHECK(!quire_flush(object, 5 * PAGE, 1));
	CHECK(in_file(path, 5 * PAGE) == 1);
	CHECK(!quire_sync(object));
	CHECK(in_file(path, 9 * PAGE) == 2);
}

static void held_back(struct quire_object *object, struct quire_mapping *map, const char *path)
{
	struct gate gate = { 0 };
	unsigned char *base = quire_base(map);

	CHECK(!quire_set_barrier(object, may_write, &gate));
	base[20 * PAGE] = 77;
	FAILS(quire_flush_mapping(map, 20 * PAGE, 1), EAGAIN);
	CHECK(strstr(quire_last_error(), "81920"));
	CHECK(in_file(path, 20 * PAGE) != 77);
	CHECK(atomic_load(&gate.asked) > 0);
	atomic_store(&gate.is_open, 1);
	CHECK(!quire_flush_mapping(map, 20 * PAGE, 1));
	CHECK(in_file(path, 20 * PAGE) == 77);
	atomic_store(&gate.is_open, 0);
	CHECK(!quire_set_barrier(object, NULL, NULL));
	base[20 * PAGE] = 78;
	CHECK(!quire_sync(object));
	CHECK(in_file(path, 20 * PAGE) == 78);
}

static void grown(struct quire_space *space, const char *path)
{
	struct quire_object *object = quire_open(space, path, QUIRE_WRITE | QUIRE_CREATE, 2 * MIB);

	CHECK(object && quire_len(object) == 0);
	struct quire_mapping *map = quire_map(object, 0, MIB,
		QUIRE_MAP_WRITE | QUIRE_MAP_BEYOND_END, QUIRE_FAULT_AROUND_AUTO);
	CHECK(map && quire_mapping_len(map) == (int64_t)MIB);
	CHECK(!quire_set_len(object, 10000));
	CHECK(quire_len(object) == 10000);
	((unsigned char *)quire_base(map))[9999] = 9;
	CHECK(!quire_unmap(map));
	FAILS(quire_set_len(object, 2 * MIB + PAGE), EFBIG);
	/* What is dirty is written by the end of it. */
	CHECK(!quire_close(object));
	CHECK(in_file(path, 9998) == 0);
	CHECK(in_file(path, 9999) == 9);
}

int main(int argc, char **argv)
{
	char path[4096];

	CHECK(argc == 2);
	snprintf(path, sizeof(path), "%s/write", argv[1]);
	make_file(path, 16 * MIB);
	struct quire_space *space = open_space(2 * MIB);
	struct quire_object *object = quire_open(space, path, QUIRE_WRITE, 0);
	struct quire_mapping *map =
		quire_map(object, 0, QUIRE_TO_END, QUIRE_MAP_WRITE, QUIRE_FAULT_AROUND_AUTO);

	CHECK(map);
	flushed(object, map, path);
	held_back(object, map, path);
	CHECK(!quire_unmap(map) && !quire_close(object));
	snprintf(path, sizeof(path), "%s/grown", argv[1]);
	grown(space, path);
	CHECK(quire_counter(space, "held_bytes_max") <= (int64_t)(2 * MIB));
	CHECK(!quire_space_close(space));
	puts("ok");
	return 0;
}
