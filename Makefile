# Every target sets up .venv by itself; all it needs is make and Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# pip applies the first variable to what it installs and, up to version 25, to isolated builds; later
# versions read the second one for those.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# One thread per test worker: several workers, each with as many threads as cores, slow each other down.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help demo test soak docs build lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train a small Maglev beside a small SWA, compare them, leave a report (minutes)"
	@echo "make test    ruff, mypy and the whole test suite"
	@echo "make soak    the long fault, load and fuzz runs"
	@echo "make docs    the site, in site/"
	@echo "make build   wheel and source archive, in dist/"
	@echo "make lint    ruff and mypy alone"
	@echo "make format  put the code into its format"
	@echo "make clean   remove caches and build outputs; .venv, runs/ and demo/ stay"

demo: $(VENV)/.ready-demo
	@$(BIN)/maglev demo

test: lint
	@echo "== pytest"
	@$(PYTEST) -q -n auto --maxprocesses 8 --dist worksteal

soak: $(VENV)/.ready-test
	@$(PYTEST) -m soak -o timeout=7200 -v

docs: $(VENV)/.ready-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The site: site/index.html"

build: $(VENV)/.ready-test
	@$(BIN)/python -m hatchling build

lint: $(VENV)/.ready-test
	@echo "== ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . ; exit 1; }
	@echo "== mypy"
	@$(BIN)/mypy

format: $(VENV)/.ready-test
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find maglev tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: Maglev needs Python 3.11 or newer; '$(PYTHON)' is $$({ $(PYTHON) -V || echo missing; } 2>/dev/null)." \
	    "Name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo "== making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV)

# Order-only: the interpreter's own date says nothing about what is installed.
$(VENV)/.ready-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing what the demo needs (PyTorch among it: minutes the first time)"
	@$(BIN)/python -m pip install --quiet -e '.[report]'
	@touch $@

$(VENV)/.ready-docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing what the site needs (PyTorch among it: minutes the first time)"
	@$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $@

$(VENV)/.ready-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing what the tests need (PyTorch among it: minutes the first time)"
	@$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@ $(VENV)/.ready-demo $(VENV)/.ready-docs
