"""Redis at a quarter of its data set: it dumps itself by a fork while clients go on, and each dump,
loaded by a bare server, has what the server had when it forked."""

import threading
import time
from dataclasses import dataclass, field

from cases import resp
from harness import MIB, Failed, case

# Keys that the probe writes in turn, each with the number of the write.
PROBE_KEYS = 64
PROBE_PAUSE_SECONDS = 0.001


class Probe(threading.Thread):
    """A client that times its commands, and writes numbers in order."""

    def __init__(self, socket, count):
        super().__init__(daemon=True)
        self.client = resp.connect(socket, patience_seconds=30)
        self.count = count
        self.written = 0
        self.times = []
        self.stopped = threading.Event()
        self.failure = None

    def run(self):
        try:
            while not self.stopped.wait(PROBE_PAUSE_SECONDS):
                number = self.written
                self.timed("SET", b"p%d" % (number % PROBE_KEYS), number)
                self.written = number + 1
                # The keys of the data set, far from each other.
                self.timed("GET", b"k%d" % (number * 7919 % self.count))
        except (Failed, OSError) as error:
            self.failure = error

    def timed(self, *words):
        started = time.monotonic()
        self.client.call(*words)
        self.times.append((started, time.monotonic() - started))

    def stop(self):
        self.stopped.set()
        self.join()
        if self.failure:
            raise Failed(f"the probe: {self.failure}")

    def latency(self, since, until):
        """Milliseconds that commands took which began in that time: the median, p99, the longest."""
        times = sorted(took * 1e3 for began, took in self.times if since <= began < until)
        if not times:
            raise Failed("no command was served while Redis dumped itself")
        return times[len(times) // 2], times[len(times) * 99 // 100], times[-1]


@dataclass
class Served:
    """The outcome of a server's run."""

    pid: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    dump_seconds: float = 0.0
    fork_ms: float = 0.0
    latency: tuple = ()
    digest: bytes = b""
    # What the probe had written before BGSAVE was sent, and what it had sent when that was answered.
    written: tuple = ()
    wrong: list = field(default_factory=list)

    def words(self):
        median, p99, longest = self.latency
        return (
            f"{self.seconds:.1f} s, fork {self.fork_ms:.0f} ms, dump {self.dump_seconds:.1f} s,"
            f" commands meanwhile {median:.2f} ms, p99 {p99:.1f}, at most {longest:.0f}"
        )


def server_argv(directory, socket, *options):
    argv = ["redis-server", "--port", "0", "--unixsocket", socket, "--save", ""]
    argv += ["--dir", str(directory), "--rdbcompression", "no", "--enable-debug-command", "yes"]
    return [*argv, *options]


def dump_under_load(context, socket, client, count, served):
    """BGSAVE while a benchmark and the probe go on."""
    probe = Probe(socket, count)
    probe.start()
    load = ["redis-benchmark", "-s", socket, "-t", "get,set,lpush,incr,zadd"]
    load += ["-n", "100000" if context.long else "20000", "-r", "100000", "-d", "64", "-q"]
    loader = context.spawn([*load, "-P", "8", "-c", "20"])
    # Some of it is under way.
    while probe.written < PROBE_KEYS and probe.is_alive():
        time.sleep(0.01)
    before, began = probe.written, time.monotonic()
    client.call("BGSAVE")
    served.written = (before, probe.written + 1)
    resp.wait_for_dump(client, patience_seconds=context.watchdog_seconds)
    ended = time.monotonic()
    loaded = context.wait(loader)
    probe.stop()
    if loaded.status != 0:
        raise Failed(f"redis-benchmark: {loaded.text[-500:]}{loaded.stderr[-500:]}")
    served.dump_seconds = ended - began
    served.fork_ms = int(client.info("latest_fork_usec")) / 1e3
    served.latency = probe.latency(began, ended)


def serve(context, argv, socket, count):
    """Fills a server, dumps it under load and once more when all is quiet, and checks every key."""
    server = context.spawn(argv)
    client = resp.connect(socket, patience_seconds=30)
    served = Served(pid=server.pid)
    started = time.monotonic()
    resp.fill(client, count)
    dump_under_load(context, socket, client, count, served)
    (context.tmp / "dump.rdb").rename(context.tmp / "loaded.rdb")
    served.wrong = resp.check(client, count)
    served.seconds = time.monotonic() - started
    served.peak_bytes = int(client.info("used_memory_peak"))
    served.digest = client.call("DEBUG", "DIGEST")
    client.call("BGSAVE")
    resp.wait_for_dump(client, patience_seconds=context.watchdog_seconds)
    (context.tmp / "dump.rdb").rename(context.tmp / "quiet.rdb")
    client.send("SHUTDOWN", "NOSAVE")
    result = context.wait(server)
    if served.wrong:
        raise Failed(f"{len(served.wrong)} wrong keys, the first {served.wrong[:3]}")
    if result.status != 0:
        raise Failed(f"redis-server ended with {result.status}: {result.text[-2000:]}")
    return served


def check_dumps(context, socket, count, served):
    """Loads both dumps into a bare server: nothing is missing, nothing else is there."""
    for name in ("loaded.rdb", "quiet.rdb"):
        server = context.spawn(server_argv(context.tmp, socket, "--dbfilename", name))
        client = resp.connect(socket, patience_seconds=120)
        wrong = resp.check(client, count)
        if wrong:
            raise Failed(f"{name}: {len(wrong)} wrong keys, the first {wrong[:3]}")
        if name == "quiet.rdb":
            digest = client.call("DEBUG", "DIGEST")
            if digest != served.digest:
                raise Failed(f"{name}: digest {digest}, the server's was {served.digest}")
        else:
            check_moment(client, served)
        client.send("SHUTDOWN", "NOSAVE")
        context.wait(server)
        (context.tmp / name).unlink()


def check_moment(client, served):
    """A dump is of one moment: of what was written in order it has all up to there."""
    stored = [client.call("GET", b"p%d" % key) for key in range(PROBE_KEYS)]
    numbers = sorted(int(number) for number in stored if number is not None)
    newest = numbers[-1] if numbers else -1
    if numbers != list(range(newest - len(numbers) + 1, newest + 1)) or len(numbers) < PROBE_KEYS:
        raise Failed(f"the dump is of no one moment: it has the writes {numbers}")
    first, last = served.written
    if not first - 1 <= newest <= last:
        raise Failed(f"the dump ends with write {newest}, not one of {first - 1} to {last}")


@case("redis", needs=("redis-server", "redis-benchmark"))
def redis(context):
    """Redis under load, bare and with a quarter of what that took."""
    count = (400 if context.long else 120) * MIB // resp.VALUE_BYTES
    socket = str(context.tmp / "socket")
    argv = server_argv(context.tmp, socket)
    bare = serve(context, argv, socket, count)
    check_dumps(context, socket, count, bare)
    swap = context.swap_directory()
    memory = bare.peak_bytes // 4
    managed = serve(context, context.quire_argv(argv, memory, swap), socket, count)
    context.nothing_left(managed.pid, swap)
    check_dumps(context, socket, count, managed)
    context.note(f"{bare.peak_bytes >> 20} MiB in {memory >> 20} MiB; bare: {bare.words()}")
    context.note(f"managed: {managed.words()}")
