/* One object mapped in two address spaces, one of which serves its faults in line. */
#include "check.h"

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
	struct quire_mapping *home, *away;

	CHECK(host && object);
	home = quire_map(object, 0, QUIRE_TO_END, QUIRE_MAP_WRITE, QUIRE_FAULT_AROUND_AUTO);
	away = quire_map_in(object, host, 0, QUIRE_TO_END, QUIRE_MAP_WRITE,
			    QUIRE_FAULT_AROUND_AUTO);
	CHECK(home && away);
	FAILS(quire_map_in(object, NULL, 0, PAGE, 0, QUIRE_FAULT_AROUND_AUTO), EINVAL);
	FAILS(quire_map_in(NULL, host, 0, PAGE, 0, QUIRE_FAULT_AROUND_AUTO), EINVAL);
	FAILS(quire_map_in(object, host, 0, PAGE, QUIRE_MAP_PRIVATE, QUIRE_FAULT_AROUND_AUTO),
	      EOPNOTSUPP);
	/* All handles but the mappings': they keep what they need. */
	CHECK(!quire_close(object) && !quire_space_close(owner) && !quire_space_close(host));
	volatile unsigned char *first = quire_base(home), *second = quire_base(away);

	for (size_t at = 0; at < len; at += 509) {
		volatile unsigned char *writer = at % 2 ? first : second;
		volatile unsigned char *reader = at % 2 ? second : first;

		CHECK(reader[at] == byte_at(at));
		writer[at] = (unsigned char)~byte_at(at);
		CHECK(reader[at] == (unsigned char)~byte_at(at));
	}
	CHECK(!quire_flush_mapping(away, 0, QUIRE_TO_END));
	CHECK(!quire_unmap(home) && !quire_unmap(away));
	FILE *file = fopen(path, "r");

	CHECK(file);
	for (size_t at = 0; at < len; at++) {
		unsigned char byte = (unsigned char)getc(file);

		CHECK(byte == (unsigned char)(at % 509 ? byte_at(at) : ~byte_at(at)));
	}
	puts("ok");
	return 0;
}
