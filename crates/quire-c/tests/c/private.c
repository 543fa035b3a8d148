/* A private copy of a file that is only open for reading: written, and never seen by the file. */
#include "check.h"

static unsigned char value(size_t at)
{
	return (unsigned char)(at / PAGE + 3);
}

int main(int argc, char **argv)
{
	char path[4096];
	const size_t len = 4 * MIB;
	unsigned char page[PAGE];

	CHECK(argc == 2);
	snprintf(path, sizeof(path), "%s/private", argv[1]);
	make_file(path, len);
	struct quire_space *space = open_space(2 * MIB);
	struct quire_object *object = quire_open(space, path, 0, 0);
	struct quire_mapping *shared = quire_map(object, 0, QUIRE_TO_END, 0, QUIRE_FAULT_AROUND_AUTO);
	struct quire_mapping *copy = quire_map(object, 0, QUIRE_TO_END,
		QUIRE_MAP_PRIVATE | QUIRE_MAP_WRITE, QUIRE_FAULT_AROUND_AUTO);
	struct quire_mapping *read = quire_map(object, PAGE + 1, QUIRE_TO_END, QUIRE_MAP_PRIVATE,
		QUIRE_FAULT_AROUND_AUTO);

	CHECK(shared && copy && read);
	unsigned char *bytes = quire_base(copy);
	const unsigned char *file = quire_base(shared), *same = quire_base(read);

	/* Twice the memory; what is written packs well. */
	for (size_t at = 0; at < len; at += PAGE) {
		CHECK(bytes[at] == byte_at(at));
		memset(bytes + at, value(at), PAGE);
	}
	for (size_t at = 0; at < len; at += PAGE)
		CHECK(bytes[at] == value(at) && bytes[at + PAGE - 1] == value(at));
	CHECK(!quire_flush_mapping(copy, 0, QUIRE_TO_END));
	CHECK(!quire_advise(copy, 0, QUIRE_TO_END, QUIRE_DONTNEED));
	for (size_t at = PAGE; at < len; at += PAGE + 1) {
		CHECK(file[at] == byte_at(at));
		CHECK(same[at - PAGE] == byte_at(at + 1));
	}
	CHECK(quire_read_at(object, 7 * PAGE, page, PAGE) == (int64_t)PAGE);
	CHECK(page[0] == byte_at(7 * PAGE));
	CHECK(bytes[7 * PAGE] == value(7 * PAGE));
	CHECK(quire_counter(space, "held_bytes_max") <= (int64_t)(2 * MIB));
	CHECK(!quire_unmap(read) && !quire_unmap(copy) && !quire_unmap(shared));
	CHECK(!quire_close(object) && !quire_space_close(space));
	puts("ok");
	return 0;
}
