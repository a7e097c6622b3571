#!/usr/bin/env bash
# Checks the models in tests/models with spin. A model's comment lists the definitions with which it must hold (lines
# "holds:"), and those of its mutants, with which it must fail (lines "fails:").
. "$(dirname "$0")/common.sh"
scripts/system.sh models
failed=0

# Searches every reachable state for deadlocks and failed assertions. Prints "holds", "fails", or nothing if the search
# did not complete.
check() {
  local model=$PWD/tests/models/$1 folder=$2
  shift 2
  rm -rf "$folder" && mkdir -p "$folder"
  (cd "$folder" && spin -a "$@" "$model" && cc -O2 -DSAFETY -DMEMLIM=4096 -o pan pan.c &&
    timeout 600 ./pan -m100000) >"$folder/log" 2>&1
  if grep -q 'errors: [1-9]' "$folder/log"; then
    echo fails
  elif grep -q 'errors: 0$' "$folder/log" && ! grep -q 'Search not completed' "$folder/log"; then
    echo holds
  fi
}

for model in tests/models/*.pml; do
  name=$(basename "$model" .pml)
  while read -r expected definitions; do
    folder=build/models/$name${definitions// /}
    found=$(check "$name.pml" "$folder" $definitions)
    say "$name $definitions ${found:-came to no end}"
    if [ "$found" != "$expected" ]; then
      say "FAILED: it is said of it that it $expected; see $folder/log"
      failed=1
    fi
  done < <(sed -nE 's/^ \* (holds|fails):/\1/p' "$model")
done
exit "$failed"
