#!/usr/bin/env bash
# Trains a model with a parameter server in several processes, then measures TensorFerry against torch.distributed.rpc.
. "$(dirname "$0")/common.sh"
scripts/system.sh build
scripts/venv.sh
scripts/build.sh
export PYTHONPATH=$PWD/$build/python:$PWD
say "a parameter server, held by a remote reference, and its trainers: examples/03-parameter-server"
"$venv/bin/python" examples/03-parameter-server/main.py
say "TensorFerry and torch.distributed.rpc, measured in turns in one run: benchmarks"
"$venv/bin/python" -m benchmarks.run --bin "$build/benchmarks" --quick
