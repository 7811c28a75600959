# Needs make and Python >= 3.10. Every target installs into .venv what is missing there; `gpu` installs nothing.
PYTHON ?= python3
PYTHON_GPU ?= python3
CONFIG ?= configs/gpt_small.yaml
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLD_PYTHON = PYTHON=$(PYTHON): Python 3.10 or newer is needed. Name one: make PYTHON=python3.11 $(MAKECMDGOALS)

.DEFAULT_GOAL := help
.PHONY: help train test check bench zoo docs gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'ARGS="..." is handed on by train, test, bench, zoo and gpu; PYTHON=... names the Python to build .venv with'

train: $(INSTALLED) ## train CONFIG (default configs/gpt_small.yaml): the main job
	$(BIN)/python -m lightning_cpu_offload fit --config $(CONFIG) $(ARGS)

test: $(INSTALLED) ## run every test, fast and slow, that needs no accelerator
	$(BIN)/python -m pytest -n auto -m "not gpu" $(ARGS)

check: $(INSTALLED) ## lint, format, types and the fast tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto -m "not slow and not gpu"

bench: $(INSTALLED) ## time the host step and whole training steps beside other libraries and the memory limit
	$(BIN)/python benchmarks/host_step.py $(ARGS)
	$(BIN)/python benchmarks/fit_step.py
	$(BIN)/python benchmarks/many_tensors.py

zoo: $(INSTALLED) ## train other people's LightningModules, stock and offloaded, each in an environment of its own
	$(BIN)/python zoo/run.py $(ARGS)

docs: $(INSTALLED) ## build the documentation as a site, site/index.html
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict --quiet

gpu: ## run the accelerator tests and benchmarks with PYTHON_GPU (default python3), a Python that already has torch
	@PYTHONPATH=. $(PYTHON_GPU) -c 'import sys, torch; torch.accelerator.is_available() or sys.exit(f"torch \
	{torch.__version__} of {sys.executable} sees no accelerator. Name a Python that does: make gpu PYTHON_GPU=...")'
	PYTHONPATH=. $(PYTHON_GPU) -m pytest -m gpu tests/gpu $(ARGS)
	PYTHONPATH=. $(PYTHON_GPU) benchmarks/gpu.py --save benchmarks/results

clean: ## remove .venv, caches and build outputs; logs/ stays
	rm -rf $(VENV) benchmarks/.venv zoo/.venvs build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo '$(OLD_PYTHON)' >&2; exit 1; }
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
		|| $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
