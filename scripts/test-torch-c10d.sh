#!/usr/bin/env bash
# Runs PyTorch's own suite of torch.distributed on the backend "tensorferry": scripts/test-torch-c10d.sh [ARGS ...].
# Arguments go to tests/torch_c10d/run.py. The report is build/torch-c10d/report.md.
. "$(dirname "$0")/common.sh"
scripts/system.sh build
scripts/venv.sh
scripts/build.sh
PYTHONPATH=$PWD/$build/python "$venv/bin/python" tests/torch_c10d/run.py --shards "$jobs" \
  --report build/torch-c10d/report.md "$@"
