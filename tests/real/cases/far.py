"""The swap tier on a server: Redis, alone and as a cluster, healthy, sick and dead."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

from harness import MIB, REPOSITORY, Failed, case, read_or

DEMO = REPOSITORY / "demo"
PAGES_MIB = 48
BUDGET = 16 * MIB
TOTAL = PAGES_MIB * 256


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """A redis-server on a free port of the loopback."""

    def __init__(self, context, *options, port=None):
        self.port = port or free_port()
        self.folder = context.tmp / f"redis.{self.port}"
        self.folder.mkdir(exist_ok=True)
        self.argv = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self.argv += ["--dir", str(self.folder), *options]
        self.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def start(self):
        log = open(self.folder / "log", "ab")
        self.process = subprocess.Popen(self.argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while "LOADING" in (answer := self.cli("PING")) or not answer:
            if time.monotonic() > deadline:
                raise Failed(f"redis-server does not start: {read_or(self.folder / 'log')}")
            time.sleep(0.05)

    def cli(self, *words, password="secret"):
        argv = ["redis-cli", "-p", str(self.port), *map(str, words)]
        done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "REDISCLI_AUTH": password})
        return done.stdout.strip()

    def keys(self):
        return [key for key in self.cli("KEYS", "*").split("\n") if key]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Cluster:
    """Three masters with a replica each."""

    def __init__(self, context):
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        # The bus has the port above by 10000.
        self.nodes = [Server(context, *options, port=20000 + free_port() % 20000) for _ in range(6)]
        addresses = [f"127.0.0.1:{node.port}" for node in self.nodes]
        make = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", "1", "--cluster-yes"]
        made = subprocess.run(make, capture_output=True, text=True, timeout=60)
        if made.returncode != 0:
            raise Failed(f"no cluster: {made.stdout[-800:]}{made.stderr}")
        deadline = time.monotonic() + 30
        while not all(self.is_settled(node) for node in self.nodes):
            if time.monotonic() > deadline:
                raise Failed("the cluster does not settle")
            time.sleep(0.1)

    def is_settled(self, node):
        info = node.cli("INFO", "replication")
        has_partner = "connected_slaves:1" in info or "master_link_status:up" in info
        return has_partner and "cluster_state:ok" in node.cli("CLUSTER", "INFO")

    @property
    def url(self):
        return ",".join(node.url for node in self.nodes)

    def masters(self):
        return [node for node in self.nodes if "role:master" in node.cli("INFO", "replication")]

    def keys(self):
        return [key for node in self.masters() for key in node.keys()]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self.nodes:
            node.kill()


def argv_of(context, url, swap=None, seconds=0, options=()):
    program = context.compile("far_pages", "-O2")
    return context.quire_argv(
        [program, str(PAGES_MIB), str(seconds)], BUDGET, swap, ("--far", url, *options)
    )


def wait_for(condition, what, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"not within {seconds} s: {what}")
        time.sleep(0.1)


def end_of(context, process):
    """Lets a run go on; what its pages were."""
    with process.go as go:
        go.write(b"go\n")
        result = context.wait(process)
    found = re.search(r"right (\d+) lost (\d+) wrong (\d+)", result.text)
    if result.status != 0 or not found:
        raise Failed(f"{result.status}: {result.text[-500:]} {result.stderr[-1500:]}")
    right, lost, wrong = map(int, found.groups())
    if wrong or right + lost != TOTAL:
        raise Failed(f"{right} right, {lost} lost, {wrong} wrong of {TOTAL}")
    return result, lost


@case("far-redis", needs=("redis-server",))
def far_redis(context):
    """All of a server's part: without a disk and behind a small swap file; nothing is lost, nothing stays there."""
    if context.pretend:
        return
    with Server(context) as server:
        for swap, options in ((None, ()), (context.swap_directory(), ("--swap-max", "8M", "--swap-encrypt"))):
            process = context.spawn_until_ready(argv_of(context, server.url, swap, 3, options))
            segments = [key for key in server.keys() if not key.endswith(":lease") and ":runs:" not in key]
            bytes_there = int(server.cli("STRLEN", segments[0]))
            if len(segments) < 40 or bytes_there != 8 * (32768 + 16):
                raise Failed(f"{len(segments)} segments, one of {bytes_there} bytes")
            if not 0 < int(server.cli("TTL", segments[0])) <= 750:
                raise Failed("a segment does not go by itself")
            result, lost = end_of(context, process)
            context.within_budget(result)
            if lost or server.keys():
                raise Failed(f"{lost} pages lost, {server.keys()[:5]} left on the server: {result.stderr}")
            context.note(f"{len(segments)} segments, {result.seconds:.1f} s")


@case("far-tls", needs=("redis-server", "openssl"))
def far_tls(context):
    """A server that is spoken to by TLS, if its certificate is one that is trusted here."""
    if context.pretend:
        return
    make = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=quire -keyout key.pem -out cert.pem"
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE")
    subprocess.run(["openssl", *make.split(), *names], cwd=context.tmp, check=True, capture_output=True)
    certificate, port = context.tmp / "cert.pem", free_port()
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(context.tmp / "key.pem"))
    with Server(context, "--tls-port", str(port), "--tls-auth-clients", "no", *files) as server:
        argv = context.quire_argv(["sleep", "1"], BUDGET, None, ("--far", f"rediss://127.0.0.1:{port}"))
        trusted = context.wait(context.spawn(argv, env={"SSL_CERT_FILE": str(certificate)}))
        stranger = context.wait(context.spawn(argv))
        if trusted.status != 0 or not 0 < int(server.cli("INFO", "commandstats").count("cmdstat_set:")):
            raise Failed(f"{trusted.status}: {trusted.stderr}")
        if stranger.status != 125 or "ertificate" not in stranger.stderr:
            raise Failed(f"a certificate of nobody's: {stranger.status}: {stranger.stderr}")


@case("far-refused", needs=("redis-server",))
def far_refused(context):
    """Servers that cannot be used: one line that says why, before the program starts."""
    if context.pretend:
        return

    def refused(url, *said, **environment):
        argv = context.quire_argv(["echo", "started"], BUDGET, None, ("--far", url))
        result = context.wait(context.spawn(argv, env={"REDISCLI_AUTH": "", **environment}))
        missing = [text for text in said if text not in result.stderr]
        if result.status != 125 or "started" in result.text or missing or "secret" in result.stderr:
            raise Failed(f"{url}: {result.status}, {missing} not in {result.stderr}")

    with Server(context, "--requirepass", "secret") as server:
        refused(server.url, "cannot use 127.0.0.1", "Authentication required", "give the password in REDISCLI_AUTH")
        refused(server.url, "cannot use 127.0.0.1", "password", REDISCLI_AUTH="wrong-secret")
        # By a name, which takes a thread to look up: none of its signals may go there.
        argv = context.quire_argv(["true"], BUDGET, None, ("--far", f"redis://localhost:{server.port}"))
        allowed = context.wait(context.spawn(argv, env={"REDISCLI_AUTH": "secret"}))
        if allowed.status != 0:
            raise Failed(allowed.stderr)
        server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        refused(server.url, "maxmemory-policy is allkeys-lru", "noeviction", REDISCLI_AUTH="secret")
    refused(f"redis://127.0.0.1:{free_port()}", "cannot be reached")
    refused("redis://nowhere.invalid:6379", "cannot be reached")
    refused("http://127.0.0.1:1", "redis://HOST:PORT")
    with Server(context) as master, Server(context, "--replicaof", "127.0.0.1", str(master.port)) as replica:
        refused(replica.url, "replica")
        refused(f"{master.url},{replica.url}", "no cluster")


@case("far-sick", needs=("redis-server",))
def far_sick(context):
    """A server that is away for a while, is full, loses keys, gives other bytes: nothing wrong ever reaches the program."""
    if context.pretend:
        return
    with Server(context, "--appendonly", "yes", "--appendfsync", "always") as server:
        process = context.spawn_until_ready(argv_of(context, server.url, seconds=10))
        process.go.write(b"go\n")
        for _ in range(3):
            time.sleep(1)
            server.kill()
            time.sleep(0.5)
            server.start()
        result, lost = end_of(context, process)
        if lost:
            raise Failed(f"{lost} pages lost, though the server came back: {result.stderr}")
    with Server(context) as server:
        # While pages are written, which then have nowhere to go, for longer than memory is waited for elsewhere.
        until = f'until [ "$(redis-cli -p {server.port} DBSIZE)" -gt 20 ]; do sleep 0.05; done'
        stop, go_on = (f"kill -{name} {server.process.pid}" for name in ("STOP", "CONT"))
        pause = subprocess.Popen(["sh", "-c", f"{until}; {stop}; sleep 15; {go_on}"])
        try:
            process = context.spawn_until_ready(argv_of(context, server.url))
            if pause.poll() is None:
                raise Failed("all was written before the server went on")
        finally:
            pause.kill()
            pause.wait()
        result, lost = end_of(context, process)
        if lost:
            raise Failed(f"{lost} pages lost, though the server went on: {result.stderr}")
    with Server(context, "--maxmemory", "12mb") as server:
        program = context.compile("far_pages", "-O2")
        argv = context.quire_argv([program, str(PAGES_MIB), "0"], BUDGET, None, ("--far", server.url))
        result = context.wait(context.spawn(argv))
        if result.status != 137 or "takes no pages" not in result.stderr or "out of memory" not in result.stderr:
            raise Failed(f"full: {result.status}, {result.stderr[-800:]}")
    with Server(context) as server:
        process = context.spawn_until_ready(argv_of(context, server.url))
        segments = [key for key in server.keys() if not key.endswith(":lease") and ":runs:" not in key]
        for key in segments[: len(segments) // 2]:
            server.cli("SETRANGE", key, 4000, "changed")
        server.cli("UNLINK", *segments[len(segments) // 2 + 5 :])
        result, lost = end_of(context, process)
        if not 1000 < lost < TOTAL or "cannot be had" not in result.stderr:
            raise Failed(f"{lost} lost: {result.stderr}")
        context.note(f"{lost} of {TOTAL} lost with their keys")


@case("far-dead", needs=("redis-server",))
def far_dead(context):
    """The server or the supervisor is killed for good: what is far is SIGBUS, what is not goes on."""
    if context.pretend:
        return
    for victim in ("server", "supervisor"):
        with Server(context) as server:
            process = context.spawn_until_ready(argv_of(context, server.url))
            if victim == "server":
                server.kill()
            else:
                os.kill(process.pid, signal.SIGKILL)
            process.go.write(b"go\n")
            process.go.close()
            wait_for(lambda: "wrong" in process.out_path.read_text(), "the program's end", 120)
            found = re.search(r"right (\d+) lost (\d+) wrong (\d+)", process.out_path.read_text())
            right, lost, wrong = map(int, found.groups())
            if wrong or right + lost != TOTAL or right < 500 or lost < 1000:
                raise Failed(f"{victim}: {right} right, {lost} lost, {wrong} wrong")
            context.wait(process)
            context.note(f"{victim}: {lost} of {TOTAL} lost")


@case("far-cluster", needs=("redis-server",))
def far_cluster(context):
    """A cluster of three masters with a replica each, of which one is killed: nothing is lost."""
    if context.pretend:
        return
    with Cluster(context) as cluster:
        process = context.spawn_until_ready(argv_of(context, cluster.url, seconds=20))
        process.go.write(b"go\n")
        time.sleep(3)
        victim = cluster.masters()[0]
        victim.kill()
        result, lost = end_of(context, process)
        if lost:
            raise Failed(f"{lost} pages lost with a master: {result.stderr}")
        cluster.nodes.remove(victim)
        left = cluster.keys()
        if left:
            raise Failed(f"left on the servers: {left[:5]}")


def library(context, name):
    """The demo's program and its data."""
    data = context.tmp / "library"
    if not data.exists():
        subprocess.run([sys.executable, DEMO / "generate.py", data], check=True)
    return [sys.executable, DEMO / "library.py", data, context.tmp / f"phases.{name}"]


@case("far-demo", needs=("redis-server",), long_only=True)
def far_demo(context):
    """CPython's database in an eighth of its memory on a cluster: a master dies; then all of them do."""
    if context.pretend:
        return
    bare = context.bare(library(context, "bare"))
    with Cluster(context) as cluster:

        def start(name):
            argv = context.quire_argv(library(context, name), 52 * MIB, None, ("--far", cluster.url))
            return context.spawn(argv)

        process = start("one")
        time.sleep(15)
        victim = cluster.masters()[0]
        victim.kill()
        result = context.wait(process)
        if result.status != 0 or result.text != bare.text:
            raise Failed(f"with a master less: {result.status}: {result.stderr[-1000:]}")
        context.within_budget(result)
        context.note(f"{bare.seconds:.1f} s bare, {result.seconds:.1f} s")
        cluster.nodes.remove(victim)
        wait_for(lambda: not cluster.keys(), "nothing is left there")
        process = start("none")
        time.sleep(15)
        for node in cluster.nodes:
            node.kill()
        result = context.wait(process)
        ends = {128 + signal.SIGBUS: "cannot be had", 128 + signal.SIGKILL: "nothing more went to"}
        if ends.get(result.status, "no end") not in result.stderr:
            raise Failed(f"without a server: {result.status}: {result.stderr[-1000:]}")
        if not bare.text.startswith(result.text):
            raise Failed(f"something wrong before the end: {result.text[-500:]}")


@case("far-faults", needs=("redis-server",), long_only=True)
def far_faults(context):
    """A minute of faults at random: server, supervisor and member killed, connections torn, the server stopped."""
    if context.pretend:
        return
    chance = random.Random(7)
    with Server(context, "--appendonly", "yes", "--appendfsync", "always") as server:
        end = time.monotonic() + 60
        counts = dict.fromkeys(("server", "torn", "stopped", "member", "supervisor"), 0)
        while time.monotonic() < end:
            # Two members, of which one may go; each says what its pages were.
            program = context.compile("far_pages", "-O2")
            both = f"{program} 32 6 < {context.tmp}/lines & one=$!; echo one $one; {program} 32 6 < {context.tmp}/lines & wait"
            (context.tmp / "lines").write_text("go\n")
            argv = context.quire_argv(["sh", "-c", both], 2 * BUDGET, None, ("--far", server.url))
            process = context.spawn(argv)
            wait_for(lambda: process.out_path.read_text().count("ready") == 2, "both have begun", 60)
            victims = chance.choices(sorted(counts), k=4)
            for victim in victims:
                time.sleep(chance.random() * 2)
                counts[victim] += 1
                if victim == "server":
                    server.kill()
                    time.sleep(chance.random())
                    server.start()
                elif victim == "torn":
                    server.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                elif victim == "stopped":
                    server.process.send_signal(signal.SIGSTOP)
                    time.sleep(chance.random() * 2)
                    server.process.send_signal(signal.SIGCONT)
                elif victim == "member":
                    kill_if_there(int(re.search(r"one (\d+)", process.out_path.read_text())[1]))
                else:
                    kill_if_there(process.pid)
            context.wait(process)
            expected = 1 if "member" in victims else 2
            wait_for(lambda: process.out_path.read_text().count("wrong") >= expected, f"the end after {victims}", 120)
            for right, lost, wrong in re.findall(r"right (\d+) lost (\d+) wrong (\d+)", process.out_path.read_text()):
                if int(wrong) or int(right) + int(lost) != 32 * 256:
                    raise Failed(f"{victims}: {right} right, {lost} lost, {wrong} wrong")
                if int(lost) and "supervisor" not in victims:
                    raise Failed(f"{victims}: {lost} lost, though the server was there")
        # The leases of runs that were killed are over; the next run takes what they left along.
        for lease in (key for key in server.keys() if key.endswith(":lease")):
            server.cli("UNLINK", lease)
        last = context.wait(context.spawn(context.quire_argv(["sleep", "2"], BUDGET, None, ("--far", server.url))))
        if last.status != 0 or server.keys():
            raise Failed(f"left on the server: {server.keys()[:5]} {last.stderr}")
        context.note(", ".join(f"{name} {count}" for name, count in counts.items()))


def kill_if_there(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
