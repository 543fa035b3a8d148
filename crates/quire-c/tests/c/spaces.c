/* One object mapped in two address spaces, one of which serves its faults in line. */
#include "check.h"

/* What the object has once both mappings have written it. */
static unsigned char byte_at_now(size_t at)
{
	return (unsigned char)(at % 509 ? byte_at(at) : ~byte_at(at));
}

int main(int argc, char **argv)
{
	char path[4096];
	const size_t len = 8 * MIB;
	struct quire_space_options options = { .memory = MIB, .is_inline = 1 };

	CHECK(argc == 2);
	snprintf(path, sizeof(path), "%s/spaces", argv[1]);
	make_file(path, len);
	struct quire_space *owner = open_space(MIB), *host = quire_space_open(&options);
	struct quire_object *object = quire_open(owner, path, QUIRE_WRITE, 0);
	struct quire_mapping *home, *away, *copy;

	CHECK(host && object);
	home = quire_map(object, 0, QUIRE_TO_END, QUIRE_MAP_WRITE, QUIRE_FAULT_AROUND_AUTO);
	away = quire_map_in(object, host, 0, QUIRE_TO_END, QUIRE_MAP_WRITE,
			    QUIRE_FAULT_AROUND_AUTO);
	copy = quire_map_in(object, host, 0, QUIRE_TO_END, QUIRE_MAP_PRIVATE,
			    QUIRE_FAULT_AROUND_AUTO);
	CHECK(home && away && copy);
	FAILS(quire_map_in(object, NULL, 0, PAGE, 0, QUIRE_FAULT_AROUND_AUTO), EINVAL);
	FAILS(quire_map_in(NULL, host, 0, PAGE, 0, QUIRE_FAULT_AROUND_AUTO), EINVAL);
	/* All handles but the mappings': they keep what they need. */
	CHECK(!quire_close(object) && !quire_space_close(owner) && !quire_space_close(host));
	volatile unsigned char *first = quire_base(home), *second = quire_base(away);
	volatile unsigned char *own = quire_base(copy);

	for (size_t at = 0; at < len; at += 509) {
		volatile unsigned char *writer = at % 2 ? first : second;
		volatile unsigned char *reader = at % 2 ? second : first;

		CHECK(reader[at] == byte_at(at));
		writer[at] = (unsigned char)~byte_at(at);
		CHECK(reader[at] == (unsigned char)~byte_at(at));
	}
	/* What is written to the copy is seen nowhere else. */
	CHECK(!quire_protect(copy, 1));
	for (size_t at = 1; at < len; at += 32 * PAGE) {
		own[at] = (unsigned char)(at / PAGE / 32 + 1);
		CHECK(first[at] == byte_at_now(at) && second[at] == byte_at_now(at));
	}
	for (size_t at = 1; at < len; at += 32 * PAGE)
		CHECK(own[at] == (unsigned char)(at / PAGE / 32 + 1));
	CHECK(!quire_protect(away, 0) && !quire_protect(copy, 0));
	/* In its place or elsewhere, as there is room. */
	CHECK(!quire_remap(away, len / 2, 0) && quire_mapping_len(away) == (int64_t)(len / 2));
	CHECK(!quire_remap(away, len, QUIRE_MAY_MOVE) && !quire_remap(copy, 40 * PAGE, 0));
	second = quire_base(away);
	own = quire_base(copy);
	for (size_t at = 0; at < len; at += 509)
		CHECK(second[at] == byte_at_now(at));
	for (size_t at = 1; at < 40 * PAGE; at += 32 * PAGE)
		CHECK(own[at] == (unsigned char)(at / PAGE / 32 + 1));
	CHECK(!quire_protect(away, 1));
	second[0] = byte_at_now(0);
	CHECK(!quire_flush_mapping(away, 0, QUIRE_TO_END));
	CHECK(!quire_unmap(home) && !quire_unmap(away) && !quire_unmap(copy));
	FILE *file = fopen(path, "r");

	CHECK(file);
	for (size_t at = 0; at < len; at++) {
		unsigned char byte = (unsigned char)getc(file);

		CHECK(byte == byte_at_now(at));
	}
	puts("ok");
	return 0;
}
