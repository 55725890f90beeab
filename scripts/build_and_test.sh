#!/bin/bash
# Builds the native library and runs the tests of its C interface and of its operators, in one go.
# References are made anew from seeds by the tests; none is stored. GPU tests say why they skip.
#
#   scripts/build_and_test.sh [FOLDER]               build in FOLDER (build/test), test
#   scripts/build_and_test.sh --build-only [FOLDER]  build alone; a GPU is not needed
#   scripts/build_and_test.sh --prebuilt FOLDER      test what --build-only left in FOLDER, also on
#                                                    another machine, without CMake or a compiler
#
# Environment: PYTHON (python3); PYTEST_ARGS, for example "-m gpu"; KDTREE_CUDA and
# KDTREE_CUDA_ARCH, cmake/cuda.cmake. Needs torch and pytest of that Python; the package need not be
# installed. CMake and Ninja are that Python's, or the system's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
do_build=1 do_test=1
case ${1:-} in
  --build-only) do_test=0; shift ;;
  --prebuilt) do_build=0; shift ;;
  -*) echo "unknown option $1, see the head of $0" >&2; exit 2 ;;
esac
build=${1:-build/test}
library=$build/libkdtree_kernels_c.so

tool() {
  local beside
  beside=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/$1
  if [ -x "$beside" ]; then echo "$beside"; else command -v "$1"; fi
}

if [ "$do_build" = 1 ]; then
  cmake=$(tool cmake) || { echo "no cmake: pip install cmake, or use --prebuilt" >&2; exit 2; }
  ninja=$(tool ninja) || { echo "no ninja: pip install ninja, or use --prebuilt" >&2; exit 2; }
  "$cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$ninja" -DKDTREE_TESTS=ON \
    -UKDTREE_CUDA -UKDTREE_CUDA_ARCH
  "$cmake" --build "$build"
fi
[ "$do_test" = 1 ] || exit 0
[ -f "$library" ] || { echo "no $library: build it, or give the folder it lies in" >&2; exit 2; }

failed=0
if [ "$do_build" = 1 ]; then
  "$(tool ctest)" --test-dir "$build" --output-on-failure || failed=1
  grep -hE "^[a-z_]+: |cases$" "$build/Testing/Temporary/LastTest.log" || true
else  # as ctest calls them: 77 is "skipped, no GPU"
  for program in "$build"/csrc/tests/test_*; do
    [ -f "$program" ] || { echo "no test programs in $build/csrc/tests" >&2; exit 2; }
    status=0
    "$program" || status=$?
    [ "$status" = 0 ] || [ "$status" = 77 ] || { echo "FAILED: $program ($status)" >&2; failed=1; }
  done
fi

# The package where it lies: a folder of links has its parts under their names.
site=$build/site
rm -rf "$site" && mkdir -p "$site/kdtree_runner"
ln -s "$PWD"/kdtree_runner/* "$PWD/spec_decode" "$PWD/model_executor" "$site/kdtree_runner/"
export KDTREE_LIB=$(realpath "$library") PYTHONPATH=$(realpath "$site")${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1  # not the checkout itself, which would hide that folder
# shellcheck disable=SC2086
"$python" -m pytest tests/ops tests/gpu tests/spec_decode tests/test_cubins.py -rs -q \
  ${PYTEST_ARGS:-} || failed=1
exit "$failed"
