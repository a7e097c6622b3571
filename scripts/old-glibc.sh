#!/usr/bin/env bash
# Builds the library of tensorferry-core for machines whose glibc is as old as 2.28, as manylinux_2_28 asks for, on a
# machine whose own is newer and that has no containers. Prints the library's path as its last line.
#
# The compiler is zig's clang, out of PyPI: it has the interface of each older glibc, and links its C++ library
# statically. The headers of Boost, OpenSSL and libibverbs are those that scripts/build.sh has found. Out of the
# machine's libcrypto.a comes SHA-256 alone. scripts/core-wheel.sh has auditwheel check what the result needs of glibc.
. "$(dirname "$0")/common.sh"
glibc=2.28
folder=$PWD/build/glibc-$glibc

scripts/system.sh build
TARGETS=none scripts/build.sh >&2
if [ "$(cat "$folder/venv/.installed" 2>/dev/null)" != "$(sha256sum <scripts/requirements/zig.txt)" ]; then
  say "installing zig" >&2
  "$(first_of "$venv/bin/python" python3)" -m venv "$folder/venv"
  try_again "$folder/venv/bin/python" -m pip install -q --disable-pip-version-check -r scripts/requirements/zig.txt >&2
  sha256sum <scripts/requirements/zig.txt >"$folder/venv/.installed"
fi

# A folder of these headers alone: beside them, /usr/include has the machine's glibc.
found() { sed -n "s/^$1:PATH=//p" "$build/CMakeCache.txt"; }
mkdir -p "$folder/include"
ln -sfn "$(found TENSORFERRY_BOOST_INCLUDE)/boost" "$folder/include/boost"
verbs=$(found TENSORFERRY_VERBS_INCLUDE)
for name in infiniband rdma; do
  [ ! -d "$verbs/$name" ] || ln -sfn "$verbs/$name" "$folder/include/$name"
done
rm -rf "$folder/include/openssl"
cp -rL --preserve=timestamps "$(found OPENSSL_INCLUDE_DIR)/openssl" "$folder/include" # else all would be built again
of_machine=/usr/include/$(uname -m)-linux-gnu/openssl # where Debian has OpenSSL's configuration
[ ! -d "$of_machine" ] || cp -rL --preserve=timestamps "$of_machine" "$folder/include"

zig=$(echo "$folder"/venv/lib/python3*/site-packages/ziglang/zig)
export ZIG_GLOBAL_CACHE_DIR=$folder/cache ZIG_LOCAL_CACHE_DIR=$folder/cache
if [ ! -f "$folder/build/build.ninja" ]; then
  say "configuring $folder/build" >&2
  CXX="$zig c++ -target $(uname -m)-linux-gnu.$glibc" cmake --preset core -B "$folder/build" >&2 \
    -DTENSORFERRY_CCACHE=OFF -DTENSORFERRY_CONTRIB=OFF -DTENSORFERRY_TESTS=OFF -DTENSORFERRY_BENCHMARKS=OFF \
    -DTENSORFERRY_WERROR=OFF -DTENSORFERRY_BOOST_INCLUDE="$folder/include" \
    -DTENSORFERRY_VERBS_INCLUDE="${verbs:+$folder/include}" -DOPENSSL_INCLUDE_DIR="$folder/include"
fi
say "building for glibc $glibc (as long as a build of the parts without torch)" >&2
cmake --build "$folder/build" --target tensorferry_c -j "$jobs" >&2
echo "$folder/build/python/tensorferry_core/libtensorferry_c.so"
