# Everything a user or a contributor runs. Each target sets up .venv first if it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
NATIVE := setup.py pyproject.toml $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/* csrc/cuda/*)
INSTALL := $(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement
PYTEST := $(BIN)/python -m pytest

# How long `make soak` runs.
SOAK_MINUTES := 30

TOOLS := build/tools
LICENCES := Apache;BSD;CC0;ISC;MIT;Mozilla Public License 2.0;MPL-2.0;PSF;Python Software Foundation;Zlib

.PHONY: setup demo test test-slow test-gpu test-stores test-wheel test-browser test-sanitize soak bench bench-quick bench-compare docs lint lock audit wheel clean

setup: .venv/.installed

# Nothing is resolved: pip takes the versions of the locks, from files whose hashes they name. PyPI's torch for Linux needs
# CUDA libraries besides; the CPU build does not, and gets none. pip prefers it where an index has it, but not while it
# checks hashes: torch is downloaded first and checked then. What builds the extension is of the lock too.
.venv/.packages: .ci/demo.lock .ci/cuda.lock
	$(PYTHON) -m venv .venv
	mkdir -p build/torch
	sed -n '/^torch==/,/[^\\]$$/p' .ci/demo.lock > build/torch/torch.lock
	$(BIN)/python -m pip download --quiet --no-deps --dest build/torch --constraint constraints.txt torch
	$(INSTALL) build/torch/torch.lock --no-index --find-links build/torch
	$(INSTALL) .ci/demo.lock
	case "$$($(BIN)/python -m pip show torch)" in *+cpu*) ;; *) $(INSTALL) .ci/cuda.lock ;; esac
	touch $@

.venv/.installed: .venv/.packages $(NATIVE)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# What the tests need besides, and what documentation and benchmarks need besides.
.venv/.test: .venv/.installed .ci/test.lock
	$(INSTALL) .ci/test.lock
	touch $@

.venv/.dev: .venv/.test .ci/dev.lock
	$(INSTALL) .ci/dev.lock
	touch $@

demo: setup
	$(BIN)/geoflow demo --out demo_output

# Two processes, each with one core: the threads of tiny operations would wait for each other. Tests of threads ask for theirs.
# Triton's interpreter and its compiler each need processes of their own. tests/conftest.py has the order of the files.
PARALLEL := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PYTEST) -n 2
test: .venv/.test
	$(PARALLEL) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" tests
	TRITON_INTERPRET=1 $(PARALLEL) -m "not slow" tests/gpu_emulated/interpreter
	$(PARALLEL) -m "not slow" tests/gpu_emulated/aot

test-slow: .venv/.test .venv/.peers
	$(PYTEST) -m "slow and not gpu" tests
	$(PYTEST) --foreign device -m "not slow and not gpu" tests --ignore=tests/gpu_emulated/cuda_emulation
	$(PYTEST) --foreign dtype -m "not slow and not gpu" tests --ignore=tests/gpu_emulated/cuda_emulation
	TRITON_INTERPRET=1 $(PYTEST) -m slow tests/gpu_emulated/interpreter
	$(PYTEST) -m slow tests/gpu_emulated/aot
	$(PYTEST) tests/gpu_emulated/ptx

# The compiled code with AddressSanitizer and UndefinedBehaviorSanitizer, then its threads with ThreadSanitizer.
test-sanitize: .venv/.test
	$(BIN)/python -m tests.reliability.sanitize
	$(PYTEST) -m slow tests/reliability/test_races.py

# Train and score for half an hour: memory and open files must not grow.
soak: .venv/.test
	$(BIN)/python -m tests.reliability.soak --minutes $(SOAK_MINUTES)

# The tests of a GPU, then times beside the estimates; the table is printed even if a test fails.
test-gpu: .venv/.test
	$(BIN)/python -m tools.gpu_report

# All vector stores against their real engines; that of pgvector needs PostgreSQL, which the test starts, and its extension.
test-stores: .venv/.test .venv/.stores
	$(PYTEST) tests/stores

# The engines ask for many packages, none of which the rest needs. What is installed already stays as it is.
.venv/.stores: .venv/.test
	mkdir -p build
	$(BIN)/python -m pip freeze --exclude-editable > build/installed.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --constraint build/installed.txt "geoflow_fast[stores]"
	touch $@

# Installs the wheel into an environment of its own, without Triton, and runs the README's first page from another folder,
# where the source tree cannot shadow it.
test-wheel: wheel
	rm -rf build/wheel-env
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet --constraint constraints.txt torch
	build/wheel-env/bin/python -m pip install --quiet --constraint constraints.txt dist/geoflow_fast-*.whl
	cd build/wheel-env && bin/python ../../tests/wheel_smoke.py ../../README.md

# Opens the demo's report in headless Chromium; a short demo makes one if `make demo` has not.
test-browser: .venv/.test
	GEOFLOW_REPORT=$(wildcard demo_output/report.html) $(PYTEST) tests/browser

# Twenty minutes on two cores: benchmarks/results/times.json, then docs/performance.md and its figures from it.
bench: .venv/.dev .venv/.peers
	mkdir -p benchmarks/results
	$(PYTEST) benchmarks --benchmark-only -k "not quick" --benchmark-json=benchmarks/results/times.json
	$(BIN)/python -m benchmarks.page benchmarks/results/times.json

# Small sizes, the same gates, tables on the terminal and nowhere else: two minutes, at most five.
bench-quick: .venv/.dev .venv/.peers
	$(PYTEST) benchmarks --benchmark-only -k quick

# Fails if commit B is slower than commit A: make bench-compare A=v0.1.0 B=HEAD
bench-compare: .venv/.dev
	$(BIN)/python -m benchmarks.compare $(A) $(B)

# Rows of libraries that are missing are left out. torchcfm asks for far more than the part that is timed.
.venv/.peers: .venv/.dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt geomloss flow_matching flash-sinkhorn
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchcfm geoopt
	touch $@

# A warning, such as a dead link, is an error.
docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tools that look at the environment are not in it.
$(TOOLS)/.installed: .ci/tools.lock
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --require-hashes --no-deps --requirement .ci/tools.lock
	touch $@

# Resolves pyproject.toml with the versions of constraints.txt for every platform, and writes down the hashes of all files.
lock: .venv/.test $(TOOLS)/.installed
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(BIN)/python -m tools.supply

# Does the advisory database know of a hole in what is locked? Are all licences of the environment among those allowed?
audit: .venv/.dev $(TOOLS)/.installed
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes $(addprefix --requirement .ci/,demo.lock test.lock dev.lock)
	$(TOOLS)/bin/pip-licenses --python=$(BIN)/python --partial-match --allow-only="$(LICENCES)"

wheel: .venv/.test
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf .venv build dist demo_output runs site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find geoflow_fast kernels tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
	rm -f geoflow_fast/_C*.so
