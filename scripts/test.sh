#!/usr/bin/env bash
# Builds and runs all tests, C++ then Python. Prints the skipped tests with their reasons, and ends with one line for
# each suite. Then makes both wheels, and runs them in bare environments.
. "$(dirname "$0")/common.sh"
scripts/system.sh build
[ "$(id -u)" != 0 ] || scripts/system.sh network # for tests that only root can run
scripts/venv.sh
scripts/build.sh
scripts/run-tests.sh "$build" "$venv/bin/python"
scripts/wheel.sh --of-build
