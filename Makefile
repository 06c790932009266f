# Everything a person needs is a target; `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKLOADS ?= all
TURNS ?= 3

# Tests start hundreds of processes: each would compile fedspan anew on a machine that forbids caches of bytecode.
unexport PYTHONDONTWRITEBYTECODE

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

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.dev
	$(PIP) -e '.[docs]'
	@touch $@

install: $(VENV)/.dev ## make the environment in .venv, with everything for development

demo: $(VENV)/.user ## compare nine methods on bundled data (under a minute) and write a report
	$(BIN)/fedspan demo

quick: $(VENV)/.dev ## run what one wants while writing (under 30 seconds)
	$(PYTEST) -m "not slow and not long"

test: $(VENV)/.dev ## run the tests (under four minutes on two cores)
	$(PYTEST) -m "not long"

full: $(VENV)/.dev ## run what takes long: faults, fuzzing, real federations, the wheel (under 30 minutes)
	$(PYTEST) -m long
	$(BIN)/python tests/tools/wheel_demo.py

check: $(VENV)/.dev ## lint, formatting, types and the layering of the source
	$(BIN)/ruff check src tests bench docs/*.py
	$(BIN)/ruff format --check src tests bench docs/*.py
	$(BIN)/mypy
	$(PYTEST) -n0 tests/test_house.py

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff format src tests bench docs/*.py
	$(BIN)/ruff check --fix --quiet src tests bench docs/*.py

bench: $(VENV)/.dev ## time whole runs beside plain torch, contestants in turns (PEERS=1, QUICK=1, RESUME=1, WORKLOADS=, ONLY=, TURNS=)
	$(BIN)/python -m bench --workloads $(WORKLOADS) --only $(or $(ONLY),all) --turns $(TURNS) --out bench.json \
	  $(if $(PEERS),--peers) $(if $(QUICK),--quick) $(if $(RESUME),--resume)

docs: $(VENV)/.docs ## write the reference from the code, and build the site in build/site (a broken link fails)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

gallery: $(VENV)/.dev ## draw the pictures of docs/explanation/gallery.md from the demo's runs (screenshots need Chromium)
	$(BIN)/python docs/make_gallery.py

clean: ## remove the environment and everything made
	rm -rf $(VENV) .venv-peers runs bench.json .pytest_cache .mypy_cache .ruff_cache .hypothesis
