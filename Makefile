# A fresh machine needs python3 (3.10 or newer) with venv, a C++20 compiler and make; the rest comes
# with `make venv`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Test files run side by side, each whole in one process: its engines are shared by its tests.
TEST_JOBS ?= 2
NATIVE := CMakeLists.txt $(shell find csrc -type f -not -path 'csrc/tests/*')
CXX_FILES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: FORCE venv demo test native-tests test-native cubins cubins-table test-python lint format native clean

venv: $(VENV)/.package

# A changed list starts from an empty environment: what it no longer names must not stay.
$(VENV)/.requirements: requirements/cpu.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c $< torch
	$(BIN)/pip install --disable-pip-version-check --no-deps -r $<
	touch $@

# What the native library is built with: other settings build it anew.
VENV_CUDA := $(or $(KDTREE_CUDA),OFF)
$(VENV)/.settings: FORCE | $(VENV)/.requirements
	@echo "$(VENV_CUDA) $(KDTREE_CUDA_ARCH)" | cmp -s - $@ || echo "$(VENV_CUDA) $(KDTREE_CUDA_ARCH)" > $@
FORCE:

# In place: Python files are used where they lie, and the native library is built into the package.
# This environment is a CPU's: its library has the CUDA operators only if KDTREE_CUDA asks for them.
$(VENV)/.package: $(VENV)/.requirements $(VENV)/.settings pyproject.toml setup.py $(NATIVE)
	KDTREE_CUDA=$(VENV_CUDA) $(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

native: venv

demo: venv
	$(BIN)/kdtree demo

test: test-native cubins test-python

# With the CUDA operators where there is an nvcc; a GPU is not needed to build them.
native-tests: venv
	$(BIN)/cmake -S . -B build/tests -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DKDTREE_TESTS=ON -UKDTREE_CUDA -UKDTREE_CUDA_ARCH
	$(BIN)/cmake --build build/tests

test-native: native-tests
	$(BIN)/ctest --test-dir build/tests --output-on-failure

# Registers, shared memory and instructions of the GPU code, and the table of them in the docs.
CUBINS := scripts/check_cubins.py --lib build/tests/libkdtree_kernels_c.so
cubins: native-tests
	$(BIN)/python $(CUBINS) --docs docs/kernels.md --skip-cpu

cubins-table: native-tests
	$(BIN)/python $(CUBINS) --write docs/kernels.md

test-python: venv
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist *.egg-info kdtree_runner/*.so
