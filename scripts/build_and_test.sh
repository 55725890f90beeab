#!/bin/bash
# Builds the native library and runs the tests of its C interface and of its operators, in one go.
# References are made anew from seeds by the tests; none is stored. GPU tests say why they skip.
#   scripts/build_and_test.sh [build folder]     KDTREE_CUDA, KDTREE_CUDA_ARCH: cmake/cuda.cmake
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/test}
python=${PYTHON:-python3}
library=libkdtree_kernels_c.so

cmake -S . -B "$build" -G Ninja -DKDTREE_TESTS=ON \
  -DKDTREE_CUDA="${KDTREE_CUDA:-AUTO}" -DKDTREE_CUDA_ARCH="${KDTREE_CUDA_ARCH:-90a;100f;120f}"
cmake --build "$build"
ctest --test-dir "$build" --output-on-failure

export KDTREE_LIB="$PWD/$build/$library"
"$python" -m pytest tests/ops tests/gpu tests/spec_decode tests/test_cubins.py -rs -q
