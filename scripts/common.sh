# Sourced by every script of this folder: paths, versions, and functions for messages.
#
#   TORCH=2.11          selects another torch than the newest: .venv-2.11 and build/torch-2.11
#   PYTHON=python3.12   selects the interpreter that makes the .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

newest_torch=2.15
torch=${TORCH:-$newest_torch}
if [ "$torch" = "$newest_torch" ]; then
  venv=$PWD/.venv
  build=build/release
else
  venv=$PWD/.venv-$torch
  build=build/torch-$torch
fi
jobs=${JOBS:-$(nproc)}

say() { printf '==> %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Runs a command up to three times, because package servers sometimes drop a connection.
try_again() {
  "$@" && return
  say "failed, trying again: $*"; sleep 5
  "$@" && return
  say "failed twice, a last try: $*"; sleep 20
  "$@"
}

# Prints the first of the given commands that exists.
first_of() {
  local name
  for name in "$@"; do
    if command -v "$name"; then return; fi
  done
  die "none of these is installed: $*"
}
