# Lockstep: set-up and the commands of every day. Bare `make` lists them.
PYTHON ?= python3
VENV ?= .venv
RECIPE ?= smoke
RANKS ?= 2
RUN_DIR ?= runs/$(RECIPE)
SET ?=

READY := $(VENV)/.ready
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup train test test-faults test-faults-long lint bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade "pip>=25.1"
	$(RUN) -m pip install -q --group dev -e .
	@touch $(READY)

setup: $(READY) ## create .venv and install everything (make train and make test do it by themselves)

train: $(READY) ## train RECIPE (smoke) on RANKS (2) processes, or resume it; FRESH=1 starts over; SET="epochs=2 …"
	@$(VENV)/bin/lockstep run $(RECIPE) --ranks $(RANKS) --run-dir $(RUN_DIR) $(if $(FRESH),--fresh) $(addprefix --set ,$(SET))

test: $(READY) ## every test that needs no cluster
	$(RUN) -m pytest -m "not faults"

test-faults: $(READY) ## kill, corrupt and starve real runs (5 random scenarios)
	$(RUN) -m pytest -m faults

test-faults-long: $(READY) ## the same with 50 random scenarios
	LOCKSTEP_SCENARIOS=50 $(RUN) -m pytest -m faults

lint: $(READY) ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(READY) ## time a training step on this machine's CPU against torch's DDP and sgemm
	$(RUN) benchmarks/cpu_step.py

clean: ## remove caches; runs/, data/ and .venv stay
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
