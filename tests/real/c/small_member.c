/*
 * Writes half a MiB, says that it is there, waits until FILE.late is, and checks what it wrote.
 *
 *     small_member FILE
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { BYTES = 512 << 10 };

int main(int count, char **words)
{
	char late[4096];
	unsigned char *data = malloc(BYTES);
	int file = count > 1 ? open(words[1], O_WRONLY | O_APPEND) : -1;

	if (!data || file < 0)
		return 2;
	snprintf(late, sizeof late, "%s.late", words[1]);
	for (size_t at = 0; at < BYTES; at++)
		data[at] = (unsigned char)(at * 2654435761u >> 9);
	if (write(file, "x", 1) != 1)
		return 2;
	while (access(late, F_OK))
		usleep(20000);
	for (size_t at = 0; at < BYTES; at++)
		if (data[at] != (unsigned char)(at * 2654435761u >> 9))
			return 1;
	return 0;
}
