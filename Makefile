# make demo | test | bench | gpu-check | format | clean
# Every target makes the environment it needs: Python >= 3.11 with venv, and g++ are enough.

TORCH ?= 2.13.0
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One at a time, also with `make -j`. What is imported is compiled then: most of what pip installs never is.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(if $(shell command -v flock),flock $(VENV)) $(BIN)/pip install --quiet --no-compile
STAMP := $(VENV)/.made-torch-$(TORCH)
CPP := $(shell find csrc tests/emu -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

# Test processes, as many as there are processors; tests/conftest.py says what goes where.
# Threads that wait must not spin: they would keep a processor from another process.
PARALLEL := OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
PYTEST_ARGS ?= -n logical --maxprocesses 4

.PHONY: demo two-heads flights test lint unit bench gpu-check format clean install tools objects kernels
.DELETE_ON_ERROR:

# pip is one process: compile beside it (--jobs=2). The last two programs have one thread each.
demo:
	@$(MAKE) --no-print-directory --jobs=2 $(STAMP)-demo objects
	@$(MAKE) --no-print-directory install
	$(BIN)/python examples/reviews.py
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target two-heads flights

two-heads: $(STAMP)-demo
	$(BIN)/python examples/two_heads.py

flights: $(STAMP)-demo
	$(BIN)/python examples/offload.py

test: lint unit

lint: $(STAMP)-test install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy

unit: $(STAMP)-test $(STAMP)-demo install
	$(BIN)/python -m fastemb
	$(PARALLEL) $(BIN)/python -m pytest $(PYTEST_ARGS) --cov --cov-report=term

bench: $(STAMP)-demo install
	$(PIP) --no-deps -r requirements/bench.txt
	$(BIN)/python bench/embedding_bag.py
	$(BIN)/python bench/optim.py
	$(BIN)/python bench/grad_scale.py
	$(BIN)/python bench/offload.py

# On a machine with a GPU, with its own Python and torch; installs into the current environment.
gpu-check:
	$(PYTHON) bench/gpu_check.py

format: $(STAMP)-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist *.egg-info fastemb/*.so fastemb/build_info.json .coverage .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# ---- environment ----------------------------------------------------------------------------------

tools: $(STAMP)-test $(STAMP)-demo

# What `install` links, for those who have something else to do meanwhile. Most of it needs no torch.
objects: kernels | $(STAMP)
	$(BIN)/python setup.py --quiet build_ext --inplace

kernels: | $(VENV)/.made
	$(BIN)/python setup.py --quiet build_kernels

# Quick when nothing changed: objects are kept in build/native.
install: | $(STAMP)
	$(PIP) --no-build-isolation --no-deps -e .

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make needs Python >= 3.11 for the pinned tools (fastemb itself: 3.10); try PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/build.txt
	touch $@

$(STAMP): | $(VENV)/.made
	rm -f $(VENV)/.made-torch-*
	$(PIP) torch==$(TORCH)
	touch $@

$(STAMP)-test: requirements/test.txt requirements/triton.txt | $(STAMP)
	$(PIP) -r requirements/test.txt
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) -r requirements/triton.txt
	touch $@

$(STAMP)-demo: requirements/demo.txt requirements/demo-data.txt | $(STAMP)
	$(PIP) -r requirements/demo.txt
	$(PIP) --no-deps -r requirements/demo-data.txt
	touch $@
