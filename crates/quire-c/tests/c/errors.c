/* Every wrong call is an error that says what to do, and none is a crash. */
#include "check.h"

#include <sys/stat.h>
#include <unistd.h>

static void nothing_is_einval(void)
{
	char buffer[8];

	FAILS(quire_space_close(NULL), EINVAL);
	FAILS(quire_serves_system_calls(NULL), EINVAL);
	FAILS(quire_counter(NULL, "pgfault"), EINVAL);
	FAILS(quire_open(NULL, "x", 0, 0), EINVAL);
	FAILS(quire_open_url(NULL, "s3://bucket/key", 0, NULL, 0), EINVAL);
	FAILS(quire_close(NULL), EINVAL);
	FAILS(quire_len(NULL), EINVAL);
	FAILS(quire_set_len(NULL, 1), EINVAL);
	FAILS(quire_refresh(NULL), EINVAL);
	FAILS(quire_flush(NULL, 0, 1), EINVAL);
	FAILS(quire_sync(NULL), EINVAL);
	FAILS(quire_read_at(NULL, 0, buffer, sizeof(buffer)), EINVAL);
	FAILS(quire_prefetch(NULL, 0, 1), EINVAL);
	FAILS(quire_set_barrier(NULL, NULL, NULL), EINVAL);
	FAILS(quire_map(NULL, 0, 1, 0, QUIRE_FAULT_AROUND_AUTO), EINVAL);
	FAILS(quire_unmap(NULL), EINVAL);
	FAILS(quire_base(NULL), EINVAL);
	FAILS(quire_mapping_len(NULL), EINVAL);
	FAILS(quire_populate(NULL, 0, 1), EINVAL);
	FAILS(quire_populate_cached(NULL, 0, 1), EINVAL);
	FAILS(quire_advise(NULL, 0, 1, QUIRE_NORMAL), EINVAL);
	FAILS(quire_flush_mapping(NULL, 0, 1), EINVAL);
	FAILS(quire_remap(NULL, 1, 0), EINVAL);
	FAILS(quire_protect(NULL, 0), EINVAL);
	FAILS(quire_pin(NULL, 0, 1, 0), EINVAL);
	FAILS(quire_unpin(NULL), EINVAL);
	FAILS(quire_cancel(NULL), EINVAL);
	FAILS(quire_cancel_free(NULL), EINVAL);
}

static void options_are_checked(void)
{
	struct quire_space_options options = { .memory = 4096 };

	FAILS(quire_space_open(&options), EINVAL);
	CHECK(strstr(quire_last_error(), "1048576"));
	options.memory = SIZE_MAX;
	FAILS(quire_space_open(&options), EINVAL);
	options = (struct quire_space_options){ .handlers = SIZE_MAX };
	FAILS(quire_space_open(&options), EINVAL);
	options = (struct quire_space_options){ .workers = 100000 };
	FAILS(quire_space_open(&options), EINVAL);
	options = (struct quire_space_options){ .is_inline = 2 };
	FAILS(quire_space_open(&options), EINVAL);
	options = (struct quire_space_options){ .reserved = { [1] = 1 } };
	FAILS(quire_space_open(&options), EINVAL);
}

static void opening(struct quire_space *space, const char *dir, const char *file)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s/missing", dir);
	FAILS(quire_open(space, path, 0, 0), ENOENT);
	CHECK(strstr(quire_last_error(), path));
	FAILS(quire_open(space, NULL, 0, 0), EINVAL);
	FAILS(quire_open(space, "", 0, 0), ENOENT);
	FAILS(quire_open(space, dir, 0, 0), EOPNOTSUPP);
	FAILS(quire_open(space, file, 1u << 31, 0), EINVAL);
	FAILS(quire_open(space, file, QUIRE_CREATE, 0), EINVAL);
	FAILS(quire_open(space, file, QUIRE_DIRECT_ON | QUIRE_DIRECT_OFF, 0), EINVAL);
	FAILS(quire_open(space, file, QUIRE_WRITE, UINT64_MAX), EFBIG);
	/* No archive, but taken as it is it is a file like others. */
	snprintf(path, sizeof(path), "%s/not.zst", dir);
	make_file(path, 3 * PAGE);
	FAILS(quire_open(space, path, 0, 0), EBADMSG);
	struct quire_object *object = quire_open(space, path, QUIRE_PLAIN, 0);
	CHECK(object && quire_len(object) == (int64_t)(3 * PAGE));
	CHECK(!quire_close(object));
}

static void mapping(struct quire_space *space, const char *file, size_t len)
{
	const int around = QUIRE_FAULT_AROUND_AUTO;
	struct quire_object *object = quire_open(space, file, 0, 0);

	CHECK(object && quire_len(object) == (int64_t)len);
	FAILS(quire_map(object, 0, 0, 0, around), EINVAL);
	FAILS(quire_map(object, len, QUIRE_TO_END, 0, around), EINVAL);
	FAILS(quire_map(object, len + 5, QUIRE_TO_END, 0, around), EINVAL);
	FAILS(quire_map(object, len, 1, 0, around), EINVAL);
	CHECK(strstr(quire_last_error(), file));
	FAILS(quire_map(object, 0, len + 1, 0, around), EINVAL);
	FAILS(quire_map(object, UINT64_MAX, 2, 0, around), EINVAL);
	FAILS(quire_map(object, 0, SIZE_MAX - 1, QUIRE_MAP_BEYOND_END, around), EINVAL);
	FAILS(quire_map(object, 0, len, 1u << 31, around), EINVAL);
	FAILS(quire_map(object, 0, len, 0, 10), EINVAL);
	FAILS(quire_map(object, 0, len, 0, -3), EINVAL);
	FAILS(quire_map(object, 0, len, QUIRE_MAP_WRITE, around), EACCES);
	CHECK(strstr(quire_last_error(), "QUIRE_WRITE"));
	FAILS(quire_set_len(object, 1), EACCES);

	/* Any byte is a start. */
	struct quire_mapping *map = quire_map(object, 4097, 10000, 0, QUIRE_FAULT_AROUND_OFF);
	CHECK(map && quire_mapping_len(map) == 10000);
	const unsigned char *base = quire_base(map);
	CHECK((uintptr_t)base % PAGE == 1);
	for (size_t i = 0; i < 10000; i++)
		CHECK(base[i] == byte_at(4097 + i));
	FAILS(quire_populate(map, 0, 10001), EINVAL);
	FAILS(quire_populate(map, 10001, QUIRE_TO_END), EINVAL);
	FAILS(quire_populate_cached(map, 10000, 1), EINVAL);
	FAILS(quire_advise(map, 1, SIZE_MAX - 1, QUIRE_NORMAL), EINVAL);
	FAILS(quire_advise(map, 0, 1, 5), EINVAL);
	FAILS(quire_advise(map, 0, 1, -1), EINVAL);
	FAILS(quire_flush_mapping(map, 9999, 2), EINVAL);
	CHECK(!quire_populate(map, 10000, QUIRE_TO_END));
	CHECK(!quire_populate(map, 0, QUIRE_TO_END));
	CHECK(quire_populate_cached(map, 0, QUIRE_TO_END) == 3);
	for (int advice = QUIRE_NORMAL; advice <= QUIRE_DONTNEED; advice++)
		CHECK(!quire_advise(map, 0, QUIRE_TO_END, advice));
	CHECK(base[1] == byte_at(4098));

	/* The mapping keeps the object. */
	CHECK(!quire_close(object));
	CHECK(base[9999] == byte_at(4097 + 9999));
	CHECK(!quire_unmap(map));
}

static void reading(struct quire_space *space, const char *file, size_t len)
{
	struct quire_object *object = quire_open(space, file, 0, 0);
	unsigned char buffer[100];

	CHECK(object);
	FAILS(quire_read_at(object, 0, NULL, 1), EINVAL);
	FAILS(quire_read_at(object, 0, buffer, SIZE_MAX), EINVAL);
	CHECK(quire_read_at(object, 0, NULL, 0) == 0);
	CHECK(quire_read_at(object, len, buffer, sizeof(buffer)) == 0);
	CHECK(quire_read_at(object, UINT64_MAX - 100, buffer, sizeof(buffer)) == 0);
	CHECK(quire_read_at(object, len - 7, buffer, sizeof(buffer)) == 7);
	for (size_t i = 0; i < 7; i++)
		CHECK(buffer[i] == byte_at(len - 7 + i));
	FAILS(quire_prefetch(object, UINT64_MAX, 2), EINVAL);
	FAILS(quire_flush(object, UINT64_MAX, 2), EINVAL);
	CHECK(quire_prefetch(object, len, QUIRE_TO_END) == 0);
	CHECK(!quire_close(object));
}

/* An error instead of a SIGBUS, and nothing to be seen of it once the file is whole again. */
static void a_file_that_shrinks(struct quire_space *space, const char *file, size_t len)
{
	struct quire_object *object = quire_open(space, file, QUIRE_DIRECT_OFF, 0);
	struct quire_mapping *map =
		quire_map(object, 0, QUIRE_TO_END, 0, QUIRE_FAULT_AROUND_AUTO);

	CHECK(map);
	CHECK(!truncate(file, PAGE));
	FAILS(quire_populate(map, 0, QUIRE_TO_END), ENXIO);
	CHECK(strstr(quire_last_error(), file) && strstr(quire_last_error(), "shorter"));
	CHECK(*(unsigned char *)quire_base(map) == byte_at(0));
	CHECK(quire_refresh(object) == (int64_t)PAGE && quire_len(object) == (int64_t)PAGE);
	CHECK(!quire_populate(map, 0, PAGE));
	CHECK(!quire_unmap(map) && !quire_close(object));
	make_file(file, len);
}

int main(int argc, char **argv)
{
	const size_t len = 100 * PAGE + 123;
	char file[4096];

	CHECK(argc == 2);
	CHECK(!quire_last_error()[0]);
	snprintf(file, sizeof(file), "%s/errors", argv[1]);
	make_file(file, len);
	nothing_is_einval();
	options_are_checked();
	struct quire_space *space = open_space(4 * MIB);
	FAILS(quire_counter(space, NULL), EINVAL);
	FAILS(quire_counter(space, "no such counter"), ENOENT);
	CHECK(quire_counter(space, "memory_bytes") == (int64_t)(4 * MIB));
	CHECK(!strcmp(quire_counter_name(0), "pgfault"));
	CHECK(!quire_counter_name(SIZE_MAX));
	opening(space, argv[1], file);
	mapping(space, file, len);
	reading(space, file, len);
	a_file_that_shrinks(space, file, len);
	CHECK(!quire_space_close(space));
	puts("ok");
	return 0;
}
