#!/usr/bin/env bash
# Checks that the parts for GPUs build with CUDA 12. Needs no GPU.
#   scripts/cuda12.sh [FOLDER ...]   compiles the sources of make test's build that include CUDA's headers, or those of
#                                    them in the folders, with the headers of CUDA 12.6 in place of the toolkit's
#   scripts/cuda12.sh headers        fetches these headers to build/cuda12-headers (5 MB) and no more
#   scripts/cuda12.sh tests          builds the torch-free tests of GPUs with them (the preset cuda12), and runs them on
#                                    emulated GPUs
. "$(dirname "$0")/common.sh"
headers=build/cuda12-headers
version=12.6 # the oldest that cmake/Cuda.cmake takes

if [ ! -f "$headers/crt/host_defines.h" ]; then
  scripts/venv.sh
  say "fetching the headers of CUDA $version"
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  try_again "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-compile --target "$wheels" \
    "nvidia-cuda-runtime-cu12==$version.*" "nvidia-cuda-nvcc-cu12==$version.*"
  mkdir -p "$headers"
  cp -r "$wheels"/nvidia/cuda_runtime/include/. "$wheels"/nvidia/cuda_nvcc/include/. "$headers"
fi

case ${1:-} in
  headers) exit ;;
  tests)
    TARGETS=none scripts/build.sh cuda12 build/cuda12
    targets=$(ctest --test-dir build/cuda12 -N -L emulated | sed -nE 's/.*: emulated\.([a-z0-9_]+)\..*/\1/p' | sort -u | xargs)
    [ -n "$targets" ] || die "build/cuda12 has no tests on emulated GPUs"
    export TARGETS=$targets
    scripts/build.sh cuda12 build/cuda12
    exec scripts/run-tests.sh build/cuda12 ;;
esac

# Prints the objects of make test's build that depend on CUDA's headers.
objects() {
  ninja -C "$build" -t deps | awk '/^[^ ]/ { object = $1; sub(/:$/, "", object) }
    /\/include\/(cuda|cuda_runtime_api)\.h$/ && !seen[object]++ { print object }' | grep -E "^($1)" || true
}
compile() { # OBJECT
  local command
  command=$(ninja -C "$build" -t commands -s "$1" |
    sed -E "s# -isystem [^ ]*cu(da[^ ]*|[0-9]+)/include# -isystem $PWD/$headers#; s# -MD -MT [^ ]+ -MF [^ ]+##")
  [[ $command == *"$headers"* ]] || die "the command for $1 names no folder of CUDA's headers"
  (cd "$build" && eval "$command -fsyntax-only") || die "CUDA $version does not compile $1"
}
export build headers version
export -f compile die

scripts/build.sh
folders=$(IFS='|' && echo "$*")
mapfile -t found < <(objects "$folders")
if [ ${#found[@]} -eq 0 ]; then
  say "CUDA $version: left out, because $build has no parts for GPUs"
  exit
fi
printf '%s\n' "${found[@]}" | xargs -P "$jobs" -I {} bash -euc 'compile "$1"' compile {} || die "see above"
say "${#found[@]} sources compile with the headers of CUDA $version"
