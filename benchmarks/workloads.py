"""What the processes of a team do while they are measured: plain loops over calls that both modules have.

Each takes the module under test first. Those with `seconds` repeat one operation for so long and return nanoseconds of
single operations; the others say what they return.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PEER = "callee"
IN_FLIGHT = 256


def noop() -> None:
    """The callee's side of an empty call."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """The callee's side of a tensor that is sent and received."""
    return tensor


def block(seconds: float) -> None:
    """The callee's side of a call that waits for something else."""
    time.sleep(seconds)


def join(rpc: ModuleType, name: str, rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Ends when all ranks have joined."""
    rpc.init_rpc(name, rank=rank, world_size=world_size, **options)


def touch(rpc: ModuleType) -> None:
    """A few calls, so that what is measured next has its connections open."""
    for _ in range(20):
        rpc.rpc_sync(PEER, noop)


def explained(rpc: ModuleType) -> tuple[str, str, dict[str, str]]:
    """Our transport and channel to the peer when all channels have been tried, and for each why it carries nothing; ""
    where it does."""
    touch(rpc)
    until = time.monotonic() + 5
    while True:
        found = rpc.explain(PEER)
        reasons = {name: "" if usable else why for name, usable, why in found.candidates}
        if not any("probe" in why for why in reasons.values()) or time.monotonic() > until:
            return found.transport, found.channel, reasons
        time.sleep(0.01)


def _repeat(operation: Callable[[], Any], seconds: float) -> list[int]:
    clock = time.perf_counter_ns
    warm = clock() + int(seconds * 0.2e9)
    while clock() < warm:
        operation()
    samples: list[int] = []
    end = clock() + int(seconds * 0.8e9)
    while True:
        begin = clock()
        operation()
        now = clock()
        samples.append(now - begin)
        if now >= end and len(samples) >= 3:
            return samples


def sync(rpc: ModuleType, seconds: float) -> list[int]:
    """An empty rpc_sync."""
    rpc_sync = rpc.rpc_sync
    return _repeat(lambda: rpc_sync(PEER, noop), seconds)


def sync_traced(rpc: ModuleType, seconds: float) -> list[int]:
    """An empty rpc_sync while the caller and the callee record a trace."""
    rpc.rpc_sync(PEER, record, args=(True,))
    record(True)
    try:
        return sync(rpc, seconds)
    finally:
        record(False)
        rpc.rpc_sync(PEER, record, args=(False,))


_traces: list[Any] = []


def record(on: bool) -> None:
    """This process records a trace, or no more."""
    import tensorferry.rpc as rpc

    if on:
        _traces.append(rpc.trace().__enter__())
    else:
        _traces.pop().__exit__(None, None, None)


_spinning = False


def _spin() -> None:
    while _spinning:
        pass


def spin(on: bool) -> None:
    """A thread of this process that computes in Python without a pause, or its end."""
    global _spinning
    _spinning = on
    if on:
        threading.Thread(target=_spin, daemon=True).start()


def sync_beside_python(rpc: ModuleType, seconds: float, where: str) -> list[int]:
    """An empty rpc_sync while another thread computes in Python, in the "caller" or the "callee"."""
    tell: Callable[[bool], None] = spin if where == "caller" else lambda on: rpc.rpc_sync(PEER, spin, args=(on,))
    tell(True)
    try:
        return sync(rpc, seconds)
    finally:
        tell(False)


def blocking(rpc: ModuleType, seconds: float, each: float) -> list[int]:
    """Calls that each block for so many seconds."""
    return _repeat(lambda: rpc.rpc_sync(PEER, block, args=(each,)), seconds)


def waiting(rpc: ModuleType, seconds: float) -> list[float]:
    """The caller's CPU time while its one call waits for the callee's handler, as a share of one core."""
    touch(rpc)
    call = rpc.rpc_async(PEER, block, args=(seconds + 1,))
    time.sleep(0.7)  # until the agent expects the reply late
    used, begin = time.process_time_ns(), time.perf_counter_ns()
    time.sleep(seconds)
    share = (time.process_time_ns() - used) / (time.perf_counter_ns() - begin)
    call.wait()
    return [share]


def in_flight(rpc: ModuleType, seconds: float, wait_all: Callable[[list[Any]], Any]) -> list[int]:
    """256 empty calls by rpc_async, then all awaited."""
    rpc_async = rpc.rpc_async
    return _repeat(lambda: wait_all([rpc_async(PEER, noop) for _ in range(IN_FLIGHT)]), seconds)


def in_flight_torch_wait_all(rpc: ModuleType, seconds: float) -> list[int]:
    """As a program written for torch.distributed.rpc awaits them."""
    return in_flight(rpc, seconds, torch.futures.wait_all)


def in_flight_own_wait_all(rpc: ModuleType, seconds: float) -> list[int]:
    """By tensorferry.wait_all."""
    from tensorferry import wait_all

    return in_flight(rpc, seconds, wait_all)


def tensors(rpc: ModuleType, seconds: float, size: int) -> list[int]:
    """An ordinary float32 tensor of `size` bytes, sent and received back."""
    rpc_sync = rpc.rpc_sync
    tensor = torch.arange(size // 4, dtype=torch.float32)
    received = rpc_sync(PEER, echo, args=(tensor,))
    if not torch.equal(received, tensor):
        raise AssertionError(f"{size} bytes came back changed")
    del received
    return _repeat(lambda: rpc_sync(PEER, echo, args=(tensor,)), seconds)


def leaves(rpc: ModuleType, seconds: float, size: int, count: int) -> list[int]:
    """A dict of `count` float32 tensors of `size` bytes each, sent and received back."""
    rpc_sync = rpc.rpc_sync
    model = {f"layers.{i}.weight": torch.arange(size // 4, dtype=torch.float32) for i in range(count)}
    received = rpc_sync(PEER, echo, args=(model,))
    if not all(torch.equal(received[name], tensor) for name, tensor in model.items()):
        raise AssertionError(f"{count} tensors came back changed")
    del received
    return _repeat(lambda: rpc_sync(PEER, echo, args=(model,)), seconds)


class Counter:
    """What a reference of torch's module refers to."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def rref_method(rpc: ModuleType, seconds: float) -> list[int]:
    """A method of a remote object."""
    counter = rpc.remote(PEER, Counter)
    counter.to_here()
    return _repeat(lambda: counter.rpc_sync().add(1), seconds)


def backward(rpc: ModuleType, seconds: float) -> list[int]:
    """A forward pass over two workers, and its backward pass by torch.distributed.autograd."""
    from torch.distributed import autograd

    weight, inputs = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)

    def step() -> None:
        with autograd.context() as context:
            hidden = rpc.rpc_sync(PEER, torch.mm, args=(weight, inputs))
            loss = rpc.rpc_sync(PEER, torch.mul, args=(hidden, 0.5)).sum()
            autograd.backward(context, [loss])
            if autograd.get_gradients(context)[weight][0, 0].item() != 32:
                raise AssertionError("the gradient is wrong")

    return _repeat(step, seconds)


def take(tensor: torch.Tensor) -> None:
    """The callee's side of a tensor that is sent or handed over."""


def sent(rpc: ModuleType, seconds: float, size: int) -> list[int]:
    """An ordinary float32 tensor of `size` bytes, sent to the callee, which returns nothing."""
    rpc_sync = rpc.rpc_sync
    tensor = torch.arange(size // 4, dtype=torch.float32)
    return _repeat(lambda: rpc_sync(PEER, take, args=(tensor,)), seconds)


def shared(rpc: ModuleType, seconds: float, size: int) -> list[int]:
    """An empty rpc_sync that hands over `size` bytes of tensorferry.empty()."""
    import tensorferry

    rpc_sync, share = rpc.rpc_sync, tensorferry.share
    tensor = tensorferry.empty(size, dtype=torch.uint8)
    rpc_sync(PEER, torch.Tensor.fill_, args=(share(tensor), 3))
    if not bool((tensor == 3).all()):
        raise AssertionError(f"{size} bytes were not shared")
    return _repeat(lambda: rpc_sync(PEER, take, args=(share(tensor),)), seconds)


def actor(rpc: ModuleType, seconds: float, seed: int) -> tuple[int, int, list[int]]:
    """Empty calls with 0.1 to 1 ms of thought before each: when it began and ended, nanoseconds of each call."""
    draw, clock, rpc_sync = random.Random(seed), time.perf_counter_ns, rpc.rpc_sync
    samples: list[int] = []
    begin = now = clock()
    while now < begin + seconds * 1e9:
        time.sleep(draw.uniform(1e-4, 1e-3))
        before = clock()
        rpc_sync(PEER, noop)
        now = clock()
        samples.append(now - before)
    return begin, now, samples


def whole_life(rpc: ModuleType, rank: int, world_size: int) -> tuple[int, int]:
    """Joins, calls each peer once, shuts down: when it began and ended."""
    begin = time.perf_counter_ns()
    rpc.init_rpc(f"agent{rank}", rank=rank, world_size=world_size)
    for peer in range(world_size):
        if peer != rank:
            rpc.rpc_sync(f"agent{peer}", noop)
    rpc.shutdown()
    return begin, time.perf_counter_ns()


def memory(kind: str) -> int:
    """Bytes of this process: "Rss" what is resident, "Pss" the same with shared pages divided among who has them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/smaps_rollup has no {kind}")


def _both(rpc: ModuleType, kind: str) -> tuple[int, int]:
    """The caller's and the callee's memory."""
    return memory(kind), rpc.rpc_sync(PEER, memory, args=(kind,))


def growth(rpc: ModuleType, count: int, size: int) -> tuple[float, float]:
    """`count` empty calls, or tensors of `size` bytes sent and received: by how many percent the caller's and the
    callee's resident set grew over the last nine tenths."""
    rpc_sync = rpc.rpc_sync
    tensor = torch.zeros(size // 4)

    def repeat(times: int) -> None:
        for _ in range(times):
            if size:
                rpc_sync(PEER, echo, args=(tensor,))
            else:
                rpc_sync(PEER, noop)

    repeat(count // 10)
    before = _both(rpc, "Rss")
    repeat(count - count // 10)
    after = _both(rpc, "Rss")
    caller, callee = (100 * (b - a) / a for a, b in zip(before, after))
    return caller, callee


_held: list[torch.Tensor] = []


def hold(tensor: torch.Tensor) -> None:
    """The callee's side of a replay buffer that is filled."""
    _held.append(tensor)


def read_held() -> float:
    """Touches every page of what is held, as a learner that samples it does."""
    return sum(float(tensor.sum()) for tensor in _held)


def replay(rpc: ModuleType, count: int, size: int) -> tuple[float, float]:
    """`count` tensors of `size` bytes sent to a callee that holds them. The growth, over the bytes held, of its
    resident set, and of the memory of both processes."""
    tensor = torch.ones(size // 4)
    rpc.rpc_sync(PEER, echo, args=(tensor,))
    resident, shares = _both(rpc, "Rss")[1], sum(_both(rpc, "Pss"))
    for _ in range(count):
        rpc.rpc_sync(PEER, hold, args=(tensor,))
    if rpc.rpc_sync(PEER, read_held) != count * (size // 4):
        raise AssertionError(f"not all of {count} tensors are there")
    resident_after, shares_after = _both(rpc, "Rss")[1], sum(_both(rpc, "Pss"))
    return (resident_after - resident) / (count * size), (shares_after - shares) / (count * size)
