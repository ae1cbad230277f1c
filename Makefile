# `make quickstart` and `make test` do everything on a fresh machine; each sets up .venv first if it is not ready.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test lint bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(VENV)/.ready
	$(BIN)/headrace train recipes/quickstart.toml

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/headrace bench learn

clean:
	rm -rf $(VENV) runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
