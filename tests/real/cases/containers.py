"""Quire where it was never before: a clean Debian, a container without root, and a machine with a newer kernel."""

import json
import os
import pwd
import re
import shutil
import statistics
import subprocess
from contextlib import contextmanager
from pathlib import Path

from cases.everyday import REPOSITORY, run_or_fail
from harness import HERE, Failed, case


def debian(context, packages="python3-minimal"):
    """A clean Debian 12 with Quire's package and a program in it, in a folder."""
    root = context.tmp / "root"
    run_or_fail(["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root])
    made = run_or_fail(["scripts/package.sh", Path(context.quire).resolve().parent, "0.0.1", context.tmp / "packages"],
                       cwd=REPOSITORY)
    (root / "quire.deb").write_bytes(Path(made.split()[1]).read_bytes())
    (root / "srv/train.py").write_text("print(sum(map(len, [bytes([n % 251]) * 4096 for n in range(50_000)])))\n")
    return root


IN_ROOT = """set -e
mount -t proc proc $1/proc; mount -t sysfs sysfs $1/sys
mount -t tmpfs tmpfs $1/dev
for device in null zero urandom userfaultfd; do touch $1/dev/$device; mount --bind /dev/$device $1/dev/$device; done
files() { (cd $1; find . -xdev -not -path './dev/*' -not -path './proc/*' -not -path './sys/*' | sort); }
files $1 > $2/before
chroot $1 dpkg -i /quire.deb
chroot $1 quire doctor > $2/doctor || test "$(grep -c '^  MISSING' $2/doctor)" = 1
cd /
chroot $1 sh -c 'cd /srv; quire run --memory 512M -- python3 train.py' > $2/trained
chroot $1 dpkg --purge quire
files $1 > $2/after
"""


@case("debian-root", long_only=True, needs=("root", "debootstrap", "unshare", "chroot", "dpkg-deb"))
def debian_root(context):
    """A clean Debian 12: the package installs, doctor is content, README's first example runs, and removal leaves
    nothing."""
    root = debian(context)
    run_or_fail(["unshare", "--mount", "--pid", "--fork", "sh", "-c", IN_ROOT, "sh", root, context.tmp])
    before, after = ((context.tmp / name).read_text().splitlines() for name in ("before", "after"))
    left = sorted(set(after) - set(before))
    # dpkg's own, and the loader's cache.
    left = [path for path in left if not path.startswith(("./var/lib/dpkg/", "./var/log/", "./var/cache/"))]
    if left:
        raise Failed(f"left behind: {left}")
    trained = (context.tmp / "trained").read_text()
    if trained != "204800000\n":
        raise Failed(f"README's first example: {trained}")
    context.note((context.tmp / "doctor").read_text().strip().splitlines()[-1])


USER = "quire-podman"
# The kernel's second hierarchy, beside version 1, is more than crun can do with.
AS_USER = """set -e
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
exec setpriv --reuid $1 --regid $1 --init-groups env HOME=$2 XDG_RUNTIME_DIR=$2 sh -c "$3"
"""
PODMAN = "podman --storage-driver vfs --root $HOME/images --runroot $HOME/run --cgroup-manager cgroupfs"
IN_CONTAINER = """grep Seccomp: /proc/self/status; dpkg -i /quire.deb > /dev/null
quire doctor; quire run --memory 64M -- python3 /srv/train.py; echo status $?"""


@contextmanager
def podman(context):
    """A user without rights, with Podman and an image that has Quire in it: runs a command there."""
    if os.path.exists(f"/home/{USER}") or USER in {entry.pw_name for entry in pwd.getpwall()}:
        raise Failed(f"there is a user {USER} already")
    root = debian(context)
    (root / "srv/passes.py").write_text(PASSES)
    home = context.tmp / "home"
    run_or_fail(["useradd", "--no-create-home", USER])
    try:
        home.mkdir()
        run_or_fail(["tar", "-C", root, "-cf", home / "root.tar", "."])
        run_or_fail(["chown", "-R", f"{USER}:{USER}", home])
        os.chmod(context.tmp, 0o755)
        run_or_fail([context.quire, "setup", "--user", USER])

        def as_user(command):
            return run_or_fail(["unshare", "--mount", "sh", "-c", AS_USER, "sh", USER, home, command])

        as_user(f"{PODMAN} import $HOME/root.tar clean")
        yield lambda flags, command: as_user(
            f"{PODMAN} run --rm --cgroups=disabled --network none {flags} clean sh -c '{command}' 2>&1")
        as_user(f"{PODMAN} unshare rm -rf $HOME/images $HOME/run")
    finally:
        subprocess.run([context.quire, "setup", "--remove"], check=False, capture_output=True)
        subprocess.run(["pkill", "-KILL", "-u", USER], check=False)
        subprocess.run(["userdel", "--force", USER], check=False, capture_output=True)


PODMAN_NEEDS = ("root", "debootstrap", "podman", "crun", "newuidmap", "unshare")
FLAGS = "--device /dev/userfaultfd --group-add keep-groups"


def cdi_file():
    """What docs/containers.md has for /etc/cdi, and the device's name there."""
    text = (REPOSITORY / "docs/containers.md").read_text()
    return re.search(r"```json\n(.*?)```", text, re.DOTALL)[1], re.search(r"`--device (quire[^`]*)`", text)[1]


@case("podman-rootless", long_only=True, needs=PODMAN_NEEDS)
def podman_rootless(context):
    """In a container of Podman's without root, under its own seccomp profile: without the device doctor names the
    flags, and with them, or by CDI, a program runs."""
    content, name = cdi_file()
    file = Path("/etc/cdi/quire.json")
    with podman(context) as in_container:
        bare = in_container("", IN_CONTAINER)
        given = in_container(FLAGS, IN_CONTAINER)
        is_new = not file.parent.exists()
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        try:
            named = in_container(f"--device {name} --group-add keep-groups", IN_CONTAINER)
        finally:
            file.unlink()
            if is_new:
                file.parent.rmdir()
    if "Seccomp:\t2" not in bare or "status 125" not in bare or FLAGS not in bare:
        raise Failed(f"without the device: {bare}")
    for said in (given, named):
        if "quire run works here" not in said or "204800000\n" not in said or "status 0" not in said:
            raise Failed(f"with it: {said}")
    context.note(given.strip().splitlines()[-2])


# Pages that do not pack, read in order and at random, in less than half of what they want.
PASSES = """import os, time
noise = os.urandom(1 << 17)
held = [noise[number * 31 % 100_000 :][:4088] for number in range(40_000)]
begun = time.monotonic()
order = list(range(len(held)))
for _ in range(2):
    for number in order:
        assert held[number][0] == noise[number * 31 % 100_000]
    order = [number * 7919 % len(held) for number in order]
print("seconds", time.monotonic() - begun)
"""
# The calls for which there is another way.
REFUSED = ("io_uring_setup", "process_madvise", "process_vm_readv")


@case("podman-fallbacks", long_only=True, needs=PODMAN_NEEDS)
def podman_fallbacks(context):
    """What it costs that a seccomp profile refuses the calls for which Quire has another way: each alone, and all that
    Podman's own profile refuses, against none."""
    profiles = {
        "none": "--security-opt seccomp=unconfined",
        "podman's profile": "",
        **{call: f"--security-opt seccomp=$HOME/{call}.json" for call in REFUSED},
    }
    seconds = {name: [] for name in profiles}
    command = "dpkg -i /quire.deb > /dev/null; quire run --memory 64M --swap-file /var/tmp -- python3 /srv/passes.py"
    with podman(context) as in_container:
        for call in REFUSED:
            rule = {"names": [call], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}
            profile = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}
            (context.tmp / f"home/{call}.json").write_text(json.dumps(profile))
        for _ in range(5):
            for name, profile in profiles.items():
                said = in_container(f"{FLAGS} {profile}", command)
                seconds[name].append(float(re.search(r"seconds ([0-9.]+)", said)[1]))
    for name, spent in seconds.items():
        ratios = sorted(one / other for one, other in zip(spent, seconds["none"]))
        context.note(f"{name}: {statistics.median(spent):.2f} s, {statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})")


# The kernel of Debian 12's backports, whose modules a machine without a disk of its own loads from its memory.
NEWER_KERNEL = """set -e
cd $1/tmp
echo deb http://deb.debian.org/debian bookworm-backports main > $1/etc/apt/sources.list.d/backports.list
chroot $1 apt-get update -q
image=$(chroot $1 apt-cache depends -t bookworm-backports linux-image-cloud-amd64 |
	sed -n 's/.*Depends: \\(linux-image-[0-9].*\\)/\\1/p')
chroot $1 sh -c "cd /tmp; apt-get download -q $image/bookworm-backports"
dpkg-deb -x linux-image-*.deb $2
cp -r $2/lib/modules $1/lib/
chroot $1 depmod $(ls $1/lib/modules)
rm -rf linux-image-*.deb $1/var/lib/apt/lists $1/var/cache/apt
chroot $1 systemctl enable machine.service
truncate -s 3G $2/disk
mkfs.ext4 -q -F $2/disk
cd $1
find . -xdev | cpio -o -H newc --quiet > $2/root.cpio
"""
SERVICE = """[Unit]
After=multi-user.target
[Service]
Type=oneshot
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
ExecStart=/bin/sh /srv/machine.sh
ExecStopPost=/sbin/poweroff -f
[Install]
WantedBy=multi-user.target
"""
IN_MACHINE = """exec 2>&1
modprobe virtio_blk; mount /dev/vda /var/tmp
dpkg -i /quire.deb > /dev/null
quire doctor
cd /srv
quire run --memory 64M -- python3 train.py; echo "in a service: $?"
scope="systemd-run --scope -q -p MemoryMax=96M -p MemorySwapMax=0"
$scope python3 train.py; echo "bare in a scope: $?"
$scope quire run --memory 80M -- python3 train.py; echo "in a scope: $?"
useradd someone; quire setup --user someone
systemd-run -q --uid=someone --pipe --wait -p Delegate=yes quire run --memory 64M -- python3 /srv/train.py
echo "as a user: $?"
CI=true python3 real/run.py $(printf ' -k %s' CASES) --quire /usr/bin/quire
"""
# They need neither a compiler nor programs beyond Python and coreutils.
IN_VERSION_2 = ("whole-shared", "whole-burst", "whole-too-much", "whole-programs", "whole-set")
# QEMU 7.2 emulates cmpxchg16b wrongly. One thread has both processors: with one each, an instruction that the kernel was
# patching ran on the other ("Oops: int3").
MACHINE = """exec timeout 2100 qemu-system-x86_64 -machine q35 -cpu max,-cx16 -smp 2 -m 2G -accel tcg,thread=single -nographic \
-no-reboot -kernel $1/boot/vmlinuz-* -initrd $1/root.cpio -drive file=$1/disk,if=virtio,format=raw,cache=unsafe \
-append "rdinit=/sbin/init console=ttyS0 quiet panic=-1 systemd.show_status=no" < /dev/null
"""


@case("machine", long_only=True, needs=("root", "debootstrap", "chroot", "dpkg-deb", "cpio", "mkfs.ext4", "qemu-system-x86_64"))
def machine(context):
    """A machine, emulated, with systemd, cgroup version 2 and a newer kernel: doctor is content, programs run in services
    and scopes and for a user, and the budget is the whole."""
    root = debian(context, "python3,systemd-sysv,dbus,kmod")
    shutil.copytree(HERE, root / "srv/real")
    (root / "srv/machine.sh").write_text(IN_MACHINE.replace("CASES", " ".join(IN_VERSION_2)))
    (root / "etc/systemd/system/machine.service").write_text(SERVICE)
    made = context.tmp / "machine"
    made.mkdir()
    run_or_fail(["sh", "-c", NEWER_KERNEL, "sh", root, made])
    console = run_or_fail(["sh", "-c", MACHINE, "sh", made])
    ends = dict(re.findall(r"^(.*): (\d+)\r?$", console, re.MULTILINE))
    wanted = {"in a service": "0", "bare in a scope": "137", "in a scope": "0", "as a user": "0"}
    cases = f"{len(IN_VERSION_2)} passed, 0 failed, 0 skipped"
    said = ("version 2: the kernel checks the budget", "quire run works here", cases)
    if not wanted.items() <= ends.items() or [words for words in said if words not in console]:
        raise Failed(f"the machine said: {console[-6000:]}")
    if "no memory cgroup" in console:
        raise Failed(f"a run had no cgroup: {console}")
    context.note(f"{re.search('on (Linux [^ ]*)', console)[1]}, {cases}")
