#!/usr/bin/env bash
# Runs the C++ tests of a build folder and, with a PYTHON given, tests/python against its package; with "gpu" those alone
# that need a GPU: scripts/run-tests.sh FOLDER [PYTHON [gpu]]. Soak tests have a command of their own, make soak.
# With TARGETS="a b" in the environment runs the C++ tests of these targets alone.
#
# A failed test runs alone, three times more (scripts/retry.py). If it passes each time, it is reported as unstable, and
# the run succeeds, unless more than two tests are.
. "$(dirname "$0")/common.sh"
folder=$1
python=${2:-}
labels=() marks='not soak' at_once=$((jobs + jobs / 2)) # many tests wait more than they compute
if [ "${3:-}" = gpu ]; then
  labels=(-L '^gpu2?$') marks='(gpu or gpu2) and not soak'
  at_once=$((jobs < 12 ? jobs : 12)) # the driver makes the contexts of many processes one after another
fi
log=$folder/tests.log
failed=0
unstable=0

# again KIND ARGS: runs failed tests alone, by scripts/retry.py, and counts those that pass each time.
again() {
  "${python:-python3}" -m scripts.retry "$@" | tee "$folder/retries.log" || failed=1
  unstable=$((unstable + $(grep -c '^==> unstable: ' "$folder/retries.log" || true)))
}

without=soak
if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  without='soak|gpu|gpu2'
  say "C++ tests labelled gpu and gpu2 are left out: no GPU on this machine"
elif ! compgen -G '/dev/nvidia1' >/dev/null; then
  without='soak|gpu2'
  say "C++ tests labelled gpu2 are left out: one GPU on this machine"
fi

if ! compgen -G '/sys/class/infiniband/*' >/dev/null; then
  without+='|rdma'
  say "C++ tests labelled rdma are left out: no RDMA card on this machine (make test-rdma makes one)"
fi

part=()
[ -z "${TARGETS:-}" ] || part=(-R "^((emulated|cards|gpu|corpus)\\.)?(${TARGETS// /|})(\\.|\$)")

progress=()
[ ! -t 1 ] || progress=(--progress)

say "C++ tests of $folder"
cpp_failed=0
whole=(--test-output-size-passed 1000000 --test-output-size-failed 1000000) # for the reasons of skips, and scripts/retry.py
ctest --test-dir "$folder" "${progress[@]}" "${whole[@]}" --output-on-failure "${labels[@]}" "${part[@]}" --label-exclude "^($without)\$" -j "$at_once" | tee "$log" || cpp_failed=1
cpp=$(grep -E 'tests passed|No tests were found' "$log" || true)

# GoogleTest prints the reason of a skip on the line after "FILE:LINE: Skipped".
reasons=$(sed -n '/: Skipped$/{n;p}' "$folder/Testing/Temporary/LastTest.log" 2>/dev/null | sort | uniq -c)
[ -z "$reasons" ] || printf 'skipped, with reasons:\n%s\n' "$reasons"
[ "$cpp_failed" = 0 ] || again cpp "$folder" "$log"

if [ -n "$python" ]; then
  say "Python tests, with $("$python" -c 'import torch; print("torch", torch.__version__)')"
  # By file, as the tests of one share processes; in the order that conftest.py gives, with pytest-xdist 3.7. Tests on
  # GPUs are few and long: a worker without work takes some of another's.
  # Only 3 there: an H100 refused further processes ("out of memory") when 23 used it, with 28 of its 80 GB in use.
  parallel=() by=loadfile workers=4
  [ "${3:-}" != gpu ] || { by=worksteal workers=3; }
  if "$python" -m pytest --help 2>/dev/null | grep -e --no-loadscope-reorder >/dev/null; then
    parallel=(-n "$((jobs < workers ? jobs : workers))" --dist "$by" --no-loadscope-reorder)
  fi
  export PYTHONPATH=$PWD/$folder/python
  failures=$PWD/$folder/failures.jsonl
  rm -f "$failures"
  status=0
  "$python" -m pytest tests/python --failures "$failures" -rsfE -q -m "$marks" "${parallel[@]}" | tee "$log" || status=$?
  py=$(tail -n 1 "$log")
  case $status in
    0) ;;
    1) again python "$python" "$failures" ;;
    *) failed=1 ;; # pytest itself failed
  esac
fi

say "C++:    ${cpp:-no result}"
[ -z "$python" ] || say "Python: ${py:-no result}"
if [ "$unstable" -gt 2 ]; then
  say "$unstable tests are unstable, which is more than two"
  failed=1
fi
exit "$failed"
