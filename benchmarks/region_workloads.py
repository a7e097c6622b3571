"""One-sided memory, measured at the caller: reads and writes of a region of the callee, and published versions. Beside
them plain copies in this process, and memory that torch.multiprocessing shares."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import tensorferry
import torch

from benchmarks.workloads import PEER, join  # noqa: F401  (every module of workloads has join)

BLOCK, BLOCKS = 8192, 40_064  # of a cache of keys and values
_kept: dict[str, Any] = {}


def own(rpc: ModuleType, size: int) -> Any:
    """The callee's side: a region of `size` bytes."""
    if (old := _kept.pop("region", None)) is not None:
        old.drop()
    _kept["region"] = rpc.region(tensorferry.empty(size, dtype=torch.uint8).fill_(7), write=True)
    return _kept["region"]


def share(size: int) -> tuple[Any, ...]:
    """The callee's side: memory as torch.multiprocessing shares it by name."""
    storage = torch.ones(size, dtype=torch.uint8).untyped_storage()
    _kept["shared"] = storage
    handle: tuple[Any, ...] = storage._share_filename_cpu_()
    return handle


def of_callee(size: int) -> Any:
    import tensorferry.rpc as rpc

    return own(rpc, size)


def repeat(operation: Any, seconds: float) -> list[int]:
    """Nanoseconds of each operation, after a few that warm up."""
    for _ in range(3):
        operation()
    samples: list[int] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples) < 3:
        begin = time.perf_counter_ns()
        operation()
        samples.append(time.perf_counter_ns() - begin)
    return samples


def read(rpc: ModuleType, seconds: float, size: int) -> list[int]:
    handle = rpc.rpc_sync(PEER, of_callee, args=(size,))
    into = torch.zeros(size, dtype=torch.uint8)
    samples = repeat(lambda: handle.read(into=into), seconds)
    if handle.carried() != "mapped" or not into.eq(7).all():
        raise AssertionError(f"read {handle.carried()}: {into[:3]}")
    return samples


def write(rpc: ModuleType, seconds: float, size: int) -> list[int]:
    handle = rpc.rpc_sync(PEER, of_callee, args=(size,))
    source = torch.full((size,), 9, dtype=torch.uint8)
    samples = repeat(lambda: handle.write(source), seconds)
    if not handle.read().eq(9).all():
        raise AssertionError("the region does not have what was written")
    return samples


def copy(rpc: ModuleType, seconds: float, size: int) -> list[int]:
    """The same bytes copied by torch on one thread, inside this process."""
    torch.set_num_threads(1)
    source, into = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return repeat(lambda: into.copy_(source), seconds)


def copy_shared(rpc: ModuleType, seconds: float, size: int) -> list[int]:
    """A copy out of the callee's memory that torch.multiprocessing shares."""
    torch.set_num_threads(1)
    handle = rpc.rpc_sync(PEER, share, args=(size,))
    storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    source, into = torch.empty(0, dtype=torch.uint8).set_(storage), torch.zeros(size, dtype=torch.uint8)
    return repeat(lambda: into.copy_(source), seconds)


def _some_blocks() -> torch.Tensor:
    return torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3))


def blocks(rpc: ModuleType, seconds: float) -> list[int]:
    handle = rpc.rpc_sync(PEER, of_callee, args=(BLOCK * BLOCKS,))
    paged = handle._part(handle._view.view(BLOCKS, BLOCK))
    into, indices = torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8), _some_blocks()
    samples = repeat(lambda: paged.read_blocks(indices, into=into), seconds)
    if not into.eq(7).all():
        raise AssertionError("blocks with other bytes")
    return samples


def gather(rpc: ModuleType, seconds: float) -> list[int]:
    """The same blocks gathered by torch on one thread, inside this process."""
    torch.set_num_threads(1)
    source, into = torch.ones(BLOCKS, BLOCK, dtype=torch.uint8), torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8)
    indices = _some_blocks()
    return repeat(lambda: torch.index_select(source, 0, indices, out=into), seconds)


def subscribe(publisher: str) -> int:
    """A reader's side."""
    import tensorferry.rpc as rpc

    _kept["subscription"] = rpc.subscribe("weights", from_=publisher)
    version: int = _kept["subscription"].latest().version
    return version


def newest(version: int) -> int:
    """A reader's side: takes the version, and looks at both ends."""
    found = _kept["subscription"].wait(newer_than=version - 1)
    weights = found["w"]
    if weights[0] != version % 251 or found.version != version:
        raise AssertionError(f"version {found.version} begins with {weights[0]}")
    return version


def versions(
    rpc: ModuleType, seconds: float, readers: int, size: int, changed: float, named: bool = False
) -> list[int]:
    """From an update of the share `changed` of `size` bytes, perhaps `named`, until all peers have the version."""
    state = {"w": torch.zeros(size, dtype=torch.uint8)}
    part = state["w"][: max(1, int(size * changed))]
    publication = rpc.publish(state, name="weights")
    me = rpc.get_worker_info()
    peers = [rank for rank in range(readers + 1) if rank != me.id]
    for peer in peers:
        rpc.rpc_sync(peer, subscribe, args=(me.name,))
    samples: list[int] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples) < 6:
        part.fill_((publication.version + 1) % 251)
        begin = time.perf_counter_ns()
        version = publication.update(state, changed={"w": slice(len(part))} if named else None)
        tensorferry.wait_all([rpc.rpc_async(peer, newest, args=(version,)) for peer in peers])
        samples.append(time.perf_counter_ns() - begin)
    publication.withdraw()
    return samples[3:]  # each of the three images has been written once
