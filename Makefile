# Everything a person needs is a target; `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKLOADS ?= all

.DEFAULT_GOAL := help
PYTEST := $(BIN)/python -m pytest

.PHONY: help install demo quick test full check format bench docs gallery clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-9s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("fedspan needs Python 3.11 or newer; this is %s. Try: make PYTHON=python3.12" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[report]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.user

install: $(VENV)/.dev ## make the environment in .venv, with everything for development

demo: $(VENV)/.user ## compare seven methods on bundled data (under a minute) and write a report
	$(BIN)/fedspan demo

quick: $(VENV)/.dev ## run what one wants while writing (under 30 seconds)
	$(PYTEST) -m "not slow and not long"

test: $(VENV)/.dev ## run the tests (under four minutes on two cores)
	$(PYTEST) -m "not long"

full: $(VENV)/.dev ## run what takes long: faults, fuzzing, real federations, the wheel (under 30 minutes)
	$(PYTEST) -m long
	$(BIN)/python tests/tools/wheel_demo.py

check: $(VENV)/.dev ## lint, formatting, types and the layering of the source
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(PYTEST) -n0 tests/test_house.py

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix --quiet src tests bench

bench: $(VENV)/.dev ## time the workloads beside their floor and limit (WORKLOADS=name,name runs some); writes bench.json
	$(BIN)/python -m bench --workloads $(WORKLOADS) --out bench.json

docs: $(VENV)/.dev ## write docs/methods.md from the methods' own docstrings
	$(BIN)/fedspan methods --markdown > docs/methods.md

gallery: $(VENV)/.dev ## draw the pictures of docs/gallery.md from the demo's runs (screenshots need Chromium)
	$(BIN)/python docs/make_gallery.py

clean: ## remove the environment and everything made
	rm -rf $(VENV) runs bench.json .pytest_cache .mypy_cache .ruff_cache .hypothesis
