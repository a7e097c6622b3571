#!/usr/bin/env bash
# Runs the tests of stream order, of memory that is used again at once, and of the groups' kernels under the CUDA
# toolkit's compute-sanitizer. It reports each access of a GPU to memory that is not allocated yet, or that is already
# freed, and races of a kernel's threads.
. "$(dirname "$0")/common.sh"
. scripts/gpu.sh

sanitizer=$(PATH=$PATH:/usr/local/cuda/bin first_of compute-sanitizer)
build_targets cuda_order_test cuda_converter_test cuda_calls_test group_direct_test
failed=()
tool=memcheck

# checked NAME COMMAND ...: runs the command and all of its processes under $tool. Notes NAME as failed if the command or
# a process had an error, or if the tool gave no summary.
checked() {
  local name=$1 log=build/gpu/sanitized.log ok=yes
  shift
  say "under $tool: $name"
  timeout 600 "$sanitizer" --tool "$tool" --target-processes all --require-cuda-init no --report-api-errors no "$@" 2>&1 | tee "$log" || ok=no
  grep -qE '(ERROR|RACECHECK) SUMMARY' "$log" || ok=no
  ! grep -qE '(ERROR|RACECHECK) SUMMARY: [1-9]' "$log" || ok=no
  [ "$ok" = yes ] || failed+=("$name")
}

# Leaves out the test that forks, because a process that has used a GPU must not fork.
checked "what streams of the channels wait for" build/gpu/tests/channels/cuda_order_test --gtest_filter='-*Killed*'
checked "the converter's streams and memory" build/gpu/tests/converters/cuda_converter_test
calls=build/gpu/tests/rpc/cuda_calls_test
checked "calls" env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$calls"
# Each tensor gets its own memory from the driver, so the sanitizer knows its bounds and when it is freed.
checked "calls, without a caching allocator" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$calls"
kernels=(build/gpu/tests/rpc/collectives/group_direct_test --gtest_filter='Ranks/DirectReductions.*/1_*:Ranks/DirectReductions.*/2_*')
checked "the kernels of groups" "${kernels[@]}"
tool=racecheck
checked "the kernels of groups" "${kernels[@]}"

[ ${#failed[@]} -eq 0 ] || die "compute-sanitizer found errors in: ${failed[*]}"
say "compute-sanitizer found no error"
