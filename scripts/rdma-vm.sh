#!/usr/bin/env bash
# Runs a command in a small virtual machine that has two RDMA cards made of software (Soft-RoCE, rdma_rxe): rxe0 with the
# address 10.98.0.1 and rxe1 with 10.98.0.2, joined by a cable of two virtual Ethernet ends. The machine has this one's
# root, read-only, and this folder as the working directory. Files that the command writes to build/rdma-vm/out stay. Cores
# of programs that crash are there too, until the next machine starts.
#
#   scripts/rdma-vm.sh COMMAND [ARGUMENT ...]      its output and exit status are the command's
#   scripts/rdma-vm.sh --check                     only fetches what it needs; fails, with a reason, if it cannot
#   RDMA_VM_SECONDS=600    kills the machine after this time, with the status 124
#   RDMA_VM_MEMORY=3072    its memory in MiB
#
# The command finds RDMA_VM_ACCELERATOR=kvm in its environment, or tcg if QEMU emulates the processor.
#
# A Debian or Ubuntu kernel is downloaded once, and not installed. QEMU uses KVM if it can, else it emulates the processor,
# which takes about ten times as long.
. "$(dirname "$0")/common.sh"
[ $# -gt 0 ] || die "usage: scripts/rdma-vm.sh COMMAND [ARGUMENT ...]"
scripts/system.sh rdma
work=$PWD/build/rdma-vm
kernel=$work/kernel
mkdir -p "$work/out"
exec 9>"$work/lock" # one machine at a time
flock --timeout 60 9 || die "another virtual machine with RDMA cards runs in this folder"

# The kernel and its modules come from one package, whatever kernel this machine runs.
fetch_kernel() {
  local meta names name
  if [ "$(id -u)" = 0 ] && ! apt-cache show linux-image-amd64 linux-image-generic >/dev/null 2>&1; then
    try_again apt-get update -qq || return 1
  fi
  for meta in linux-image-amd64 linux-image-generic; do # Debian, Ubuntu
    names=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
      --no-enhances "$meta" 2>/dev/null | grep -oE '^linux-(image|modules|modules-extra)-[0-9][^ ]*' | sort -u) || continue
    say "downloading a kernel: ${names//$'\n'/ }"
    rm -rf "$kernel.new"
    mkdir -p "$kernel.new"
    (cd "$kernel.new" && try_again apt-get -o APT::Sandbox::User=root download -qq $names) || return 1
    for name in "$kernel.new"/*.deb; do dpkg -x "$name" "$kernel.new" && rm "$name"; done
    rm -rf "$kernel"
    mv "$kernel.new" "$kernel"
    return
  done
  return 1
}
compgen -G "$kernel/boot/vmlinuz-*" >/dev/null || fetch_kernel || die "no kernel package can be downloaded for the virtual machine"
[ "$1" != --check ] || exit 0

modules=$kernel/lib/modules
[ -d "$modules" ] || modules=$kernel/usr/lib/modules
version=$(ls "$modules" | head -n 1)
depmod -b "${modules%/lib/modules}" "$version" 2>/dev/null || true

machine=(-cpu max -smp "$((jobs < 4 ? jobs : 4))" -no-user-config -nodefaults -display none -serial stdio -no-reboot
  -kernel "$(compgen -G "$kernel/boot/vmlinuz-*" | head -n 1)")
# Runs QEMU for so many seconds at most. It is killed, because a QEMU that hangs in the kernel ends for nothing less, also
# if its parent is killed.
limited() { timeout --signal=KILL "$1" setpriv --pdeathsig KILL qemu-system-x86_64 "${machine[@]}" "${@:2}"; }
# Inside some virtual machines /dev/kvm opens, and then no instruction runs. So KVM counts once it has run a kernel.
if [ ! -s "$work/accelerator" ]; then
  accelerator=tcg,thread=multi
  if [ -w /dev/kvm ] && limited 10 -accel kvm -m 512 -append "console=ttyS0 panic=-1 rdinit=/none" </dev/null 2>&1 |
    grep 'Linux version' >/dev/null; then
    accelerator=kvm
  fi
  echo "$accelerator" >"$work/accelerator"
fi
accelerator=$(cat "$work/accelerator")

# The first root: a shell, the modules in the order in which they load, and what mounts the second root.
first=$work/first
rm -rf "$first"
mkdir -p "$first"/{bin,dev,proc,sys,mnt,modules}
cp "$(command -v busybox)" "$first/bin/busybox"
count=100
for module in virtio_pci 9pnet_virtio 9p crc32_generic rdma_rxe ib_uverbs veth tls gcm ctr ghash_generic; do
  while read -r path; do
    name=$(basename "${path%%.ko*}").ko
    ! compgen -G "$first/modules/*-$name" >/dev/null || continue
    count=$((count + 1))
    case $path in
      *.xz) xz -dc "$path" ;;
      *.zst) zstd -qdc "$path" ;;
      *) cat "$path" ;;
    esac >"$first/modules/$count-$name"
  done < <(modprobe -d "${modules%/lib/modules}" -S "$version" --show-depends "$module" 2>/dev/null | awk '/^insmod/ {print $2}')
done
cat >"$first/init" <<'END'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in /modules/*; do $b insmod $module; done
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=1048576 root /mnt
for folder in proc sys dev; do $b mount --bind /$folder /mnt/$folder; done
for folder in tmp run var/tmp; do $b mount -t tmpfs tmpfs /mnt/$folder; done
$b mkdir -p /mnt/dev/shm
$b mount -t tmpfs shm /mnt/dev/shm
. /where
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576 out "/mnt$out"
$b cp /command /mnt/run/command
$b chroot /mnt /bin/bash "$guest" "$home" "$out"
$b poweroff -f
END
chmod +x "$first/init"
printf 'home=%q\nout=%q\nguest=%q\nexport RDMA_VM_ACCELERATOR=%q\n' \
  "$PWD" "$work/out" "$PWD/scripts/rdma-guest.sh" "${accelerator%%,*}" >"$first/where"
printf '%q ' "$@" >"$first/command"
rm -f "$work/out/status" "$work"/out/core.*
(cd "$first" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/first.gz"

# An emulated processor has one time stamp counter for all cores. The kernel does not know that, and would ask an
# emulated device for the time, in a system call.
clock=
[ "$accelerator" = kvm ] || clock="clocksource=tsc tsc=reliable"

status=0
seconds=${RDMA_VM_SECONDS:-600}
began=$SECONDS
limited "$seconds" -accel "$accelerator" -m "${RDMA_VM_MEMORY:-3072}" -initrd "$work/first.gz" \
  -virtfs local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap \
  -virtfs local,path="$work/out",mount_tag=out,security_model=none \
  -append "console=ttyS0 panic=-1 quiet loglevel=3 mitigations=off $clock" </dev/null 2>"$work/qemu.log" |
  sed -u 's/\r$//; /reboot: Power down$/d' || status=${PIPESTATUS[0]}
if [ "$status" = 137 ] && [ $((SECONDS - began)) -ge "$seconds" ]; then
  printf 'error: the virtual machine was ended after %s s (RDMA_VM_SECONDS)\n' "$seconds" >&2
  exit 124
fi
for core in "$work"/out/core.*; do [ ! -e "$core" ] || say "a program crashed, and left ${core#"$PWD/"}"; done
[ -s "$work/out/status" ] || { tail -n 5 "$work/qemu.log" >&2; die "the virtual machine ended without a status"; }
exit "$(cat "$work/out/status")"
