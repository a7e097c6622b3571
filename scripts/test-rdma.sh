#!/usr/bin/env bash
# Runs the tests that need an RDMA card in a virtual machine with two cards made of software (scripts/rdma-vm.sh). Ends
# with one line for each part. With "part" it runs for at most four minutes after the build, and if this machine cannot
# have such a virtual machine, it says why and succeeds.
. "$(dirname "$0")/common.sh"
if [ "${1:-}" = part ] && ! scripts/rdma-vm.sh --check; then
  say "skipped: this machine cannot have the virtual machine, as said above"
  exit 0
fi
scripts/system.sh build
scripts/venv.sh
scripts/build.sh
seconds=3000
[ "${1:-}" != part ] || seconds=240
RDMA_VM_SECONDS=${RDMA_VM_SECONDS:-$seconds} scripts/rdma-vm.sh scripts/rdma-tests.sh "$build" "$venv/bin/python" "$@"
