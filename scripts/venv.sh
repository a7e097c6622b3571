#!/usr/bin/env bash
# Makes .venv (.venv-$TORCH) with torch and the packages of the given requirement sets. Leaves it as it is if the sets
# have not changed since the last time.
. "$(dirname "$0")/common.sh"

# Checks for Python 3.10 or newer, its headers and the venv module. A plain Debian Python lacks the headers and venv.
usable() {
  "$1" - 2>/dev/null <<'PYTHON'
import ensurepip, os, sys, sysconfig, venv
headers = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
sys.exit(not (headers and sys.version_info >= (3, 10)))
PYTHON
}

if [ ! -x "$venv/bin/python" ]; then
  python=${PYTHON:-python3}
  if ! usable "$python"; then
    if [ -z "${PYTHON:-}" ]; then
      scripts/system.sh python
      python=/usr/bin/python3
    fi
    usable "$python" || die "$python is older than 3.10, or has no venv module or no headers (python3-venv, python3-dev). PYTHON= picks another."
  fi
  say "making ${venv##*/} with $("$python" --version)"
  "$python" -m venv "$venv"
fi

quiet=()
[ -t 1 ] || quiet=(-q) # a terminal shows the progress, because the first time pip loads some 3 GB

for set in base "$@"; do
  list=scripts/requirements/$set.txt
  key="$torch $(sha256sum <"$list")"
  stamp=$venv/.installed-$set
  if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
    say "installing torch $torch and $list into ${venv##*/}"
    try_again "$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check "torch==$torch.*" -r "$list"
    echo "$key" >"$stamp"
  fi
done
