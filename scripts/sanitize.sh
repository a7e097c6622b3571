#!/usr/bin/env bash
# Builds and runs the torch-free tests of a sanitizer preset: scripts/sanitize.sh asan|tsan|fuzz [SECONDS].
# With SECONDS runs those that the change reaches, the nearest first, and a rotating fifth of the others
# (scripts/reached.py). It then begins nothing after SECONDS, and says what it leaves to make nightly. The change is what
# differs from the merge base with TIDY_BASE (origin/main), or the newest commit if that is the merge base.
. "$(dirname "$0")/common.sh"
preset=$1
limit=${2:-}
folder=build/$preset
scripts/system.sh build clang python
build() { scripts/build.sh "$preset" "$folder" "-DCMAKE_CXX_COMPILER=$(first_of clang++-16 clang++)"; }

symbolizer=external_symbolizer_path=$(first_of llvm-symbolizer-16 llvm-symbolizer)
export ASAN_OPTIONS=$symbolizer:detect_leaks=1:detect_stack_use_after_return=1
export LSAN_OPTIONS=suppressions=$PWD/scripts/lsan.supp:print_suppressions=0
export UBSAN_OPTIONS=$symbolizer:print_stacktrace=1
export TSAN_OPTIONS=$symbolizer:halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/scripts/tsan.supp
# clang 16's ThreadSanitizer does not start on kernels that randomise more address bits than it expects.
run() { setarch -R scripts/run-tests.sh "$folder"; }

if [ -z "$limit" ]; then
  build
  run
  exit
fi

base=$(git merge-base "${TIDY_BASE:-origin/main}" HEAD 2>/dev/null || true)
[ -n "$base" ] && [ "$base" != "$(git rev-parse HEAD)" ] || base=$(git rev-parse --verify -q HEAD~1 || true)
TARGETS=none build
reached=$(python3 -m scripts.reached "$folder" ${base:+"$base"})
mapfile -t targets <<<"$reached"
say "the change since ${base:-the beginning} reaches ${#targets[@]} test targets, the rotating fifth of the others included"

failed=0
at=0
at_a_time=8 # long enough to keep the processors busy, short enough to end in time
while [ "$at" -lt ${#targets[@]} ] && [ "$SECONDS" -lt "$limit" ]; do
  export TARGETS="${targets[*]:at:at_a_time}"
  build
  run || failed=1
  at=$((at + at_a_time))
done
[ "$at" -ge ${#targets[@]} ] || say "left out, for make nightly, after $SECONDS s under $preset: ${targets[*]:at}"
exit "$failed"
