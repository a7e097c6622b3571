#!/usr/bin/env bash
# Runs the C++ tests of a build folder and, with a PYTHON given, tests/python against its package; with "gpu" those alone
# that need a GPU: scripts/run-tests.sh FOLDER [PYTHON [gpu]]. Soak tests have a command of their own, make soak.
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
if [ "${EVERY:-1}" != 1 ]; then
  part=(-I "1,,$EVERY")
  say "C++ tests other than every ${EVERY}th are left out: EVERY=$EVERY"
fi

progress=()
[ ! -t 1 ] || progress=(--progress)

say "C++ tests of $folder"
ctest --test-dir "$folder" "${progress[@]}" --output-on-failure "${labels[@]}" "${part[@]}" --label-exclude "^($without)\$" -j "$at_once" | tee "$log" || failed=1
cpp=$(grep -E 'tests passed|No tests were found' "$log" || true)

# GoogleTest prints the reason of a skip on the line after "FILE:LINE: Skipped".
reasons=$(sed -n '/: Skipped$/{n;p}' "$folder/Testing/Temporary/LastTest.log" 2>/dev/null | sort | uniq -c)
[ -z "$reasons" ] || printf 'skipped, with reasons:\n%s\n' "$reasons"

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
  PYTHONPATH=$PWD/$folder/python "$python" -m pytest tests/python -rsfE -q -m "$marks" "${parallel[@]}" | tee "$log" || failed=1
  py=$(tail -n 1 "$log")
fi

say "C++:    ${cpp:-no result}"
[ -z "$python" ] || say "Python: ${py:-no result}"
exit "$failed"
