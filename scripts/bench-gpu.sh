#!/usr/bin/env bash
# Measures tensors on GPUs beside torch.distributed.rpc, NCCL and bare copies. Needs no network where python3 (or
# PYTHON=) has torch already: make bench-gpu ARGS="--only 64mb".
. "$(dirname "$0")/common.sh"

python=${PYTHON:-python3}
if ! "$python" -c 'import torch, numpy' 2>/dev/null; then
  scripts/system.sh build
  scripts/venv.sh
  python=$venv/bin/python
fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  die "no GPU that torch can use here (torch.cuda.is_available() is False): nothing was measured"

cmake --preset release -B build/gpu "-DPython_EXECUTABLE=$(command -v "$python")" >/dev/null
cmake --build build/gpu -j "$jobs" --target tensorferry_python tensorferry_python_package
PYTHONPATH=$PWD/build/gpu/python:$PWD exec "$python" -m benchmarks.gpu "$@"
