#!/usr/bin/env bash
# Run the tests and fuzz inputs of the native kernels with these compiled for AddressSanitizer and UBSan: any access
# outside an array, and any undefined behaviour, ends the run. Arguments go to pytest. With SANITIZERS=thread, for
# ThreadSanitizer, which finds what two threads do to the same memory; then only the tests of threads are run.
#
# Variables: PYTHON (the interpreter with the test requirements; .venv/bin/python), CXX (the compiler; g++), RUNS (mutated
# frames for each format beside the tests; 5000). What this is not: part of `make test`; it takes two or three minutes.
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
sanitizers=${SANITIZERS:-address,undefined}
flags="-O1 -g -fno-omit-frame-pointer -fsanitize=$sanitizers -fno-sanitize-recover=all"
CFLAGS="$flags" CXXFLAGS="$flags" LDFLAGS="-fsanitize=$sanitizers" \
    "$python" -W ignore setup.py -q build_ext --inplace --force >"$build/log" 2>&1
if ! ls hvd_gradcomp/ops/native/_kernels*.so >/dev/null 2>&1; then
    cat "$build/log"
    exit 1
fi

case $sanitizers in
    thread) libraries=$($CXX -print-file-name=libtsan.so) ;;
    *) libraries="$($CXX -print-file-name=libasan.so):$($CXX -print-file-name=libubsan.so)" ;;
esac

# Python itself is not compiled for the sanitizers, so their library has to come first; and it does not free everything.
run() {
    LD_PRELOAD=$libraries ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
        TSAN_OPTIONS=halt_on_error=1:die_after_fork=0 PYTHONPATH=$PWD PYTHONMALLOC=malloc \
        HVD_GRADCOMP_NATIVE=1 OMP_NUM_THREADS=1 "$python" "$@"
}
# The sanitizers write to the process's own error output, which pytest must leave alone.
check() {
    run -m pytest -q -p no:cacheprovider --capture=sys --rootdir "$root" "$@"
}
if [ "$sanitizers" = thread ]; then
    check tests/unit/test_native_threads.py "$@"
    echo "sanitize: clean"
    exit
fi
check tests/unit/test_native_kernels.py tests/unit/test_native_refusal.py tests/unit/test_native_threads.py "$@"
run tests/unit/native_fuzz.py "${RUNS:-5000}"
echo "sanitize: clean"
