# `make demo` and `make test` do everything from nothing, and skip what is already done.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test lint bench soak env clean

demo: $(INSTALLED)  ## run the pipeline on the embedded default and show the table
	dvc repro
	salcli table

test: $(INSTALLED)  ## run the tests
	pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)  ## ruff and mypy
	ruff check .
	ruff format --check .
	mypy

bench: $(INSTALLED)  ## compare speeds (on a quiet machine; some minutes)
	python -m benchmarks.speed

soak: $(INSTALLED)  ## kills, flipped bits and concurrent runs for 20 minutes; counts what was lost
	python -m benchmarks.soak $(SOAK)

env: $(INSTALLED)  ## the virtual environment alone

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "salcli needs Python 3.11 or newer; name one with: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing salcli and its dependencies (torch is large: this takes some minutes) …"
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $@

clean:  ## remove everything that was built, but not the environment
	rm -rf data/prepared data/splits data/unseen runs scratch sweep .salcli dvc_plots .dvc/cache .dvc/tmp
