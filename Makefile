# Each target does its whole set-up in a fresh clone; all it needs is Python >= 3.10 and make.
#   make demo    train a small model on real text, fixed batches against odb
#   make test    run every test
#   make lint    ruff and mypy --strict
#   make test-trainers   train in every framework that odb adapts, each in its own environment

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
TRAINERS_FLAGS ?=

.PHONY: demo test test-trainers lint clean

demo: $(VENV)/.demo
	$(BIN)/odb demo $(DEMO_FLAGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-trainers: $(VENV)/.test
	$(BIN)/python -m tests.trainers.environments $(TRAINERS_FLAGS)

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

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt constraints-trainers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -c constraints-trainers.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) .trainers odb-demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
