"""Quire where it was never before: a clean Debian, and a container without root."""

import os
import pwd
import subprocess
from pathlib import Path

from cases.everyday import REPOSITORY, run_or_fail
from harness import Failed, case


def debian(context):
    """A clean Debian 12 with Quire's package and a program in it, in a folder."""
    root = context.tmp / "root"
    run_or_fail(["debootstrap", "--variant=minbase", "--include=python3-minimal", "bookworm", root])
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


@case("podman-rootless", long_only=True, needs=("root", "debootstrap", "podman", "crun", "newuidmap", "unshare"))
def podman_rootless(context):
    """In a container of Podman's without root, under its own seccomp profile: without the device doctor names the
    flags, and with them a program runs."""
    if os.path.exists(f"/home/{USER}") or USER in {entry.pw_name for entry in pwd.getpwall()}:
        raise Failed(f"there is a user {USER} already")
    root = debian(context)
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
        run = f"{PODMAN} run --rm --cgroups=disabled --network none"
        bare = as_user(f"{run} clean sh -c '{IN_CONTAINER}' 2>&1")
        flags = "--device /dev/userfaultfd --group-add keep-groups"
        given = as_user(f"{run} {flags} clean sh -c '{IN_CONTAINER}' 2>&1")
        if "Seccomp:\t2" not in bare or "status 125" not in bare or flags not in bare:
            raise Failed(f"without the device: {bare}")
        if "quire run works here" not in given or "204800000\n" not in given or "status 0" not in given:
            raise Failed(f"with it: {given}")
        as_user(f"{PODMAN} unshare rm -rf $HOME/images $HOME/run")
    finally:
        subprocess.run([context.quire, "setup", "--remove"], check=False, capture_output=True)
        subprocess.run(["pkill", "-KILL", "-u", USER], check=False)
        subprocess.run(["userdel", "--force", USER], check=False, capture_output=True)
    context.note(given.strip().splitlines()[-2])
