/* What is written to a memory object is there, in every mapping, with and without a swap file. */
#include "check.h"

#define LEN (8 * MIB)

static struct quire_space *open_swapping(const char *folder)
{
	struct quire_space_options options = {
		.memory = 2 * MIB,
		.swap_folder = folder,
		.swap_bytes = 32 * MIB,
	};
	struct quire_space *space = quire_space_open(&options);

	CHECK(space);
	return space;
}

/* Noise goes to the swap file; without one, what can be compressed stays in memory. */
static unsigned char expected(size_t at, int is_noise)
{
	return is_noise ? byte_at(at) : (unsigned char)(at / PAGE + at % 7);
}

static void written(struct quire_space *space, int is_noise)
{
	struct quire_object *object = quire_open_memory(space, LEN, 0);
	struct quire_mapping *first, *second;
	unsigned char *base, *shown, byte;

	CHECK(object && quire_len(object) == LEN);
	first = quire_map(object, 0, QUIRE_TO_END, QUIRE_MAP_WRITE,
			  QUIRE_FAULT_AROUND_AUTO);
	second = quire_map(object, 0, QUIRE_TO_END, 0, QUIRE_FAULT_AROUND_AUTO);
	CHECK(first && second);
	base = quire_base(first);
	shown = quire_base(second);
	CHECK(shown[LEN - 1] == 0);
	for (size_t at = 0; at < LEN; at++)
		base[at] = expected(at, is_noise);
	for (size_t at = 0; at < LEN; at++)
		CHECK(shown[at] == expected(at, is_noise));
	CHECK(!quire_flush(object, 0, QUIRE_TO_END));
	CHECK(!quire_sync(object));
	CHECK(!quire_set_len(object, MIB));
	CHECK(!quire_set_len(object, LEN));
	CHECK(quire_read_at(object, MIB, &byte, 1) == 1 && byte == 0);
	CHECK(quire_read_at(object, MIB - 1, &byte, 1) == 1 && byte == expected(MIB - 1, is_noise));
	CHECK(quire_counter(space, "pswpout") > 0 && quire_counter(space, "pswpin") > 0);
	CHECK((quire_counter(space, "zswpwb") > 0) == is_noise);
	CHECK(!quire_unmap(first));
	CHECK(!quire_unmap(second));
	CHECK(!quire_close(object));
}

int main(int argc, char **argv)
{
	struct quire_space_options no_folder = { .swap_bytes = MIB };
	struct quire_space_options too_small = { .swap_folder = argv[1], .swap_bytes = 1 };
	struct quire_space *space;

	CHECK(argc == 2);
	space = open_space(2 * MIB);
	written(space, 0);
	FAILS(quire_open_memory(NULL, 1, 0), EINVAL);
	FAILS(quire_open_memory(space, (uint64_t)1 << 60, 0), EFBIG);
	CHECK(!quire_space_close(space));
	space = open_swapping(argv[1]);
	written(space, 1);
	CHECK(!quire_space_close(space));
	FAILS(quire_space_open(&no_folder), EINVAL);
	FAILS(quire_space_open(&too_small), EINVAL);
	puts("ok");
	return 0;
}
