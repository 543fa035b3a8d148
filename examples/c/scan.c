/*
 * Sums a file through a mapping that holds no more memory than it may.
 *
 *     cc -O2 -o scan scan.c $(pkg-config --cflags --libs quire)
 *     ./scan FILE [MEMORY_MIB]
 *
 * Of a file with a name that ends in .zst it sums the file that is packed in it.
 */
#include <errno.h>
#include <inttypes.h>
#include <quire.h>
#include <stdio.h>
#include <stdlib.h>

/* The bytes that are populated before they are summed: a read error is an error then, not a SIGBUS. */
#define STEP ((size_t)256 << 10)

static int fail(const char *doing)
{
	fprintf(stderr, "scan: cannot %s: %s\n", doing, quire_last_error());
	return 1;
}

static void print_counters(const struct quire_space *space)
{
	const char *name;

	printf("held at most %" PRId64 " of %" PRId64 " bytes\n",
	       quire_counter(space, "held_bytes_max"), quire_counter(space, "memory_bytes"));
	for (size_t i = 0; (name = quire_counter_name(i)); i++) {
		int64_t value = quire_counter(space, name);

		if (value > 0)
			printf("%s %" PRId64 "\n", name, value);
	}
}

/* FNV-1a over 64-bit words, and over the bytes that are left. */
static uint64_t add(uint64_t sum, const unsigned char *at, size_t len)
{
	for (; len >= 8; at += 8, len -= 8) {
		uint64_t word;

		__builtin_memcpy(&word, at, 8);
		sum = (sum ^ word) * UINT64_C(0x100000001b3);
	}
	for (; len; at++, len--)
		sum = (sum ^ *at) * UINT64_C(0x100000001b3);
	return sum;
}

int main(int argc, char **argv)
{
	struct quire_space_options options = { 0 };
	uint64_t sum = UINT64_C(0xcbf29ce484222325);
	struct quire_mapping *mapping = NULL;
	struct quire_object *object;
	struct quire_space *space;
	size_t len;

	if (argc < 2 || argc > 3) {
		fprintf(stderr, "usage: scan FILE [MEMORY_MIB]\n");
		return 2;
	}
	options.memory = (size_t)(argc > 2 ? strtoul(argv[2], NULL, 10) : 16) << 20;
	space = quire_space_open(&options);
	if (!space)
		return fail("make an address space");
	object = quire_open(space, argv[1], 0, 0);
	if (!object)
		return fail("open the file");
	len = (size_t)quire_len(object);
	if (len) {
		mapping = quire_map(object, 0, QUIRE_TO_END, 0, QUIRE_FAULT_AROUND_AUTO);
		if (!mapping)
			return fail("map the file");
		if (quire_advise(mapping, 0, QUIRE_TO_END, QUIRE_SEQUENTIAL))
			return fail("say how the mapping is used");
	}
	for (size_t at = 0; at < len; at += STEP) {
		size_t step = len - at < STEP ? len - at : STEP;

		if (quire_populate(mapping, at, step))
			return fail("read the file");
		sum = add(sum, (const unsigned char *)quire_base(mapping) + at, step);
	}
	printf("%016" PRIx64 "  %s\n", sum, argv[1]);
	print_counters(space);
	if ((mapping && quire_unmap(mapping)) || quire_close(object) || quire_space_close(space))
		return fail("close everything");
	return 0;
}
