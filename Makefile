PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
BENCH_STAMP := $(VENV)/.bench-stamp

.PHONY: setup demo test test-slow check format bench clean

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("bne needs Python 3.11 or newer; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev,plots]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@

demo: $(STAMP)
	$(BIN)/bne demo -o demo

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH_STAMP)
	$(BIN)/python -m studies.bench

clean:
	rm -rf build dist demo bench .pytest_cache .mypy_cache .ruff_cache
	find src tests studies -name __pycache__ -type d -prune -exec rm -rf {} +
