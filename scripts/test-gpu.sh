#!/usr/bin/env bash
# Builds everything and runs the tests that need a GPU. make test runs the other tests.
. "$(dirname "$0")/common.sh"
. scripts/gpu.sh

scripts/build.sh release build/gpu "$interpreter"
scripts/run-tests.sh build/gpu "$python" gpu
