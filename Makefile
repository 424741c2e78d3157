# One environment, .venv, made in two steps: what a user needs (demo), then what a developer needs (everything else).
# Each step leaves a stamp and is repeated only when a file that decides it has changed.

PYTHON  ?= python3
WORKERS ?= 3
PART    ?= all

PY       := .venv/bin/python
PIP      := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt
DEMO_ENV := .venv/.stamp-demo
TEST_ENV := .venv/.stamp-test
MORE_ENV := .venv/.stamp-integrations

# Dozens of processes that the tests start import the same modules: they are compiled once.
unexport PYTHONDONTWRITEBYTECODE

# One thread per worker. Two workers leave a quarter of two cores idle while tests wait for their own processes: a third takes it.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadgroup

# The parts of make test-full. "rest" is whatever no other part names, so a new test folder is never left out.
PARTS            := taps statistics linalg curvature kernels privacy models train dist integrations zoo rest
tests_taps       := tests/taps
tests_statistics := tests/statistics
tests_linalg     := tests/linalg
tests_curvature  := tests/curvature
tests_kernels    := tests/kernels
tests_privacy    := tests/privacy
tests_models     := tests/models
tests_train      := tests/train
tests_dist       := tests/dist
tests_integrations := tests/integrations
tests_zoo        := tests/zoo
tests_rest       := tests $(foreach part,$(filter-out rest,$(PARTS)),$(addprefix --ignore=,$(tests_$(part))))

# Every script of benchmarks/; a leading underscore marks a helper. BENCH="one two" runs some of them.
BENCH ?= $(basename $(notdir $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-full test-browser lint bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(DEMO_ENV) ## run the whole pipeline on the embedded default
	$(PY) -m gramian demo

test: $(TEST_ENV) ## the tests on a sample of each matrix, lint beside them
	@logs=$$(mktemp -d); $(MAKE) --no-print-directory lint >$$logs/lint 2>&1 & lint=$$!; \
	{ $(PYTEST) -m "not full and not gpu and not browser"; echo $$? >$$logs/status; } | tee $$logs/tests; \
	wait $$lint; lint=$$?; tests=$$(cat $$logs/status); \
	cat $$logs/lint; echo "== lint: exit $$lint"; echo "== tests: exit $$tests"; tail -n 1 $$logs/tests; \
	rm -r $$logs; [ "$$lint $$tests" = "0 0" ]

test-full: $(addprefix full-,$(if $(filter all,$(PART)),$(PARTS),$(PART))) ## the matrices whole: PART=taps|statistics|linalg|curvature|kernels|privacy|models|train|dist|integrations|zoo|rest|all

full-integrations: $(MORE_ENV)

full-%: $(TEST_ENV)
	@$(if $(filter $*,$(PARTS)),,$(error PART=$*: no such part, choose one of: $(PARTS) all))
	@echo "== $*"; start=$$(date +%s); status=0; \
	GRAMIAN_FULL=1 $(PYTEST) --durations=10 -m "not gpu and not browser" $(tests_$*) || status=$$?; \
	echo "== $*: $$(($$(date +%s) - start)) s, exit $$status"; exit $$status

test-browser: $(TEST_ENV) ## the report in headless Chromium (apt install chromium, or CHROMIUM=path)
	$(PIP) -e '.[test-browser]'
	OMP_NUM_THREADS=1 $(PY) -m pytest -m browser tests/report

lint: $(TEST_ENV) ## ruff (lint and format) and mypy --strict
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy --strict -p gramian

bench: $(TEST_ENV) ## run the benchmarks: BENCH="name ..." for some of them
	$(if $(strip $(BENCH)),,$(error benchmarks/ holds no script))
	@for name in $(BENCH); do echo "== $$name"; $(PY) -m benchmarks.$$name || exit; done

clean: ## remove the environment, caches and runs/
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist runs *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEMO_ENV): pyproject.toml constraints.txt
	@echo "installing gramian into .venv (some minutes the first time)"
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[privacy,plot,hf]'
	@touch $@

$(TEST_ENV): $(DEMO_ENV) requirements-peers.txt
	@echo "installing the test tools and peers into .venv"
	$(PIP) -e '.[test]'
	$(PIP) --no-deps -r requirements-peers.txt
	@touch $@

$(MORE_ENV): $(TEST_ENV)
	@echo "installing the libraries of the integrations into .venv"
	$(PIP) -e '.[test,test-integrations]'
	@touch $@
