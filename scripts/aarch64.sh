#!/usr/bin/env bash
# Compiles the torch-free parts for 64-bit Arm on another processor, and runs the tests of what is written for a processor
# there by QEMU's emulation of a process: copies and reductions, and with them channels, frames and codec. Groups are not
# among them, because QEMU tells each thread another time at which the process began, by which ranks know each other.
# It says nothing about speed, nor about the order in which a real processor shows its writes.
. "$(dirname "$0")/common.sh"
if ! grep -qx 'ID=debian' /etc/os-release; then  # Ubuntu has Arm's packages on other servers than its own
  command -v docker >/dev/null || { say "tests for 64-bit Arm are left out: this is no Debian, and has no docker"; exit; }
  exec docker run --rm -v "$PWD:/src" -w /src debian:12 scripts/aarch64.sh
fi
scripts/system.sh build aarch64
export TARGETS="channels_test basic_test shm_test frame_test codec_test reduce_test"
scripts/build.sh aarch64 build/aarch64
scripts/run-tests.sh build/aarch64
