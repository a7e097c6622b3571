#!/usr/bin/env bash
# Configures and builds one preset: scripts/build.sh [PRESET [FOLDER [CMAKE OPTIONS ...]]]. Default: make test's build.
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
say "building $folder"
cmake --build "$folder" -j "$jobs"
