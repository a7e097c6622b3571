#!/usr/bin/env bash
# The tests of what streams wait for, and of memory that is used again at once, under the CUDA toolkit's
# compute-sanitizer: nothing on a GPU touches memory that is not there yet, or no more.
. "$(dirname "$0")/common.sh"
. scripts/gpu.sh

sanitizer=$(PATH=$PATH:/usr/local/cuda/bin first_of compute-sanitizer)
build_targets tensorferry_python tensorferry_python_package cuda_order_test cuda_converter_test
export PYTHONPATH=$PWD/build/gpu/python
failed=()

# checked NAME [OPTIONS ...] -- COMMAND ...: its processes, all of them, must have been checked without an error.
checked() {
  local name=$1 log=build/gpu/sanitized.log options=() ok=yes
  shift
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  say "under memcheck: $name"
  "$sanitizer" --tool memcheck --target-processes all --require-cuda-init no --report-api-errors no "${options[@]}" "$@" 2>&1 | tee "$log" || ok=no
  grep -q 'ERROR SUMMARY' "$log" || ok=no
  ! grep -q 'ERROR SUMMARY: [1-9]' "$log" || ok=no
  [ "$ok" = yes ] || failed+=("$name")
}

checked "what streams of the channels wait for" -- build/gpu/tests/channels/cuda_order_test --gtest_filter=-*Killed*
checked "the converter's streams and memory" -- build/gpu/tests/converters/cuda_converter_test
again='long_kernels or freed_and_filled or overwritten_once or what_a_stream_is_doing or streams_of_the_caller'
checked "calls, torch's caching allocator" -- "$python" -m pytest tests/python/test_cuda.py -q -k "$again"
# Here each tensor's memory comes and goes in the order of streams, and the sanitizer knows of it. cuda_ipc cannot export
# such memory, and is left out.
export PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync
checked "calls, cudaMallocAsync" --track-stream-ordered-races all -- \
  "$python" -m pytest tests/python/test_cuda.py -q -k "long_kernels or freed_and_filled"

[ ${#failed[@]} -eq 0 ] || die "compute-sanitizer found errors in: ${failed[*]}"
say "compute-sanitizer found no error"
