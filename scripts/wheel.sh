#!/usr/bin/env bash
# Builds the wheel of the package for the torch of .venv, checks it, and runs it in an environment of its own:
#   make wheel                    the wheel is dist/tensorferry-*.whl
#   scripts/wheel.sh FILE.whl     checks and runs one that was built before
#   scripts/wheel.sh --of-build   makes it of what the build has, in a moment, as make test does
#
# Then scripts/core-wheel.sh builds the wheel without torch, for manylinux_2_28 but with --of-build, and runs it beside
# the first.
#
# libtorch is not copied into the wheel: the wheel needs the torch that it was built with, which pip installs beside it.
# auditwheel names the wheel by the glibc of this machine, and refuses other libraries.
. "$(dirname "$0")/common.sh"
built=${1:-}
core=(--old-glibc)
if [ "$built" = --of-build ]; then
  core=()
  scripts/venv.sh lint
  scripts/build.sh
  say "making the wheel of what $build has"
  stage=build/wheel # a source tree whose build installs files that are there
  rm -rf "$stage" dist/tensorferry-*.whl
  mkdir -p "$stage/python" dist
  cp -rL python/tensorferry "$stage/python"
  cp pyproject.toml README.md LICENSE "$stage"
  cmake --install "$build" --component python --prefix "$stage/installed" --strip >/dev/null
  cmake --install "$build" --component cpp --prefix "$stage/installed/tensorferry/cpp" >/dev/null
  {
    echo 'cmake_minimum_required(VERSION 3.25)'
    grep '^project(tensorferry VERSION' CMakeLists.txt
    echo 'install(DIRECTORY installed/ DESTINATION . COMPONENT python)'
  } >"$stage/CMakeLists.txt"
  "$venv/bin/python" -m pip wheel -q "./$stage" --no-deps --no-build-isolation -w dist --config-settings build.targets=all
  built=$(echo dist/tensorferry-*.whl)
elif [ -z "$built" ]; then
  scripts/system.sh build
  scripts/venv.sh lint # has scikit-build-core and pybind11-stubgen
  say "building the wheel (as long as a full build)"
  mkdir -p dist
  rm -f dist/tensorferry-*.whl
  CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$venv/bin/python" -m pip wheel . --no-deps --no-build-isolation -w dist
  built=$(echo dist/tensorferry-*.whl)
fi

say "checking $built"
files=$("$venv/bin/python" -m zipfile -l "$built")
for name in _C.pyi py.typed _build_info.py __main__.py doctor/__init__.py; do
  grep -q "^tensorferry/$name " <<<"$files" || die "$built lacks tensorferry/$name"
done
scripts/venv.sh wheel
rm -rf dist/repaired # an earlier run may have ended in between
PATH=$venv/bin:$PATH "$venv/bin/python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
  --exclude 'libcud*' --exclude 'libnv*' -w dist/repaired "$built" # finds patchelf
rm "$built"
mv dist/repaired/*.whl dist
rmdir dist/repaired
built=$(echo dist/tensorferry-*.whl)

# A bare environment: it sees the torch of .venv, and nothing of this tree.
bare=$(mktemp -d)
trap 'rm -rf "$bare"' EXIT
"$venv/bin/python" -m venv "$bare/venv"
"$venv/bin/python" -c 'import site; print("\n".join(site.getsitepackages()))' \
  >"$("$bare/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/torch-of-the-build.pth"
"$bare/venv/bin/python" -m pip install -q --no-deps "$built"
cp -r examples/01-hello examples/03-parameter-server "$bare"

say "running hello and the parameter server in it"
cd "$bare"
"$bare/venv/bin/python" -c 'import tensorferry; print(tensorferry.__file__)' | grep -q "^$bare/" || die "another package is imported"
for example in 01-hello 03-parameter-server; do
  "$bare/venv/bin/python" "$bare/$example/main.py"
done
# Its status says whether something is broken on this machine, which says nothing about the wheel.
findings=$("$bare/venv/bin/tensorferry" doctor local || true)
printf '%s\n' "$findings"
grep -q '^calls by ring' <<<"$findings" || die "tensorferry doctor has not measured calls"
cd "$OLDPWD"
scripts/core-wheel.sh "${core[@]}" "$bare/venv/bin/python"
say "$built is good"
