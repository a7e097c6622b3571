#!/usr/bin/env bash
# Installs the missing system packages of the given sets (aarch64, build, clang, docs, format, grpc, models, network,
# pictures, python, rdma). As root it installs them by apt. Otherwise it prints the command to type and fails.
. "$(dirname "$0")/common.sh"

if ! command -v dpkg-query >/dev/null; then
  say "no Debian or Ubuntu here: g++ >= 12, CMake >= 3.25, Ninja, Boost >= 1.81, OpenSSL 3, GoogleTest, Google Benchmark are needed"
  exit 0
fi

# A package may be there for several architectures.
installed() { dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed; }

boost_is_new_enough() {
  local version
  version=$(sed -n 's/^#define BOOST_VERSION \([0-9]*\)$/\1/p' /usr/include/boost/version.hpp 2>/dev/null)
  [ "${version:-0}" -ge 108100 ]
}

packages=()
for set in "$@"; do
  case $set in
    build)
      packages+=(g++ make git cmake ninja-build ccache pkg-config libssl-dev libgtest-dev libgmock-dev libbenchmark-dev libibverbs-dev)
      boost_is_new_enough || packages+=(boost) ;;
    aarch64) packages+=(g++-aarch64-linux-gnu qemu-user-static libstdc++6:arm64 libssl-dev:arm64 libgtest-dev:arm64 libgmock-dev:arm64) ;;
    clang) packages+=(clang-16 lld-16 llvm-16 libclang-rt-16-dev clang-tidy-16 clang-format-16) ;;
    docs) packages+=(doxygen) ;;
    format) packages+=(clang-format-16) ;;
    grpc) packages+=(pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc) ;;
    network) packages+=(iproute2 iptables) ;;
    pictures) packages+=(graphviz) ;;
    models) packages+=(spin gcc libc6-dev) ;;
    rdma) # a virtual machine with RDMA cards: scripts/rdma-vm.sh
      packages+=(qemu-system-x86 busybox-static kmod cpio xz-utils zstd iproute2 rdma-core ibverbs-providers libibverbs-dev
        ibverbs-utils perftest) ;;
    python) packages+=(python3 python3-venv python3-dev) ;;
    *) die "unknown set of packages: $set" ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  installed "$package" || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ]; then
  case " ${missing[*]} " in *:arm64*) dpkg --add-architecture arm64 ;; esac
  say "apt-get update"
  try_again apt-get update -qq
fi
# Debian 12 has Boost 1.81 beside an older default; Ubuntu 24.04's default is 1.83.
boost=libboost-dev
if apt-cache show libboost1.81-dev >/dev/null 2>&1; then boost=libboost1.81-dev; fi
missing=("${missing[@]/#boost/$boost}")

if [ "$(id -u)" != 0 ]; then
  die "system packages are missing. Type: sudo apt-get update && sudo apt-get install -y ${missing[*]}"
fi
say "installing ${missing[*]}"
DEBIAN_FRONTEND=noninteractive try_again apt-get install -y -qq --no-install-recommends "${missing[@]}"
