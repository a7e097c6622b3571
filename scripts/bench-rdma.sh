#!/usr/bin/env bash
# Measures tensors by RDMA beside perftest, in a virtual machine with two cards made of software (scripts/rdma-vm.sh):
# make bench-rdma ARGS="--only 1mb". The run is kept as build/rdma-vm/out/run.json.
. "$(dirname "$0")/common.sh"
scripts/system.sh build
scripts/venv.sh
scripts/build.sh
RDMA_VM_SECONDS=${RDMA_VM_SECONDS:-1800} exec scripts/rdma-vm.sh env "PYTHONPATH=$PWD" "$venv/bin/python" -m benchmarks.rdma \
  --bin "$build/benchmarks" --json build/rdma-vm/out/run.json "$@"
