/* Threads share handles; each has its own error. */
#include "check.h"

#include <pthread.h>

#define THREADS 4
#define LEN (16 * MIB)

static struct quire_space *space;
static struct quire_object *object;
static struct quire_mapping *shared;

static void *work(void *argument)
{
	unsigned number = (unsigned)(uintptr_t)argument;
	const unsigned char *base = quire_base(shared);
	unsigned seed = number + 1;
	char name[32];

	CHECK(!quire_last_error()[0]);
	snprintf(name, sizeof(name), "/missing-%u", number);
	FAILS(quire_open(space, name, 0, 0), ENOENT);
	for (int round = 0; round < 400; round++) {
		size_t at = (size_t)rand_r(&seed) % (LEN - 3 * PAGE);
		unsigned char buffer[100];

		CHECK(base[at] == byte_at(at));
		CHECK(quire_read_at(object, at, buffer, sizeof(buffer)) == sizeof(buffer));
		CHECK(buffer[99] == byte_at(at + 99));
		if (round % 8 == 0) {
			struct quire_mapping *own =
				quire_map(object, at, 2 * PAGE, 0, (int)(at % 12) - 2);

			CHECK(own);
			CHECK(*((unsigned char *)quire_base(own) + PAGE) == byte_at(at + PAGE));
			CHECK(!quire_unmap(own));
		}
		CHECK(strstr(quire_last_error(), name));
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];
	char path[4096];

	CHECK(argc == 2);
	snprintf(path, sizeof(path), "%s/threads", argv[1]);
	make_file(path, LEN);
	space = open_space(2 * MIB);
	object = quire_open(space, path, 0, 0);
	CHECK(object);
	shared = quire_map(object, 0, QUIRE_TO_END, 0, QUIRE_FAULT_AROUND_AUTO);
	CHECK(shared);
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, work, (void *)i));
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	CHECK(!quire_last_error()[0]);
	CHECK(!quire_unmap(shared) && !quire_close(object));
	CHECK(quire_counter(space, "held_bytes_max") <= (int64_t)(2 * MIB));
	CHECK(!quire_space_close(space));
	puts("ok");
	return 0;
}
