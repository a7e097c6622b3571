#!/usr/bin/env bash
# Builds and runs the torch-free tests of a sanitizer preset: scripts/sanitize.sh asan|tsan|fuzz. With EVERY=N in the
# environment, runs every Nth of them.
. "$(dirname "$0")/common.sh"
preset=$1
scripts/system.sh build clang
scripts/build.sh "$preset" "build/$preset" "-DCMAKE_CXX_COMPILER=$(first_of clang++-16 clang++)"

symbolizer=external_symbolizer_path=$(first_of llvm-symbolizer-16 llvm-symbolizer)
export ASAN_OPTIONS=$symbolizer:detect_leaks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=$symbolizer:print_stacktrace=1
export TSAN_OPTIONS=$symbolizer:halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/scripts/tsan.supp
# clang 16's ThreadSanitizer does not start on kernels that randomise more address bits than it expects.
setarch -R scripts/run-tests.sh "build/$preset"
