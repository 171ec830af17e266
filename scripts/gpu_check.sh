#!/usr/bin/env bash
# On a machine with a GPU: the tests of the Triton kernels there, and the kernel benchmark. A few minutes, of which the
# compiler takes most. Needs this package's test requirements, torch for CUDA and the Triton that belongs to it;
# Horovod is not needed. What is not here: tests of whole jobs with NCCL.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}

"$python" - <<'END'
import torch, triton
assert torch.cuda.is_available(), "torch sees no GPU here"
print(torch.cuda.get_device_name(), "torch", torch.__version__, "Triton", triton.__version__)
END
unset TRITON_INTERPRET
export PYTHONPATH=$PWD
"$python" -m pytest -q -p no:cacheprovider --timeout 600 tests/unit/test_triton_kernels.py \
    tests/unit/test_triton_refusal.py tests/unit/test_triton_steps.py tests/unit/test_triton_code.py \
    tests/unit/test_triton_choice.py
"$python" benchmarks/gpu_kernels.py "$@"
