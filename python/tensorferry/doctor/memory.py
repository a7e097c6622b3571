"""Checks of memory: what processes of this host can share, and how."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator

from .finding import BROKEN, OK, SLOW, Finding, Host, size_text

__all__ = ["CHECKS"]

_ENOUGH_SHM = 1 << 30
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)


def memfd(host: Host) -> Iterator[Finding]:
    cost = "No shared memory: calls go by socket (about twice the latency), tensors by cma or basic."
    try:
        fd = os.memfd_create("tensorferry-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        yield Finding("memfd", BROKEN, f"memfd_create: {error.strerror}", cost, _why_no_memfd(host, error))
        return
    try:
        os.ftruncate(fd, 1 << 20)
        with mmap.mmap(fd, 1 << 20) as mapped:
            mapped[:4] = b"here"
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except OSError as error:
        yield Finding("memfd", BROKEN, f"a memfd of 1 MiB: {error.strerror}", cost, _why_no_memfd(host, error))
    else:
        yield Finding("memfd", OK, "memory can be shared and sealed")
    finally:
        os.close(fd)


def _why_no_memfd(host: Host, error: OSError) -> str:
    if host.read("proc/sys/vm/memfd_noexec") == "2":
        return "vm.memfd_noexec=2 forbids it: sysctl vm.memfd_noexec=1."
    return f"Allow memfd_create in this container's seccomp profile, and raise its memory limit (errno {error.errno})."


def dev_shm(host: Host) -> Iterator[Finding]:
    cost = "TensorFerry does not use /dev/shm, but torch's DataLoader workers and NCCL do: they fail with a bus error."
    path = host.root / "dev/shm"
    try:
        about = os.statvfs(path)
    except OSError as error:
        yield Finding("dev_shm", BROKEN, f"/dev/shm: {error.strerror}", cost, "Mount a tmpfs there.")
        return
    total, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    found = f"/dev/shm has {size_text(total)}, {size_text(free)} of it free"
    if not os.access(path, os.W_OK):
        yield Finding("dev_shm", BROKEN, "/dev/shm cannot be written", cost, "Mount it with mode 1777.")
    elif min(total, free) < _ENOUGH_SHM:
        yield Finding("dev_shm", SLOW, found, cost, "docker run --shm-size=8g, or mount a larger tmpfs there.")
    else:
        yield Finding("dev_shm", OK, found)


def _read_from_child() -> int:
    """Returns the errno with which a child reads this process's memory by process_vm_readv; 0: it can."""
    word = ctypes.create_string_buffer(b"a word for the child")
    mine = ctypes.create_string_buffer(len(word))
    part = ctypes.c_size_t * 2  # an iovec: address and length
    there = part(ctypes.addressof(word), len(word))
    here = part(ctypes.addressof(mine), len(mine))
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        got = call(parent, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        os._exit(0 if got == len(word) else ctypes.get_errno() or 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def cma(host: Host) -> Iterator[Finding]:
    cost = "The channel cma is off: tensors that are not in shared memory are copied twice."
    error = _read_from_child()
    if error == 0:
        yield Finding("cma", OK, "processes of this user read one another's memory (process_vm_readv)")
        return
    scope = host.read("proc/sys/kernel/yama/ptrace_scope") or "0"
    if scope != "0":
        advice = "sysctl kernel.yama.ptrace_scope=0, if every process of this user may be traced by the others."
        yield Finding("cma", SLOW, f"kernel.yama.ptrace_scope is {scope}", cost, advice)
    elif "\nSeccomp:\t2" in (host.read("proc/self/status") or ""):
        advice = "Allow process_vm_readv in the container's seccomp profile, or docker run --cap-add=SYS_PTRACE."
        yield Finding("cma", SLOW, "seccomp forbids process_vm_readv", cost, advice)
    else:
        found = f"process_vm_readv: {os.strerror(error) if error > 0 else error}"
        yield Finding("cma", SLOW, found, cost, "Run both processes as one user, with the same capabilities.")


def huge_pages(host: Host) -> Iterator[Finding]:
    path = "sys/kernel/mm/transparent_hugepage/"
    for name, what in (("enabled", "of processes"), ("shmem_enabled", "that is shared")):
        text = host.read(path + name)
        chosen = text[text.index("[") + 1 : text.index("]")] if text and "[" in text and "]" in text else ""
        check = "huge_pages" if name == "enabled" else "huge_pages_shared"
        if chosen in ("never", "deny"):
            cost = f"Memory {what} has small pages: the first use of large tensors is slower, by up to a third."
            advice = f"echo {'madvise' if name == 'enabled' else 'advise'} > /{path}{name}"
            yield Finding(check, SLOW, f"huge pages for memory {what}: {chosen}", cost, advice)
        elif chosen:
            yield Finding(check, OK, f"huge pages for memory {what}: {chosen}")


def room(host: Host) -> Iterator[Finding]:
    """Looks for the least limit of memory: the system's, the cgroup's, and RLIMIT_AS (in limits.py)."""
    limits = []
    for line in (host.read("proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append((int(line.split()[1]) << 10, "available on this host"))
    most, used = host.read("sys/fs/cgroup/memory.max"), host.read("sys/fs/cgroup/memory.current")
    if most and most != "max":
        limits.append((int(most) - int(used or 0), "left in this cgroup (memory.max)"))
    if not limits:
        return
    left, where = min(limits)
    found = f"{size_text(left)} {where}"
    if left < 512 << 20:
        cost = "An agent may keep 1 GiB of results under way for each peer: calls fail with ResourceExhausted, or the "
        yield Finding(
            "memory", SLOW, found, cost + "kernel kills the process.", "Raise the limit, or lower max_bytes_in_flight=."
        )
    else:
        yield Finding("memory", OK, found)


CHECKS = (memfd, dev_shm, cma, huge_pages, room)
