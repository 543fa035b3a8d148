/* A child has no mapping, and no use for what it inherited; it may open its own. */
#include "check.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static struct quire_space *space;
static struct quire_object *object;
static struct quire_mapping *map;

static int wait_for(pid_t child)
{
	int status;

	CHECK(child > 0);
	CHECK(waitpid(child, &status, 0) == child);
	return status;
}

static void everything_inherited_fails(void)
{
	char buffer[8];

	FAILS(quire_counter(space, "pgfault"), ECHILD);
	CHECK(strstr(quire_last_error(), "forked"));
	FAILS(quire_serves_system_calls(space), ECHILD);
	FAILS(quire_open(space, "/dev/null", 0, 0), ECHILD);
	FAILS(quire_len(object), ECHILD);
	FAILS(quire_set_len(object, 1), ECHILD);
	FAILS(quire_refresh(object), ECHILD);
	FAILS(quire_flush(object, 0, 1), ECHILD);
	FAILS(quire_sync(object), ECHILD);
	FAILS(quire_read_at(object, 0, buffer, sizeof(buffer)), ECHILD);
	FAILS(quire_prefetch(object, 0, 1), ECHILD);
	FAILS(quire_set_barrier(object, NULL, NULL), ECHILD);
	FAILS(quire_map(object, 0, 1, 0, QUIRE_FAULT_AROUND_AUTO), ECHILD);
	FAILS(quire_base(map), ECHILD);
	FAILS(quire_mapping_len(map), ECHILD);
	FAILS(quire_populate(map, 0, 1), ECHILD);
	FAILS(quire_populate_cached(map, 0, 1), ECHILD);
	FAILS(quire_advise(map, 0, 1, QUIRE_NORMAL), ECHILD);
	FAILS(quire_flush_mapping(map, 0, 1), ECHILD);
	FAILS(quire_unmap(map), ECHILD);
	FAILS(quire_close(object), ECHILD);
	FAILS(quire_space_close(space), ECHILD);
}

static void own(const char *path)
{
	struct quire_space *mine = open_space(2 * MIB);
	struct quire_object *file = quire_open(mine, path, 0, 0);
	struct quire_mapping *bytes =
		quire_map(file, 0, QUIRE_TO_END, 0, QUIRE_FAULT_AROUND_AUTO);

	CHECK(bytes);
	for (size_t at = 0; at < 8 * MIB; at += PAGE)
		CHECK(((unsigned char *)quire_base(bytes))[at] == byte_at(at));
	/* Having one of its own makes what it inherited no better. */
	everything_inherited_fails();
	CHECK(!quire_unmap(bytes) && !quire_close(file) && !quire_space_close(mine));
}

int main(int argc, char **argv)
{
	volatile unsigned char *base;
	char path[4096];
	pid_t child;
	int status;

	CHECK(argc == 2);
	snprintf(path, sizeof(path), "%s/fork", argv[1]);
	make_file(path, 8 * MIB);
	space = open_space(2 * MIB);
	object = quire_open(space, path, QUIRE_WRITE, 0);
	map = quire_map(object, 0, QUIRE_TO_END, QUIRE_MAP_WRITE, QUIRE_FAULT_AROUND_AUTO);
	CHECK(map);
	base = quire_base(map);
	base[0] = 42;

	child = fork();
	if (!child) {
		signal(SIGSEGV, SIG_DFL);
		_exit(base[0] == 42 ? 0 : 1);
	}
	status = wait_for(child);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);

	child = fork();
	if (!child) {
		everything_inherited_fails();
		own(path);
		/* And a child's child. */
		child = fork();
		if (!child) {
			everything_inherited_fails();
			own(path);
			_exit(0);
		}
		status = wait_for(child);
		_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
	}
	status = wait_for(child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);

	/* The parent notices nothing. */
	CHECK(base[0] == 42);
	base[7 * MIB] = 43;
	CHECK(!quire_sync(object));
	CHECK(quire_counter(space, "pgpgout") > 0);
	CHECK(!quire_unmap(map) && !quire_close(object) && !quire_space_close(space));
	puts("ok");
	return 0;
}
