#!/usr/bin/env bash
# Configures and builds one preset: scripts/build.sh [PRESET [FOLDER [CMAKE OPTIONS ...]]]. Default: make test's build.
# With TARGETS="a b" in the environment builds these targets alone, and with TARGETS=none configures only.
. "$(dirname "$0")/common.sh"
preset=${1:-release}
folder=${2:-$build}
shift $(($# < 2 ? $# : 2))

options=("$@")
if [ -x "$venv/bin/python" ]; then
  options+=("-DPython_EXECUTABLE=$venv/bin/python")
fi

# Configures again only if the options have changed. CMake itself does so if one of its files changes.
key="$preset ${options[*]}"
if [ ! -f "$folder/build.ninja" ] || [ "$(cat "$folder/.configured" 2>/dev/null)" != "$key" ]; then
  say "configuring $folder"
  cmake --preset "$preset" -B "$folder" "${options[@]}"
  echo "$key" >"$folder/.configured"
fi
[ "${TARGETS:-}" != none ] || exit 0

targets=()
if [ -n "${TARGETS:-}" ]; then
  read -ra targets <<<"$TARGETS"
  targets=(--target "${targets[@]}")
fi
say "building ${TARGETS:-everything} in $folder"
cmake --build "$folder" -j "$jobs" "${targets[@]}"
