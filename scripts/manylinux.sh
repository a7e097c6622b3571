#!/usr/bin/env bash
# Prepares a container of manylinux_2_28 for a build, as cibuildwheel's before-all: the headers of Boost and a static
# OpenSSL, in /opt/tensorferry, because the distribution's own are too old, and the header of libibverbs.
set -euo pipefail
prefix=/opt/tensorferry
work=$(mktemp -d)
cd "$work"

fetch() { # URL SHA256
  curl -fsSL --retry 3 -o archive "$1"
  echo "$2  archive" | sha256sum -c -
  tar xf archive
}

mkdir -p "$prefix/include"
fetch https://archives.boost.io/release/1.81.0/source/boost_1_81_0.tar.bz2 \
  71feeed900fbccca04a3b4f2f84a7c217186f28a940ed8b7ed4725986baf99fa
cp -r boost_1_81_0/boost "$prefix/include"

dnf install -y perl-core rdma-core-devel # what OpenSSL's Configure is written in; the header of libibverbs
fetch https://github.com/openssl/openssl/releases/download/openssl-3.0.15/openssl-3.0.15.tar.gz \
  23c666d0edf20f14249b3d8f0368acaee9ab585b09e1de82107c66e1f3ec9533
cd openssl-3.0.15
./Configure no-tests --prefix="$prefix" --libdir=lib # shared libraries too: the linker reads the names of their functions
make -j"$(nproc)" >/dev/null
make install_sw >/dev/null
