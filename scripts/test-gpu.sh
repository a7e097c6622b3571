#!/usr/bin/env bash
# Builds all, and runs the tests that need a GPU (make test runs the others, there as elsewhere). Needs no network where
# python3 (or PYTHON=) has torch already.
. "$(dirname "$0")/common.sh"

python=${PYTHON:-python3}
if ! "$python" -c 'import torch, numpy, pytest' 2>/dev/null; then
  scripts/system.sh build
  scripts/venv.sh
  python=$venv/bin/python
fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  die "no GPU that torch can use here (torch.cuda.is_available() is False): nothing was tested. make test needs none."
"$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.device_count(), "x", torch.cuda.get_device_name(0))'

scripts/build.sh release build/gpu "-DPython_EXECUTABLE=$(command -v "$python")"
scripts/run-tests.sh build/gpu "$python" gpu
