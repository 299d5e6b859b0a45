# `make demo` and `make test` do everything from a fresh clone: each first runs `make setup`.

PYTHON ?= python3
VENV ?= .venv
# The version the project is tested with. A plain `pip install torch` takes whatever build the index prefers; give the
# build that you want, with the options that find it: make setup TORCH="torch==2.13.0 --index-url ..."
TORCH ?= torch==2.13.0
EXTRAS ?= demo,dev,docs
PYTEST_ARGS ?=
# for example DEMO_ARGS="--model minilm", a BERT encoder instead of the language model
DEMO_ARGS ?=
ACCURACY_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
TOOLS := $(VENV)/.stamp-tools
INSTALLED := $(VENV)/.stamp-installed
NATIVE := $(wildcard setup.py) $(shell find quant_kernels/csrc -type f \
	\( -name '*.h' -o -name '*.cu' -o -name '*.cpp' \) 2>/dev/null)

.PHONY: help setup test torture accuracy test-vllm demo format lint types docs bench wheel ci clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(INSTALLED) ## create .venv, install everything, build the kernels (does nothing when up to date)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: no later package may choose another one. Then what the build itself needs, because
# the kernels are compiled against this very torch and not in an isolated environment.
$(TOOLS): Makefile | $(BIN)/python
	$(PIP) install $(TORCH)
	$(PIP) install --prefer-binary "setuptools>=77" wheel ninja packaging numpy
	@touch $@

$(INSTALLED): $(TOOLS) pyproject.toml $(NATIVE)
	$(PIP) install --prefer-binary --no-build-isolation --editable ".[$(EXTRAS)]"
	@touch $@

test: setup ## run all tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

torture: setup ## faults, load and hostile input in the long form (hours), with counts and seeds
	-$(PIP) install atheris
	$(BIN)/python tests/torture/fuzz_config.py --runs 10000000 --seconds 14400
	$(BIN)/python tests/torture/fuzz_headers.py --runs 1000000 --seconds 7200
	$(BIN)/python tests/torture/fuzz_cli.py --runs 100000 --seconds 3600
	$(BIN)/python tests/torture/checkpoint_faults.py --kills 200 --errors
	$(BIN)/python tests/torture/hard_numbers.py
	$(BIN)/python tests/torture/threads.py --seconds 60
	$(BIN)/python tests/torture/ranks.py
	$(BIN)/python tests/torture/load.py

accuracy: setup ## what formats and recipes cost two real models: table, JSON, picture
	$(BIN)/python tests/accuracy --output build/accuracy $(ACCURACY_ARGS)

test-vllm: setup ## run the plug-in inside vLLM's CPU build, in an environment of its own (3.5 GB)
	tests/integrations/in_vllm/setup.sh $(VENV) $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pytest -c tests/integrations/in_vllm/pytest.ini tests/integrations/in_vllm $(PYTEST_ARGS)

demo: setup ## quantize a real language model and measure it (see docs/tutorial)
	$(BIN)/python docs/tutorial/demo $(DEMO_ARGS)

format: setup ## format the code and apply the safe fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: setup ## check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup ## check the types
	$(BIN)/mypy

docs: setup ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html

bench: setup ## run the benchmarks, which print ratios
	@for file in tests/benchmarks/bench_*.py; do \
		echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

wheel: setup ## build the wheel into dist/ and check what it holds
	rm -rf dist build/lib* build/bdist*
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .
	$(BIN)/python tests/packaging/check_wheel.py dist
	$(BIN)/python tests/packaging/try_wheel.py dist

ci: ## what continuous integration runs
	.ci/run

clean: ## remove everything built, but not .venv
	rm -rf build dist docs/_build .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find quant_kernels -name '*.so' -delete
