#!/usr/bin/env bash
# Runs inside the virtual machine of scripts/rdma-vm.sh, whose disk is read-only, what needs an RDMA card or a kernel with
# TLS: C++ tests of the build folder $1, Python tests by the interpreter $2, and perftest. With "part" it leaves out what
# takes long where the processor is emulated; loading torch alone takes a minute there. It then begins nothing in its
# last 90 seconds, and says what it left out: scripts/rdma-tests.sh FOLDER PYTHON [part]
. "$(dirname "$0")/common.sh"
folder=$1
python=$2
extent=${3:-all}
failed=0
report=()
# The two ends of a test have a card each, so that the cable is between them, as between two hosts.
export TENSORFERRY_TEST_RDMA=rxe0,rxe1
too_slow=
if [ "${RDMA_VM_ACCELERATOR:-}" = tcg ]; then
  export TENSORFERRY_TEST_PATIENCE=300
  too_slow='IbvRegistered*TenThousandOffers*:IbvShallow*TenThousandOffers*' # register memory ten thousand times
fi

begin_until=1000000 # seconds since the machine started
[ "$extent" != part ] || begin_until=150

# Runs a part, and keeps its result for the last lines.
run() {
  local name=$1 start=$SECONDS result=ok
  shift
  if [ "$(sed 's/\..*//' /proc/uptime)" -gt "$begin_until" ]; then
    report+=("$(printf '%5d s  %-12s %s' 0 "no time left" "$name")")
    return
  fi
  say "$name"
  "$@" || { result="FAILED ($?)"; failed=1; }
  report+=("$(printf '%5d s  %-12s %s' $((SECONDS - start)) "$result" "$name")")
}

# All cases of a program in one process, or those of a filter.
cpp() { timeout --kill-after=5 1200 "$folder/tests/$1" --gtest_brief=1 "--gtest_filter=${2:-*}"; }

# Both ends have both cards, and split large buffers over them.
with_both_cards() { TENSORFERRY_TEST_RDMA='' "$@"; }

# One direction of one program of perftest, from card to card. perftest prints what these cards lack to stderr.
perftest() {
  "$1" -d rxe0 -x 1 -s "$2" -n 100 -F >/dev/null 2>&1 &
  local _
  for _ in {1..120}; do  # until the server listens at its port, 18515
    ! grep -q ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6 || break
    sleep 0.5
  done
  "$1" -d rxe1 -x 1 -s "$2" -n 100 -F 10.98.0.1 2>/dev/null | grep -E '^ *[0-9]+ +[0-9]+ +[0-9.]+ ' || { kill %1; return 1; }
  wait %1
}

pythons() {
  PYTHONPATH=$PWD/$folder/python timeout --kill-after=5 1200 "$python" -m pytest "$@" -q -rs -p no:cacheprovider
}

# The machine's kernel has TLS, unlike that of some hosts, and the environment makes the tests insist on it.
tls() { TENSORFERRY_TEST_KERNEL_TLS=1 cpp "agent/$1"; }

ibv_devinfo -l
run "TLS by the kernel, ports" tls tls_port_test
run "TLS by the kernel, agents" tls tls_test
run "queue pairs" cpp channels/rdma_queue_pair_test
run "verbs" cpp channels/rdma_verbs_test
for program in ib_read_bw ib_write_bw; do
  for bytes in 65536 1048576; do run "$program, $bytes bytes" perftest "$program" "$bytes"; done
done
if [ "$extent" = part ]; then
  run "agents" cpp agent/ibv_agents_test 'Over/*tcp*-*Many*'
  run "conformance: sizes" cpp channels/ibv_test 'IbvFixture*Carries*'
  run "conformance: ends" cpp channels/ibv_test 'IbvFixture*Killed*Pull*:IbvFixture*CloseDuring*'
  run "conformance: memory" cpp channels/ibv_test 'Ibv.*-*ManyLarge*'
else
  run "agents" cpp agent/ibv_agents_test
  run "hostile peers" cpp channels/ibv_hostile_test
  run "Python" pythons tests/python/test_rdma.py tests/python/test_rdma_peers.py
  run "hostile peers of a queue pair" cpp channels/rdma_hostile_test
  run "the channel" cpp channels/ibv_test 'Ibv.*'
  for kind in '' Registered Staged Shallow; do
    run "conformance: Ibv${kind}Fixture" cpp channels/ibv_test "Ibv${kind}Fixture*-$too_slow"
  done
  run "conformance, both cards" with_both_cards cpp channels/ibv_test 'Ibv.*:IbvFixture*CarriesEverySize*'
fi
printf '%s\n' "${report[@]}"
[ -z "$too_slow" ] || say "left out, because QEMU emulates the processor: $too_slow"
exit "$failed"
