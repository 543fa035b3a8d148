"""Runs a program twice, bare and under Quire, and holds the two against each other.

Owns: temporary directories, the watchdog with its diagnosis, the compiling of the C programs, and
the search for what a run left behind. Leaves to others: what is run (`cases/`) and which cases are
chosen (`run.py`).

The driver makes itself the reaper of its orphans, so that every process that a run started stays
below it in the process tree: what is still there after a run was left behind.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MIB = 1 << 20
PR_SET_CHILD_SUBREAPER = 36


class Failed(Exception):
    """The case found something wrong."""


class Skipped(Exception):
    """The case cannot run here: a right or a program is missing."""


@dataclass
class Result:
    """What a run printed, how it ended (128+N for signal N), how long it took, what it held."""

    stdout: Path
    stderr: str
    status: int
    seconds: float
    peak_bytes: int

    @property
    def text(self):
        return self.stdout.read_text(errors="replace")


@dataclass
class Case:
    function: object
    name: str
    long_only: bool
    needs: tuple

    def __call__(self, context):
        return self.function(context)


CASES = []


def case(name, long_only=False, needs=()):
    """Registers a test; `needs` names programs, or "root"."""

    def register(function):
        CASES.append(Case(function, name, long_only, needs))
        return function

    return register


def become_reaper():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root):
    """Every process below `root`, zombies too, as (pid, command, state)."""
    children = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            before, _, after = (entry / "stat").read_text().rpartition(")")
        except OSError:
            continue
        state, parent = after.split()[:2]
        process = (int(entry.name), before.partition("(")[2], state)
        children.setdefault(int(parent), []).append(process)
    found, queue = [], [root]
    while queue:
        for process in children.get(queue.pop(), []):
            found.append(process)
            queue.append(process[0])
    return found


def read_or(path, otherwise="?"):
    try:
        return Path(path).read_text(errors="replace").strip("\0\n ") or otherwise
    except OSError as error:
        return f"({error.strerror})"


def diagnose(root, quire):
    """Where every thread below `root` stands, to understand a hang: first what says most."""
    lines, stacks = [], []
    for pid, command, state in descendants(root):
        cmdline = read_or(f"/proc/{pid}/cmdline").replace("\0", " ")[:160]
        lines.append(f"process {pid} ({command}) {state}: {cmdline}")
        status = read_or(f"/proc/{pid}/status").splitlines()
        lines += [f"    {line}" for line in status if line.startswith(("VmRSS", "Threads", "VmHWM"))]
        names = set()
        for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda task: int(task.name)):
            name = read_or(task / "comm")
            names.add(name)
            stat = read_or(task / "stat").rpartition(")")[2].split()
            where = read_or(task / "wchan")
            lines.append(f"  task {task.name} {name} {stat[0]} ticks {stat[11:13]} {where}")
            stacks.append(f"task {task.name} {name}: {read_or(task / 'syscall')}")
            stacks += [f"    {line}" for line in read_or(task / "stack").splitlines()]
        if "quire-kswapd" in names:
            lines.append(counted_in_a_second(quire, pid))
    return "\n".join(lines + stacks)


def counted_in_a_second(quire, pid):
    """What a process counts while it seems to hang: nothing, or the same again and again."""
    argv = [quire, "stat", "-x", ",", "-e", "*", "-p", str(pid), "--", "sleep", "1"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "    in a second: no answer"
    counted = [line.split(",") for line in (done.stdout + done.stderr).splitlines()]
    counted = [f"{row[2]} {row[0]}" for row in counted if len(row) > 2 and row[0] != "0"]
    return f"    in a second: {', '.join(counted)}"


def kill_descendants(root):
    """Ends every process below `root`, and reaps those that became our children."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        alive = descendants(root)
        if not alive:
            return
        for pid, _, state in alive:
            if state != "Z":
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        reap()
        time.sleep(0.02)


def reap():
    """Collects processes that have ended; those of `subprocess` are collected by their owners."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def status_of(wait_status):
    if os.WIFSIGNALED(wait_status):
        return 128 + os.WTERMSIG(wait_status)
    return os.WEXITSTATUS(wait_status)


def quire_cgroups(pid):
    """Cgroups whose name carries the supervisor's process id."""
    found = []
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        for name in names:
            if "quire" in name and str(pid) in name:
                found.append(os.path.join(directory, name))
    return found


@dataclass
class Context:
    """What a case works with."""

    quire: str
    long: bool
    tmp: Path
    watchdog_seconds: float
    pretend: bool = False
    notes: list = field(default_factory=list)
    runs: int = 0

    def note(self, text):
        self.notes.append(text)

    @property
    def stats(self):
        return self.tmp / "stats.json"

    # Programs -------------------------------------------------------------------------------

    def compile(self, name, *flags):
        """Compiles c/NAME.c; the program is linked dynamically, as a preload library needs."""
        source, program = HERE / "c" / f"{name}.c", self.tmp / name
        command = ["cc", "-O1", "-g", "-Wall", "-Wextra", "-pthread", "-o", program, source, *flags]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            raise Failed(f"cc {name}.c:\n{built.stderr}")
        if built.stderr:
            raise Failed(f"cc {name}.c warns:\n{built.stderr}")
        return str(program)

    def quire_argv(self, argv, memory_bytes, swap=None, options=(), whole=False):
        """The command that runs `argv` under Quire with that budget, for managed memory alone or for the
        `whole`; its counters go to a file."""
        if self.pretend:
            return list(argv)
        head = [self.quire, "run", "--memory", str(memory_bytes), "--stats", str(self.stats)]
        if not whole:
            head.append("--managed-only")
        if swap:
            head += ["--swap-file", str(swap)]
        return [*head, *options, "--", *argv]

    # Runs -----------------------------------------------------------------------------------

    def spawn(self, argv, stdin=None, env=None, cwd=None):
        """Starts a process in a session of its own, its output in files."""
        self.runs += 1
        out, err = self.tmp / f"out.{self.runs}", self.tmp / f"err.{self.runs}"
        with open(stdin or os.devnull, "rb") as given, open(out, "wb") as o, open(err, "wb") as e:
            process = subprocess.Popen(
                [str(word) for word in argv],
                stdin=given,
                stdout=o,
                stderr=e,
                env={**os.environ, **(env or {})},
                cwd=cwd or self.tmp,
                start_new_session=True,
            )
        process.out_path, process.err_path = out, err
        process.started_at = time.monotonic()
        return process

    def spawn_until_ready(self, argv, patience_seconds=60):
        """Starts a program that prints "ready" and then waits for a line of input; returns once it is."""
        fifo = self.tmp / f"go.{self.runs}"
        os.mkfifo(fifo)
        go = open(fifo, "r+b", buffering=0)
        process = self.spawn(argv, stdin=fifo)
        process.go = go
        deadline = time.monotonic() + patience_seconds
        while "ready" not in process.out_path.read_text():
            if time.monotonic() > deadline or process.poll() is not None:
                raise Failed(f"it does not get ready: {read_or(process.err_path, '')}")
            time.sleep(0.05)
        return process

    def go_on(self, process):
        """Lets such a program go on, and waits for its end, which is to be a good one."""
        with process.go as go:
            go.write(b"go\n")
            result = self.wait(process)
        if result.status != 0:
            raise Failed(f"{result.status}: {result.stderr}")
        return result

    def wait(self, process, timeout_seconds=None):
        """Waits for the process; when the watchdog bites it prints where every thread stands."""
        timeout_seconds = timeout_seconds or self.watchdog_seconds
        pidfd = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            remaining = process.started_at + timeout_seconds - time.monotonic()
            if not poll.poll(max(0, remaining) * 1000):
                diagnosis = diagnose(os.getpid(), self.quire)
                kill_descendants(os.getpid())
                raise Failed(
                    f"no end after {timeout_seconds:.0f} s: {process.args}\n"
                    f"stderr: {read_or(process.err_path, '')[-2000:]}\n{diagnosis}"
                )
        finally:
            os.close(pidfd)
        seconds = time.monotonic() - process.started_at
        _, wait_status, usage = os.wait4(process.pid, 0)
        process.returncode = status_of(wait_status)
        return Result(
            process.out_path,
            read_or(process.err_path, ""),
            process.returncode,
            seconds,
            usage.ru_maxrss * 1024,
        )

    def bare(self, argv, **how):
        return self.wait(self.spawn(argv, **how))

    def managed(self, argv, memory_bytes, swap=None, options=(), whole=False, **how):
        """Runs under Quire and looks for what the run left behind."""
        process = self.spawn(self.quire_argv(argv, memory_bytes, swap, options, whole), **how)
        result = self.wait(process)
        lives_on = "live on without a supervisor" in result.stderr
        self.nothing_left(process.pid, swap, cgroups=not lives_on)
        if lives_on and quire_cgroups(process.pid):
            # They took longer to end than the supervisor waits for its cgroup: it goes with the next
            # run.
            self.wait(self.spawn([self.quire, "run", "--memory", str(64 * MIB), "true"]))
            self.nothing_left(process.pid, swap)
        if not self.pretend and result.status not in (125, 126, 127):
            self.within_budget(result)
        return result

    def within_budget(self, result):
        """Fails if the run was not managed, or held more than it was allowed to."""
        try:
            stats = json.loads(self.stats.read_text())
        except (OSError, ValueError) as error:
            raise Failed(f"no counters: {error}\nstderr: {result.stderr[-2000:]}") from None
        if stats["processes"] == 0:
            raise Failed(f"no process was managed: {result.stderr[-2000:]}")
        if stats["held_bytes_max"] > stats["budget_bytes"]:
            raise Failed(f"{stats['held_bytes_max']} held, allowed {stats['budget_bytes']}")

    def nothing_left(self, pid, swap=None, cgroups=True, patience_seconds=10):
        """Fails where a run's processes, cgroups or swap files outlive it."""
        deadline = time.monotonic() + patience_seconds
        while True:
            reap()
            left = [f"process {p} ({c}) {s}" for p, c, s in descendants(os.getpid())]
            left += [f"cgroup {path}" for path in (quire_cgroups(pid) if cgroups else ())]
            if swap:
                left += [f"file {path}" for path in Path(swap).iterdir()]
            if not left:
                return
            if time.monotonic() > deadline:
                kill_descendants(os.getpid())
                raise Failed("left behind: " + ", ".join(left))
            time.sleep(0.02)

    def swap_directory(self):
        directory = self.tmp / "swap"
        directory.mkdir(exist_ok=True)
        return directory

    def same(self, argv, memory_bytes=None, share=4, swap=False, options=(), **how):
        """Runs bare, then under Quire with `memory_bytes` (or bare's peak over `share`): the same
        output and the same end are required. Returns both results."""
        bare = self.bare(argv, **how)
        memory_bytes = memory_bytes or max(bare.peak_bytes // share, 16 * MIB)
        directory = self.swap_directory() if swap else None
        managed = self.managed(argv, memory_bytes, directory, options, **how)
        self.compare(bare, managed)
        self.note(
            f"{bare.peak_bytes >> 20} MiB in {memory_bytes >> 20} MiB,"
            f" {bare.seconds:.1f} s bare, {managed.seconds:.1f} s"
        )
        return bare, managed

    def compare(self, bare, managed):
        if managed.status != bare.status:
            raise Failed(
                f"ended with {managed.status}, bare with {bare.status}\n"
                f"stdout: {managed.text[-1000:]}\nstderr: {managed.stderr[-3000:]}"
            )
        difference = subprocess.run(
            ["cmp", bare.stdout, managed.stdout], capture_output=True, text=True, check=False
        )
        if difference.returncode != 0:
            raise Failed(
                f"other output than bare: {difference.stdout}{difference.stderr}"
                f"bare:\n{head_of(bare.stdout)}\nmanaged:\n{head_of(managed.stdout)}\n"
                f"stderr: {managed.stderr[-3000:]}"
            )


def head_of(path, limit=1500):
    with open(path, "rb") as file:
        return file.read(limit).decode(errors="replace")


def need(*needs):
    """Raises `Skipped` where one of the needs is missing."""
    for name in needs:
        if name == "root":
            if os.geteuid() != 0:
                raise Skipped("needs root")
        elif shutil.which(name) is None:
            raise Skipped(f"needs {name}")


def temporary_directory():
    """On a real file system where there is one: a swap file on tmpfs would be memory again."""
    base = os.environ.get("TMPDIR") or ("/var/tmp" if os.path.isdir("/var/tmp") else None)
    directory = Path(tempfile.mkdtemp(prefix="quire-real-", dir=base))
    # Some programs give up root before they run from here.
    directory.chmod(0o755)
    return directory
