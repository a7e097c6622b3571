#!/usr/bin/env bash
# Builds and runs all tests, C++ then Python. Says what was skipped and why; ends with a line for each.
. "$(dirname "$0")/common.sh"
scripts/system.sh build
scripts/venv.sh
scripts/build.sh
scripts/run-tests.sh "$build" "$venv/bin/python"
