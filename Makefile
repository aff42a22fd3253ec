# Everything from a fresh clone: Python 3.11 or newer and make are all it takes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test slow faults gpu check format lint types bench study clean

help:  ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedglimpse needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## Compare methods on the digits data: a table in about a minute
	$(BIN)/fedglimpse compare fedavg fedavg-window glimpse 'seeds=[0,1,2]' rounds=60 data.partition=label_skew --out runs/demo --resume

test: $(READY)  ## Run the default tests
	$(BIN)/pytest -n auto --dist worksteal

slow: $(READY)  ## Run the long tests
	$(BIN)/pytest -n auto --dist worksteal -m "slow and not processes"
	$(BIN)/pytest -m "slow and processes"

faults: $(READY)  ## Try every fault that stored results must survive, then take out each sync and checksum
	$(BIN)/python tests/faults/campaigns.py --full
	$(BIN)/python tests/faults/mutations.py

gpu: $(READY)  ## Run the tests that need a GPU
	$(BIN)/pytest -m gpu

format: $(READY)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)  ## Check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)  ## Check types
	$(BIN)/mypy

check: lint types test  ## Format, lint, types and tests

bench: $(READY)  ## Measure this machine: trainers, sketches, agent
	$(BIN)/python benchmarks/trainers.py
	$(BIN)/python benchmarks/agent.py
	$(BIN)/python benchmarks/sketch.py
	$(BIN)/python benchmarks/population.py
	$(BIN)/fedglimpse bench round --dataset har --lanes 4

study: $(READY)  ## Make every table and figure of study/ again from its stored results
	$(BIN)/python study/tools/update_pages.py

clean:  ## Remove everything that was made
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
