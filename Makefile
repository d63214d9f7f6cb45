# Commands of a checkout. `make help` lists them; CONTRIBUTING.md says when to use which.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
BIN := $(VENV)/bin
PHASE := infra/phase.sh
# Arguments for pytest (make test TESTS="tests/unit -k codec") and key=value overrides for the demo.
TESTS ?=
SET ?=
# Test processes: much of the suite waits for brokers, so two more than there are cores.
JOBS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2)))

# A thousand processes import the same modules: each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

# Brokers of tests live for seconds: compiling them well costs more than it gives.
SHORT_LIVED := -XX:TieredStopAtLevel=1

.PHONY: help setup demo test compile suite lint types imports bars docs clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup:  ## make or refresh .venv (quick when nothing changed)
	@$(PHASE) set-up infra/setup.sh $(VENV)

demo: setup  ## watch a small model learn to sort digits; the last line names the run folder
	@$(BIN)/headrace run @ recipes/sort_digits/run.toml $(SET)

test: setup lint imports  ## set-up, checks and every test
	@$(MAKE) --no-print-directory -j 2 types compile
	@$(MAKE) --no-print-directory suite

compile: setup  ## what the tests import, once for all test processes
	@$(BIN)/python -m pytest --collect-only -q $(TESTS) | tail -n 1

suite: setup  ## every test, without the checks
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 JAVA_TOOL_OPTIONS=$(SHORT_LIVED) $(PHASE) tests $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=25 $(TESTS)

lint: setup  ## ruff
	@$(PHASE) lint $(BIN)/ruff check .

types: setup  ## mypy --strict
	@$(PHASE) types $(BIN)/mypy

imports: setup  ## which folder may import which
	@$(PHASE) imports $(BIN)/lint-imports

bars: setup  ## the measured shape of the code beside its bars
	@$(BIN)/python tests/architecture/bars.py

docs: setup  ## write the parts of the documentation that are facts of the code
	@$(BIN)/python docs/generate.py

clean:  ## remove the environment, caches and builds (runs/ stays)
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
