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

.PHONY: venv demo test test-native test-python lint format native clean

venv: $(VENV)/.package

# A changed list starts from an empty environment: what it no longer names must not stay.
$(VENV)/.requirements: requirements/cpu.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c $< torch
	$(BIN)/pip install --disable-pip-version-check --no-deps -r $<
	touch $@

# In place: Python files are used where they lie, and the native library is built into the package.
$(VENV)/.package: $(VENV)/.requirements pyproject.toml setup.py $(NATIVE)
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

native: venv

demo: venv
	$(BIN)/kdtree demo

test: test-native test-python

test-native: venv
	$(BIN)/cmake -S . -B build/tests -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DKDTREE_TESTS=ON
	$(BIN)/cmake --build build/tests
	$(BIN)/ctest --test-dir build/tests --output-on-failure

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
