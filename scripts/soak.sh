#!/usr/bin/env bash
# Runs the long tests:
#   - the C++ tests with their loops in full;
#   - the Python tests marked soak: all pairs of call shapes and 200,000 random ones, leaks, growth, repeated endings;
#   - both suites ten times on busy cores (TIMES=3: three times);
#   - clang-tidy on the whole tree; make lint reads only what has changed.
. "$(dirname "$0")/common.sh"
scripts/system.sh build
scripts/venv.sh
scripts/build.sh
failed=()
say "C++ tests, with loops in full"
TENSORFERRY_SOAK=1 ctest --test-dir "$build" --output-on-failure --label-exclude '^(gpu|gpu2)$' || failed+=("C++ tests")
say "Python soak tests"
PYTHONPATH=$PWD/$build/python "$venv/bin/python" -m pytest tests/python -rsfE -q -m soak || failed+=("Python soak tests")

# Repeats both suites while other processes keep the cores busy, because no test may depend on an idle machine.
times=${TIMES:-10}
say "C++ and Python tests, $times times on busy cores"
hogs=()
for _ in $(seq "$(nproc)"); do
  sh -c 'while :; do :; done' & hogs+=($!)
done
trap 'kill "${hogs[@]}"' EXIT
for time in $(seq "$times"); do
  say "time $time of $times"
  scripts/run-tests.sh "$build" "$venv/bin/python" || failed+=("time $time")
done
say "clang-tidy"
scripts/tidy.sh all || failed+=(clang-tidy)
[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]}"
