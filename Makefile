# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need only a Python 3.11+ and make: they set up .venv themselves.

VENV ?= .venv
BIN := $(VENV)/bin
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-matrix lint style simulate mutants mutants-sample bench docs wheel clean

help:
	@echo "make demo       two engines, a router, and KV cache handed from one to the other"
	@echo "make test       lint, types, import rules, and all tests"
	@echo "make test-unit  only the tests that need no vLLM"
	@echo "make test-matrix  the tests that need vLLM, with every supported version of it"
	@echo "scripts/as_cpu.sh avx2 make test  the same as on a CPU without AVX-512 and AMX"
	@echo "make lint       ruff, mypy, import-linter, and whether docs/models.md is up to date"
	@echo "make simulate SEEDS=0:20000  explore orders; the result goes to benchmarks/results"
	@echo "make mutants    how soon the simulation finds small faults; the table goes to benchmarks/results"
	@echo "make mutants-sample  which of 300 mutants that a library makes no check finds; takes hours"
	@echo "make bench      benchmarks; tables and plots go to benchmarks/results"
	@echo "make docs       the site, in site/, unless a link leads nowhere; its tools have an environment"
	@echo "make wheel      wheel and sdist, in dist/, and a check of what is in them"
	@echo "make setup      only make or update $(VENV)"
	@echo "make clean      remove caches, made models and $(VENV)"
	@echo "ARGS='...' is passed on by demo, the tests and bench."

setup:
	@scripts/setup_env.sh

demo: setup
	@$(BIN)/omni-connector demo --cache .models $(ARGS)

lint: style
	$(BIN)/mypy
	$(BIN)/python -m tests.support_table --check

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

test: style
	@TYPES=yes scripts/run_tests.sh $(ARGS)

test-unit: setup
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not vllm and not e2e" $(ARGS)

test-matrix: setup
	@scripts/test_matrix.sh $(ARGS)

SEEDS ?= 0:20000
simulate: setup
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs 2 \
		--keep benchmarks/results/simulation.md $(ARGS)

mutants: setup
	$(BIN)/python -m tests.simulation.mutants --jobs 2 \
		--keep benchmarks/results/mutants.md $(ARGS)

# mutmut is not among the development tools: its needs would make `make setup` heavier for all, and
# this is run seldom. Pinned, as another version's operators would draw another sample.
MUTMUT := mutmut==3.8.1 libcst==1.9.0 coverage==7.17.3
mutants-sample: setup
	$(BIN)/python -m pip install --quiet --no-deps --target .mutants/packages --upgrade $(MUTMUT)
	PYTHONPATH=.:.mutants/packages $(BIN)/python -m benchmarks.mutants_sample \
		measure ask table --jobs 2 $(ARGS)

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

DOCS_VENV ?= .venv-docs
docs: setup
	test -x $(DOCS_VENV)/bin/mkdocs || $(BIN)/python -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet -r docs/requirements.txt
	$(DOCS_VENV)/bin/mkdocs build --strict

wheel: setup
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python scripts/check_wheel.py dist

clean:
	rm -rf $(VENV) .venv-[0-9]* $(DOCS_VENV) .models build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache .fetched
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
