/* A thread that faults serves itself: a file of twice the memory, read twice. */
#include "check.h"

#include <fcntl.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	char path[4096];
	const size_t len = 128 * MIB;
	struct quire_space_options options = {
		.memory = len / 2, .is_inline = 1,
	};

	CHECK(argc == 2);
	snprintf(path, sizeof(path), "%s/inline", argv[1]);
	make_file(path, len);
	quire_space_close(open_space(MIB)); /* ends here without the right */
	struct quire_space *space = quire_space_open(&options);
	CHECK(space);
	struct quire_object *object = quire_open(space, path, 0, 0);
	struct quire_mapping *map = quire_map(object, 0, QUIRE_TO_END, 0, QUIRE_FAULT_AROUND_AUTO);

	CHECK(map);
	const unsigned char *bytes = quire_base(map);

	for (int round = 0; round < 2; round++)
		for (size_t at = 0; at < len; at += 509)
			CHECK(bytes[at] == byte_at(at));
	/* A page that is not mapped is of no use to a system call, until it is populated. */
	int pipes[2];

	CHECK(!quire_serves_system_calls(space) && !pipe(pipes));
	CHECK(!quire_advise(map, 0, 2 * MIB, QUIRE_DONTNEED));
	CHECK(write(pipes[1], bytes + MIB, 8) == -1 && errno == EFAULT);
	CHECK(!quire_populate(map, MIB, 8));
	CHECK(write(pipes[1], bytes + MIB, 8) == 8);
	CHECK(!quire_unmap(map) && !quire_close(object) && !quire_space_close(space));
	puts("ok");
	return 0;
}
