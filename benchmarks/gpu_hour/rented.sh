#!/usr/bin/env bash
# The first hour, or ten minutes, on a rented machine with NVIDIA GPUs. In a copy of this repository:
#
#     bash benchmarks/gpu_hour/rented.sh [MINUTES]       # 10 unless told otherwise
#
# The minutes count from when all is installed. PYTHON: another python3, of 3.11 or later. What pip reads from its
# environment counts too: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER install wheels that were brought along.
set -euo pipefail
cd "$(dirname "$0")/../.."

minutes=${1:-10}
python=${PYTHON:-python3}

# jax's libraries for CUDA 13 need a driver of 580 or later, those for CUDA 12 one of 525.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
if [ "${driver%%.*}" -ge 580 ]; then cuda=cuda13; else cuda=cuda12; fi
echo "driver $driver: jax[$cuda]"

# PyTorch's CUDA libraries are of other versions than jax's: an environment of its own, made at the same time.
torch() {
  "$python" -m venv .venv-torch
  .venv-torch/bin/python -m pip install --quiet torch numpy pydantic lazy-loader
  .venv-torch/bin/python -c 'import torch; assert torch.cuda.is_available(), torch.version.cuda'
}
mkdir -p build
torch > build/torch.log 2>&1 &
torch=$!
make .venv/installed-dev PYTHON="$python"
.venv/bin/python -m pip install --quiet -c constraints.txt "jax[$cuda]"
.venv/bin/python -c 'import jax; assert jax.default_backend() == "gpu", jax.devices(); print(jax.devices())'
wait "$torch" || echo "without PyTorch, see build/torch.log: the step is compared with a bare jit alone"

status=0
GPU_HOUR=$minutes make gpu-hour PYTHON="$python" || status=$?
# They are worth more than the machine: commit them from there, or take this file along.
tar -czf build/results.tar.gz benchmarks/results
echo "build/results.tar.gz: benchmarks/results/, to be committed"
exit "$status"
