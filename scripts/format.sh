#!/usr/bin/env bash
# Formats C++ by .clang-format and Python by ruff (pyproject.toml), in place.
. "$(dirname "$0")/common.sh"
. scripts/sources.sh
scripts/system.sh format
scripts/venv.sh lint
say "errors"
"$venv/bin/python" scripts/errors.py
say "clang-format"
cpp_sources | xargs -r "$(first_of clang-format-16 clang-format)" -i
say "ruff"
"$venv/bin/ruff" check --fix -q .
"$venv/bin/ruff" format -q .
