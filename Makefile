# make demo | test | test-long | bench | install PREFIX=/usr/local | clean
#
# Every target first sees to what it needs (scripts/setup.sh). CARGO_TARGET_DIR is respected.

PREFIX ?= /usr/local
CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release
QUIRE := $(abspath $(RELEASE)/quire)
REAL := python3 tests/real/run.py --quire $(QUIRE)

.PHONY: release demo test test-long check unit real bench install clean

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
	$(MAKE) --no-print-directory real

check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

# Unit and property tests, the simulator, loom, the engine on the real MMU, the front-ends.
unit:
	$(CARGO) test --workspace

# Real programs under `quire run`, each held against its bare run.
real:
	$(REAL) --quick

test-long: setup-test release
	QUIRE_SIM_SECONDS=600 $(CARGO) test --workspace
	$(REAL) --long

bench: setup-bench release
	$(QUIRE) bench run
	$(QUIRE) bench swap
	$(QUIRE) bench fault

# `make && sudo make install`: what is built already is not built again as root.
$(RELEASE)/quire:
	$(MAKE) --no-print-directory release

install: $(RELEASE)/quire
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/quire
	install -m 755 $(RELEASE)/quire $(DESTDIR)$(PREFIX)/bin/quire
	install -m 755 $(RELEASE)/libquire_preload.so $(DESTDIR)$(PREFIX)/lib/quire/libquire_preload.so

clean:
	$(CARGO) clean
	rm -rf demo-data
