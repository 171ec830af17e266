#!/usr/bin/env bash
# Build the native kernels for another processor and compare what they do there with the numpy reference, without Python
# on that side. For 64-bit ARM on Debian: apt-get install g++-aarch64-linux-gnu qemu-user
#
# Variables: CXX (the compiler; aarch64-linux-gnu-g++), RUNNER (what runs its programs; qemu-aarch64), PYTHON (the
# interpreter with the test requirements; .venv/bin/python). What this says nothing about: speed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
cxx=${CXX:-aarch64-linux-gnu-g++}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

PYTHONPATH=$PWD HVD_GRADCOMP_NATIVE=0 "$python" tests/unit/native_cases.py "$build/cases"
# As in setup.py.
sources=$(ls hvd_gradcomp/ops/native/csrc/*.cpp | grep -v module.cpp)
"$cxx" -std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -pthread -static \
    -Ihvd_gradcomp/ops/native/csrc $sources tests/unit/native_cases.cpp -o "$build/check"
${RUNNER-qemu-aarch64} "$build/check" "$build/cases"
