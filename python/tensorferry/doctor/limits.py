"""Checks of what the system lets this process have: descriptors, threads, locked memory, processors."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator

from .finding import BROKEN, NOTE, OK, SLOW, Finding, Host, size_text

__all__ = ["CHECKS"]

_DESCRIPTORS_EACH = 4  # of a link to a peer: 3, and one for a connection of bulk data
_INFINITE = resource.RLIM_INFINITY


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == _INFINITE else str(limit)


def descriptors(host: Host) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    peers = max(0, soft - used - 64) // _DESCRIPTORS_EACH
    found = f"{_limit_text(soft)} descriptors (ulimit -n), {used} in use: enough for about {peers} peers"
    if soft != _INFINITE and peers < 150:
        state = BROKEN if peers < 16 else SLOW
        cost = f"A link to a peer takes up to {_DESCRIPTORS_EACH}: further peers are refused with ResourceExhausted."
        yield Finding(
            "descriptors", state, found, cost, f"ulimit -n {_limit_text(hard)}, or LimitNOFILE= of the service."
        )
    else:
        yield Finding("descriptors", OK, found)


def threads(host: Host) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = (
        [] if soft == _INFINITE or os.geteuid() == 0 else [(soft, "RLIMIT_NPROC (ulimit -u), for all of this user")]
    )
    pids = host.read("sys/fs/cgroup/pids.max")
    if pids and pids != "max":
        limits.append((int(pids), "pids.max of this cgroup"))
    if not limits:
        yield Finding("threads", OK, "no limit on threads but the system's")
        return
    least, which = min(limits)
    found = f"{least} processes and threads: {which}"
    if least < 1024:
        cost = "Each function that blocks holds a thread: above the limit, calls wait until others end."
        yield Finding("threads", SLOW, found, cost, "Raise it, or lower max_threads= of the agents.")
    else:
        yield Finding("threads", OK, found)


def address_space(host: Host) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == _INFINITE:
        return
    cost = "Mapped memory of peers counts: calls fail with ResourceExhausted, and CUDA does not start."
    yield Finding("address_space", SLOW, f"RLIMIT_AS (ulimit -v) is {size_text(soft)}", cost, "ulimit -v unlimited")


def locked_memory(host: Host) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"{'unlimited' if soft == _INFINITE else size_text(soft)} may be locked (ulimit -l)"
    if soft == _INFINITE or soft >= 1 << 30:
        yield Finding("locked_memory", OK, found)
        return
    if not host.names("sys/class/infiniband"):
        yield Finding("locked_memory", NOTE, found + "; no network card needs more here")
        return
    cost = "RDMA cards read registered memory alone, which is locked: the channel ibv falls back to TCP."
    advice = "ulimit -l unlimited, LimitMEMLOCK=infinity of the service, or docker run --ulimit memlock=-1."
    yield Finding("locked_memory", BROKEN, found, cost, advice)


def processors(host: Host) -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    quota, _, period = (host.read("sys/fs/cgroup/cpu.max") or "max 100000").partition(" ")
    if quota != "max":
        usable = min(usable, max(1, int(quota) // int(period or 100000)))
    if usable < 2:
        cost = (
            "Caller and callee take turns on one processor: a call takes two switches of the scheduler, some 5 us more."
        )
        yield Finding(
            "processors", SLOW, "one processor for this process", cost, "taskset, cpuset or cpu.max: give it two."
        )
    else:
        yield Finding("processors", OK, f"{usable} processors for this process")


def clock(host: Host) -> Iterator[Finding]:
    source = host.read("sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    times = 2000
    began = time.perf_counter_ns()
    for _ in range(times):
        time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    each = (time.perf_counter_ns() - began) / times
    found = f"clock source {source}, {each:.0f} ns for each reading"
    if source in ("hpet", "acpi_pm", "jiffies", "xen"):
        cost = "Each call reads the clock several times: some microseconds more for each call."
        yield Finding(
            "clock", SLOW, found, cost, "Boot with clocksource=tsc if the processor's is stable (dmesg says)."
        )
    elif time.time() < 1_700_000_000:
        cost = "Traces and flight recorders of several hosts do not fit together, and certificates fail."
        yield Finding("clock", SLOW, f"the time of day is {time.ctime()}", cost, "Start an NTP client.")
    else:
        yield Finding("clock", OK, found)


CHECKS = (descriptors, threads, address_space, locked_memory, processors, clock)
