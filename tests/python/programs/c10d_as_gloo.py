"""One rank of what process groups have as ProcessGroupGloo has it: several tensors a rank, and groups that are merged.
c10d_as_gloo.py FILE RANK SIZE SCENARIO..."""

from __future__ import annotations

import math
import re
import sys
from datetime import timedelta

import tensorferry.c10d  # noqa: F401
import torch
import torch.distributed as dist

rank, size = int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("tensorferry", store=dist.FileStore(sys.argv[1], size), rank=rank, world_size=size)
world = dist.group.WORLD
assert world is not None


def two() -> list[torch.Tensor]:
    """Of all ranks, these are the numbers from 1 on; the second tensor is not contiguous."""
    return [torch.full((3, 2), 2.0 * rank + 1), torch.full((2, 3), 2.0 * rank + 2).t()]


def reduces() -> None:
    for op, expected in (
        (dist.ReduceOp.SUM, size * (2 * size + 1)),
        (dist.ReduceOp.PRODUCT, math.factorial(2 * size)),
        (dist.ReduceOp.MIN, 1),
        (dist.ReduceOp.MAX, 2 * size),
    ):
        opts = dist.AllreduceOptions()
        opts.reduceOp = op
        tensors = two()
        work = world.allreduce(tensors, opts)
        work.wait()
        assert [each.unique().tolist() for each in (*tensors, *work.result())] == [[expected]] * 4, (op, tensors)
    bits = [torch.tensor([1 << rank]), torch.tensor([1 << size])]
    opts.reduceOp = dist.ReduceOp.BOR
    future = world.allreduce(bits, opts).get_future()
    assert [each.item() for each in future.wait()] == [(1 << (size + 1)) - 1] * 2


def sums_sparse() -> None:
    tensors = [torch.sparse_coo_tensor([[rank + i, size]], [1.0, 2.0], (size + 2,)) for i in range(2)]
    world.allreduce(tensors).wait()
    expected = [1.0] + [2.0] * (size - 1) + [4.0 * size + 1, 0]
    assert [each.to_dense().tolist() for each in tensors] == [expected] * 2, tensors


def broadcasts() -> None:
    for root in range(size):
        for chosen in range(2):
            opts = dist.BroadcastOptions()
            opts.rootRank, opts.rootTensor = root, chosen
            tensors = two()
            world.broadcast(tensors, opts).wait()
            assert [each.unique().tolist() for each in tensors] == [[2 * root + chosen + 1]] * 2


def gathers() -> None:
    outputs = [[torch.empty(3, 2) for _ in range(2 * size)] for _ in range(2)]
    world.allgather(outputs, two()).wait()
    for each in outputs:
        assert [tensor.unique().tolist() for tensor in each] == [[i + 1] for i in range(2 * size)]


def refuses() -> None:
    one = torch.ones(2)
    average = dist.AllreduceOptions()
    average.reduceOp = dist.ReduceOp.AVG
    wrong = dist.BroadcastOptions()
    wrong.rootTensor = 2
    for call, said in (
        (lambda: world.allreduce([one, torch.ones(3)]), "one layout, dtype and shape"),
        (lambda: world.allreduce([one, one.to_sparse()]), "one layout, dtype and shape"),
        (lambda: world.allreduce([one, one], average), "with this reduction"),
        (lambda: world.broadcast([one, one], wrong), "no tensor 2 among 2"),
        (lambda: world.allgather([[one] * size] * 2, [one, one]), f"a list has {size} tensors"),
        (lambda: world.reduce([one, one]), "one tensor a rank, not 2"),
    ):
        try:
            call().wait()
        except ValueError as error:
            assert re.search(said, str(error)), error
        else:
            raise AssertionError(f"no error, but {said}")
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size, "the group goes on"


def merges() -> None:
    """The parts of a group become one again, twice, each time in a store of its own."""
    parts = [list(range(first, size, 2)) for first in range(min(2, size))]
    part = next(filter(None, (world.split_group(ranks) for ranks in parts)))
    for turn in ("first", "second"):
        store = dist.FileStore(f"{sys.argv[1]}.{turn}", size)
        merged = part.merge_remote_group(store, size, timedelta(seconds=60))
        assert merged.size() == size
        t = torch.tensor([float(rank)])
        merged.allreduce([t]).wait()
        assert t.item() == sum(range(size))
        ranks = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
        merged.allgather([ranks], [torch.tensor([merged.rank()])]).wait()
        assert [each.item() for each in ranks] == list(range(size))
    t = torch.ones(1)
    part.allreduce([t]).wait()
    assert t.item() == part.size(), "the parts go on"


for scenario in sys.argv[4:]:
    globals()[scenario]()
    print("done", scenario)
dist.destroy_process_group()
