# make demo   set everything up, show the operator being convolution and attention, and train all four layers on digits
# make test   set everything up and run every check
#
# PYTHON chooses the interpreter; VENV an environment, which is made and filled where it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.convnn-ready

.PHONY: demo test test-slow test-gpu bench format

demo: $(READY)
	$(BIN)/convnn verify
	$(BIN)/convnn compare digits

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@.ci/browser
	@echo 'Tests deselected below carry the markers slow and gpu: make test-slow, make test-gpu.'
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow tests

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu tests/gpu tests/triton

bench: $(READY)
	$(BIN)/python benchmarks/chunked.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Made again whenever the project's requirements change.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("convnn needs Python 3.10 or newer, got " + sys.version.split()[0] + "; set PYTHON" if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[lab,dev]'
	touch $(READY)
