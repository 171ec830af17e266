#!/usr/bin/env bash
# Run the tests and fuzz inputs of the native kernels with these compiled for AddressSanitizer and UBSan: any access
# outside an array, and any undefined behaviour, ends the run. Arguments go to pytest.
#
# Variables: PYTHON (the interpreter with the test requirements; .venv/bin/python), CXX (the compiler; g++), RUNS (mutated
# frames for each format beside the tests; 5000). What this is not: part of `make test`; it takes a minute or two.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(realpath -s "${PYTHON:-.venv/bin/python}")
export CXX=${CXX:-g++} CC=${CXX:-g++}
root=$PWD
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

mkdir "$build/source"
cp -r setup.py setup.cfg pyproject.toml hvd_gradcomp tests "$build/source"
cd "$build/source"
rm -f hvd_gradcomp/ops/native/_kernels*.so
flags="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
CFLAGS="$flags" CXXFLAGS="$flags" LDFLAGS="-fsanitize=address,undefined" \
    "$python" -W ignore setup.py -q build_ext --inplace --force >"$build/log" 2>&1
if ! ls hvd_gradcomp/ops/native/_kernels*.so >/dev/null 2>&1; then
    cat "$build/log"
    exit 1
fi

# Python itself is not compiled for the sanitizers, so their library has to come first; and it does not free everything.
run() {
    LD_PRELOAD="$($CXX -print-file-name=libasan.so):$($CXX -print-file-name=libubsan.so)" \
        ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$PWD PYTHONMALLOC=malloc \
        HVD_GRADCOMP_NATIVE=1 OMP_NUM_THREADS=1 "$python" "$@"
}
# The sanitizers write to the process's own error output, which pytest must leave alone.
run -m pytest -q -p no:cacheprovider --capture=sys --rootdir "$root" tests/unit/test_native_kernels.py \
    tests/unit/test_native_refusal.py "$@"
run tests/unit/native_fuzz.py "${RUNS:-5000}"
echo "sanitize: clean"
