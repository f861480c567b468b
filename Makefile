# Two commands do everything, set-up included:  make demo   make test
# Set-up is layered: `light` installs what planning needs (seconds), `run` adds torch, `dev` adds the checks.

VENV   ?= .venv
TARGETS ?= .venv-targets
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
            $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test quick nightly format lint bench docs targets clean light run dev

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s: 

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "meshwright needs Python 3.11 or newer: none was found on PATH" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "could not create $(VENV): is the venv module installed?" >&2; rm -rf $(VENV); exit 1; }

# A stamp is written only after its install succeeded, so an interrupted set-up is simply repeated.
$(VENV)/.light: pyproject.toml setup.py constraints.txt $(shell find src -name "*.c") | $(BIN)/python
	@echo "setting up: planning (light)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.run: $(VENV)/.light
	@echo "setting up: torch (large: a minute or more)"
	@$(PIP) --editable '.[run]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "setting up: checks and docs"
	@$(PIP) --editable '.[dev]'
	@touch $@

light: $(VENV)/.light
run: $(VENV)/.run
dev: $(VENV)/.dev

demo: $(VENV)/.light  ## plan a real model on a real cluster, then the parts that need torch
	@$(BIN)/python examples/plan_automatically.py
	@$(BIN)/python examples/plan_by_hand.py
	@$(BIN)/python examples/estimate_plans.py
	@$(BIN)/python examples/launch_everywhere.py
	@$(MAKE) --no-print-directory run
	@$(BIN)/python examples/plan_any_module.py
	@$(BIN)/python examples/prepare_data.py
	@$(BIN)/python examples/train_automatically.py

format: $(VENV)/.dev  ## write all files as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/.dev  ## format, lint, types, order of the rooms, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/line_count.py

docs: $(VENV)/.dev  ## build the documentation; a dead link is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs docs/_build/html
	@$(BIN)/python docs/check_links.py docs/_build/html
	@echo "docs/_build/html/index.html"

test: lint docs  ## everything CI checks
	@sh tests/system_packages.sh
	@sh tests/other_pythons.sh tests/watcher tests/clusters
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 8

# The planning rooms, and one small training: what most changes break, in under two minutes.
quick: lint  ## lint, types, tests of the planning rooms, one small training
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/test_house.py tests/test_versions.py tests/models tests/clusters \
	  tests/plans tests/cost/test_layer.py tests/cost/test_memory.py tests/cost/test_pipeline.py \
	  tests/search/test_cuts.py tests/run/test_executor.py

nightly: $(VENV)/.dev  ## rare and long cases: soaks, kills, signals, many random plans (an hour or more)
	@sh tests/system_packages.sh
	@sh tests/other_pythons.sh tests/watcher tests/clusters tests/plans tests/models tests/frameworks tests/traces
	$(BIN)/python -m pytest -m nightly --durations 8

# Each framework has a file of pinned versions; a test is skipped by name where its framework could not be installed.
# Frameworks want different versions of the same packages: each has a venv of its own.
targets:  ## exports against the frameworks themselves (large: installs each into a venv of its own)
	@for file in tests/targets/*.txt; do name=$$(basename $$file .txt); bin=$(TARGETS)/$$name/bin; echo "== $$name"; \
	  test -x $$bin/python || $(PYTHON) -m venv $(TARGETS)/$$name || exit 1; \
	  alone=$$(head -n 1 $$file | grep -q -e '--no-deps' && echo --no-deps); \
	  DS_BUILD_OPS=0 $$bin/python -m pip install --quiet --disable-pip-version-check $$alone --requirement $$file || exit 1; \
	  DS_ACCELERATOR=cpu PYTHONPATH=src:. $$bin/python -m pytest -q -rs tests/targets/test_$$name.py || exit 1; done

bench: $(VENV)/.dev  ## measurements; each prints the peer and us
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:  ## remove everything that make has built
	rm -rf $(VENV) $(TARGETS) .venv-pythons docs/_build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
