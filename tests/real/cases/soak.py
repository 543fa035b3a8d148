"""Redis, a sort and a build in turn, in one run at a quarter of what they want, while members are killed
at random: who is not killed is right, and the accounts are those of who is left.

`QUIRE_SOAK_SECONDS` says for how long (a minute, where it is not set).
"""

import itertools
import json
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cases import resp
from cases.builds import Build
from cases.forks import accounts, accounts_of
from cases.programs import write_text
from harness import MIB, Failed, case, descendants

# A budget in which nothing needs to go.
ROOMY = 1024 * MIB
# In which a victim is killed, from its start.
KILLED_WITHIN_SECONDS = 8.0


def kill(pid):
    """Whether there was such a process."""
    try:
        os.kill(pid, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False


def open_files(pid):
    """What a supervisor has open, sorted, but for those by which it learns how its latest members ended."""
    entries = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted(re.sub(r"\d+", "", entry) for entry in entries if "[pidfd]" not in entry)


class Kind:
    def use(self):
        """Nobody talks to it."""


class Sort(Kind):
    name = "sort"

    def __init__(self, context):
        self.text = context.tmp / "text"
        write_text(self.text, 40)
        self.argv = ["sort", "-S", "1G", "--parallel=2", str(self.text)]
        self.expected = context.bare(self.argv, env={"LC_ALL": "C"}).stdout.read_bytes()

    def is_right(self, job):
        return job.out.read_bytes() == self.expected


class Make(Kind):
    name = "build"

    def __init__(self, context):
        self.build = Build(context)
        self.argv = [str(word) for word in self.build.argv]
        context.bare(self.argv)
        self.expected = self.build.take_objects()

    def is_right(self, job):
        return self.build.take_objects() == self.expected


class Redis:
    name = "redis"

    def __init__(self, context):
        self.count = 40 * MIB // resp.VALUE_BYTES
        self.socket = str(context.tmp / "redis")
        self.argv = ["redis-server", "--port", "0", "--unixsocket", self.socket, "--save", ""]
        self.argv += ["--dir", str(context.tmp)]
        self.wrong = None

    def use(self):
        """Fills it, forks it, and reads all that it has."""
        self.wrong = None
        try:
            client = resp.connect(self.socket, patience_seconds=60)
            resp.fill(client, self.count)
            client.call("BGSAVE")
            self.wrong = resp.check(client, self.count)
            resp.wait_for_dump(client, patience_seconds=600)
            client.send("SHUTDOWN", "NOSAVE")
        except (Failed, OSError) as error:
            self.wrong = [str(error)]

    def is_right(self, job):
        return self.wrong == []


class Job:
    """A program in the background of the run's shell."""

    numbers = itertools.count(1)

    def __init__(self, context, kind):
        base = context.tmp / f"job{next(Job.numbers)}"
        self.kind = kind
        self.out, self.status = base.with_suffix(".out"), base.with_suffix(".status")
        self.pid_file, script = base.with_suffix(".pid"), base.with_suffix(".sh")
        words = " ".join(kind.argv)
        script.write_text(
            f"echo $$ > {self.pid_file}\n{words} > {self.out} 2>&1 < /dev/null\n"
            f"echo $? > {self.status}.new\nmv {self.status}.new {self.status}\n"
        )
        self.line = f"LC_ALL=C sh {script} &\n"

    def pid(self, patience_seconds=120):
        deadline = time.monotonic() + patience_seconds
        while not (self.pid_file.exists() and self.pid_file.read_text().strip()):
            if time.monotonic() > deadline:
                raise Failed(f"{self.kind.name} does not start")
            time.sleep(0.01)
        return int(self.pid_file.read_text())

    def kill_one(self, rng):
        """Kills a process of it, if there is one still."""
        pid = self.pid()
        time.sleep(rng.uniform(0, KILLED_WITHIN_SECONDS))
        alive = [victim for victim, _, state in descendants(pid) if state != "Z"]
        return bool(alive) and kill(rng.choice(alive))

    def end(self, patience_seconds):
        """The status, once it has ended."""
        deadline = time.monotonic() + patience_seconds
        while not self.status.exists():
            if time.monotonic() > deadline:
                raise Failed(f"{self.kind.name} does not end")
            time.sleep(0.05)
        return int(self.status.read_text())


class Soak:
    """A run that stands for as long as its shell is told to."""

    def __init__(self, context, memory_bytes):
        self.context, self.killed = context, 0
        self.swap, fifo = context.swap_directory(), context.tmp / "input"
        os.mkfifo(fifo)
        # Both ends, so that neither opening waits for the other.
        self.pipe = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
        command = context.quire_argv(["sh"], memory_bytes, self.swap)
        self.process = context.spawn(command, stdin=fifo)
        self.descriptors = None
        self.first = None

    def start(self, kind):
        job = Job(self.context, kind)
        os.write(self.pipe, job.line.encode())
        return job

    def turn(self, kind, victim, rng):
        """One job that must be right, beside one of which a process is killed."""
        doomed = self.start(victim)
        checked = self.start(kind)
        with ThreadPoolExecutor(1) as killer:
            killed = killer.submit(doomed.kill_one, rng)
            kind.use()
        self.killed += killed.result()
        status = checked.end(self.context.watchdog_seconds)
        if status != 0 or not kind.is_right(checked):
            said = checked.out.read_bytes()[-1000:].decode(errors="replace")
            raise Failed(f"{kind.name} ended with {status}, and is not right: {said}")
        self.end_of(doomed)
        if not self.context.pretend:
            self.check_accounts()
        for job in (doomed, checked):
            job.out.unlink(missing_ok=True)

    def end_of(self, doomed):
        """What is left of a job of which a process was killed is killed as well."""
        own = {self.process.pid, self.shell()}
        for pid, _, state in descendants(os.getpid()):
            if state != "Z" and pid not in own:
                kill(pid)
        if isinstance(doomed.kind, Make):
            for made in doomed.kind.build.objects:
                made.unlink(missing_ok=True)

    def shell(self):
        """The program of the run: its first process."""
        self.first = self.first or descendants(self.process.pid)[0][0]
        return self.first

    def check_accounts(self):
        """The tree has what its shell has, and the supervisor as many descriptors as before."""
        os.write(self.pipe, b"wait\n")
        accounts_of(self.context, self.process, members=1, patience_seconds=120)
        deadline = time.monotonic() + 10
        # The shell works still, on what it was told.
        while wrong := self.wrong_accounts():
            if time.monotonic() > deadline:
                raise Failed(f"the accounts are not those of the shell: {wrong}")
            time.sleep(0.1)
        descriptors = open_files(self.process.pid)
        if self.descriptors not in (None, descriptors):
            raise Failed(f"the supervisor has {descriptors}, it had {self.descriptors}")
        self.descriptors = descriptors

    def wrong_accounts(self):
        """What the tree has and its last member has not."""
        tree, shell = accounts(self.context, self.process.pid), accounts(self.context, self.shell())
        words = "held_pages", "wanted_pages", "managed_pages", "pool_pages", "swap_file_pages"
        return {word: (tree[word], shell[word]) for word in words if tree[word] != shell[word]}

    def close(self):
        os.write(self.pipe, b"exit 0\n")
        result = self.context.wait(self.process, self.context.watchdog_seconds + self.seconds())
        os.close(self.pipe)
        self.context.nothing_left(self.process.pid, self.swap)
        if result.status != 0:
            raise Failed(f"the run ended with {result.status}: {result.stderr[-2000:]}")
        if not self.context.pretend:
            self.context.within_budget(result)
        if "the kernel killed" in result.stderr:
            raise Failed(result.stderr[-2000:])

    def seconds(self):
        return time.monotonic() - self.process.started_at


def wanted_bytes(context, kind):
    """What a job wants where all of it fits."""
    soak = Soak(context, ROOMY)
    job = soak.start(kind)
    kind.use()
    status = job.end(context.watchdog_seconds)
    if status != 0 or not kind.is_right(job):
        raise Failed(f"{kind.name} ended with {status} where all fits")
    soak.close()
    Path(context.tmp / "input").unlink()
    return 0 if context.pretend else json.loads(context.stats.read_text())["wanted_bytes_max"]


@case("soak", long_only=True, needs=("redis-server", "sort", "make", "cc"))
def soak_in_turn(context):
    """Each in turn must be right beside another of which a process is killed."""
    kinds = [Redis(context), Sort(context), Make(context)]
    wanted = [wanted_bytes(context, kind) for kind in kinds]
    memory = max((sum(wanted) - min(wanted)) // 4, 16 * MIB)
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    deadline = time.monotonic() + float(os.environ.get("QUIRE_SOAK_SECONDS", 60))
    soak, turns = Soak(context, memory), 0
    try:
        while turns < len(kinds) or time.monotonic() < deadline:
            kind = kinds[turns % len(kinds)]
            victim = rng.choice([other for other in kinds if other is not kind])
            soak.turn(kind, victim, rng)
            turns += 1
    except Failed as failed:
        said = soak.process.err_path.read_text(errors="replace")[-2000:]
        status = soak.process.poll()
        raise Failed(f"turn {turns}, seed {seed}: {failed}; the run, status {status}: {said}") from None
    soak.close()
    wants = ", ".join(f"{kind.name} {want >> 20}" for kind, want in zip(kinds, wanted))
    context.note(f"{turns} turns, {soak.killed} killed; in {memory >> 20} MiB, they want {wants} MiB")
