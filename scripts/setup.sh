#!/usr/bin/env bash
# Installs what building, testing and the demo need, on Debian and its relatives. It installs only what
# is missing, and prints nothing if all is there.
#
#     scripts/setup.sh build|test|bench|demo|package|picture
set -euo pipefail

target=${1:?which target: build, test, bench, demo, package or picture}

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
packages=()
# need COMMAND PACKAGE: PACKAGE will be installed where COMMAND is not found.
need() {
	command -v "$1" >/dev/null || packages+=("$2")
}
header() {
	[ -e "/usr/include/$1" ] || packages+=("$2")
}

need cc gcc
header stdio.h libc6-dev
case $target in
test | bench | demo) need python3 python3 ;;
esac
case $target in
test)
	need g++ g++
	need make make
	need redis-server redis-server
	need redis-benchmark redis-tools
	need stress-ng stress-ng
	command -v s3rver >/dev/null || need npm npm
	need prometheus prometheus
	need tmux tmux
	need gcore gdb
	need openssl openssl
	need debootstrap debootstrap
	need jupyter jupyter-nbconvert
	[ -e /usr/lib/python3/dist-packages/ipykernel ] || packages+=(python3-ipykernel)
	[ -e /usr/bin/pytest ] || packages+=(python3-pytest)
	[ -n "$(compgen -G '/usr/lib/postgresql/*/bin/postgres')" ] || packages+=(postgresql)
	need timeout coreutils
	need mount mount
	need setpriv util-linux
	header linux/io_uring.h linux-libc-dev
	python3 -c 'import ensurepip' 2>/dev/null || packages+=(python3-venv)
	# CPython's own tests, which some packages leave out.
	python3 -c 'import test._test_multiprocessing, test.test_subprocess' 2>/dev/null ||
		packages+=(libpython3-testsuite)
	;;
picture) need dot graphviz ;;
package) need make make && need dpkg-deb dpkg && need objdump binutils ;;
bench)
	need make make && need mkswap util-linux && need swapon mount
	need g++ g++ && need redis-server redis-server
	;;
esac

if [ ${#packages[@]} -gt 0 ]; then
	if ! command -v apt-get >/dev/null; then
		echo "setup: install what is missing: ${packages[*]}" >&2
		exit 1
	fi
	echo "setup: installing ${packages[*]}"
	export DEBIAN_FRONTEND=noninteractive
	"${as_root[@]}" apt-get update -q >/dev/null
	# No service is needed: the tests start a Redis of their own.
	RUNLEVEL=1 "${as_root[@]}" apt-get install -qy --no-install-recommends "${packages[@]}" >/dev/null
fi

if [ "$target" = test ] && ! command -v s3rver >/dev/null; then
	echo "setup: installing s3rver, a server as S3 is one"
	"${as_root[@]}" npm install --global --silent --no-fund --no-audit s3rver@3.7.1
fi

if ! command -v cargo >/dev/null; then
	echo "setup: no cargo: install Rust 1.88 or newer (https://rustup.rs)" >&2
	exit 1
fi
if [ "$target" = test ]; then
	for component in rustfmt clippy; do
		if [ $component = rustfmt ]; then tool=fmt; else tool=clippy; fi
		cargo $tool --version >/dev/null 2>&1 && continue
		echo "setup: adding $component"
		rustup component add $component
	done
fi
if [ "$target" = demo ] && ! python3 -c 'import sqlite3' 2>/dev/null; then
	echo "setup: this python3 has no sqlite3, which the demo uses: $(command -v python3)" >&2
	exit 1
fi
