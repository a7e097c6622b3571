"""One rank of a group of tensorferry.collectives: group_rank.py FILE RANK SIZE SCENARIO...

Its tensors are on TEST_DEVICE, in which RANK stands for the rank; without that, on the CPU.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorferry
import torch
import torch.distributed as dist
from refusing import refused
from tensorferry import collectives, ddp, errors

rank, size = int(sys.argv[2]), int(sys.argv[3])
device = os.environ.get("TEST_DEVICE", "cpu").replace("RANK", str(rank))
torch.set_default_device(device)
names = [f"rank{each}" for each in range(size)]
agent = tensorferry.Agent(names[rank], store=dist.FileStore(sys.argv[1], size), trust="full")
group = collectives.form_group(names, agent=agent, timeout=60)
total = sum(range(1, size + 1))


def busy() -> None:
    """Gives the current stream work, so that the host is far ahead of it."""
    if device != "cpu":
        torch.cuda._sleep(50_000_000)


def full(value: float, *shape: int) -> torch.Tensor:
    busy()
    return torch.full(shape, float(value))


def operations() -> None:
    """Every operation reads what the current stream had before it, and its results are valid in that stream's order."""
    for count in 1, 37, 100_001:
        assert group.all_reduce(full(rank + 1, count)).wait().eq(total).all()
        out = torch.empty(count)
        given = full(rank + 1, count)
        assert group.all_reduce(given, "max", out=out).wait() is out
        assert out.eq(size).all() and given.eq(rank + 1).all()
        assert group.all_reduce(full(rank + 1, count), "premultiplied_sum", factor=0.5).wait().eq(total / 2).all()
        assert group.broadcast(full(rank, count), size - 1).wait().eq(size - 1).all()
        reduced = group.reduce(full(rank + 1, count), size - 1).wait()
        assert rank != size - 1 or reduced.eq(total).all()
        assert [each[0].item() for each in group.all_gather(full(rank, count)).wait()] == list(range(size))
        gathered = group.gather(full(rank, count), 0).wait()
        assert [each[-1].item() for each in gathered] == (list(range(size)) if rank == 0 else [])
        parts = [full(10 * rank + to, count) for to in range(size)]
        assert group.scatter(torch.empty(count), parts if rank == 0 else [], 0).wait().eq(rank).all()
        summed = group.reduce_scatter(torch.empty(count), parts).wait()
        assert summed.eq(10 * sum(range(size)) + size * rank).all()
        outs = group.all_to_all([torch.empty(count) for _ in range(size)], parts).wait()
        assert [each[0].item() for each in outs] == [10 * source + rank for source in range(size)]
        sent = group.send(full(rank, count), (rank + 1) % size, tag=7)
        got = torch.empty(count)
        assert group.receive(got, tag=7).wait() == (rank - 1) % size
        sent.wait()
        assert got.eq((rank - 1) % size).all()
    group.barrier().wait()


def kinds() -> None:
    """Strided, coalesced and sparse tensors, rows of one tensor, functions of the program, and objects."""
    strided = full(rank + 1, 6, 8).t()
    assert group.all_reduce(strided).wait().eq(total).all() and strided.stride() == (1, 8)
    several = [full(rank + 1, 3), full(rank + 1, 2, 2)]
    assert all(each.eq(total).all() for each in group.all_reduce_coalesced(several).wait())
    whole = torch.empty(2 * size, 3)
    group.all_gather(full(rank, 2, 3), whole).wait()
    assert whole[:, 0].tolist() == [float(each) for each in range(size) for _ in range(2)]
    sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 5.0], (size + 1,))
    assert group.all_reduce(sparse).wait().to_dense().tolist() == [float(size)] + [5.0] * size

    def larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(b > a, b, a)

    assert group.all_reduce(full(rank, 1000), larger).wait().eq(size - 1).all()
    assert group.broadcast_object({"of": rank}, size - 1) == {"of": size - 1}
    if device != "cpu" and size > 1:
        try:
            group.all_gather(torch.ones(2), [torch.empty(2, device="cpu")] * size).wait()
        except errors.InvalidArgument as error:
            assert "one device" in str(error), error
        else:
            raise AssertionError("tensors of two devices were taken")
    group.barrier().wait()


def waits() -> None:
    """wait() is for the current stream, wait(timeout) for the host, and ``await`` for both as wait()."""

    async def awaited() -> torch.Tensor:
        return await group.all_reduce(full(rank + 1, 5000))

    assert asyncio.run(awaited()).eq(total).all()
    work = group.all_reduce(full(rank + 1, 5000))
    result = work.wait(30.0)
    assert work.done() and result.eq(total).all()
    if device == "cpu":
        return
    group.all_reduce(torch.ones(1)).wait()
    torch.cuda.synchronize()
    group.barrier().wait()
    torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
    tensor = torch.full((1 << 20,), rank + 1.0)
    group.all_reduce(tensor).wait()
    is_under_way = not torch.cuda.current_stream().query()
    assert is_under_way or "Tensors of GPUs go directly" not in group.explain("all_reduce", 1 << 22)
    with torch.cuda.stream(torch.cuda.Stream()):
        work = group.all_reduce(torch.full((1 << 20,), rank + 1.0))
    work.wait()  # on another stream than the one of the call
    assert tensor.eq(total).all()


def hooks() -> None:
    """The hooks, over several buckets of two dtypes; and parameters of the CPU beside those of the device."""

    def parameters() -> list[torch.Tensor]:
        made = [torch.zeros(3, 4), torch.zeros(5, dtype=torch.float64), torch.zeros(6, 2).t(), torch.zeros(())]
        made += [torch.zeros(7, device="cpu"), torch.zeros(50_000)]
        for parameter in made:
            parameter.requires_grad_()
            busy()
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        return made

    def by_work(state: collectives.Group, bucket: ddp.GradBucket) -> Any:
        return state.all_reduce(bucket.buffer(), "average")

    def at_once(state: collectives.Group, bucket: ddp.GradBucket) -> Any:
        return state.all_reduce_coalesced([bucket.buffer()], "average").wait()

    def by_future(state: collectives.Group, bucket: ddp.GradBucket) -> Any:
        return ddp.all_reduce_hook(state, bucket)

    in_turn = ddp.CommHook(by_future, overlap=False)
    for hook in ddp.all_reduce_hook, ddp.half_hook, ddp.bfloat16_hook, by_work, at_once, by_future, in_turn:
        for bucket_bytes in 60, 1 << 20:
            mine = parameters()
            ddp.reduce_gradients(mine, group, hook, bucket_bytes=bucket_bytes)
            for parameter in mine:
                assert parameter.grad is not None and parameter.grad.eq(total / size).all(), (hook, bucket_bytes)

    def fails(state: collectives.Group, bucket: ddp.GradBucket) -> Any:
        return state.all_reduce(torch.ones(3 + rank), "average")

    try:
        ddp.reduce_gradients(parameters()[:1], group, fails)
    except RuntimeError as error:
        assert 'fails" failed at bucket 0' in str(error), error
        assert "rank 1" in str(error) or size == 1, error  # alone: the result has another size than the bucket
    else:
        raise AssertionError("the ranks agreed")

    tensors = [full(rank + each, 4 + each) for each in range(5)]
    tensors += [torch.full((3,), float(rank), dtype=torch.float64), torch.full((2,), float(rank), device="cpu")]
    ddp.broadcast_coalesced(group, tensors, size - 1, bucket_bytes=40)
    for each, tensor in enumerate(tensors):
        assert tensor.eq(size - 1 + (each if each < 5 else 0)).all(), each


def stays() -> None:
    """Tensors of a GPU stay there, also those of hooks."""
    group.all_reduce(torch.ones(1)).wait()
    assert "Tensors of GPUs go directly" in group.explain("all_reduce", 4), group.explain("all_reduce", 4)


def counts_paths() -> None:
    """Each operation counts by the way that it takes, which a call may ask for."""

    def counted(operation: str, path: str, algorithm: str, call: Callable[[], object]) -> None:
        before = dict(group.paths)
        call()
        gained = {key: count - before.get(key, 0) for key, count in group.paths.items() if count != before.get(key)}
        assert gained == {(operation, path, algorithm): 1}, gained

    def reduce(algorithm: str) -> None:
        group.all_reduce(ones, algorithm=algorithm).wait()

    torch.cuda.set_device(torch.device(device))  # a graph captures the streams of the current device
    ones = torch.ones(1000)
    group.all_reduce(ones).wait()  # the ranks find out how they reach one another's GPUs
    for algorithm in "one_shot", "two_shot":
        counted("all_reduce", "gpu", algorithm, partial(reduce, algorithm))
    counted("broadcast", "gpu", "copies", lambda: group.broadcast(ones, algorithm="direct").wait())
    staged = lambda: group.all_reduce(ones, lambda a, b: a + b, algorithm="one_shot").wait()  # noqa: E731
    counted("all_reduce", "staged", "one_shot", staged)
    host = torch.ones(10, device="cpu")
    counted("all_reduce", "host", "two_shot", lambda: group.all_reduce(host, algorithm="two_shot").wait())
    refused(errors.InvalidArgument, lambda: group.all_reduce(ones, algorithm="ring"), "on a GPU", "one_shot, two_shot")
    graph, steps = torch.cuda.CUDAGraph(), torch.ones(8)
    captured = dict(group.paths)
    with torch.cuda.graph(graph):
        group.all_reduce(steps, algorithm="one_shot").wait()
    key = ("all_reduce", "graph", "one_shot")
    assert group.paths[key] == captured.get(key, 0) + 1, group.paths


def beside_nccl() -> None:
    """Calls with tensors of GPUs, from and to every rank, while NCCL reduces on another stream, for BESIDE_SECONDS."""
    index = torch.device(device).index
    torch.cuda.set_device(index)
    dist.init_process_group(
        "nccl", store=dist.FileStore(sys.argv[1] + ".nccl", size), rank=rank, world_size=size, device_id=index
    )
    ends = time.monotonic() + float(os.environ["BESIDE_SECONDS"])
    counts = {"calls": 0, "reductions": 0}
    failed: list[BaseException] = []

    def over() -> bool:
        """Also on GPUs that other programs keep busy, both have happened more than ten times, or a minute has gone."""
        late = time.monotonic() - ends
        return late > 60 or (late > 0 and min(counts.values()) > 10)

    def reduce() -> None:
        try:
            torch.set_default_device(device)
            torch.cuda.set_device(index)
            with torch.cuda.stream(torch.cuda.Stream()):
                tensor, going = torch.empty(4 << 20), torch.ones(1)
                while going.item() == 1:  # all ranks stop after the same reduction
                    tensor.fill_(1)
                    dist.all_reduce(tensor)
                    going.fill_(0 if over() else 1)
                    dist.all_reduce(going, dist.ReduceOp.MAX)
                    counts["reductions"] += 1
                assert tensor.eq(size).all()
        except BaseException as error:
            failed.append(error)

    reducing = threading.Thread(target=reduce)
    reducing.start()
    peer = names[(rank + 1) % size]
    while not over() and not failed:
        sent = full(counts["calls"] % 1000, 1 << (counts["calls"] % 23))
        returned = agent.rpc_sync(peer, torch.add, args=(sent, 1), device={index: (index + 1) % size}, timeout=20)
        assert returned.device == sent.device and returned.eq(sent + 1).all()
        counts["calls"] += 1
    reducing.join(30)
    assert not reducing.is_alive() and not failed, failed
    assert counts["calls"] > 10 and counts["reductions"] > 10, counts
    print("beside NCCL:", counts, flush=True)
    dist.destroy_process_group()


for name in sys.argv[4:]:
    globals()[name]()
    print("done", name, flush=True)
group.barrier().wait()
group.close()
agent.leave()
