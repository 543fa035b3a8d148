# make demo | test | python | test-long | mutants | bench | picture | install PREFIX=/usr/local | install-bench | package | clean
#
# Every target first sees to what it needs (scripts/setup.sh). CARGO_TARGET_DIR is respected.

PREFIX ?= /usr/local
CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release
QUIRE := $(abspath $(RELEASE)/quire)
# The workspace's, for pkg-config.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# By itself: its engine has hooks for simulations, which the programs' must not have.
SIMULATED := -p quire-simulated --features program
REAL := python3 tests/real/run.py --quire $(QUIRE)

.PHONY: release demo test test-long mutants check unit python real bench simulated picture install install-bench package clean

release: setup-build
	$(CARGO) build --release --workspace

setup-%:
	@scripts/setup.sh $*

demo: setup-demo release
	demo/run.sh $(QUIRE)

# In this order: what fails soonest comes first.
test: setup-test
	$(MAKE) --no-print-directory check
	$(MAKE) --no-print-directory unit
	$(MAKE) --no-print-directory release
	$(MAKE) --no-print-directory python
	$(MAKE) --no-print-directory real

check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy $(SIMULATED) --all-targets -- -D warnings
	tests/names.py

# Unit and property tests, the simulator, loom, the engine on the real MMU, the front-ends.
unit:
	$(CARGO) test --workspace
	$(CARGO) test $(SIMULATED)

# The Python package: its wheel, installed into an environment of its own, and tested there.
python: setup-test
	python3 -m venv $(TARGET)/python
	$(TARGET)/python/bin/pip install --quiet --requirement python/requirements-test.txt
	$(TARGET)/python/bin/pip install --quiet --force-reinstall --no-deps .
	$(TARGET)/python/bin/python -m pytest -q

# Real programs under `quire run`, each held against its bare run.
real:
	$(REAL) --quick

test-long: setup-test release
	QUIRE_SIM_SECONDS=600 QUIRE_OBJECT_SECONDS=60 $(CARGO) test --workspace
	QUIRE_LONG=1 $(MAKE) --no-print-directory python
	$(REAL) --long

# Mistakes planted in a copy of the engine, each of which the simulator or a test must find.
mutants: setup-test
	tests/mutants.py

bench: setup-bench release simulated
	$(QUIRE) bench all --html target/bench.html

# The program of `quire bench --simulate`.
simulated: setup-build
	$(CARGO) build --release $(SIMULATED)

# docs/architecture.svg, of docs/architecture.dot.
picture: setup-picture
	scripts/picture.sh

# `make && sudo make install`: what is built already is not built again as root.
$(RELEASE)/quire $(RELEASE)/quire-bench:
	$(MAKE) --no-print-directory release

install: $(RELEASE)/quire
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/quire
	install -m 755 $(RELEASE)/quire $(DESTDIR)$(PREFIX)/bin/quire
	install -m 755 $(RELEASE)/libquire_preload.so $(DESTDIR)$(PREFIX)/lib/quire/libquire_preload.so
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib/pkgconfig
	install -d $(DESTDIR)$(PREFIX)/share/man/man3 $(DESTDIR)$(PREFIX)/share/man/man7
	install -m 755 $(RELEASE)/libquire.so $(DESTDIR)$(PREFIX)/lib/libquire.so
	install -m 644 $(RELEASE)/libquire.a $(DESTDIR)$(PREFIX)/lib/libquire.a
	install -m 644 crates/quire-c/include/quire.h $(DESTDIR)$(PREFIX)/include/quire.h
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(VERSION)|' crates/quire-c/quire.pc.in \
		> $(DESTDIR)$(PREFIX)/lib/pkgconfig/quire.pc
	chmod 644 $(DESTDIR)$(PREFIX)/lib/pkgconfig/quire.pc
	$(RELEASE)/quire generate $(DESTDIR)$(PREFIX)/share
	install -m 644 docs/man/quire.3 $(DESTDIR)$(PREFIX)/share/man/man3
	install -m 644 docs/man/quire.7 $(DESTDIR)$(PREFIX)/share/man/man7

$(RELEASE)/quire-simulated:
	$(MAKE) --no-print-directory simulated

# The programs that `quire bench` runs, which users do not need.
install-bench: $(RELEASE)/quire-bench $(RELEASE)/quire-simulated
	install -d $(DESTDIR)$(PREFIX)/libexec/quire
	install -m 755 $(RELEASE)/quire-bench $(RELEASE)/quire-simulated $(DESTDIR)$(PREFIX)/libexec/quire

# A .deb and a .tar.gz, in $(PACKAGES).
PACKAGES ?= $(TARGET)/packages
package: setup-package $(RELEASE)/quire
	scripts/package.sh $(RELEASE) $(VERSION) $(PACKAGES)

clean:
	$(CARGO) clean
	rm -rf demo-data
