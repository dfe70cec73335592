# Two commands do everything: `make demo` and `make test`. Each makes its own environment on first use.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
PIP_FLAGS := --quiet --disable-pip-version-check --no-input

.PHONY: demo test lint pytest pytest-oldest zoo bench clean

demo: $(VENV)/.demo
	$(VENV)/bin/hf-neat-packing demo

test: lint pytest-oldest pytest

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder
	$(VENV)/bin/pytest -q --doctest-modules hf_neat_packing

# The contract of every transformers name that is used, and exactness, on the oldest supported release.
pytest-oldest: $(OLDEST)/.dev
	OMP_NUM_THREADS=1 $(OLDEST)/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder \
		-k "not inductor and not kernels" tests/test_compat.py tests/attention

zoo: $(VENV)/.dev
	$(VENV)/bin/hf-neat-packing audit --zoo

bench: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/attention.py
	$(VENV)/bin/python benchmarks/training_step.py
	$(VENV)/bin/python benchmarks/planning.py
	$(VENV)/bin/python benchmarks/data.py
	$(VENV)/bin/python benchmarks/ranks.py

clean:
	rm -rf $(VENV) $(OLDEST)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(OLDEST)/bin/python:
	$(PYTHON) -m venv $(OLDEST)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing hf_neat_packing and what the demo needs into $(VENV) (once) ..."
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[trainer]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing hf_neat_packing and the development tools into $(VENV) (once) ..."
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo

$(OLDEST)/.dev: pyproject.toml constraints-oldest.txt | $(OLDEST)/bin/python
	@echo "Installing the oldest supported transformers into $(OLDEST) (once) ..."
	$(OLDEST)/bin/python -m pip install $(PIP_FLAGS) -c constraints-oldest.txt -e . accelerate pytest pytest-xdist hypothesis
	@touch $@
