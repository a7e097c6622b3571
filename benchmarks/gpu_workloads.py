"""What the processes of a GPU row do while they are measured; like workloads.py, with tensors on GPUs.

A sample is the time until the bytes are on the receiver's GPU, not until a copy has been asked for: the callee waits
for its stream before it answers, and a caller that copies by itself waits for its own.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from benchmarks.workloads import PEER, _repeat, touch

__all__ = ["touch"]

IN_FLIGHT = 4
BATCH = 16  # copies that one sample of those in flight stands for


def join(
    rpc: ModuleType, name: str, rank: int, world_size: int, here: int, there: int, options: dict[str, Any]
) -> None:
    """The caller's tensors are on `here`, the callee's on `there`."""
    torch.cuda.set_device(here if rank == 0 else there)
    if rpc.__name__ in ("torch.distributed.rpc", "benchmarks.torch_backend"):
        maps = {PEER: {here: there}} if rank == 0 else None
        given = rpc.TensorPipeRpcBackendOptions(device_maps=maps, devices=[here if rank == 0 else there])
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=given)
    else:
        maps = {PEER: {here: there}} if rank == 0 else {}
        rpc.init_rpc(name, rank=rank, world_size=world_size, device_maps=maps, **options)


# ---- the callee's side


def take(tensor: torch.Tensor) -> None:
    torch.cuda.current_stream(tensor.device).synchronize()


def last(tensor: torch.Tensor) -> float:
    return float(tensor[-1].item())


# ---- calls


def _filled(size: int, device: int | str) -> torch.Tensor:
    tensor = torch.arange(size // 4, device=device, dtype=torch.float32) % 1000
    torch.cuda.synchronize()
    return tensor


def _check(rpc: ModuleType, tensor: torch.Tensor) -> None:
    """Sends it a few times, which opens what has to be opened."""
    for _ in range(20):
        if rpc.rpc_sync(PEER, last, args=(tensor,)) != float(tensor[-1].item()):
            raise AssertionError(f"{tensor.nbytes} bytes arrived changed")


def one(rpc: ModuleType, seconds: float, size: int, here: int) -> list[int]:
    """One tensor a call, one call after another."""
    tensor = _filled(size, here)
    _check(rpc, tensor)
    rpc_sync = rpc.rpc_sync
    return _repeat(lambda: rpc_sync(PEER, take, args=(tensor,)), seconds)


def several(rpc: ModuleType, seconds: float, size: int, here: int) -> list[float]:
    """Four calls in flight: nanoseconds for each tensor."""
    tensor = _filled(size, here)
    _check(rpc, tensor)

    def batch() -> None:
        flying: deque[Any] = deque()
        for _ in range(BATCH):
            if len(flying) == IN_FLIGHT:
                flying.popleft().wait()
            flying.append(rpc.rpc_async(PEER, take, args=(tensor,)))
        for future in flying:
            future.wait()

    return _each(batch, seconds)


def _each(batch: Callable[[], None], seconds: float) -> list[float]:
    return [sample / BATCH for sample in _repeat(batch, seconds)]


def channel(rpc: ModuleType, here: int) -> str:
    """What carries a tensor of ours."""
    tensor = _filled(1 << 20, here)
    _check(rpc, tensor)
    until = time.monotonic() + 5
    while (found := rpc.explain(PEER, tensor)).channel == "" and time.monotonic() < until:
        time.sleep(0.01)
    return str(found.channel)


# ---- bare copies, in one process


class _Copies:
    """cudaMemcpyPeerAsync itself: torch's copy_ adds events at both ends."""

    def __init__(self, size: int, here: int, there: int) -> None:
        self._runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")  # torch has loaded it
        self.source = _filled(size, here)
        self.targets = [torch.empty(size // 4, device=there) for _ in range(IN_FLIGHT if size < 1 << 30 else 1)]
        self.streams = [torch.cuda.Stream(here) for _ in self.targets]  # type: ignore[no-untyped-call]
        for target in self.targets:
            target.copy_(self.source)  # has torch enable the access between the two
        torch.cuda.synchronize(here)
        self._size, self._here, self._there = size, here, there

    def begin(self, number: int) -> None:
        which = number % len(self.targets)
        error = self._runtime.cudaMemcpyPeerAsync(
            ctypes.c_void_p(self.targets[which].data_ptr()),
            self._there,
            ctypes.c_void_p(self.source.data_ptr()),
            self._here,
            ctypes.c_size_t(self._size),
            ctypes.c_void_p(self.streams[which].cuda_stream),
        )
        if error != 0:
            raise RuntimeError(f"cudaMemcpyPeerAsync failed with {error}")

    def end(self) -> None:
        for stream in self.streams:
            stream.synchronize()


def copy(_: ModuleType, seconds: float, size: int, here: int, there: int) -> list[int]:
    """One copy and its synchronisation."""
    copies = _Copies(size, here, there)

    def operation() -> None:
        copies.begin(0)
        copies.streams[0].synchronize()

    return _repeat(operation, seconds)


def copies(_: ModuleType, seconds: float, size: int, here: int, there: int) -> list[float]:
    """Four copies in flight: nanoseconds for each."""
    some = _Copies(size, here, there)

    def batch() -> None:
        for number in range(BATCH):
            some.begin(number)
        some.end()

    return _each(batch, seconds)


def pinned(_: ModuleType, seconds: float, size: int, here: int) -> list[int]:
    """The slower of the two ways between a GPU and page-locked memory."""
    on_gpu, on_host = _filled(size, here), torch.empty(size // 4, pin_memory=True)

    def copied(to: torch.Tensor, of: torch.Tensor) -> None:
        to.copy_(of, non_blocking=True)
        torch.cuda.current_stream(here).synchronize()

    with torch.cuda.device(here):
        down = _repeat(lambda: copied(on_host, on_gpu), seconds / 2)
        up = _repeat(lambda: copied(on_gpu, on_host), seconds / 2)
    return max(down, up, key=lambda samples: sorted(samples)[len(samples) // 2])


def chunked(_: ModuleType, seconds: float, size: int, here: int, there: int) -> list[int]:
    """By way of page-locked memory in chunks of 4 MiB, both ways at once, ordered by the GPUs themselves: the least
    that a call by cuda_basic has to do."""

    def chunks(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor[begin : begin + (1 << 20)] for begin in range(0, len(tensor), 1 << 20)]

    source, host = chunks(_filled(size, here)), chunks(torch.empty(size // 4, pin_memory=True))
    target = chunks(torch.empty(size // 4, device=there))
    down, up = torch.cuda.Stream(here), torch.cuda.Stream(there)  # type: ignore[no-untyped-call]
    copied = [torch.cuda.Event() for _ in host]  # type: ignore[no-untyped-call]

    def operation() -> None:
        for number, each in enumerate(host):
            with torch.cuda.stream(down):
                each.copy_(source[number], non_blocking=True)
                copied[number].record(down)
            with torch.cuda.stream(up):
                up.wait_event(copied[number])
                target[number].copy_(each, non_blocking=True)
        up.synchronize()

    return _repeat(operation, seconds)


# ---- NCCL


def nccl_join(_: ModuleType, rank: int, device: int) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method="env://", rank=rank, world_size=2, device_id=torch.device("cuda", device)
    )


def nccl(_module: ModuleType, rank: int, device: int, size: int, count: int, each: int) -> list[float]:
    """`count` times `each` sends (rank 0) or receives, then their synchronisation: nanoseconds for one."""
    import torch.distributed as dist

    tensor = _filled(size, device)
    samples = []
    for number in range(count + 3):
        begin = time.perf_counter_ns()
        for _ in range(each):
            if rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
        torch.cuda.synchronize(device)
        if number >= 3:
            samples.append((time.perf_counter_ns() - begin) / each)
    return samples


def group_join(_: ModuleType, rank: int, device: int) -> None:
    """Forms a process group of Gloo and one of TensorFerry."""
    import tensorferry.c10d  # noqa: F401  registers the backend
    import torch.distributed as dist

    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
    _groups.update(gloo=dist.group.WORLD, tensorferry=dist.new_group(backend="tensorferry"))


_groups: dict[str, Any] = {}  # by backend


def all_reduce(_: ModuleType, backend: str, rank: int, device: int, size: int, count: int) -> list[int]:
    """Reduces a tensor that is rewritten before: nanoseconds of each operation and its synchronisation."""
    import torch.distributed as dist

    tensor = torch.empty(size // 4, device=device)
    samples = []
    for number in range(count + 3):
        tensor.fill_(rank + 1)
        torch.cuda.synchronize(device)
        dist.barrier(_groups["tensorferry"])
        begin = time.perf_counter_ns()
        dist.all_reduce(tensor, group=_groups[backend])
        torch.cuda.synchronize(device)
        if number >= 3:
            samples.append(time.perf_counter_ns() - begin)
    if not bool((tensor == 3).all()):
        raise AssertionError(f"all_reduce wrote {tensor[:3].tolist()}..., not 3")
    return samples


def among_join(_: ModuleType, rank: int, device: int, ranks: int) -> None:
    """Forms a process group of NCCL and one of TensorFerry, of ranks with a GPU each."""
    import tensorferry.c10d  # noqa: F401  registers the backend
    import torch.distributed as dist

    torch.cuda.set_device(device)
    where = torch.device("cuda", device)
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=ranks, device_id=where)
    _groups.update(nccl=dist.group.WORLD, tensorferry=dist.new_group(backend="tensorferry"))


SYMMETRIC_ONE_SHOT = 256 << 10  # bytes up to which torch's symmetric memory is reduced in one shot


def _reducing(backend: str, size: int, device: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Returns a tensor in the memory that suits the backend, and what sums it and returns the result."""
    import tensorferry
    import torch.distributed as dist

    if backend == "nccl":
        tensor = torch.empty(size // 4, device=device)
    elif backend == "tensorferry":
        tensor = tensorferry.empty(size // 4, device=f"cuda:{device}")
    else:
        import torch.distributed._symmetric_memory as symmetric_memory

        name = _groups["nccl"].group_name
        tensor = symmetric_memory.empty(size // 4, device=torch.device("cuda", device))
        symmetric_memory.rendezvous(tensor, name)
        if size <= SYMMETRIC_ONE_SHOT:
            return tensor, lambda: torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name)
        return tensor, lambda: torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", name)

    def reduce() -> torch.Tensor:
        dist.all_reduce(tensor, group=_groups[backend])
        return tensor

    return tensor, reduce


def among(
    _: ModuleType, backend: str, rank: int, device: int, ranks: int, size: int, count: int, graph: bool
) -> list[float]:
    """Sums a tensor that is rewritten before: nanoseconds of each operation and its synchronisation. `graph`: of an
    operation among ten in a CUDA graph, without the rewriting."""
    import torch.distributed as dist

    each = 10 if graph else 1
    tensor, reduce = _reducing(backend, size, device)
    tensor.fill_(1)
    result = reduce()  # connects, and compiles kernels
    torch.cuda.synchronize(device)
    captured = torch.cuda.CUDAGraph()
    if graph:
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            for _i in range(each):
                result = reduce()
    samples = []
    for number in range(count + 3):
        tensor.fill_(0 if graph else 1)
        torch.cuda.synchronize(device)
        dist.barrier(_groups["tensorferry"])
        begin = time.perf_counter_ns()
        if graph:
            captured.replay()
        else:
            result = reduce()
        torch.cuda.synchronize(device)
        if number >= 3:
            samples.append((time.perf_counter_ns() - begin) / each)
    expected = 0 if graph else ranks
    if not bool((result == expected).all()):
        raise AssertionError(f"{backend} at rank {rank} wrote {result[:3].tolist()}..., not {expected}")
    dist.barrier(_groups["tensorferry"])  # no rank lets go of memory that another one reads
    return samples


# ---- regions: one-sided reads of the callee's memory

BLOCK, BLOCKS = 8192, 40_064  # of a cache of keys and values
_kept: list[Any] = []
_published: list[Any] = []  # the tensors, and the publication


def _shapes() -> list[tuple[int, ...]]:
    """290 tensors of 0.6 GB in bfloat16, as a transformer of 24 layers has them."""
    layer = [(1024, 1024), (1024, 1024), (256, 1024), (256, 1024), (2816, 1024), (2816, 1024), (1024, 2816)]
    small = [(1024,), (1024,), (1024,), (128,), (128,)]
    return [*(layer + small) * 24, (32_000, 1024), (1024, 1024)]


def own(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Any]:
    """The callee's side: a region of ones for each shape."""
    import tensorferry.rpc as rpc

    for region in _kept:
        region.drop()
    _kept[:] = [rpc.region(torch.ones(shape, dtype=dtype, device="cuda")) for shape in shapes]
    torch.cuda.synchronize()
    return list(_kept)


def _some_blocks(device: int) -> torch.Tensor:
    return torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3)).to(device)


def region_blocks(rpc: ModuleType, seconds: float, size: int, here: int) -> list[int]:
    """All blocks of a region of the callee in any order, until they are here."""
    [paged] = rpc.rpc_sync(PEER, own, args=([(BLOCKS, BLOCK)], torch.uint8))
    into, indices = torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8, device=here), _some_blocks(here)
    samples = _repeat(lambda: paged.read_blocks(indices, into=into), seconds)
    if paged.carried() != "mapped" or not into.eq(1).all():
        raise AssertionError(f"blocks {paged.carried()}, or with other bytes")
    return samples


def gather(_: ModuleType, seconds: float, here: int) -> list[int]:
    """The same blocks gathered by torch inside one process."""
    source = torch.ones(BLOCKS, BLOCK, dtype=torch.uint8, device=here)
    into, indices = torch.zeros_like(source), _some_blocks(here)

    def operation() -> None:
        torch.index_select(source, 0, indices, out=into)
        torch.cuda.current_stream(here).synchronize()

    return _repeat(operation, seconds)


def region_weights(rpc: ModuleType, seconds: float, size: int, here: int) -> list[int]:
    """290 tensors of the callee, until they are here."""
    import tensorferry

    handles = rpc.rpc_sync(PEER, own, args=(_shapes(), torch.bfloat16))
    into = [torch.zeros(handle.shape, dtype=handle.dtype, device=here) for handle in handles]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    tensorferry.read_regions(handles, into)
    print(f"  (the first time, with 290 grants: {1e3 * (time.perf_counter() - begin):.1f} ms)", flush=True)
    samples = _repeat(lambda: tensorferry.read_regions(handles, into), seconds)
    if not all(out.eq(1).all() for out in into):
        raise AssertionError("weights with other bytes")
    return samples


def weights_by_call(rpc: ModuleType, seconds: float, size: int, here: int) -> list[int]:
    """The same tensors in a dict that a call brings."""
    rpc.rpc_sync(PEER, own, args=(_shapes(), torch.bfloat16))

    def operation() -> None:
        rpc.rpc_sync(PEER, owned)
        torch.cuda.current_stream(here).synchronize()

    return _repeat(operation, seconds)


def owned() -> dict[str, torch.Tensor]:
    """The callee's side."""
    return {str(place): region.tensor for place, region in enumerate(_kept)}


def publish_next() -> int:
    """The callee's side: the same tensors, all of them other than before, as a version on its GPU."""
    import tensorferry.rpc as rpc

    if not _published:
        tensors = {
            str(place): torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for place, shape in enumerate(_shapes())
        }
        _published.extend((tensors, rpc.publish(tensors, name="weights", on_gpu=True)))
    tensors, publication = _published
    value: int = publication.version % 100
    for tensor in tensors.values():
        tensor.fill_(value)
    publication.update(tensors)
    return value


def version_weights(rpc: ModuleType, seconds: float, size: int, here: int) -> list[int]:
    """The same tensors as versions of the callee, each until it is here."""
    value = rpc.rpc_sync(PEER, publish_next)
    into = {str(place): torch.zeros(shape, dtype=torch.bfloat16, device=here) for place, shape in enumerate(_shapes())}
    loader = rpc.subscribe("weights", from_=PEER).into(into)
    samples: list[int] = []
    end = time.perf_counter() + seconds
    while len(samples) < 8 or time.perf_counter() < end:
        torch.cuda.synchronize(here)
        begin = time.perf_counter_ns()
        loader.load()
        samples.append(time.perf_counter_ns() - begin)
        if loader.carried != "gpu to gpu" or not all(out.eq(value).all() for out in into.values()):
            raise AssertionError(f"weights {loader.carried}, or with other bytes")
        value = rpc.rpc_sync(PEER, publish_next)
    print(f"  (the first time, with an image to map: {samples[0] / 1e6:.1f} ms)", flush=True)
    return samples[3:]  # the publisher has 2 or 3 images


def copies_of_weights(_: ModuleType, seconds: float, here: int, there: int) -> list[int]:
    """The same tensors copied one by one inside one process."""
    sources = [torch.ones(shape, dtype=torch.bfloat16, device=there) for shape in _shapes()]
    into = [torch.zeros(shape, dtype=torch.bfloat16, device=here) for shape in _shapes()]

    def operation() -> None:
        for out, source in zip(into, sources, strict=True):
            out.copy_(source, non_blocking=True)
        torch.cuda.current_stream(here).synchronize()
        torch.cuda.current_stream(there).synchronize()

    return _repeat(operation, seconds)
