# `make demo` and `make test` need nothing but Python, and on the first call install what they use into .venv.

PYTHON ?= python3
BIN ?= .venv/bin
PYTEST_ARGS ?=
# Processes that share the tests; torch then takes one thread in each. WORKERS=0 runs them in one, with its output.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(1)/python -m pytest -n $(WORKERS)
BENCH_ARGS ?=

PYTHON_FOLDERS := src modeling benchmarks examples tests

.DEFAULT_GOAL := help
.PHONY: help install demo test test-floor nightly style quality bench bench-engine model reference-model build clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

install: .venv/.installed ## create .venv with the package (editable), [train], [cli] and [dev]

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --constraint constraints.txt --editable ".[train,cli,dev]"
	@# pyright cannot follow package-dir, so it gets d2f_hf.modeling as a link (stubPath in pyproject.toml).
	mkdir -p .venv/typings/d2f_hf && ln -sfn ../../../modeling .venv/typings/d2f_hf/modeling
	touch $@

.venv-floor/.installed: pyproject.toml constraints-floor.txt
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python -m pip install --constraint constraints-floor.txt --editable ".[train,cli,dev]"
	touch $@

# The question reaches the script through the environment, and $(value) keeps make from expanding it: "$5", quotes and
# backticks arrive as they were typed.
unexport QUESTION
demo: export D2F_QUESTION = $(value QUESTION)
demo: .venv/.installed ## answer word problems with D2F and its rivals; QUESTION="..." asks your own
	@if [ -n "$$D2F_QUESTION" ]; then \
	    exec $(BIN)/python examples/reference_model/demo.py --question="$$D2F_QUESTION"; \
	else \
	    exec $(BIN)/python examples/reference_model/demo.py; \
	fi

test: export HF_HUB_OFFLINE = 1
test: .venv/.installed ## run the tests that are not marked nightly
	$(call PYTEST,$(BIN)) $(PYTEST_ARGS)

test-floor: export HF_HUB_OFFLINE = 1
test-floor: .venv-floor/.installed ## the same tests on the oldest supported versions, in .venv-floor
	$(call PYTEST,.venv-floor/bin) $(PYTEST_ARGS)

nightly: export HF_HUB_OFFLINE = 1
nightly: .venv/.installed ## the long tests
	$(call PYTEST,$(BIN)) -m nightly $(PYTEST_ARGS)

style: .venv/.installed ## fix and format the code
	$(BIN)/ruff check --fix $(PYTHON_FOLDERS)
	$(BIN)/ruff format $(PYTHON_FOLDERS)

quality: .venv/.installed ## lint, format check, types
	$(BIN)/ruff check $(PYTHON_FOLDERS)
	$(BIN)/ruff format --check $(PYTHON_FOLDERS)
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: .venv/.installed ## measure scores, tokens per forward, speed and the decoding loop against their targets
	$(BIN)/python -m benchmarks.decoding --targets --compile $(BENCH_ARGS)

bench-engine: .venv/.installed ## measure the decoding loop alone, on random weights: overhead, context, memory
	$(BIN)/python -m benchmarks.decoding --engine 100m --compile $(BENCH_ARGS)

model: .venv/.installed ## write the D2F reference model to my-d2f-model, a folder like those on the Hub
	$(BIN)/python examples/reference_model/reference_models.py --output my-d2f-model

reference-model: .venv/.installed ## train the reference model; resumes where it stopped
	$(BIN)/python examples/reference_model/train.py

build: .venv/.installed ## sdist and wheel into dist/
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

clean: ## remove build output (not .venv)
	rm -rf build dist d2f_hf.egg-info .pytest_cache .ruff_cache
