/* A stand-in for the preload library: it joins the run as a member would, and manages nothing.
 * FAKE_OBITUARY=N has a program named by FAKE_VICTIM leave that obituary and kill itself. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int receive(int connection, uint32_t welcome[6])
{
    char space[CMSG_SPACE(4 * sizeof(int))];
    struct iovec part = {welcome, 24};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != 24)
        return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header)
        return -1;
    int count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int), descriptors[4];
    memcpy(descriptors, CMSG_DATA(header), count * sizeof(int));
    for (int i = 1; i < count; i++)
        close(descriptors[i]);
    return descriptors[0];
}

__attribute__((constructor)) static void join(void)
{
    const char *name = getenv("QUIRE_SOCKET");
    if (!name || !*name)
        return;
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    memcpy(address.sun_path + 1, name, length);
    length += offsetof(struct sockaddr_un, sun_path) + 1;
    struct { uint32_t magic, version, fork, parent; uint64_t held, wanted; } hello = {
        MAGIC, VERSION, 0, UINT32_MAX, 0, 0};
    uint32_t welcome[6];
    if (connect(connection, (struct sockaddr *)&address, length) ||
        send(connection, &hello, sizeof hello, 0) != sizeof hello)
        return;
    int memfd = receive(connection, welcome);
    char *control = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    close(memfd);
    const char *obituary = getenv("FAKE_OBITUARY"), *victim = getenv("FAKE_VICTIM");
    if (control == MAP_FAILED || !obituary || !victim ||
        strcmp(victim, program_invocation_short_name))
        return;
    char *member = control + MEMBERS + welcome[2] * (size_t)MEMBER_BYTES;
    *(uint32_t *)(member + OBITUARY) = atoi(obituary);
    kill(getpid(), SIGKILL);
}
