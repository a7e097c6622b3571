#!/usr/bin/env bash
# Measures tensors on GPUs against torch.distributed.rpc, NCCL and bare copies: make bench-gpu ARGS="--only 64mb".
. "$(dirname "$0")/common.sh"
. scripts/gpu.sh

build_targets tensorferry_python tensorferry_python_package
PYTHONPATH=$PWD/build/gpu/python:$PWD exec "$python" -m benchmarks.gpu "$@"
