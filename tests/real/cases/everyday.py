"""What a person does with Quire every day: installs it, runs something, looks at it."""

import errno
import gzip
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from harness import HERE, MIB, Failed, case, descendants

REPOSITORY = HERE.parent.parent


def run_or_fail(argv, **how):
    ran = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False, **how)
    if ran.returncode != 0:
        raise Failed(f"{argv}: {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def files_below(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def runs(quire):
    """Whether an installed quire runs a program."""
    program = "print(sum(map(len, [bytes(4096)] * 10000)))"
    said = run_or_fail([quire, "run", "-q", "--memory", 32 * MIB, "--", sys.executable, "-c", program])
    if said != "40960000\n":
        raise Failed(f"{quire} run: {said}")
    version = run_or_fail([quire, "--version"])
    if not re.fullmatch(r"quire \d+\.\d+\.\d+( \(\w+(-modified)?\))?\n", version):
        raise Failed(f"{quire} --version: {version}")


@case("package", needs=("dpkg-deb", "objdump", "make", "bash"))
def package(context):
    """The packages are made, installed into an empty root, used from there, and removed."""
    folder, root = context.tmp / "packages", context.tmp / "root"
    release = Path(context.quire).resolve().parent
    made = run_or_fail(["scripts/package.sh", release, "0.0.1", folder], cwd=REPOSITORY)
    archive, package = made.split()

    # A root of its own: nothing of it is in the machine's database of packages.
    for place in ("var/lib/dpkg/info", "var/lib/dpkg/updates", "var/log"):
        (root / place).mkdir(parents=True)
    for name in ("status", "available"):
        (root / "var/lib/dpkg" / name).touch()
    dpkg = ["dpkg", f"--root={root}", "--force-depends", "--force-not-root", "--log=/dev/null"]
    run_or_fail([*dpkg, "--install", package])
    runs(root / "usr/bin/quire")
    page = gzip.decompress((root / "usr/share/man/man1/quire-run.1.gz").read_bytes()).decode()
    if "swap\\-file" not in page or "QUIRE_MEMORY" not in page:
        raise Failed(f"quire-run(1) does not describe its options:\n{page[:500]}")
    if not (root / "usr/share/man/man7/quire.7.gz").exists():
        raise Failed("there is no quire(7)")
    completion = root / "usr/share/bash-completion/completions/quire"
    script = f"source {completion}; COMP_WORDS=(quire run --mem); COMP_CWORD=2; _quire quire --mem run; echo ${{COMPREPLY[@]}}"
    completed = run_or_fail(["bash", "-c", script]).split()
    if completed != ["--memory", "--memory-per-process", "--members-max"]:
        raise Failed(f"bash completes --mem as {completed}")
    run_or_fail([*dpkg, "--purge", "quire"])
    left = files_below(root / "usr") if (root / "usr").exists() else []
    if left:
        raise Failed(f"left behind: {left}")

    run_or_fail(["tar", "-xzf", archive, "-C", context.tmp])
    [unpacked] = context.tmp.glob("quire-0.0.1-linux-*")
    runs(unpacked / "bin/quire")
    context.note(f"{Path(package).stat().st_size >> 10} KiB")


def on_a_terminal(argv, timeout_seconds):
    """Runs a program with a terminal as its standard error; what it wrote there."""
    leader, follower = pty.openpty()
    process = subprocess.Popen([str(word) for word in argv], stdout=subprocess.DEVNULL, stderr=follower)
    os.close(follower)
    written = b""
    try:
        while select.select([leader], [], [], timeout_seconds)[0]:
            try:
                more = os.read(leader, 4096)
            except OSError:
                break  # The last process that had it has ended.
            if not more:
                break
            written += more
        if process.wait(timeout=timeout_seconds) != 0:
            raise Failed(f"status {process.returncode}: {written!r}")
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    return written.decode()


@case("progress")
def progress(context):
    """A line a second on a terminal, and none elsewhere."""
    program = "import time\nheld = bytearray(48 << 20)\nheld[::4096] = b'1' * len(held[::4096])\ntime.sleep(3)"
    argv = context.quire_argv([sys.executable, "-c", program], 32 * MIB, None, ["--progress"])
    shown = on_a_terminal(argv, context.watchdog_seconds)
    line = r"quire: wants [\d.]+ MiB, holds [\d.]+ MiB of 32 MiB, waits \d+\.\d\d s a second\r"
    lines = re.findall(r"\x1b\[K" + line, shown)
    if len(lines) < 2:
        raise Failed(f"{len(lines)} lines: {shown!r}")
    if not re.search(r"\r\x1b\[Kquire: wanted", shown):
        raise Failed(f"the line is not taken away at the end: {shown!r}")
    elsewhere = context.managed([sys.executable, "-c", program], 32 * MIB, None, ["--progress"])
    if "waits" in elsewhere.stderr:
        raise Failed(f"it writes where no terminal is: {elsewhere.stderr}")
    context.note(f"{len(lines)} lines")


def fetched(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


def wait_for(what, find, seconds=30):
    """What `find` finds, once it finds something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            found = find()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            found = None
        if found:
            return found
        time.sleep(0.2)
    raise Failed(f"{what} has not come within {seconds} s")


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def scraped_by_prometheus(context, target, query):
    """What a Prometheus of its own knows of a target."""
    port = free_port()
    config = context.tmp / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: quire, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    argv = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={context.tmp / 'tsdb'}"]
    server = context.spawn([*argv, f"--web.listen-address=127.0.0.1:{port}"])
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        return wait_for("a sample in Prometheus", lambda: json.loads(fetched(url))["data"]["result"])
    finally:
        server.terminate()
        server.wait()


@case("metrics", needs=("prometheus",))
def metrics(context):
    """What `quire metrics` serves is what a real Prometheus knows; a port that is taken is said."""
    held = "import time; held = bytearray(20 << 20); held[::4096] = b'1' * len(held[::4096]); time.sleep(600)"
    run = context.spawn([context.quire, "run", "-q", "--memory", 64 * MIB, "--", sys.executable, "-c", held])
    target = f"127.0.0.1:{free_port()}"
    server = context.spawn([context.quire, "metrics", "--listen", target])
    try:
        line = re.compile(rf'quire_held_bytes{{pid="{run.pid}",.*}} (\d+)')

        def enough():
            found = line.search(fetched(f"http://{target}/metrics"))
            return found and int(found[1]) > 20 * MIB

        wait_for("what the run holds", enough)
        query = f'quire_held_bytes{{pid="{run.pid}"}}'
        [sample] = scraped_by_prometheus(context, target, query)
        if not 20 * MIB < int(sample["value"][1]) <= 64 * MIB:
            raise Failed(f"Prometheus has {sample}")
        try:
            fetched(f"http://{target}/other")
            raise Failed("there is something at another path")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        again = context.bare([context.quire, "metrics", "--listen", target])
        if again.status != 125 or f"cannot listen on {target}" not in again.stderr:
            raise Failed(f"a port that is taken: {again.status} {again.stderr}")
        printed = context.bare([context.quire, "metrics"])
        if not line.search(printed.text) or not printed.text.endswith("# EOF\n"):
            raise Failed(f"it prints {printed.text}")
    finally:
        for process in (server, run):
            process.terminate()
            process.wait()
    context.note(f"Prometheus has {int(sample['value'][1]) >> 20} MiB")


@case("top", needs=("tmux",))
def top(context):
    """`quire top` on a terminal of 80 by 24: it shows a run and its processes, and leaves the terminal as it was."""
    held = "import time; held = bytearray(48 << 20); held[::4096] = b'1' * len(held[::4096]); time.sleep(600)"
    run = context.spawn([context.quire, "run", "-q", "--memory", 32 * MIB, "--", sys.executable, "-c", held])
    tmux = ["tmux", "-L", f"quire-test-{os.getpid()}", "-f", "/dev/null"]
    shell = f"{context.quire} top --delay 0.3; echo over $?; sleep 600"
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "TERM": "xterm"}

    def screen():
        return run_or_fail([*tmux, "capture-pane", "-p"])

    def shows(pattern):
        return lambda: re.search(pattern, screen(), re.MULTILINE)

    run_or_fail([*tmux, "new-session", "-d", "-x", "80", "-y", "24", "sh", "-c", shell], env=environment)
    try:
        number = r"\d+(\.\d)?"
        run_line = rf"^ +{run.pid} +{number}M +32M +{number}M +{number}[BKM] .* python"
        wait_for("the run's line", shows(run_line))
        process = rf"^ +\d+ sleeping +{number}M +{number}M .*python"
        wait_for("its process's line", shows(process))
        if any(len(line) > 80 for line in screen().splitlines()) or "q quit" not in screen():
            raise Failed(f"it does not fit:\n{screen()}")
        run_or_fail([*tmux, "send-keys", "/", "nothing", "Enter"])
        wait_for("the filter's line", shows('no run whose command has "nothing"'))
        run_or_fail([*tmux, "send-keys", "Escape"])
        wait_for("the run again", shows(run_line))
        run.terminate()
        run.wait()
        wait_for("the end of the run", shows("no run that this user may look into"))
        run_or_fail([*tmux, "send-keys", "q"])
        wait_for("its end", shows("^over 0"))
        if "q quit" in screen():
            raise Failed(f"it leaves the terminal otherwise:\n{screen()}")
    except Failed as failed:
        raise Failed(f"{failed}\n{screen()}") from None
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
        run.kill()
        run.wait()
    none = context.bare([context.quire, "top"])
    if none.status != 125 or "needs a terminal" not in none.stderr:
        raise Failed(f"without a terminal: {none.status} {none.stderr}")


@case("setup", needs=("root", "unshare", "setpriv", "groupadd"))
def setup(context):
    """As the user without rights that a machine's administrator lets run quire, and no more after that."""
    quire = context.quire
    script = """set -e
root=$(mktemp -d); etc=$root/etc; mkdir $etc
cp -a /etc/. $etc/
mount --bind $etc /etc
mkdir $root/dev; mount -t tmpfs none $root/dev
mknod -m 600 $root/dev/u c $(printf '%d %d' 0x$(stat -c %t /dev/userfaultfd) 0x$(stat -c %T /dev/userfaultfd))
mount --bind $root/dev/u /dev/userfaultfd
as() { setpriv --reuid=65534 --regid=65534 --bounding-set=-all --inh-caps=-all "$@"; }
as --clear-groups $1 doctor --fix > $root/fix && exit 3
grep -q '^sudo quire setup' $root/fix || exit 4
$1 setup --user nobody
test "$(stat -c '%a %G' /dev/userfaultfd)" = '660 quire' || exit 5
getent group quire | grep -q ':nobody$' || exit 6
id=$(getent group quire | cut -d: -f3)
as --groups=$id $1 run -q --no-cgroup -m 32M -- sh -c 'echo right'
as --clear-groups $1 doctor > /dev/null && exit 7
$1 setup --user nobody > /dev/null
$1 setup --remove > /dev/null
test "$(stat -c '%a %G' /dev/userfaultfd)" = '600 root' || exit 8
getent group quire && exit 9
test ! -e /etc/udev/rules.d/60-quire.rules
"""
    run = ["unshare", "--mount", "sh", "-c", script, "sh", quire]
    ran = subprocess.run(run, capture_output=True, text=True, check=False, cwd=context.tmp,
                         env={**os.environ, "TMPDIR": str(context.tmp)})
    if ran.returncode != 0 or "right\n" not in ran.stdout:
        raise Failed(f"{ran.returncode}: {ran.stdout}{ran.stderr}")
    refused = subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", quire, "setup"], capture_output=True,
                             text=True, check=False)
    if refused.returncode != 125 or "run it as root" not in refused.stderr:
        raise Failed(f"{refused}")


SECRET = """
import random, sys
source = random.Random(4)
pages = [source.randbytes(4000) + b"a secret of the program's " + source.randbytes(70) for _ in range(12_000)]
print("ready", flush=True)
sys.stdin.readline()
source = random.Random(4)
for page in pages:
    assert page == source.randbytes(4000) + b"a secret of the program's " + source.randbytes(70)
"""


def swap_file_of(pid):
    """The file without a name that a supervisor has in its folder for swap."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        if "/swap/" in os.readlink(descriptor):
            return descriptor
    raise Failed("the run has no swap file")


@case("swap-encrypt")
def swap_encrypt(context):
    """What lies in the swap file can be read without the option, and cannot be with it."""
    shown = {}
    for options in ((), ("--swap-encrypt",)):
        swap = context.swap_directory()
        run = context.spawn_until_ready(
            context.quire_argv([sys.executable, "-c", SECRET], 24 * MIB, swap, options)
        )
        # Its first part: it is as long as it may become, and segments are taken from the beginning on.
        with swap_file_of(run.pid).open("rb") as file:
            content = file.read(64 * MIB)
        shown[options] = content.count(b"a secret of the program's ")
        if content.count(0) > len(content) // 2:
            raise Failed("little is in the swap file")
        context.go_on(run)
        context.nothing_left(run.pid, swap)
    if shown[()] < 1000 or shown[("--swap-encrypt",)] != 0:
        raise Failed(f"seen in the file: {shown}")


LOOKED_AT = """
import ctypes, sys
pages = [bytes([number % 251]) * 8192 for number in range(6_000)]
for page in pages:
    print(id(page) + bytes.__basicsize__ - 1)
sum(page[5000] for page in pages[:200])
print("ready", flush=True)
sys.stdin.readline()
assert all(page == bytes([number % 251]) * 8192 for number, page in enumerate(pages))
"""


@case("looked-at", needs=("root",))
def looked_at(context):
    """A debugger's look (/proc/PID/mem) at a page that has left memory is EIO, and never other bytes than its own."""
    swap = context.swap_directory()
    run = context.spawn_until_ready(context.quire_argv([sys.executable, "-c", LOOKED_AT], 16 * MIB, swap))
    addresses = [int(line) for line in run.out_path.read_text().split()[:-1]]
    program = next(pid for pid, command, _ in descendants(run.pid) if command.startswith("python"))
    seen, gone = 0, 0
    with open(f"/proc/{program}/mem", "rb", buffering=0) as memory:
        for number, address in enumerate(addresses):
            # Bytes of one page.
            at = (address + 4095) // 4096 * 4096
            try:
                memory.seek(at)
                content = memory.read(64)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                gone += 1
                continue
            seen += 1
            if content != bytes([number % 251]) * 64:
                raise Failed(f"{at:#x} has {content[:8]!r}, not {number % 251}")
    context.go_on(run)
    context.nothing_left(run.pid, swap)
    if gone == 0 or seen == 0:
        raise Failed(f"{seen} pages were seen, {gone} not: nothing was tried")
    context.note(f"{seen} pages seen, {gone} EIO")


DUMPED = """
import os, resource, sys
os.chdir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
""" + LOOKED_AT.replace("% 251", "% 250 + 1")


def pages_in_core(path, addresses):
    """What a core dump has for the page at each address: 64 bytes, or None."""
    with path.open("rb") as core:
        head = core.read(64)
        headers_at, header_bytes, headers = *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54)
        core.seek(headers_at)
        loads = [struct.unpack_from("<IIQQQQ", core.read(header_bytes)) for _ in range(headers)]
        for address in addresses:
            held = [
                offset + address - start
                for kind, _, offset, start, _, length in loads
                if kind == 1 and start <= address < start + length
            ]
            core.seek(held[0] if held else 0)
            yield core.read(64) if held else None


@case("core-dump", needs=("root", "gcore"))
def core_dump(context):
    """A core dump has a page's own bytes or zeros, which is stated; writing one neither ends a run nor takes memory.

    gdb writes one of a program that goes on, and the kernel one of a program that aborts.
    """
    cores = context.tmp / "cores"
    cores.mkdir()
    notes = []
    for by in ("gdb", "kernel"):
        swap = context.swap_directory()
        argv = [sys.executable, "-c", DUMPED, str(cores)]
        run = context.spawn_until_ready(context.quire_argv(argv, 40 * MIB, swap, whole=True))
        # Of each value the first whole page.
        addresses = [(int(line) + 4095) // 4096 * 4096 for line in run.out_path.read_text().split()[:-1]]
        program = next(pid for pid, command, _ in descendants(run.pid) if command.startswith("python"))
        if by == "gdb":
            gcore = ["gcore", "-o", str(cores / "of-gdb"), str(program)]
            done = subprocess.run(gcore, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                raise Failed(f"gcore: {done.stderr[-1000:]}")
            context.go_on(run)
        else:
            os.kill(program, signal.SIGABRT)
            with run.go:
                status = context.wait(run).status
            if status != 128 + signal.SIGABRT:
                raise Failed(f"{status} after an abort")
        written = list(cores.iterdir())
        if not written and by == "kernel":
            notes.append("the machine's kernel.core_pattern puts the kernel's elsewhere")
            continue
        found = list(pages_in_core(written[0], addresses))
        wrong = [at for at, page in enumerate(found) if page not in (None, bytes(64), bytes([at % 250 + 1]) * 64)]
        own = sum(page not in (None, bytes(64)) for page in found)
        if wrong or own == len(found):
            raise Failed(f"{by}: {len(wrong)} pages with bytes that are not their own, {own} of {len(found)} in it")
        notes.append(f"{by}: {own} of {len(found)} pages")
        written[0].unlink()
        context.nothing_left(run.pid, swap)
    context.note(", ".join(notes))
