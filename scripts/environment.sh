#!/usr/bin/env bash
# Make the virtual environment .venv ready: pinned frameworks, Horovod, and this package in editable form.
# Safe to repeat: what it was made from is written down at the end, and while that stays the same it returns at once.
#
# Variables: PYTHON (the interpreter to start from), EXTRAS (of this package; without "tensorflow" there is none), TORCH
# (the requirement for torch, such as torch==2.13.0+cu126, wherever pip finds it), HOROVOD_* (options of Horovod's build;
# HOROVOD_GPU_OPERATIONS also asks for the frameworks' GPU builds).
# What this script does not do: run anything, or install for use elsewhere (for that: pip install hvd_gradcomp).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
stamp=$venv/ready
extras=${EXTRAS:-torch,tensorflow,examples,dev}
say() { echo "environment: $*"; }

ingredients() {
    cat constraints.txt setup.cfg scripts/environment.sh scripts/build_horovod.py
    # The editable install names this folder: a clone that was moved or copied is made anew.
    echo "$PWD ${PYTHON:-} ${TORCH:-} $extras"
    command -v mpicxx || true
    env | grep '^HOROVOD_' | sort || true
}

# An editable package has its native kernels compiled beside its sources: again when those have changed since.
kernels_are_current() {
    local sources=hvd_gradcomp/ops/native/csrc built
    [ -d $sources ] || return 0 # an image is made before the code is there
    built=$(find hvd_gradcomp/ops/native -name '_kernels*.so' | head -n 1)
    [ -n "$built" ] && [ -z "$(find $sources setup.py -newer "$built" | head -n 1)" ]
}

wanted=$(ingredients | sha256sum)
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    kernels_are_current || {
        say "compiling the native kernels"
        "$venv/bin/python" -m pip install --quiet --no-input --no-build-isolation --no-deps -e .
    }
    exit 0
fi

scripts/system_packages.sh
wanted=$(ingredients | sha256sum)

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "the tested versions in constraints.txt need Python 3.11 or newer, but $python is $("$python" --version)."
    say "Name another one with PYTHON=..., or install the package alone with pip into an environment of your own."
    exit 1
fi

rm -f "$stamp"
if [ ! -x "$venv/bin/pip" ]; then
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
export PATH="$PWD/$venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
pip=(python -m pip install --quiet --no-input -c constraints.txt)

say "installing the build tools and frameworks of constraints.txt"
"${pip[@]}" setuptools wheel cmake ninja packaging

gpu=no
if [ -n "${HOROVOD_GPU_OPERATIONS:-}" ] || [ "$(uname -m)" != x86_64 ]; then
    gpu=yes # or another kind of processor, for which there is one build only, under the plain name
fi

# PyPI's torch for Linux on x86-64 is the CUDA build, with gigabytes of libraries that a machine without a GPU never
# loads. The CPU build comes from whatever index pip is set up with.
tested=$(sed -n 's/^torch==//p' constraints.txt)
present=$(python -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])' 2>/dev/null || true)
if [ -n "${TORCH:-}" ]; then
    "${pip[@]}" "$TORCH"
elif [ "$present" = "$tested" ]; then
    say "torch $present is there already"
elif [ $gpu = yes ]; then
    "${pip[@]}" torch
else
    # Where pip is not set up with an index that has it, the plain name brings the large build, which works as well.
    "${pip[@]}" "torch==$tested+cpu" 2>/dev/null || {
        say "no CPU build of torch in pip's indexes (PIP_EXTRA_INDEX_URL can name PyTorch's own): taking the CUDA build"
        "${pip[@]}" "torch==$tested"
    }
fi
case ,$extras, in
    *,tensorflow,*)
        if [ $gpu = yes ]; then "${pip[@]}" tensorflow; else "${pip[@]}" tensorflow-cpu; fi
        ;;
esac

python scripts/build_horovod.py --constraints constraints.txt

# mpi4py needs an MPI library to be of any use.
if command -v mpirun >/dev/null; then
    extras=$extras,mpi
fi
say "installing hvd_gradcomp[$extras] in editable form"
"${pip[@]}" --no-build-isolation -e ".[$extras]"
if [[ ,$extras, = *,tensorflow,* && ,$extras, = *,dev,* ]]; then
    # Legacy Keras, for the tests that compare with it. It requires TensorFlow by a name under which it is not installed
    # here (tensorflow-cpu), and would bring the other build along.
    "${pip[@]}" --no-deps tf-keras
fi

echo "$wanted" >"$stamp"
say "ready: $venv"
