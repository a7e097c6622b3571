"""What the ranks of a group do while they are measured: the same operations of torch.distributed on two backends.

Each rank has a process group of Gloo and one of TensorFerry. Every input is rewritten before each operation. A sample
is the time from a common start to the end at this rank. Groups that lose a rank are of processes of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import tensorferry
import torch
import torch.distributed as dist
from tensorferry import c10d  # registers the backend

from benchmarks import network

OURS, GLOO = "tensorferry", "gloo"
FEWEST, MOST = 3, 300  # samples of a turn
WIDTH, LAYERS, BATCH = 2048, 6, 4  # a network of 25 million parameters

_groups: dict[str, Any] = {}  # by backend


def join(_: ModuleType, rank: int, world_size: int, folder: str, host: Mapping[str, str] | None = None) -> str:
    """Forms a group of each backend; all ranks call it. `host`: the emulated host that this process enters before, as
    network.Hosts.end() gives it. Returns how the bytes of our group go."""
    if host is not None:
        network.enter(host["namespace"], os.path.join(folder, f"host{rank}"))
        os.environ.update(GLOO_SOCKET_IFNAME=host["device"], TENSORFERRY_SOCKET_IFNAME=host["device"])
        os.environ["TENSORFERRY_KEY"] = "the key of the benchmarks"
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group(GLOO, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    _groups.update({GLOO: dist.group.WORLD, OURS: dist.new_group(backend=OURS)})
    return c10d.group_of(_groups[OURS]).explain("all_reduce", 1 << 20)


@dataclass(frozen=True)
class Operation:
    """One operation of a group."""

    rewrite: Callable[[], object]  # its inputs
    run: Callable[[], object]
    out: Callable[[], torch.Tensor]  # what it has written at this rank
    expected: list[float]  # the elements of each of so many equal parts of it

    def check(self) -> None:
        """Raises AssertionError unless the last run has written what is expected."""
        parts = self.out().reshape(-1).tensor_split(len(self.expected))
        for part, value in zip(parts, self.expected):
            if not bool((part == value).all()):
                raise AssertionError(f"an operation wrote {part[:3].tolist()}..., not {value}")


def operation(name: str, group: Any, size: int) -> Operation:
    """An operation on float32 tensors of `size` bytes. Of all_gather, reduce_scatter and all_to_all these are the bytes
    of all ranks together."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine, each = rank + 1.0, [other + 1.0 for other in range(ranks)]
    count = size // 4
    whole = tensorferry.empty(count) if name == "all_reduce_empty" else torch.empty(count)
    out = torch.empty(count)
    share = torch.empty(count // ranks)

    def of(tensor: torch.Tensor, run: Callable[[], object], written: torch.Tensor, *expected: float) -> Operation:
        return Operation(lambda: tensor.fill_(mine), run, lambda: written, list(expected))

    def send() -> None:
        if rank == 0:
            dist.send(whole, 1, group=group)
        else:
            dist.recv(whole, 0, group=group)

    operations: dict[str, Callable[[], Operation]] = {
        "all_reduce": lambda: of(whole, lambda: dist.all_reduce(whole, group=group), whole, sum(each)),
        "all_reduce_empty": lambda: of(whole, lambda: dist.all_reduce(whole, group=group), whole, sum(each)),
        "broadcast": lambda: of(whole, lambda: dist.broadcast(whole, src=0, group=group), whole, each[0]),
        "all_gather": lambda: of(share, lambda: dist.all_gather_into_tensor(out, share, group=group), out, *each),
        "reduce_scatter": lambda: of(
            whole, lambda: dist.reduce_scatter_tensor(share, whole, group=group), share, sum(each)
        ),
        "all_to_all": lambda: of(whole, lambda: dist.all_to_all_single(out, whole, group=group), out, *each),
        "send": lambda: of(whole, send, whole, each[0]),
        "barrier": lambda: of(share, lambda: dist.barrier(group=group), share, mine),
        "ddp": lambda: step(group, mine, sum(each) / ranks),
    }
    return operations[name]()


def step(group: Any, mine: float, average: float) -> Operation:
    """A forward and a backward pass of DistributedDataParallel. Each layer passes the average of its inputs on, so that
    the gradients are known."""
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1 / WIDTH)
            layer.bias.zero_()
    network = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    inputs = torch.empty(BATCH, WIDTH)

    def rewrite() -> None:
        inputs.fill_(mine)
        network.zero_grad()

    def gradient() -> torch.Tensor:
        assert isinstance(layers[0].weight.grad, torch.Tensor)
        return layers[0].weight.grad

    return Operation(rewrite, lambda: network(inputs).sum().backward(), gradient, [BATCH * average])


def repeat(_: ModuleType, backend: str, name: str, sizes: Mapping[str, int], seconds: float) -> dict[str, list[int]]:
    """Repeats an operation with tensors of each of these sizes, for so many seconds of operations each: nanoseconds of
    single operations at this rank, by the names of the sizes. All ranks call it."""
    return {which: _repeat(operation(name, _groups[backend], size), seconds) for which, size in sizes.items()}


def _repeat(repeated: Operation, seconds: float) -> list[int]:
    clock, start = time.perf_counter_ns, _groups[OURS]

    def once() -> int:
        repeated.rewrite()
        dist.barrier(group=start)
        begin = clock()
        repeated.run()
        return clock() - begin

    once()
    repeated.check()
    slowest = torch.tensor(once())
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=start)
    count = int(seconds * 1e9 / slowest.item())  # the same at every rank
    samples = [once() for _ in range(min(max(count, FEWEST), MOST))]
    repeated.check()
    return samples


def stand_by(_: ModuleType, backend: str, store: str, rank: int, world_size: int) -> str:
    """Begins a process group of `backend` that reconfigure() forms. Returns the handle of this rank."""
    torch.set_num_threads(1)
    place, wait = dist.FileStore(store), timedelta(seconds=20)
    dist.init_process_group(
        backend, store=place, rank=rank, world_size=world_size, timeout=wait, enable_reconfigure=True
    )
    return _handle()


def _handle() -> str:
    handle: str = dist._get_reconfigure_handle()
    return handle


def _reconfigure(uuid: int, handles: list[str]) -> int:
    """Forms the group of these ranks, in which each reduces a tensor. Returns when that has ended."""
    dist._reconfigure(uuid, handles).wait()
    tensor = torch.full((256,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    end = time.perf_counter_ns()
    if not bool((tensor == sum(range(1, len(handles) + 1))).all()):
        raise AssertionError(f"an operation after reconfigure() wrote {tensor[:3].tolist()}...")
    return end


def begin(_: ModuleType, handles: list[str]) -> str:
    """Forms the group for the first time. Returns the handle of this rank from then on."""
    _reconfigure(1, handles)
    return _handle()


def survive(_: ModuleType, handles: list[str], reducing: bool) -> int:
    """Reconfigures the group without the rank that has died. `reducing`: reduces before, until that fails."""
    try:
        while reducing:
            dist.all_reduce(torch.ones(256))
    except RuntimeError:
        pass
    return _reconfigure(2, handles)
