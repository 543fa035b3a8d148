#!/usr/bin/env bash
# scripts/package.sh RELEASE VERSION FOLDER: makes quire_VERSION_ARCHITECTURE.deb and
# quire-VERSION-linux-MACHINE.tar.gz in FOLDER, of what is built in RELEASE.
set -euo pipefail
release=$1 version=$2 folder=$3
cd "$(dirname "$0")/.."
mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# install_into ROOT PREFIX: as `make install` does, without what only a debugger reads.
install_into() {
	make -s install RELEASE="$release" DESTDIR="$1" PREFIX="$2"
	strip --strip-unneeded "$1$2"/bin/quire "$1$2"/lib/quire/*.so "$1$2"/lib/*.so
	strip --strip-debug "$1$2"/lib/libquire.a
	local documents=$1$2/share/doc/quire
	mkdir -p "$documents"
	cp README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT docs/{manual,cookbook,containers}.md docs/grafana.json "$documents"
}

machine=$(uname -m)
top=quire-$version-linux-$machine
install_into "$work/$top" ""
tar -C "$work" --owner=0 --group=0 -czf "$folder/$top.tar.gz" "$top"

architecture=$(dpkg --print-architecture)
root=$work/root
install_into "$root" /usr
# Debian's zsh looks there.
mv "$root/usr/share/zsh/site-functions" "$root/usr/share/zsh/vendor-completions"
gzip -9n "$root"/usr/share/man/man*/*
# The newest of the C library's versions that a symbol asks for.
glibc=$(objdump -T "$root"/usr/bin/quire "$root"/usr/lib/quire/*.so "$root"/usr/lib/*.so |
	grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -V | tail -n 1)
mkdir "$root/DEBIAN"
cat >"$root/DEBIAN/control" <<-END
	Package: quire
	Version: $version
	Architecture: $architecture
	Maintainer: The Quire developers
	Installed-Size: $(du -sk "$root/usr" | cut -f 1)
	Depends: libc6 (>= $glibc), libgcc-s1
	Section: utils
	Priority: optional
	Description: runs programs in less memory than they want
	 Quire manages the memory of a program and its children in user space: real
	 page faults, a budget, compressed swap, and a swap file, with no patched kernel
	 and no root. "quire run --memory 512M -- program" runs any dynamically linked
	 program; a C library maps files larger than memory.
END
dpkg-deb --root-owner-group -Zxz --build "$root" "$folder/quire_${version}_$architecture.deb" >/dev/null
ls -1 "$folder/$top.tar.gz" "$folder/quire_${version}_$architecture.deb"
