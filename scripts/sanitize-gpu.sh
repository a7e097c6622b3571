#!/usr/bin/env bash
# Runs the tests of stream order, and of memory that is used again at once, under the CUDA toolkit's compute-sanitizer.
# It reports each access of a GPU to memory that is not allocated yet, or that is already freed.
. "$(dirname "$0")/common.sh"
. scripts/gpu.sh

sanitizer=$(PATH=$PATH:/usr/local/cuda/bin first_of compute-sanitizer)
build_targets cuda_order_test cuda_converter_test cuda_calls_test
failed=()

# checked NAME COMMAND ...: runs the command and all of its processes under memcheck. Notes NAME as failed if the
# command or a process had an error, or if memcheck gave no summary.
checked() {
  local name=$1 log=build/gpu/sanitized.log ok=yes
  shift
  say "under memcheck: $name"
  timeout 600 "$sanitizer" --tool memcheck --target-processes all --require-cuda-init no --report-api-errors no "$@" 2>&1 | tee "$log" || ok=no
  grep -q 'ERROR SUMMARY' "$log" || ok=no
  ! grep -q 'ERROR SUMMARY: [1-9]' "$log" || ok=no
  [ "$ok" = yes ] || failed+=("$name")
}

# Leaves out the test that forks, because a process that has used a GPU must not fork.
checked "what streams of the channels wait for" build/gpu/tests/channels/cuda_order_test --gtest_filter='-*Killed*'
checked "the converter's streams and memory" build/gpu/tests/converters/cuda_converter_test
calls=build/gpu/tests/rpc/cuda_calls_test
checked "calls" env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$calls"
# Each tensor gets its own memory from the driver, so the sanitizer knows its bounds and when it is freed.
checked "calls, without a caching allocator" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$calls"

[ ${#failed[@]} -eq 0 ] || die "compute-sanitizer found errors in: ${failed[*]}"
say "compute-sanitizer found no error"
