#!/usr/bin/env bash
# Runs clang-tidy on the torch-free C++ sources that changed since the merge base with TIDY_BASE (origin/main), or in the
# last 20 commits of this line if that is the newest commit. Reads the whole tree if there is no such commit, or if asked:
# scripts/tidy.sh all (make soak does).
. "$(dirname "$0")/common.sh"
scripts/system.sh build clang
scripts/venv.sh lint

since=()
if [ "${1:-}" != all ] && base=$(git merge-base "${TIDY_BASE:-origin/main}" HEAD 2>/dev/null); then
  [ "$base" != "$(git rev-parse HEAD)" ] || base=$(git rev-parse --verify -q HEAD~20 || true)
  [ -z "$base" ] || since=("$base")
fi
cmake --preset asan -B build/lint -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null
cmake --build build/lint --target tensorferry_published >/dev/null # the copies of headers that a source includes
"$venv/bin/python" scripts/tidy.py "$(first_of clang-tidy-16 clang-tidy)" build/lint "$jobs" "${since[@]}"
