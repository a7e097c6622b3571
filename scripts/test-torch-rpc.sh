#!/usr/bin/env bash
# Runs PyTorch's own suite of torch.distributed.rpc on TensorFerry's backend: scripts/test-torch-rpc.sh [gpu] [ARGS ...].
# Arguments go to tests/torch_rpc/run.py. The report is build/torch-rpc/report.md, or report-gpu.md.
. "$(dirname "$0")/common.sh"
report=report.md
groups=(cpu faulty)
at_once=$jobs
if [ "${1:-}" = gpu ]; then
  shift
  . scripts/gpu.sh
  scripts/build.sh release build/gpu "$interpreter"
  build=build/gpu
  groups=(gpu)
  at_once=$((jobs < 6 ? jobs : 6)) # the driver makes the contexts of a test's processes one after another
  report=report-gpu.md
else
  scripts/system.sh build
  scripts/venv.sh
  scripts/build.sh
  python=$venv/bin/python
fi
PYTHONPATH=$PWD/$build/python "$python" tests/torch_rpc/run.py "${groups[@]}" --shards "$at_once" \
  --report "build/torch-rpc/$report" "$@"
