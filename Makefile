# Each target does its whole set-up in a fresh clone; all it needs is Python >= 3.10 and make.
#   make demo    train a small model on real text, fixed batches against odb
#   make test    run every test
#   make lint    ruff and mypy --strict

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO_FLAGS ?=
PYTEST_FLAGS ?=

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/odb demo $(DEMO_FLAGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "odb needs Python >= 3.10; pass PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) odb-demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
