# `make help` lists what there is. Needs Python 3.11 or newer, make and a package index; everything goes into .venv.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test fast test-full acceptance lint types format wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## make the environment in .venv

$(READY): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ditto needs Python 3.11 or newer; say which: make PYTHON=python3.12")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

demo: setup  ## run the checkpoint example, then resume what it stopped
	@mkdir -p .examples-recovery
	$(PY) -m examples.control-flow.recovery.checkpoint_resume > .examples-recovery/demo.json
	@cat .examples-recovery/demo.json
	$(PY) -m examples.control-flow.recovery.checkpoint_resume --directory "$$($(PY) -c 'import json; print(json.load(open(".examples-recovery/demo.json"))["directory"])')"

test: setup lint types  ## set up, check style and types, run all tests but the long sweeps
	$(PY) -m pytest -q -m "not sweep"

fast: setup lint  ## what to run on every save: style and the tests without a disk
	$(PY) -m pytest -q tests/unit

test-full: setup lint types  ## all tests, the long sweeps included
	$(PY) -m pytest -q

acceptance: setup  ## run all recovery cases, report in .acceptance/; CONFIG=ditto.yaml asks its model
	$(PY) -m benchmarks.acceptance $(if $(CONFIG),--config $(CONFIG))

lint: setup
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/ruff format --quiet --check .

types: setup
	$(VENV)/bin/mypy

format: setup  ## format the code and mend what can be mended
	$(VENV)/bin/ruff format --quiet .
	$(VENV)/bin/ruff check --quiet --fix .

wheel: setup  ## build the wheel into dist/
	$(PY) -m build --no-isolation --wheel --outdir dist .

clean:  ## remove what was built, not the environment
	rm -rf dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis .examples-recovery .acceptance
