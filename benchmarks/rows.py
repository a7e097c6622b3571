"""Every row of the benchmark: what is measured, by whom, where, and what it is held to.

A new row is an entry of ROWS; a new kind of contestant is a function of contestants.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.contestants import (
    ALONE,
    BARE_COPY,
    BARE_TCP,
    BARE_TRANSFER,
    BARE_UNIX,
    EMPTY_CALL,
    FEWER,
    GRPC,
    IPERF3,
    ONE_INTERFACE,
    ONE_TENSOR,
    OURS,
    QUIET,
    STRANGERS,
    TORCH,
    TORCH_ON_OURS,
    TORCH_SHARED,
    UNCOUNTED,
    WARM_COPY,
    WHOLE,
    WITHOUT_TLS,
    Contestant,
    Scale,
    actors,
    beside_blocking,
    between_hosts,
    carried,
    idle,
    in_new_pair,
    iperf3,
    one_sided,
    over_interfaces,
    program,
    python,
    stranger,
    threads,
    whole_lives,
)
from benchmarks.group_rows import GROUPS, NOT_IN_GROUPS, OPERATIONS, after_a_death_row, group_row
from benchmarks.placement import Placement
from benchmarks.row import Row
from benchmarks.units import (
    MICROSECONDS,
    PERCENT,
    SECONDS,
    SHARE_OF_CORE,
    THREADS,
    TIMES_ITS_BYTES,
    Figure,
    Unit,
    gigabytes,
    gigabytes_sent,
    maximum,
    p99,
    per_second,
)
from benchmarks.workloads import IN_FLIGHT

CORES = len(os.sched_getaffinity(0))


def _times(placement: Placement, unpinned: float, two_cores: float) -> float | None:
    return {Placement.UNPINNED: unpinned, Placement.TWO_CORES: two_cores}.get(placement)


def _targets(**peers: float | None) -> dict[str, float]:
    names = {"torch": TORCH, "bare": BARE_UNIX}
    return {names[peer]: times for peer, times in peers.items() if times is not None}


def _slug(placement: Placement) -> str:
    return placement.value.replace(" ", "-")


def _empty_call(placement: Placement) -> Row:
    targets = _targets(torch=_times(placement, 40, 100), bare=_times(placement, 1, 4))
    return Row(
        f"noop-{_slug(placement)}",
        "empty rpc_sync",
        (Figure(MICROSECONDS, targets),),
        ours=python(OURS, "sync"),
        peers={TORCH: python(TORCH, "sync"), BARE_UNIX: program("bare_roundtrip", transport="unix")},
        placement=placement,
        quick=placement is Placement.UNPINNED,
    )


def _cpp_call(placement: Placement) -> Row:
    return Row(
        f"cpp-{_slug(placement)}",
        "empty call from C++",
        (Figure(MICROSECONDS, _targets(bare=_times(placement, 1 / 0.75, 1 / 0.15))),),
        ours=program("cpp_call", transport="ring"),
        peers={BARE_UNIX: program("bare_roundtrip", transport="unix")},
        placement=placement,
    )


def _cpp_call_over(transport: str, peer: str, targets: dict[str, float]) -> Row:
    return Row(
        f"cpp-{transport}",
        f"empty call from C++ over {transport} sockets",
        (Figure(MICROSECONDS, targets),),
        ours=program("cpp_call", transport=transport),
        peers={peer: program("bare_roundtrip", transport=transport)},
    )


# Who calls whom by the typed API of C++ programs.
DIRECTIONS = {"cpp": "C++ to C++", "python-serves": "C++ to Python", "python-calls": "Python to C++"}
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "empty": ("empty call", {"kind": "empty"}),
    "text": ("string of 64 bytes, sent and received", {"kind": "text"}),
    "1mb": ("1 MB tensor, sent and received", {"kind": "tensor", "bytes": str(1 << 20)}),
    "64mb": ("64 MB tensor, sent and received", {"kind": "tensor", "bytes": str(64 << 20)}),
}


def _typed_call(peer: str, kind: str) -> Row:
    title, options = KINDS[kind]
    unit = gigabytes(int(options["bytes"])) if "bytes" in options else MICROSECONDS
    peers = {GRPC: program("grpc_call", **options)}
    if "bytes" not in options:
        peers[BARE_UNIX] = program("bare_roundtrip", transport="unix")
    return Row(
        f"typed-{peer}-{kind}",
        f"{title}, {DIRECTIONS[peer]}",
        (Figure(unit, {GRPC: 15} if (peer, kind) == ("cpp", "empty") else {}),),
        ours=program("cpp_typed", transport="ring", peer=peer, python=sys.executable, **options),
        peers=peers,
        rounds=1 if kind == "64mb" else None,  # gRPC takes a second for each there
    )


def _typed_callers(callers: int) -> Row:
    return Row(
        f"typed-callers-{callers}",
        f"empty calls of {callers} threads at once, C++ to C++",
        (Figure(per_second("calls/s", 1), {GRPC: 10} if callers == 64 else {}),),
        ours=program("cpp_typed", transport="ring", callers=str(callers)),
        peers={GRPC: program("grpc_call", callers=str(callers))},
    )


# What leaves one transport only; the ring is the default and has the rows without a transport in their name, too.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "ring": {},
    "unix": {"shared_memory": False},
    "tcp": {"unix_sockets": False},
}


def _empty_call_over(transport: str, placement: Placement) -> Row:
    bare, name = ("tcp", BARE_TCP) if transport == "tcp" else ("unix", BARE_UNIX)
    return Row(
        f"transport-{transport}-{_slug(placement)}",
        f"empty rpc_sync by transport {transport}",
        (Figure(MICROSECONDS),),
        ours=carried("sync", TRANSPORTS[transport], transport=transport),
        peers={TORCH: python(TORCH, "sync"), name: program("bare_roundtrip", transport=bare)},
        placement=placement,
        rounds=2,
    )


def _empty_call_beside_hogs(placement: Placement) -> Row:
    """A caller that sleeps until its reply comes is the measure: spinning must not cost more than it gains."""
    return Row(
        f"hogs-{_slug(placement)}",
        "empty rpc_sync",
        (Figure(MICROSECONDS, {BARE_UNIX: 1}),),
        ours=python(OURS, "sync"),
        peers={BARE_UNIX: program("bare_roundtrip", transport="unix"), TORCH: python(TORCH, "sync")},
        placement=placement,
        hogs=2,
        rounds=3,
    )


def _empty_call_beside_python(where: str, process: str) -> Row:
    return Row(
        f"gil-{process}",
        f"empty rpc_sync, a busy Python thread in the {process}",
        (Figure(MICROSECONDS, {ALONE: 1 / 5}),),
        ours=python(OURS, "sync_beside_python", where=where),
        peers={ALONE: python(ALONE, "sync"), TORCH: python(TORCH, "sync_beside_python", where=where)},
        rounds=3,
    )


TENSOR_TARGETS = {1: {TORCH: 5.0}, 16: {TORCH: 2.5}, 64: {TORCH: 8.0, BARE_COPY: 1.5}}


def _tensors(megabytes: int, hogs: int = 0) -> Row:
    size = megabytes << 20
    peers = {TORCH: python(TORCH, "tensors", size=size)}
    if megabytes == 64:
        peers[BARE_COPY] = program("bare_copy", bytes=str(size))
    targets = {TORCH: 4.5} if hogs else TENSOR_TARGETS[megabytes]
    return Row(
        f"tensor-{megabytes}mb" + ("-busy" if hogs else ""),
        f"{megabytes} MB tensor, sent and received",
        (Figure(gigabytes(size), targets),),
        ours=python(OURS, "tensors", size=size),
        peers=peers,
        hogs=hogs,
        quick=not hogs,
    )


CHANNELS = ("shm", "cma", "basic", "tensorpipe")


def _tensors_by(name: str, channel: str, options: Mapping[str, Any], megabytes: int) -> Row:
    size = megabytes << 20
    peers = {TORCH: python(TORCH, "tensors", size=size)}
    targets: dict[str, float] = {}
    if channel == "basic":
        transport = "tcp" if name == "tcp" else "unix"
        bare = BARE_TRANSFER[transport]
        peers[bare] = program("bare_transfer", transport=transport, bytes=str(size))
        targets = {TORCH: 1.5, bare: 1.0} if megabytes > 1 else {}
    return Row(
        f"channel-{name}-{megabytes}mb",
        f"{megabytes} MB tensor by channel {channel}" + (" over TCP" if name == "tcp" else ""),
        (Figure(gigabytes(size), targets),),
        ours=carried("tensors", {**options, "channels": channel}, channel=channel, size=size),
        peers=peers,
        rounds=2,
    )


def _beside_others(name: str, title: str, unit: Unit, ours: str, torchs: str, theirs: str, **arguments: Any) -> Row:
    """The libraries that people would pick instead, each by the way that its users would write it."""
    given = {name: value for name, value in arguments.items() if name != "count"}
    return Row(
        f"peers-{name}",
        title,
        (Figure(unit),),
        ours=python(OURS, ours, **given),
        peers={
            TORCH: python(TORCH, torchs, **given),
            **{who: stranger(who, theirs, **arguments) for who in STRANGERS},
        },
        strangers=True,
    )


def _sent_beside_others(megabytes: int) -> Row:
    size = megabytes << 20
    unit = Unit("GB/s", float(size), rate=True)
    title = f"{megabytes} MB tensor, sent"
    return _beside_others(f"sent-{megabytes}mb", title, unit, "sent", "sent", "send", size=size)


def _between_hosts(tensors: int) -> Row:
    size = 64 << 20
    peer = IPERF3.format(tensors)
    titled = "64 MB tensor" if tensors == 1 else f"{tensors} tensors of 64 MB in flight"
    return Row(
        f"network-sent-{tensors}",
        f"{titled}, sent from C++ over a veth pair",
        (Figure(Unit("GB/s", float(tensors * size), rate=True), {peer: 0.9}),),
        ours=between_hosts("cpp_transfer", transport="tcp", kind="tensor", bytes=str(size), callers=str(tensors)),
        peers={peer: iperf3(tensors, tensors * size)},
        rounds=3,
    )


def _over_tls(size: int) -> Row:
    kind = {"kind": "tensor", "bytes": str(size)} if size else {"kind": "empty", "bytes": "0"}
    titled = f"{size >> 20} MB tensor, sent from C++" if size else "empty call from C++"
    return Row(
        f"network-tls-{size >> 20}mb" if size else "network-tls-empty",
        f"{titled} over a veth pair, with TLS",
        (Figure(gigabytes_sent(size) if size else MICROSECONDS, {WITHOUT_TLS: 0.5}),),
        ours=between_hosts("cpp_transfer", transport="tls", **kind),
        peers={WITHOUT_TLS: between_hosts("cpp_transfer", transport="tcp", **kind)},
        rounds=3,
    )


def _over_two_interfaces() -> Row:
    size = 64 << 20
    given = {"transport": "tcp", "kind": "tensor", "bytes": str(size)}
    return Row(
        "network-interfaces",
        "64 MB tensor, sent from C++ over two veth pairs of 1 Gbit/s each",
        (Figure(gigabytes_sent(size), {ONE_INTERFACE: 1.8}),),
        ours=over_interfaces(2, "cpp_transfer", **given),
        peers={ONE_INTERFACE: over_interfaces(1, "cpp_transfer", **given)},
        rounds=3,
    )


def _small_beside_large() -> Row:
    given = {"transport": "tcp", "kind": "empty"}
    return Row(
        "network-beside-1gb",
        "empty call from C++ over a veth pair, beside 1 GB that is sent",
        (Figure(MICROSECONDS), Figure(MICROSECONDS, {QUIET: 1 / 3}, "p99", "p99", of=p99)),
        ours=between_hosts("cpp_transfer", bytes=str(1 << 30), **given),
        peers={QUIET: between_hosts("cpp_transfer", bytes="0", **given)},
        rounds=3,
    )


def _leaves(kilobytes: int) -> Row:
    count, size = 200, kilobytes << 10
    return Row(
        f"leaves-{kilobytes}kb",
        f"{count} tensors of {kilobytes} KB in a dict, sent and received",
        (Figure(MICROSECONDS, {ONE_TENSOR: 1 / 2}),),
        ours=python(OURS, "leaves", size=size, count=count),
        peers={
            ONE_TENSOR: python(ONE_TENSOR, "tensors", size=count * size),
            TORCH: python(TORCH, "leaves", size=size, count=count),
        },
    )


def _actors(count: int, peers: dict[str, Contestant], better: dict[str, float], once: bool = False) -> Row:
    return Row(
        f"actors-{count}",
        f"{count} actors that think 0.1 to 1 ms, one learner",
        (
            Figure(per_second("calls/s", 1), better, "rate", series="passed"),
            Figure(MICROSECONDS, better, "p99", "p99 of a call", series="each", of=p99),
            Figure(MICROSECONDS, better, "cpu", "CPU time a call, all processes", series="computed"),
        ),
        ours=actors(OURS, count),
        peers=peers,
        rounds=1,
        once=once,
    )


def _memory(name: str, title: str, count: Scale, size: int) -> Row:
    return Row(
        f"memory-{name}",
        title,
        (
            Figure(PERCENT, {}, "caller", "caller's resident set over the last 90 %", "caller", limit=2),
            Figure(PERCENT, {}, "callee", "callee's resident set over the last 90 %", "callee", limit=2),
        ),
        ours=in_new_pair("growth", ("caller", "callee"), count, size),
        count=count,
        rounds=1,
        once=True,
    )


def _torch_backend(name: str, title: str, unit: Unit, times: float | None, workload: str, **arguments: Any) -> Row:
    """A program of torch's module on both backends."""
    return Row(
        f"torch-backend-{name}",
        f"torch.distributed.rpc on both backends: {title}",
        (Figure(unit, {TORCH: times or 1}),),
        ours=python(TORCH_ON_OURS, workload, **arguments),
        peers={TORCH: python(TORCH, workload, **arguments)},
        rounds=3,
    )


HELD = 5120  # bytes of a tensor in a replay buffer
CALLS, MEGABYTES, REPLAY = Scale(1_000_000, 20_000), Scale(10_000, 200), Scale(1_000_000, 20_000)


def _region(what: str, size: int) -> Row:
    """A read or a write of a region of the callee, beside a copy of the same bytes."""
    text = f"{size >> 20} MB" if size >> 20 else f"{size >> 10} KB"
    large = size >= 1 << 20
    figure = Figure(gigabytes_sent(size), {WARM_COPY: 0.9}) if large else Figure(MICROSECONDS, limit=3.0)
    return Row(
        f"region-{what}-{text.replace(' ', '').lower()}",
        f"{text} of a peer's region: {what}",
        (figure,),
        ours=one_sided(what, size=size),
        peers={WARM_COPY: one_sided("copy", size=size), TORCH_SHARED: one_sided("copy_shared", size=size)},
    )


VERSION, READERS = 1 << 30, 4


def _version(changed: float, named: bool = False) -> Contestant:
    return one_sided("versions", processes=READERS + 1, readers=READERS, size=VERSION, changed=changed, named=named)


def _versions(title: str, name: str, ours: Contestant, peer: str, workload: Contestant, target: float) -> Row:
    return Row(name, title, (Figure(SECONDS, {peer: target}),), ours=ours, peers={peer: workload}, rounds=1)


# What decides whether a change may stay, for --core.
CORE = (
    "noop-unpinned", "in-flight", "tensor-1mb", "tensor-64mb", "leaves-20kb", "cpp-unpinned", "transport-tcp-unpinned",
    "torch-backend-in-flight", "group-2-all_reduce", "region-read-4kb",
)  # fmt: skip

ROWS = [
    *[_region(what, size) for what in ("read", "write") for size in (4 << 10, 1 << 20, 64 << 20)],
    Row(
        "region-blocks",
        "40,064 blocks of 8 KB of a peer's region, read in any order",
        (Figure(gigabytes_sent(40_064 * 8192), {WARM_COPY: 0.8}),),
        ours=one_sided("blocks"),
        peers={WARM_COPY: one_sided("gather")},
    ),
    _versions(
        "a version of 1 GB, all of it changed, at 4 readers",
        "version-whole",
        _version(1.0),
        WARM_COPY,
        one_sided("copy", processes=READERS + 1, size=VERSION),
        0.9,
    ),
    _versions(
        "a version of 1 GB, 1 % of it changed, at 4 readers",
        "version-delta",
        _version(0.01),
        WHOLE,
        _version(1.0),
        5.0,
    ),
    _versions(
        "a version of 1 GB, 1 % of it changed and named, at 4 readers",
        "version-named",
        _version(0.01, named=True),
        WHOLE,
        _version(1.0),
        5.0,
    ),
    *[_empty_call(placement) for placement in Placement],
    Row(
        "in-flight",
        f"{IN_FLIGHT} calls in flight, tensorferry.wait_all",
        (Figure(per_second("calls/s", IN_FLIGHT), {TORCH: 40}),),
        ours=python(OURS, "in_flight_own_wait_all"),
        peers={TORCH: python(TORCH, "in_flight_torch_wait_all")},
        quick=True,
    ),
    Row(
        "in-flight-torch-futures",
        f"{IN_FLIGHT} calls in flight, torch.futures.wait_all",
        (Figure(per_second("calls/s", IN_FLIGHT), {TORCH: 20}),),
        ours=python(OURS, "in_flight_torch_wait_all"),
        peers={TORCH: python(TORCH, "in_flight_torch_wait_all")},
    ),
    *[_tensors(megabytes) for megabytes in TENSOR_TARGETS],
    _tensors(64, hogs=CORES),
    Row(
        "shared-256mb",
        "256 MB handed over by tensorferry.share",
        (Figure(MICROSECONDS, {EMPTY_CALL: 1 / 3}),),
        ours=python(OURS, "shared", size=256 << 20),
        peers={EMPTY_CALL: python(OURS, "sync")},
    ),
    _leaves(20),
    _leaves(200),
    *[_cpp_call(placement) for placement in Placement],
    *[_typed_call(peer, kind) for peer in DIRECTIONS for kind in KINDS],
    *[_typed_callers(callers) for callers in (4, 16, 64)],
    _cpp_call_over("unix", BARE_UNIX, {}),
    _cpp_call_over("tcp", BARE_TCP, {BARE_TCP: 1 / 1.3}),
    *[_empty_call_over(transport, placement) for transport in TRANSPORTS for placement in Placement],
    *[_tensors_by(channel, channel, {}, size) for channel in CHANNELS for size in TENSOR_TARGETS],
    *[_tensors_by("tcp", "basic", TRANSPORTS["tcp"], size) for size in TENSOR_TARGETS],
    *[_between_hosts(tensors) for tensors in (1, 4)],
    *[_over_tls(size) for size in (0, 64 << 20)],
    _over_two_interfaces(),
    _small_beside_large(),
    _empty_call_beside_hogs(Placement.UNPINNED),
    _empty_call_beside_hogs(Placement.TWO_CORES),
    Row(
        "metrics-on",
        "empty rpc_sync, with metrics served to Prometheus",
        (Figure(MICROSECONDS, {UNCOUNTED: 0.98}),),
        ours=python(OURS, "sync", {"metrics_port": 0}),
        peers={UNCOUNTED: python(UNCOUNTED, "sync", {"metrics": False})},
    ),
    Row(
        "trace-on",
        "empty rpc_sync, recorded by both agents",
        (Figure(MICROSECONDS, {ALONE: 1 / 1.25}),),
        ours=python(OURS, "sync_traced"),
        peers={ALONE: python(ALONE, "sync")},
        rounds=3,
    ),
    _empty_call_beside_python("caller", "caller"),
    _empty_call_beside_python("callee", "server"),
    Row(
        "blocking-handler",
        "empty rpc_sync while a handler blocks 10 ms for another caller",
        (
            Figure(MICROSECONDS),
            Figure(MICROSECONDS, {}, "p99", "p99", of=p99),
            Figure(MICROSECONDS, {}, "max", "longest", of=maximum),
        ),
        ours=beside_blocking(OURS, 0.01),
        peers={ALONE: beside_blocking(ALONE, 0), TORCH: beside_blocking(TORCH, 0.01)},
        rounds=3,
    ),
    Row(
        "start-16",
        "16 agents start, each calls each, shut down",
        (Figure(SECONDS, {TORCH: 8}),),
        ours=whole_lives(OURS, 16),
        peers={TORCH: whole_lives(TORCH, 16)},
        rounds=1,
    ),
    _actors(16, {TORCH: actors(TORCH, 16)}, {TORCH: 1}),
    _actors(64, {FEWER: actors(OURS, 16)}, {}, once=True),  # 82 processes start
    _memory("calls", "{count} empty calls", CALLS, 0),
    _memory("tensors", "{count} tensors of 1 MB, sent and received", MEGABYTES, 1 << 20),
    Row(
        "memory-replay",
        "{count} tensors of 5 KB held by the callee",
        (
            Figure(TIMES_ITS_BYTES, {}, "", "its resident set", "callee", limit=1.3),
            Figure(TIMES_ITS_BYTES, {}, "both", "memory of both processes", "both", limit=1.3),
        ),
        ours=in_new_pair("replay", ("callee", "both"), REPLAY, HELD, needs=2 * HELD),
        count=REPLAY,
        rounds=1,
        once=True,
    ),
    _beside_others("empty", "empty call", MICROSECONDS, "sync", "sync", "empty"),
    _beside_others(
        "in-flight",
        f"{IN_FLIGHT} empty calls in flight",
        per_second("calls/s", IN_FLIGHT),
        "in_flight_own_wait_all",
        "in_flight_torch_wait_all",
        "in_flight",
        count=IN_FLIGHT,
    ),
    *[_sent_beside_others(megabytes) for megabytes in TENSOR_TARGETS],
    _torch_backend("noop", "empty rpc_sync", MICROSECONDS, 10, "sync"),
    _torch_backend(
        "in-flight", f"{IN_FLIGHT} calls in flight", per_second("calls/s", IN_FLIGHT), 5, "in_flight_torch_wait_all"
    ),
    _torch_backend("rref", "a method of an RRef", MICROSECONDS, 5, "rref_method"),
    *[
        _torch_backend(
            f"{size}mb", f"{size} MB tensor, sent and received", gigabytes(size << 20), 2.5, "tensors", size=size << 20
        )
        for size in TENSOR_TARGETS
    ],
    _torch_backend("backward", "a forward and a backward pass over two workers", MICROSECONDS, 1.5, "backward"),
    *[
        group_row(where, operation)
        for where in GROUPS
        for operation in OPERATIONS
        if (where, operation) not in NOT_IN_GROUPS
    ],
    after_a_death_row("told", "of which the others are told", False),
    after_a_death_row("reducing", "which ends the all_reduce of the others", True),
    Row("idle-cpu", "idle agent", (Figure(SHARE_OF_CORE),), idle(OURS), {TORCH: idle(TORCH)}, rounds=3),
    Row(
        "waiting-cpu",
        "one call in flight, whose handler sleeps: the caller",
        (Figure(SHARE_OF_CORE, limit=0.3),),
        ours=python(OURS, "waiting"),
        peers={TORCH: python(TORCH, "waiting")},
        rounds=3,
    ),
    Row("idle-threads", "idle agent", (Figure(THREADS),), threads(OURS), {TORCH: threads(TORCH)}, rounds=1),
]
