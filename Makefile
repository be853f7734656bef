# Everything runs in .venv, which is made when it is missing and brought up to date when
# pyproject.toml or constraints.txt change. Nothing else has to be set up.

PYTHON ?= python3
JOBS ?= 2
# Another index to look for torch in, for example PyTorch's own one with CPU builds.
TORCH_INDEX ?=
# What `make bench` is given: --smoke, --only SECTION ..., --json FILE.
BENCH ?=
# Names or patterns of the networks that `make zoo` is to convert; all if empty.
ZOO ?=
# How many networks `make fuzz` tries, and the seed of the first; it prints every seed that fails.
N ?= 10000
SEED ?= 0

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install -qq -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One thread a worker: with more, two workers on two cores slow each other down.
# Nothing is fetched from a model hub: offline, a test that tries fails at once.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --durations=15

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu bench zoo fuzz evidence results lint format docs wheel clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: PYTHON=$(PYTHON) JOBS=$(JOBS) TORCH_INDEX=$(TORCH_INDEX) ZOO=$(ZOO) N=$(N) SEED=$(SEED)"

demo: $(VENV)/.demo  ## train five small networks, convert them, compare; a table and a page of curves
	$(BIN)/tg demo

test: $(VENV)/.dev  ## run the tests, without those marked slow or gpu
	$(PYTEST) -m "not slow and not gpu"

test-all: $(VENV)/.all  ## run the tests marked slow as well, those of Lightning, hls4ml and Chromium among them
	$(PYTEST) -m "not gpu"

# Most of the time Triton compiles, so processes help though the GPU is one.
test-gpu: $(VENV)/.dev  ## run the tests that need a GPU, before any timing on one
	$(PYTEST) -m "gpu and not slow"

bench: $(VENV)/.dev  ## check every kernel, then time it; BENCH="--only cpu --json FILE" for less, and to keep it
	PYTHONPATH=src $(BIN)/python -m benchmarks $(BENCH)

zoo: $(VENV)/.dev  ## convert one network of every family of timm and many of transformers
	$(TEST_ENV) $(BIN)/python -m tests.zoo --jobs $(JOBS) $(if $(ZOO),--only $(ZOO))

fuzz: $(VENV)/.dev  ## N random networks and ten times as many gates, converted and compared in every way
	$(TEST_ENV) $(BIN)/python -m tests.fuzz --networks $(N) --gates $$((10 * $(N))) --seed $(SEED) --jobs $(JOBS)

# One thread: two wait for each other on two busy cores.
evidence: $(VENV)/.dev  ## networks that others trained, before and after conversion, on real data
	$(TEST_ENV) $(BIN)/python -m experiments.evidence

results: $(VENV)/.dev  ## rebuild docs/results.md from the rows that the experiments measured
	$(TEST_ENV) PYTHONPATH=src $(BIN)/python -m experiments.results

lint: $(VENV)/.dev  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## repair style where a tool can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Not --quiet: what it hides --strict does not count.
docs: $(VENV)/.dev  ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The same bytes from the same commit, whenever it is built.
wheel: | $(BIN)/pip  ## build the wheel into dist/
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m pip wheel -q --no-deps -w dist .

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools benchmarks experiments -type d -name __pycache__ -prune -exec rm -rf {} +

# pip comes last when a virtual environment is made, so it stands for a complete one.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing threshold-gating and what the demo needs into $(VENV) (about a minute) ..."
	@$(PIP_INSTALL) -e '.[demo]'
	@touch $@

# The development environment holds all that the demo needs, so it stands for both.
$(VENV)/.dev: pyproject.toml constraints.txt $(wildcard tools/tv-cpu-shim/*) | $(BIN)/pip
	@echo "Installing threshold-gating and what its tests need into $(VENV) (about two minutes) ..."
	@$(PIP_INSTALL) ./tools/tv-cpu-shim -e '.[dev]'
	@touch $(VENV)/.demo $@

# What the slow tests need beside it.
$(VENV)/.all: $(VENV)/.dev
	@$(PIP_INSTALL) -e '.[browser,hls4ml,lightning,notebooks]'
	@touch $@
