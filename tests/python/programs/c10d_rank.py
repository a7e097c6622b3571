"""One rank of a torch.distributed job on the backend tensorferry: c10d_rank.py FILE RANK SIZE SCENARIO..."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import tensorferry.c10d
import torch
import torch.distributed as dist

rank, size = int(sys.argv[2]), int(sys.argv[3])


def mine(*shape: int, of: int = rank) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10 * of


def everyone(*shape: int) -> list[torch.Tensor]:
    return [mine(*shape, of=each) for each in range(size)]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def dense() -> None:
    for shape in (0,), (5,), (300, 301):
        t = mine(*shape)
        dist.all_reduce(t)
        same(t, sum(everyone(*shape)))
        t = mine(*shape)
        dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True).wait()
        same(t, mine(*shape, of=size - 1))
        t = mine(*shape)
        dist.broadcast(t, src=size - 1)
        same(t, mine(*shape, of=size - 1))
        t = mine(*shape)
        dist.reduce(t, dst=0)
        if rank == 0:
            same(t, sum(everyone(*shape)))
        outs = [torch.empty(shape) for _ in range(size)]
        dist.all_gather(outs, mine(*shape))
        for got, expected in zip(outs, everyone(*shape)):
            same(got, expected)
        out = torch.empty(size * shape[0], *shape[1:])
        dist.all_gather_into_tensor(out, mine(*shape))
        same(out, torch.cat(everyone(*shape)))
        dist.gather(mine(*shape), outs if rank == 0 else None, dst=0)
        dist.scatter(t, outs if rank == 0 else None, src=0)
        same(t, mine(*shape))
        whole = torch.cat([mine(*shape) + each for each in range(size)])
        out = torch.empty(shape)
        dist.reduce_scatter_tensor(out, whole)
        same(out, sum(everyone(*shape)) + size * rank)
        dist.reduce_scatter(out, list(whole.chunk(size)) if shape[0] else [out.clone() for _ in range(size)])
        same(out, sum(everyone(*shape)) + size * rank)
        dist.all_to_all(outs, [mine(*shape) + each for each in range(size)])
        for got, expected in zip(outs, everyone(*shape)):
            same(got, expected + rank)
    dist.barrier()


def strided() -> None:
    t = mine(40, 60).t()
    assert not t.is_contiguous()
    dist.all_reduce(t)
    same(t, sum(everyone(40, 60)).t())
    t = mine(40, 60)[:, ::2]
    dist.broadcast(t, src=0)
    same(t, mine(40, 60, of=0)[:, ::2])
    outs = [torch.zeros(60, 40).t() for _ in range(size)]
    dist.all_gather(outs, mine(60, 40).t().contiguous().clone())
    for each, got in enumerate(outs):
        same(got, mine(60, 40, of=each).t())


def uneven() -> None:
    outs = [torch.empty(each + 1, 7) for each in range(size)]
    dist.all_gather(outs, mine(rank + 1, 7))
    for each, got in enumerate(outs):
        same(got, mine(each + 1, 7, of=each))
    # Rank a gives b + 1 rows to rank b.
    given = mine(size * (size + 1) // 2, 3)
    got = torch.empty(size * (rank + 1), 3)
    dist.all_to_all_single(got, given, [rank + 1] * size, [each + 1 for each in range(size)])
    begin = rank * (rank + 1) // 2
    same(got, torch.cat([mine(len(given), 3, of=each)[begin : begin + rank + 1] for each in range(size)]))


def reductions() -> None:
    integers = torch.tensor([0b1100, 0b1010, 7], dtype=torch.int32) << rank
    all_of_them = [torch.tensor([0b1100, 0b1010, 7], dtype=torch.int32) << each for each in range(size)]
    for op, combine in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
        (dist.ReduceOp.MIN, torch.minimum),
        (dist.ReduceOp.PRODUCT, torch.mul),
    ):
        expected = all_of_them[0]
        for each in all_of_them[1:]:
            expected = combine(expected, each)
        t = integers.clone()
        dist.all_reduce(t, op=op)
        same(t, expected)
    t = mine(9)
    dist.all_reduce(t, op=dist.ReduceOp.AVG)
    same(t, sum(everyone(9)) / size)
    t = mine(9)
    dist.all_reduce(t, op=dist._make_nccl_premul_sum(0.5))
    same(t, sum(each * 0.5 for each in everyone(9)))
    for dtype in (torch.half, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.float64):
        t = (mine(4000) % 13 / 8).to(dtype)
        parts = [(each % 13 / 8).to(dtype) for each in everyone(4000)]
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        expected = sum(part.to(wide) for part in parts).to(dtype)
        dist.all_reduce(t)
        same(t.to(wide), expected.to(wide))
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    assert flags.tolist() == [True, True, False]


def several() -> None:
    tensors = [mine(3), mine(4, 5), mine(0)]
    dist.all_reduce_coalesced(tensors)
    for got, shape in zip(tensors, ((3,), (4, 5), (0,))):
        same(got, sum(everyone(*shape)))
    t = torch.sparse_coo_tensor([[rank, size]], torch.tensor([1.0, 2.0]), (size + 1,))
    dist.all_reduce(t)
    same(t.to_dense(), torch.tensor([1.0] * size + [2.0 * size]))


def point_to_point() -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(50000)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine(50000), after), dist.P2POp(dist.irecv, got, before)])
    for work in works:
        work.wait()
    same(got, mine(50000, of=before))
    if rank == 0:
        seen = {dist.recv(got[:5]) for _ in range(1, size)}
        assert seen == set(range(1, size))
    else:
        dist.send(mine(5), 0)
    small = torch.empty(1)
    if rank == 0:
        dist.send(torch.tensor([1.0]), 1, tag=1)
        dist.send(torch.tensor([2.0]), 1, tag=2)
    elif rank == 1:
        for tag in 2, 1:
            dist.recv(small, 0, tag=tag)
            assert small.item() == tag


def objects() -> None:
    out: list[object] = [None] * size
    dist.all_gather_object(out, {"rank": rank})
    assert out == [{"rank": each} for each in range(size)]
    values = ["a", 3] if rank == 0 else [None, None]
    dist.broadcast_object_list(values, src=0)
    assert values == ["a", 3]


def groups() -> None:
    even = dist.new_group([each for each in range(size) if each % 2 == 0])
    everybody = dist.new_group()
    if rank % 2 == 0:
        t = torch.ones(1)
        dist.all_reduce(t, group=even)
        assert t.item() == (size + 1) // 2
    t = torch.ones(1)
    works = [dist.all_reduce(t, group=everybody, async_op=True)]
    u = torch.ones(100000)
    works.append(dist.all_reduce(u, async_op=True))
    for work in works:
        work.wait()
    assert t.item() == u[0].item() == size
    future = dist.all_reduce(u, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0][0].item()).wait() == size * size
    assert "two_shot" in tensorferry.c10d.group_of().explain("all_reduce", 1 << 26)


def functional() -> None:
    import torch.distributed._functional_collectives as funcol

    same(funcol.all_reduce(mine(6), "sum", dist.group.WORLD).clone(), sum(everyone(6)))
    same(funcol.all_gather_tensor(mine(6), 0, dist.group.WORLD).clone(), torch.cat(everyone(6)))
    mesh = dist.init_device_mesh("cpu", (size,))
    assert mesh.get_local_rank() == rank


def mismatches() -> None:
    t = torch.ones(3 if rank != 1 else 4)
    try:
        dist.all_reduce(t)
    except dist.DistBackendError as error:
        assert "rank 1" in str(error) and "different operations" in str(error), error
    else:
        raise AssertionError("no error")
    dist.barrier()  # the group goes on
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1)) if rank != 1 else None
    except RuntimeError as error:
        assert rank != 0 or "rank 1" in str(error), error
    else:
        assert rank == 1


def ddp() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, labels = torch.randn(8 * size, 20), torch.randint(0, 3, (8 * size,))
    whole = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        part = slice(8 * rank, 8 * rank + 8)
        torch.nn.functional.cross_entropy(trained(data[part]), labels[part]).backward()
        optimizer.step()
    alone = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
    with torch.no_grad():
        for to, value in zip(alone.parameters(), whole):
            to.copy_(value)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(alone(data), labels).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(a, b)


def dies() -> None:
    """The last rank dies while the others wait for it."""
    dist.barrier()
    if rank == size - 1:
        os._exit(9)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1000000 if size > 2 else 4))
    except dist.DistBackendError as error:
        assert f"rank {size - 1}" in str(error) and "died" in str(error), error
    else:
        raise AssertionError("no error")
    assert time.monotonic() - began < 10
    print("survived", flush=True)
    os._exit(0)  # torch's own shutdown would wait for the dead


for name in sys.argv[4:]:
    if not dist.is_initialized():
        dist.init_process_group(
            "tensorferry", store=dist.FileStore(sys.argv[1], size), rank=rank, world_size=size,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
    globals()[name]()
    print("done", name, flush=True)
dist.barrier()  # a rank that leaves ends the others' receptions from any rank
dist.destroy_process_group()
