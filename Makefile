# The commands, the same for people and CI. Each first makes .venv (again when the pins change), with plain pip.
#
#   make demo        plans a small GPT for two regions, and trains it there, emulated, by the plan, by the best usual scheme and data-parallel
#   make check       style, types and layers
#   make test        the tests of every feature: under four minutes on two cores
#   make test-slow   all other tests: under fifteen minutes
#   make soak        long campaigns: ten thousand damaged files of every kind (SOAK="--count N --seed N" for others)
#   make bench       every benchmark in its quick form
#   make docs        links and examples of the documentation

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEEDED := import sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	"$$name" -c '$(NEEDED)' 2>/dev/null && { echo "$$name"; break; }; done)
TEST := $(BIN)/python -m pytest -n 2 --dist worksteal
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

.PHONY: demo check test test-slow soak bench docs
.DEFAULT_GOAL := demo

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Isthmus needs Python 3.11 or newer; none was found. Say where: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || "$(PYTHON)" -m venv --clear --without-pip $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m pip --python $(BIN)/python install -q pip
	@echo "Installing into $(VENV) (the first time takes some minutes)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@echo "Compiling the simulator (up to a minute)"
	@$(BIN)/python tools/compile.py
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

test: $(STAMP)
	$(TEST) -m "not slow"

test-slow: $(STAMP)
	$(TEST) -m slow

soak: $(STAMP)
	$(BIN)/python -m tests.fuzz.run $(SOAK)

bench: $(STAMP)
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python "$$file" --quick; done

docs: $(STAMP)
	$(BIN)/python -m pytest tests/test_docs.py
