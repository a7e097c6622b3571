#!/usr/bin/env bash
# Runs the benchmarks of TensorFerry and of the libraries it is compared with: make bench ARGS="--quick".
. "$(dirname "$0")/common.sh"
scripts/system.sh build
scripts/system.sh grpc || say "the rows beside gRPC are left out"
scripts/venv.sh
scripts/build.sh
for argument in "$@"; do
  if [ "$argument" = --peers ]; then scripts/peers.sh; fi
done
PYTHONPATH=$PWD/$build/python:$PWD exec "$venv/bin/python" -m benchmarks.run --bin "$build/benchmarks" "$@"
