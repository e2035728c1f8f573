# Every target sets itself up first: .venv from the hash-pinned lock, once, and again when the lock changes.
# `make demo` and `make test` need a part of the lock only.
#
#   make demo    the order flow, end to end             SCALE=0.01 sizes it, KEEP=1 leaves it running at the end
#                CLUSTER=1: over three nodes and a Kafka (Java, Maven), whose leader is lost in the middle
#   make test    the tests of every change: minutes     T="tests/test_layers.py -k name" runs what it names instead
#   make deep    all others but the soak                T= narrows
#   make soak    the tests that run for long            T= narrows
#   make bench   all benchmarks: a table, bench.json    ONLY=tx. narrows, SCALE=0.1 shortens
#   make check   ruff, mypy strict, the layer test, several at once
#   make shots   pictures of the console for README and docs, by a headless Chromium
#   make deb     a Debian package of the broker, in build/deb
#   make release wheels and source distributions of the commit HEAD, built and checked, in dist; it uploads nothing
#   make house   the numbers of the code's structure and of four walks   NAMES=1 lists the cases
#   make lock    writes requirements/ anew              UPGRADE=1 takes the newest versions
#   make clean   removes what the others made, but for .venv
#
# PYTHON=/path/to/python3 chooses the Python (3.11 or newer) to build .venv with.

export PYTHON
# Many short processes are started: compiled modules are kept, wherever the sources are and whatever is set outside.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/pycache
venv := .venv
python := $(venv)/bin/python
ready := $(venv)/.ready
complete := $(venv)/.complete
install := $(python) -m uv pip install --quiet --python $(python) --no-deps --no-build-isolation
sources := $(wildcard txmq txmq_command.py spark adapters examples tests scripts)
compiled := .cache/compiled
classes := .cache/java/classes.jsa
jars := .cache/kafka
programs := .cache/deployment

.PHONY: help demo test deep soak bench check types style layers shots house deb release lock clean

help:
	@sed -n 's/^#   //p' Makefile

$(ready): requirements/build.txt requirements/test.txt pyproject.toml
	@echo "setting up $(venv) (the first time takes a minute) ..." >&2
	@$(python) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ found=$$(scripts/find-python) && "$$found" -m venv --clear $(venv); }
	@$(python) -m pip --disable-pip-version-check --no-input install --quiet \
		--require-hashes --only-binary :all: -r requirements/build.txt
	@# PySpark comes as source: its build uses the pinned setuptools, not whatever is newest.
	@$(install) --require-hashes -r requirements/test.txt
	@$(install) -e .
	@touch $@

$(complete): $(ready) requirements/lock.txt
	@echo "adding to $(venv) what the other targets need ..." >&2
	@$(install) --require-hashes -r requirements/lock.txt
	@touch $@

# The tests' modules, by one process, once: else each of those that run tests at once compiles all of them.
$(compiled): $(ready)
	@mkdir -p $(@D)
	@$(python) -m pytest --collect-only -qq -m "$(quick)" >/dev/null 2>&1 || true
	@touch $@

# Spark's classes, once: else each Java machine of the tests reads and links them anew. Without it they take longer.
$(classes): $(ready)
	@$(python) -m tests.java_archive >/dev/null 2>&1 || true

# Kafka's jars, once, where Maven is. Without them its tests are skipped.
$(jars): tests/kafka.pom.xml | $(ready)
	@$(python) -m tests.kafka_nodes >/dev/null 2>&1 || true

# helm and what else reads packaging, once, where Go is. Without them its tests are skipped.
$(programs): tests/deployment_tools.py | $(ready)
	@$(python) -m tests.deployment_tools >/dev/null 2>&1 || true

demo: $(ready) $(if $(CLUSTER),$(jars))
	@$(python) -m examples.order_flow $(if $(SCALE),--scale $(SCALE)) $(if $(KEEP),--keep) $(if $(CLUSTER),--cluster)

# Some tests at once; how many, which of them stay together, and in which order: tests/reporting.py.
at_once := --numprocesses auto --maxprocesses 8 --dist loadscope --no-loadscope-reorder
quick := not soak and not deep

test: $(if $(T),$(complete),$(compiled))
	@$(python) -m pytest $(at_once) $(if $(T),$(T),-m "$(quick)")

deep: $(complete) $(classes) $(jars) $(programs)
	@$(python) -m pytest $(at_once) -m "deep and not soak" $(T)

soak: $(complete) $(classes)
	@$(python) -m pytest $(at_once) -m soak --timeout 3600 $(T)

bench: $(complete)
	@$(python) -m tests.bench $(if $(ONLY),--only $(ONLY)) $(if $(SCALE),--scale $(SCALE)) $(if $(AGAINST),--against $(AGAINST))

# mypy keeps one core busy for about a minute: the others do the rest.
check: $(complete)
	@$(MAKE) --no-print-directory --jobs 2 types style layers

types: $(complete)
	@$(python) -m mypy $(sources)

style: $(complete)
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .

layers: $(ready)
	@$(python) -m pytest --quiet tests/test_layers.py

shots: $(complete)
	@$(python) -m tests.admin.shots docs

house: $(complete)
	@$(python) scripts/house.py $(if $(NAMES),--names)
	@echo
	@$(python) scripts/walks.py $(if $(NAMES),--hot 10)

deb: $(complete)
	@$(python) scripts/debian_package.py

release: $(ready)
	@$(python) scripts/release.py

lock: compile := $(python) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)
lock: pinned := --constraint requirements/lock.txt --no-annotate
lock: $(ready)
	@$(compile) --all-extras --group test --group dev pyproject.toml --output-file requirements/lock.txt
	@$(compile) $(pinned) --extra demo --group test pyproject.toml --output-file requirements/test.txt
	@printf 'setuptools\nuv\n' | $(compile) $(pinned) - --output-file requirements/build.txt
	@touch $(ready)

clean:
	@rm -rf build dist *.egg-info spark/*.egg-info .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache out bench.json
	@find . -name __pycache__ -not -path './$(venv)/*' -prune -exec rm -rf {} +
