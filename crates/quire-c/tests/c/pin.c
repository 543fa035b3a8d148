/* Pinned ranges, where system calls are not served; a mapping that changes; calls that do not wait. */
#include "check.h"

#include <fcntl.h>
#include <unistd.h>

static unsigned char source[64 * 4096];

/* The kernel writes to what is pinned, while something else wants all the memory. */
static void pin(struct quire_space *space, struct quire_object *object, struct quire_object *other, int fd)
{
	struct quire_mapping *map =
		quire_map(object, 0, QUIRE_TO_END, QUIRE_MAP_WRITE, QUIRE_FAULT_AROUND_AUTO);
	unsigned char *bytes = quire_base(map);
	static unsigned char into[1 << 16];

	CHECK(map && bytes);
	CHECK(!quire_populate(map, 0, sizeof(source)));
	CHECK(pread(fd, bytes, sizeof(source), 0) == -1 && errno == EFAULT);
	struct quire_pinned *pinned = quire_pin(map, 0, sizeof(source), QUIRE_PIN_WRITE);
	CHECK(pinned);
	FAILS(quire_pin(map, 0, QUIRE_TO_END, 0), ENOMEM);
	FAILS(quire_pin(map, 0, 1, 2), EINVAL);
	FAILS(quire_set_len(object, PAGE), EBUSY);
	/* Nothing that would take it away under the pin. */
	FAILS(quire_unmap(map), EBUSY);
	FAILS(quire_remap(map, PAGE, QUIRE_MAY_MOVE), EBUSY);
	FAILS(quire_protect(map, 0), EBUSY);
	CHECK(strstr(quire_last_error(), "quire_unpin"));
	CHECK(quire_base(map) == bytes);
	FAILS(quire_pin(NULL, 0, 1, 0), EINVAL);
	FAILS(quire_unpin(NULL), EINVAL);
	for (uint64_t at = 0; at < 2 * MIB; at += sizeof(into))
		CHECK(quire_read_at(other, at, into, sizeof(into)) == sizeof(into));
	CHECK(!quire_sync(object));
	CHECK(pread(fd, bytes, sizeof(source), 0) == sizeof(source));
	CHECK(!memcmp(bytes, source, sizeof(source)));
	CHECK(!quire_unpin(pinned));
	CHECK(!quire_sync(object));
	CHECK(quire_counter(space, "held_bytes_max") <= (int64_t)MIB);
	CHECK(!quire_unmap(map));
}

static void change(struct quire_object *object, struct quire_object *read_only)
{
	struct quire_mapping *map = quire_map(object, 0, 8 * PAGE, 0, QUIRE_FAULT_AROUND_AUTO);
	struct quire_mapping *behind = quire_map(object, 0, 8 * PAGE, 0, QUIRE_FAULT_AROUND_AUTO);
	int pipes[2];

	CHECK(map && behind && !pipe(pipes));
	unsigned char *bytes = quire_base(map);
	FAILS(quire_remap(map, 16 * PAGE, 0), ENOMEM);
	FAILS(quire_remap(map, 16 * PAGE, 2), EINVAL);
	CHECK(quire_base(map) == bytes && quire_mapping_len(map) == (int64_t)(8 * PAGE));
	CHECK(!quire_remap(map, 16 * PAGE, QUIRE_MAY_MOVE));
	CHECK(quire_base(map) != bytes && quire_mapping_len(map) == (int64_t)(16 * PAGE));
	bytes = quire_base(map);
	CHECK(!memcmp(bytes, source, 16 * PAGE));
	CHECK(!quire_protect(map, 1) && !quire_protect(map, 1));
	bytes[0] ^= 1;
	CHECK(!quire_protect(map, 0) && !quire_sync(object));
	CHECK(write(pipes[1], source, 1) == 1);
	CHECK(read(pipes[0], bytes, 1) == -1 && errno == EFAULT);
	CHECK(!quire_unmap(map) && !quire_unmap(behind));
	map = quire_map(read_only, 0, PAGE, 0, QUIRE_FAULT_AROUND_AUTO);
	FAILS(quire_protect(map, 1), EACCES);
	CHECK(*(unsigned char *)quire_base(map) == byte_at(0));
	FAILS(quire_pin(map, 0, 1, QUIRE_PIN_WRITE), EINVAL);
	CHECK(!quire_unmap(map));
}

static void cancel(struct quire_object *object)
{
	struct quire_cancel_token *token = quire_cancel_new();
	unsigned char byte;

	CHECK(token);
	FAILS(quire_set_patience(token, -2), EINVAL);
	CHECK(!quire_set_patience(token, 3600000));
	CHECK(!quire_sync(object));
	CHECK(quire_read_at(object, 0, &byte, 1) == 1);
	CHECK(!quire_cancel(token) && !quire_cancel_free(token));
	FAILS(quire_sync(object), EINTR);
	CHECK(strstr(quire_last_error(), "cannot wait longer to flush"));
	CHECK(quire_read_at(object, 0, &byte, 1) == 1);
	CHECK(!quire_set_patience(NULL, 0));
	FAILS(quire_sync(object), EINTR);
	CHECK(!quire_set_patience(NULL, -1));
	CHECK(!quire_sync(object));
}

int main(int argc, char **argv)
{
	char path[4096], source_path[4096];
	struct quire_space_options options = { .memory = MIB, .is_inline = 1 };

	CHECK(argc == 2);
	snprintf(path, sizeof(path), "%s/target", argv[1]);
	snprintf(source_path, sizeof(source_path), "%s/source", argv[1]);
	make_file(source_path, 2 * MIB);
	make_file(path, 2 * MIB);
	quire_space_close(open_space(MIB)); /* ends here without the right */
	struct quire_space *space = quire_space_open(&options);
	int fd = open(source_path, O_RDONLY);

	CHECK(space && fd >= 0 && pread(fd, source, sizeof(source), 0) == sizeof(source));
	struct quire_object *object = quire_open(space, path, QUIRE_WRITE, 0);
	struct quire_object *other = quire_open(space, source_path, 0, 0);
	CHECK(object && other);
	pin(space, object, other, fd);
	change(object, other);
	cancel(object);
	CHECK(!quire_close(object) && !quire_close(other) && !quire_space_close(space));
	puts("ok");
	return 0;
}
