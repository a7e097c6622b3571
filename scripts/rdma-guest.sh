#!/usr/bin/env bash
# What scripts/rdma-vm.sh runs inside the virtual machine: makes the two cards, runs /run/command in the folder $1, and
# writes its exit status to $2/status. A program that crashes leaves a core in $2.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp PYTHONDONTWRITEBYTECODE=1
ulimit -l unlimited
ulimit -c unlimited
echo "$2/core.%e.%p" >/proc/sys/kernel/core_pattern
cd "$1" || exit
(
  set -e
  # A read of a megabyte has 256 packets, and the default lets 1000 wait. A cable drops none.
  echo 100000 >/proc/sys/net/core/netdev_max_backlog
  ip link set lo up
  ip link add v0 mtu 9000 type veth peer name v1 mtu 9000
  ip address add 10.98.0.1/24 dev v0
  ip address add 10.98.0.2/24 dev v1
  for device in all v0 v1; do
    echo 1 >/proc/sys/net/ipv4/conf/$device/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$device/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$device/arp_ignore
  done
  ip link set v0 up
  ip link set v1 up
  # A cable keeps packets in order. Here each processor has a queue of what arrives, so one processor takes all of an end.
  echo 1 >/sys/class/net/v0/queues/rx-0/rps_cpus
  echo $(($(nproc) > 1 ? 2 : 1)) >/sys/class/net/v1/queues/rx-0/rps_cpus
  # Both addresses are local, so packets between them would stay in the kernel. Only what has come over the cable is
  # delivered here; what goes to the other end's address leaves by the cable.
  ip route add 10.98.0.2 dev v0 src 10.98.0.1 table 1
  ip route add 10.98.0.1 dev v1 src 10.98.0.2 table 2
  ip rule add pref 10 iif v0 lookup local
  ip rule add pref 11 iif v1 lookup local
  ip rule add pref 20 from 10.98.0.1 to 10.98.0.2 lookup 1
  ip rule add pref 21 from 10.98.0.2 to 10.98.0.1 lookup 2
  ip rule add pref 30 lookup local
  ip rule delete pref 0 lookup local
  rdma link add rxe0 type rxe netdev v0
  rdma link add rxe1 type rxe netdev v1
) || { echo "the RDMA cards cannot be made"; exit; }
bash /run/command </dev/null 2>&1
status=$?
echo "$status" >"$2/status"
