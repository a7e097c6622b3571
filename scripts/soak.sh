#!/usr/bin/env bash
# The long tests, those labelled (C++) or marked (Python) soak: leaks, growth, endings a hundred times over.
. "$(dirname "$0")/common.sh"
scripts/system.sh build
scripts/venv.sh
scripts/build.sh
say "C++ soak tests"
ctest --test-dir "$build" --output-on-failure -L '^soak$'
say "Python soak tests"
PYTHONPATH=$PWD/$build/python "$venv/bin/python" -m pytest tests/python -rsfE -q -m soak
