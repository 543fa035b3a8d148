"""A small client of Redis' protocol, and the data set that the Redis case fills and checks."""

import hashlib
import socket
import time

from harness import Failed

VALUE_BYTES = 1000


class Loading(Failed):
    """The server reads its dump; it answers later."""


class Client:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        # A digest of all data goes through all of swap.
        self.socket.settimeout(600)
        self.socket.connect(path)
        self.stream = self.socket.makefile("rb", buffering=1 << 20)

    def send(self, *words):
        self.socket.sendall(encode(words))

    def call(self, *words):
        self.send(*words)
        return self.reply()

    def reply(self):
        line = self.stream.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            if rest == b"-1":
                return None
            return self.stream.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        if kind == b"-":
            if rest.startswith(b"LOADING"):
                raise Loading(rest.decode())
            raise Failed(f"redis: {rest.decode()}")
        if not line:
            raise Failed("redis closed the connection")
        return rest

    def info(self, name):
        for line in self.call("INFO").decode().splitlines():
            if line.startswith(name + ":"):
                return line.partition(":")[2]
        raise Failed(f"redis has no {name}")


def encode(words):
    words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    head = b"*%d\r\n" % len(words)
    return head + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def connect(path, patience_seconds):
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            client = Client(path)
            client.call("PING")
            return client
        except (OSError, Loading):
            if time.monotonic() > deadline:
                raise Failed("redis-server does not answer") from None
            time.sleep(0.05)


def value_of(number):
    """Half of it is text that repeats, half is not to be guessed."""
    digest = hashlib.sha512(b"%d" % number).hexdigest().encode()
    return (b"%d " % number + digest * 4 + b"the quick brown fox " * 25)[:VALUE_BYTES]


def batches(count, size=500):
    for first in range(0, count, size):
        yield range(first, min(first + size, count))


def fill(client, count):
    for batch in batches(count):
        client.socket.sendall(
            b"".join(encode(("SET", b"k%d" % i, value_of(i))) for i in batch)
        )
        for _ in batch:
            client.reply()


def check(client, count):
    """The keys whose value is not what was put there."""
    wrong = []
    for batch in batches(count):
        client.socket.sendall(b"".join(encode(("GET", b"k%d" % i)) for i in batch))
        wrong += [i for i in batch if client.reply() != value_of(i)]
    return wrong


def wait_for_dump(client, patience_seconds):
    deadline = time.monotonic() + patience_seconds
    while client.info("rdb_bgsave_in_progress") != "0":
        if time.monotonic() > deadline:
            raise Failed("BGSAVE does not end")
        time.sleep(0.1)
    if client.info("rdb_last_bgsave_status") != "ok":
        raise Failed("BGSAVE failed")
