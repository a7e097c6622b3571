#!/usr/bin/env bash
# Runs every fuzzer for 30 or the given seconds, two at once per core: scripts/fuzz.sh [SECONDS].
# Seeds are in tests/fuzz/corpus/NAME, and new inputs go to build/fuzz/corpus. After a crash the script keeps the input,
# and prints the path to it.
. "$(dirname "$0")/common.sh"
export seconds=${1:-30}
scripts/system.sh build clang
scripts/build.sh fuzz build/fuzz "-DCMAKE_CXX_COMPILER=$(first_of clang++-16 clang++)"

ASAN_OPTIONS=external_symbolizer_path=$(first_of llvm-symbolizer-16 llvm-symbolizer)
export ASAN_OPTIONS UBSAN_OPTIONS=print_stacktrace=1

fuzz_one() {
  local name=$1 log=build/fuzz/$1.log
  mkdir -p "build/fuzz/corpus/$name" "tests/fuzz/corpus/$name"
  if "build/fuzz/fuzzers/$name" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/$name-" "build/fuzz/corpus/$name" "tests/fuzz/corpus/$name" >"$log" 2>&1; then
    echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") runs in $seconds s"
  else
    tail -n 60 "$log"
    echo "$name: FAILED, see $log and build/fuzz/$name-*"
    return 1
  fi
}
export -f fuzz_one

mapfile -t fuzzers < <(find build/fuzz/fuzzers -maxdepth 1 -type f -executable -printf '%f\n' 2>/dev/null | sort)
[ ${#fuzzers[@]} -gt 0 ] || die "no fuzzers in build/fuzz/fuzzers"
say "${#fuzzers[@]} fuzzers, $seconds s each"
printf '%s\n' "${fuzzers[@]}" | xargs -P "$((2 * jobs))" -I{} bash -c 'fuzz_one {}'
