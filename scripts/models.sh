#!/usr/bin/env bash
# Checks the models in tests/models with spin. A model's comment lists the definitions with which it must hold (lines
# "holds:"), and those of its mutants, with which it must fail (lines "fails:").
. "$(dirname "$0")/common.sh"
scripts/system.sh models

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

# Checks one line of a model's comment: its name, "holds" or "fails", and the definitions.
check_line() {
  local name=$1 expected=$2 definitions=${*:3}
  local folder=build/models/$name${definitions// /} found
  found=$(check "$name.pml" "$folder" $definitions)
  say "$name $definitions ${found:-came to no end}"
  [ "$found" = "$expected" ] || { say "FAILED: it is said of it that it $expected; see $folder/log"; return 1; }
}
export -f say check check_line

for model in tests/models/*.pml; do
  # Without blanks at the end, by which a line would continue for xargs.
  sed -nE "s/ +$//; s/^ \* (holds|fails):/$(basename "$model" .pml) \1/p" "$model"
done | xargs -P "$jobs" -L 1 bash -c 'check_line "$@"' check_line
