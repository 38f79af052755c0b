# The one entry to everything: `make demo` and `make test` need only Python and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH ?= benchmarks/cpu_throughput.py
ARGS ?=
QUIET ?= -qq
# Tests run in as many processes as there are cores. `make test PARALLEL=` runs them in one, as a debugger needs it.
PARALLEL ?= -n logical --maxprocesses 8 --dist worksteal
SEEDS ?= 10
# Tests start many processes, each of which would compile all of the package where Python may not keep what it compiled.
test test-seeds quick slow: export PYTHONDONTWRITEBYTECODE :=
NOT_QUICK := gpu or slow or vllm or ray or parity or properties or crash or interpreted or embedded or processes or browser

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help tables demo test test-seeds quick slow gpu-test gpu-test-multi vllm-test ray-test clients compat torture check docs figures format bench release clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  ARGS="..." is passed on to demo, test, test-seeds, quick, slow, gpu-test, gpu-test-multi, vllm-test, ray-test, clients, compat, torture and bench; PYTHON=python3.12 picks a Python.'

demo: $(VENV)/.ready  ## set up, then answer examples/prompts.jsonl with the embedded model
	@$(BIN)/headrace run examples/prompts.jsonl -o examples/answers.jsonl --overwrite $(ARGS)

test: $(VENV)/.ready-dev  ## set up, then run the tests
	@$(BIN)/pytest $(PARALLEL) $(ARGS)

test-seeds: $(VENV)/.ready-dev  ## the tests with ten seeds: none may fail by chance
	@$(BIN)/python tools/test_seeds.py --seeds $(SEEDS) -- $(PARALLEL) $(ARGS)

quick: $(VENV)/.ready-dev  ## the tests that need neither large models, transformers, Triton, a browser nor other processes
	@$(BIN)/pytest $(PARALLEL) -m "not ($(NOT_QUICK))" $(ARGS)

slow: $(VENV)/.ready-dev  ## the tests that take longer
	@$(BIN)/pytest $(PARALLEL) -m "slow and not gpu" $(ARGS)

gpu-test: $(VENV)/.ready-gpu  ## the tests that need a GPU
	@$(BIN)/pytest -m gpu $(ARGS)

gpu-test-multi: $(VENV)/.ready-gpu  ## the tests that need two GPUs or more
	@$(BIN)/pytest -m multi_gpu $(ARGS)

vllm-test: $(VENV)/.ready-dev  ## the tests that start vLLM, from HEADRACE_VLLM_PYTHON=PATH (minutes)
	@$(BIN)/pytest -m vllm $(ARGS)

ray-test: $(VENV)/.ready-ray  ## the tests that start Ray clusters on this machine (minutes)
	@$(BIN)/pytest -m ray $(ARGS)

clients: $(VENV)/.ready-dev  ## real clients against the server, each installed into an environment of its own (minutes)
	@$(BIN)/python -m tests.clients.run $(ARGS)

compat: $(VENV)/.ready-dev  ## the server tests of other projects: VLLM=CHECKOUT SGLANG=CHECKOUT LLAMA_CPP=CHECKOUT (an hour)
	@$(BIN)/python -m tests.compat.run $(if $(VLLM),--vllm $(VLLM)) $(if $(SGLANG),--sglang $(SGLANG)) $(if $(LLAMA_CPP),--llama-cpp $(LLAMA_CPP)) $(ARGS)

torture: $(VENV)/.ready-dev  ## kill batch jobs in every way, 500 seeds, and look whether they survive
	@$(BIN)/python -m tests.jobs.crash.torture $(ARGS)

check: $(VENV)/.ready-dev  ## format, lint, types, import layers and the documentation
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Not with --quiet, which would hide the warnings from --strict.
docs: $(VENV)/.ready-dev  ## build the documentation site into build/site; broken links and anchors are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

tables: $(VENV)/.ready-dev  ## rewrite the tables of the docs and the Grafana dashboard from the code
	@$(BIN)/python tools/docs_tables.py

figures: $(VENV)/.ready-dev  ## draw the figures of README and docs from the records in benchmarks/results
	@$(BIN)/python benchmarks/figures.py

format: $(VENV)/.ready-dev  ## rewrite the code as `check` wants it
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: $(VENV)/.ready-dev  ## the benchmark, with its peers beside it
	@$(BIN)/python $(BENCH) $(ARGS)

release: $(VENV)/.ready-dev  ## build sdist and wheel, check them, and run the demo from the wheel in an empty environment
	@$(PIP_INSTALL) build twine
	@$(BIN)/python tools/release.py

clean:  ## remove the virtual environment and everything built
	@rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per set of extras. pip runs only when pyproject.toml or constraints.txt is newer than the stamp.
$(VENV)/.ready: EXTRAS :=
$(VENV)/.ready-dev: EXTRAS := [dev]
$(VENV)/.ready-gpu: EXTRAS := [dev,gpu]
$(VENV)/.ready-ray: EXTRAS := [dev,ray]
$(VENV)/.ready-dev: INCLUDED := $(VENV)/.ready
$(VENV)/.ready-gpu $(VENV)/.ready-ray: INCLUDED := $(VENV)/.ready $(VENV)/.ready-dev
$(VENV)/.ready $(VENV)/.ready-dev $(VENV)/.ready-gpu $(VENV)/.ready-ray: pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	    $(PYTHON) -c "$$REFUSE_OTHER_PYTHONS" "$(PYTHON)" && $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing headrace$(EXTRAS) into $(VENV) (a minute or more the first time: torch is large) ..."
	@$(PIP_INSTALL) setuptools && $(PIP_INSTALL) --no-build-isolation -e ".$(EXTRAS)" || { \
	    echo "pip failed. To see all it says, add QUIET= to the make command."; exit 1; }
	@touch $(INCLUDED) $@

# The build uses the environment's own setuptools, so that its version is pinned too.
PIP_INSTALL = $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt

define REFUSE_OTHER_PYTHONS
import sys
major, minor = sys.version_info[:2]
if not (3, 11) <= (major, minor) <= (3, 13):
    sys.exit("Headrace needs Python 3.11, 3.12 or 3.13, but %s is Python %d.%d. "
             "Name another one, such as: make demo PYTHON=python3.12" % (sys.argv[1], major, minor))
endef
export REFUSE_OTHER_PYTHONS
