"""One rank of a torch.distributed job on the backend tensorferry: c10d_rank.py FILE RANK SIZE SCENARIO...

Its tensors are on TEST_DEVICE; without that, on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import tensorferry
import torch
import torch.distributed as dist
from refusing import refused
from tensorferry import errors
from tensorferry.c10d import Options, group_of

rank, size = int(sys.argv[2]), int(sys.argv[3])
device = os.environ.get("TEST_DEVICE", "cpu").replace("RANK", str(rank))  # "cuda:RANK": each rank has a GPU of its own
torch.set_default_device(device)
if device.startswith("cuda:"):
    torch.cuda.set_device(device)


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
    shapes = (3,), (4, 5), (0,)
    tensors = [mine(*shape) for shape in shapes]
    dist.all_reduce_coalesced(tensors)
    for got, shape in zip(tensors, shapes):
        same(got, sum(everyone(*shape)))
    tensors = [mine(*shape).t() for shape in ((4, 5), (1, 1))]
    dist.all_reduce_coalesced(tensors, op=dist.ReduceOp.MAX, async_op=True).wait()
    same(tensors[0], mine(4, 5, of=size - 1).t())
    lists = [[torch.empty(shape) for shape in shapes] for _ in range(size)]
    dist.all_gather_coalesced(lists, [mine(*shape) for shape in shapes])
    for each, got in enumerate(lists):
        for one, shape in zip(got, shapes):
            same(one, mine(*shape, of=each))
    tensors = [mine(3), mine(7)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    gathered = [torch.empty(size * 3), torch.empty(size * 7)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, n in zip(gathered, (3, 7)):
            dist.all_gather_into_tensor(out, mine(n))
    manager.wait()
    reduced = [torch.empty(3), torch.empty(7)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, whole in zip(reduced, gathered):
            dist.reduce_scatter_tensor(out, whole)
    manager.wait()
    for t, whole, out, n in zip(tensors, gathered, reduced, (3, 7)):
        same(t, sum(everyone(n)))
        same(whole, torch.cat(everyone(n)))
        same(out, size * mine(n))


def sparse() -> None:
    for dtype in torch.float, torch.double, torch.int64:
        for width in (), (2,), (2, 3):
            # Two elements of a matrix, of which the second is everyone's.
            values = torch.ones(2, *width, dtype=dtype)
            given = [
                torch.sparse_coo_tensor([[each, size], [0, 1]], values * (each + 1), (size + 1, 2, *width))
                for each in range(size)
            ]
            t = given[rank].clone()
            work = dist.all_reduce(t, async_op=True)
            work.wait()
            assert t.is_sparse and t.is_coalesced()
            same(t.to_dense(), sum(each.to_dense() for each in given))
    t = torch.sparse_coo_tensor([[1, 1]], torch.ones(2), (4,))  # not coalesced
    same(dist.all_reduce(t, async_op=True).get_future().wait()[0].to_dense(), torch.tensor([0, 2.0 * size, 0, 0]))
    t = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (4,))
    dist.all_reduce(t)
    assert t._nnz() == 0 and t.shape == (4,)
    # One rank has elements, and the others none.
    t = torch.sparse_coo_tensor([[2]] if rank == 0 else torch.empty(1, 0), torch.ones(1 if rank == 0 else 0), (4,))
    dist.all_reduce(t)
    same(t.to_dense(), torch.tensor([0, 0, 1.0, 0]))
    refused(ValueError, lambda: dist.all_reduce(t, op=dist.ReduceOp.MAX), "can only be summed")


def never_comes(call: Callable[[], object], to: str = "") -> None:
    """The last rank is named as one that did not come; perhaps beside others that a busy machine has held up."""
    try:
        call()
    except dist.DistBackendError as error:
        other = r"rank \d( \(\S+\))?, "
        pattern = rf"within 3 s: of its {size} ranks, ({other})*rank {size - 1}( \(\S+\))? did not come{to}"
        assert re.search(pattern, str(error)), error
    else:
        raise AssertionError("no error")


def refusals() -> None:
    """A call that is wrong at every rank fails there, and the group goes on."""
    world = dist.group.WORLD
    one = torch.ones(1)
    refused(dist.DistBackendError, lambda: world.broadcast(one, root=size), f"has no rank {size}")
    refused(
        ValueError, lambda: world.allreduce([one, torch.ones(2)]), "one layout" if device == "cpu" else "one tensor"
    )
    own = "to itself"
    refused(dist.DistBackendError, lambda: dist.all_gather_into_tensor(torch.empty(size * 2), torch.ones(3)), own)
    refused(dist.DistBackendError, lambda: dist.all_gather_into_tensor(torch.empty(size * 4), torch.ones(3)), own)
    refused(dist.DistBackendError, lambda: dist.all_to_all([one] * size, [torch.ones(9)] * size), own)
    if size > 1:
        refused(ValueError, lambda: dist.all_gather_into_tensor(torch.empty(size * 3 + 1), torch.ones(3)), "ranks")
    refused(dist.DistBackendError, lambda: dist.all_reduce(one, op=dist.ReduceOp.BAND), "not defined for float32")
    # Several elements at one address cannot be written, which turns out when the others have the result.
    refused(dist.DistBackendError, lambda: dist.all_reduce(one.expand(4)), "cannot be written")
    t = torch.ones(4)
    dist.all_reduce(t)
    same(t, torch.full((4,), float(size)))


def shapes() -> None:
    t = torch.tensor(float(rank))
    dist.all_reduce(t)
    assert t.item() == sum(range(size))
    out = torch.empty(size)
    dist.all_gather_into_tensor(out, torch.tensor(float(rank)))
    same(out, torch.arange(float(size)))
    out = torch.empty(size, 3)
    dist.all_gather_into_tensor(out, mine(3))
    same(out, torch.stack(everyone(3)))
    got = torch.empty(3)
    dist.reduce_scatter_tensor(got, out)
    same(got, size * mine(3))
    # Rank 0 gives nothing to anyone, and rank a gives a rows to each.
    got = torch.empty(sum(range(size)))
    dist.all_to_all_single(got, torch.full((size * rank,), float(rank)), list(range(size)), [rank] * size)
    same(got, torch.cat([torch.full((each,), float(each)) for each in range(size)]))
    # The parts of a reduce_scatter have several sizes.
    got = torch.empty(rank + 1)
    dist.reduce_scatter(got, [torch.ones(each + 1) for each in range(size)])
    same(got, torch.full((rank + 1,), float(size)))
    with torch.inference_mode():
        t = mine(40, 60).t()  # copied, and copied back by a thread that is not in inference mode
        dist.all_reduce(t, async_op=True).wait()
        same(t, sum(everyone(40, 60)).t())
        tensors = [mine(3), mine(5)]
        dist.all_reduce_coalesced(tensors, async_op=True).wait()
        same(tensors[1], sum(everyone(5)))


def many() -> None:
    """Hundreds of operations are under way at once."""
    numbered = torch.__version__ >= "2.15"  # earlier ones ask no backend of a third party
    before = dist.group.WORLD._get_sequence_number_for_group() if numbered else 0
    tensors = [mine(1 + 37 * i % 5000) + i for i in range(300)]
    works = [
        dist.all_reduce(t, async_op=True) if i % 3 else dist.broadcast(t, src=i % size, async_op=True)
        for i, t in enumerate(tensors)
    ]
    for work in reversed(works):
        work.wait()
        if torch.get_default_device().type == "cuda":
            torch.cuda.synchronize()  # GPUs may do it among themselves: then wait() does not wait for them
        assert work.is_completed() and work.is_success()
    for i, t in enumerate(tensors):
        n = len(t)
        same(t, sum(everyone(n)) + size * i if i % 3 else mine(n, of=i % size) + i)
    if numbered:
        assert dist.group.WORLD._get_sequence_number_for_group() == before + len(tensors)


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
    assert ("one_shot" if size == 1 else "two_shot") in group_of().explain("all_reduce", 1 << 26)


def functional() -> None:
    import torch.distributed._functional_collectives as funcol

    same(funcol.all_reduce(mine(6), "sum", dist.group.WORLD).clone(), sum(everyone(6)))
    same(funcol.all_gather_tensor(mine(6), 0, dist.group.WORLD).clone(), torch.cat(everyone(6)))
    mesh = dist.init_device_mesh("cpu", (size,))
    assert mesh.get_local_rank() == rank
    if size == 4:
        names = ("rows", "columns")
        mesh = dist.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=names, backend_override={"rows": Options(name="the rows")}
        )
        assert group_of(mesh.get_group("rows")).label == "the rows"
        for dimension, other in ("rows", rank ^ 2), ("columns", rank ^ 1):
            t = mine(3)
            dist.all_reduce(t, group=mesh.get_group(dimension))
            same(t, mine(3) + mine(3, of=other))


def options() -> None:
    assert group_of().label == "world"
    chosen = Options(name="gradients", algorithms="all_reduce=two_shot", board=False, timeout=50)
    group = dist.new_group(pg_options=chosen)
    below = group_of(group)
    assert below.label == "gradients" and below.size == size
    if size > 1:
        said = below.explain("all_reduce", 8)
        assert "two_shot (prescribed)" in said and "the option board is off" in said, said
    before = below.progress
    t = mine(3)
    dist.all_reduce(t, group=group)
    same(t, sum(everyone(3)))
    assert below.progress == (before[0] + 1, before[0] + 1)
    cpu = torch.device("cpu")
    assert group._get_backend(cpu).options._timeout == timedelta(seconds=50)
    group = dist.new_group(pg_options=chosen, timeout=timedelta(seconds=70))  # the same name, and torch's time-out
    assert group._get_backend(cpu).options._timeout == timedelta(seconds=70)
    assert chosen._timeout == timedelta(seconds=50)
    refused(errors.InvalidArgument, lambda: Options(algorithms="all_reduce=fast"), "prescribes no algorithm")
    refused(TypeError, lambda: dist.new_group(pg_options={"name": "gradients"}), "is a tensorferry.c10d.Options, not a")
    refused(errors.InvalidArgument, lambda: dist.new_group(pg_options=Options(interface="eth")), "interface='localhost")
    refused(errors.InvalidArgument, lambda: dist.new_group(pg_options=Options(max_threads=3)), "max_threads=3, but")
    dist.new_group(pg_options=Options(interface="localhost"))
    other = dist.new_group(backend="gloo")
    refused(KeyError, lambda: group_of(other), "does not have the backend tensorferry")
    if hasattr(torch._C._distributed_c10d._DistributedBackendOptions, "process_group"):
        wrong = other._get_backend(cpu).options
        refused(TypeError, lambda: dist.new_group(pg_options=wrong), "is a tensorferry.c10d.Options, not a")


def algorithms() -> None:
    """The group under a process group takes an algorithm for one call."""
    group = group_of()
    for algorithm in "one_shot", "two_shot", "ring":
        before = dict(group.paths)
        same(group.all_reduce(mine(1000), algorithm=algorithm).wait(), sum(everyone(1000)))
        key = ("all_reduce", "host", algorithm)
        assert group.paths == before | {key: before.get(key, 0) + 1}, (group.paths, before)
    asked = "two_shot" if rank == size - 1 else "one_shot"
    texts = [f'rank {size - 1} ("rank{size - 1}@', 'by algorithm "two_shot"', 'by algorithm "one_shot"']
    for length in 10, 100_000:
        refused(errors.InvalidArgument, lambda n=length: group.all_reduce(mine(n), algorithm=asked).wait(), *texts)
    refused(errors.InvalidArgument, lambda: group.all_reduce(mine(1), algorithm="fast"), "one_shot, two_shot, ring")
    dist.barrier()


def lazy() -> None:
    """The first operation forms the group."""
    group = dist.new_group(pg_options=Options(lazy=True))
    dist.send(mine(5), 0, group=group) if rank == 1 else None
    if rank == 0 and size > 1:
        got = torch.empty(5)
        dist.recv(got, 1, group=group)
        same(got, mine(5, of=1))
    t = mine(5)
    dist.all_reduce(t, group=group)
    same(t, sum(everyone(5)))
    group = dist.new_group(pg_options=Options(lazy=True))
    assert group_of(group).names == group_of().names
    never = dist.new_group(pg_options=Options(lazy=True))
    if size > 1:
        # The option bounds the formation alone, and torch's timeout= its barrier in new_group() too.
        group = dist.new_group(pg_options=Options(lazy=True, timeout=3))
        dist.barrier()
        if rank < size - 1:
            never_comes(lambda: dist.barrier(group), " to its first operation")
    dist.destroy_process_group(never)
    dist.barrier()


def split() -> None:
    if torch.__version__ < "2.15":
        return  # its split_group() is for GPUs
    colours = [list(range(0, size, 2)), list(range(1, size, 2))] if size > 1 else [[0]]
    mine_of = colours[rank % 2]
    part = dist.split_group(split_ranks=colours)
    assert dist.get_process_group_ranks(part) == mine_of and group_of(part).label == part.group_name
    t = mine(1000)
    dist.all_reduce(t, group=part)
    same(t, sum(mine(1000, of=each) for each in mine_of))
    # The order of the ranks is kept, and all ranks call it.
    some = [size - 1, 0][:size]
    chosen = Options(name="ends", algorithms="all_reduce=two_shot", timeout=5)
    ends = dist.split_group(split_ranks=[some], pg_options=chosen, timeout=timedelta(seconds=70))
    if rank not in some:
        assert ends is dist.GroupMember.NON_GROUP_MEMBER
    else:
        below = group_of(ends)
        assert below.label == "ends" and below.names == [group_of().names[each] for each in some]
        assert dist.get_rank(ends) == some.index(rank)
        assert ends._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=70)
        t = mine(3)
        dist.all_reduce(t, group=ends)
        same(t, sum(mine(3, of=each) for each in some))
    # A part of a part takes its options, but no name. Every rank calls it: torch counts the groups of a process, and
    # the next one has that number as its name.
    half = dist.split_group(split_ranks=colours, pg_options=Options(name="half", algorithms="all_reduce=two_shot"))
    again = dist.split_group(half, split_ranks=[list(range(len(mine_of)))])
    assert group_of(half).label == "half" and group_of(again).label == again.group_name
    assert group_of(again).names == group_of(half).names
    if size > 2:
        assert "two_shot (prescribed)" in group_of(again).explain("all_reduce", 8)
    alone = dist.split_group(half, split_ranks=[[each] for each in range(len(mine_of))])
    assert group_of(alone).size == 1
    lazily = dist.new_group(pg_options=Options(lazy=True))
    part = dist.split_group(lazily, split_ranks=colours)  # forms the lazy group; its parts are lazy too
    t = mine(3)
    dist.all_reduce(t, group=part)
    same(t, sum(mine(3, of=each) for each in mine_of))
    wrong = dist.new_group(backend="gloo")._get_backend(torch.device("cpu")).options
    refused(TypeError, lambda: dist.split_group(split_ranks=colours, pg_options=wrong), "not options of gloo")


def recorded() -> None:
    """Torch's flight recorder has the operations, and knows which have ended."""
    if torch.__version__ < "2.15":
        return  # it asks no backend
    group = dist.new_group()
    dist.all_reduce(mine(3), group=group)
    dist.barrier(group)

    def entries() -> list[dict[str, object]]:
        found = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="tensorferry"))
        return [each for each in found["entries"] if each["process_group"][0] == group.group_name]

    until = time.monotonic() + 60
    while not all(each["retired"] for each in entries()) and time.monotonic() < until:
        time.sleep(0.01)
    assert [each["profiling_name"] for each in entries()] == ["tensorferry:all_reduce", "tensorferry:barrier"]
    assert all(each["state"] == "completed" and each["retired"] for each in entries()), entries()


def detail() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch itself names a rank that calls another operation."""
    t = torch.ones(2)
    dist.all_reduce(t)
    assert t[0].item() == size and group_of().size == size
    try:
        dist.all_reduce(t) if rank != 1 else dist.broadcast(t, src=0)
    except RuntimeError as error:
        assert "Detected mismatch" in str(error) and "ank 1" in str(error), error
        assert "ALLREDUCE" in str(error) and "BROADCAST" in str(error), error
    else:
        raise AssertionError("no error")
    same(t, torch.full((2,), float(size)))


def mismatches() -> None:
    t = torch.ones(3 if rank != 1 else 4)
    try:
        dist.all_reduce(t)
    except dist.DistBackendError as error:
        assert "rank 1" in str(error) and "different operations" in str(error), error
    else:
        raise AssertionError("no error")
    dist.barrier()  # the group goes on
    counts = [3 if rank != 1 else 4, 2]  # the ranks disagree on the first tensor alone
    wholes, parts = [torch.zeros(size * n) for n in counts], [torch.zeros(n) for n in counts]
    with dist._coalescing_manager(async_ops=True) as manager:
        for whole, part in zip(wholes, parts):
            dist.all_gather_into_tensor(whole, part)
    refused(dist.DistBackendError, manager.wait, "different operations")
    with dist._coalescing_manager(async_ops=True) as manager:
        for whole, part in zip(wholes, parts):
            dist.reduce_scatter_tensor(part, whole)
    refused(dist.DistBackendError, manager.wait, "different operations")
    lists = [[torch.zeros(n) for n in counts] for _ in range(size)]
    refused(dist.DistBackendError, lambda: dist.all_gather_coalesced(lists, parts), "different operations")
    dist.barrier()


def late() -> None:
    """Barriers end at their timeout, and name the ranks that have not come."""
    for wait_all in False, True:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=3), wait_all_ranks=wait_all) if rank != 1 else None
        except RuntimeError as error:
            # Another rank may be late too, on a busy machine.
            root, others = r"Ranks? (\d, )*1(, \d)* failed to pass", f"Rank {rank} successfully reached"
            assert re.search(f"{root if rank == 0 else others} monitoredBarrier", str(error)), error
        else:
            assert rank == 1
        dist.barrier()
    if rank == 0:
        refused(RuntimeError, lambda: dist.monitored_barrier(timeout=timedelta(0)), "Rank 0 timed out in monitoredB")
    dist.barrier()
    short = dist.new_group(timeout=timedelta(seconds=30))
    if rank == 0:
        refused(dist.DistBackendError, lambda: dist.barrier(short, timeout=timedelta(seconds=0.1)), " timeout ")


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


def streams() -> None:
    """On a GPU, inputs are read and results are written in the order of the current stream."""
    a_while = 100_000_000  # cycles
    for use in torch.cuda.current_stream(), torch.cuda.Stream():
        with torch.cuda.stream(use):
            for _ in range(3):
                torch.cuda._sleep(a_while)
                t = torch.full((1 << 20,), float(rank + 1))  # in memory that the last round has just released
                dist.all_reduce(t)
                total = t.sum()
                t.fill_(-1)
                assert total.item() == (1 << 20) * sum(range(1, size + 1))
            # The result goes to a tensor that a kernel still uses.
            out, before = torch.zeros(size * (1 << 18)), mine(1 << 18)
            dist.barrier()
            torch.cuda._sleep(a_while)
            seen = out.sum()
            dist.all_gather_into_tensor(out, before)
            assert seen.item() == 0
            same(out, torch.cat(everyone(1 << 18)))
            work = dist.all_reduce(before, async_op=True)
            doubled = work.get_future().then(lambda done: done.value()[0] * 2)
            same(doubled.wait(), 2 * sum(everyone(1 << 18)))
    # Another stream may use the result once the work has been waited for there.
    t = mine(1 << 18)
    work = dist.all_reduce(t, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
        copy = t.clone()
    torch.cuda.synchronize()
    same(copy, sum(everyone(1 << 18)))
    t = mine(1 << 18)
    work = dist.all_reduce(t, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.synchronize()
        copy = t.clone()
    torch.cuda.synchronize()
    same(copy, sum(everyone(1 << 18)))
    elsewhere = [torch.empty(2, device="cpu")] * size
    refused(dist.DistBackendError, lambda: dist.all_gather(elsewhere, mine(2)), "one device")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        refused(dist.DistBackendError, lambda: dist.all_reduce(t), "captured")
    dist.all_reduce(t)


def direct() -> None:
    """On GPUs that the ranks reach, every reduction gives the bits that it gives on the CPU."""
    dist.all_reduce(torch.ones(1))
    assert "Tensors of GPUs go directly" in group_of().explain("all_reduce", 4), group_of().explain("all_reduce", 4)
    reals, integers = ("SUM", "AVG", "PRODUCT", "MIN", "MAX"), ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    ):  # fmt: skip
        for count in 1, 37, 300_001:
            seeded = torch.Generator("cpu").manual_seed(rank)
            whole = torch.randint(-100, 100, (count + 1,), generator=seeded, device="cpu")
            given = (whole % 2).to(dtype) if dtype in (torch.bool, torch.uint8) else (whole / 64).to(dtype)
            ops = reals[:2] if dtype.is_complex else reals if dtype.is_floating_point else integers
            for op in ops:
                for first in 0, 1:  # an address that is no multiple of 16
                    here = given.cuda()[first : first + count]
                    there = given[first : first + count].clone()
                    dist.all_reduce(here, getattr(dist.ReduceOp, op))
                    dist.all_reduce(there, getattr(dist.ReduceOp, op))
                    assert torch.equal(here.cpu().view(torch.uint8), there.view(torch.uint8)), (dtype, count, op, first)
    # Larger than a chunk, in place, and behind work of the current stream for which the call does not wait.
    t = torch.full((20_000_003,), float(rank + 1))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
    dist.all_reduce(t)
    assert not torch.cuda.current_stream().query()  # the call did not wait for the stream
    same(t, torch.full_like(t, sum(range(1, size + 1))))
    work = dist.all_reduce(t, async_op=True)
    assert work.wait(timedelta(seconds=20)) and work.is_completed() and work.is_success()


def graphs() -> None:
    """Operations are captured into CUDA graphs, and replayed between others."""
    dist.all_reduce(torch.ones(1))
    explained = group_of().explain("all_reduce", 4096)
    assert "whose kernels meet by flags in the memory of the GPUs" in explained, explained
    small, large, half = torch.zeros(1000), torch.zeros(5_000_011), torch.zeros(300_001, dtype=torch.bfloat16)
    own, all_of_them, exchanged = torch.zeros(size, 3001), torch.zeros(size, size, 3001), torch.zeros(size, 3001)
    scattered, spread = torch.zeros(3001), torch.zeros(3001)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for tensor in small, large, half:  # the kernels are compiled before
            dist.all_reduce(tensor)
        dist.all_gather_into_tensor(all_of_them, own)
        dist.reduce_scatter_tensor(scattered, own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for tensor in small, large, half:
            tensor.add_(rank + 1)
            dist.all_reduce(tensor)
        scaled = small * 2
        own.copy_(torch.arange(size).view(-1, 1).expand_as(own) * 100.0 + rank).add_(small[0])
        dist.all_gather_into_tensor(all_of_them, own)
        dist.all_to_all_single(exchanged, own)
        dist.reduce_scatter_tensor(scattered, own)
        spread.copy_(own[0])
        dist.broadcast(spread, src=1)
        refused(dist.DistBackendError, lambda: dist.send(small, 1 - rank), "send cannot be captured")
    total = sum(range(1, size + 1))
    for turn in range(20):
        for tensor in small, large, half:
            tensor.fill_(turn % 3)
        graph.replay()
        for tensor in small, large, half:
            same(tensor, torch.full_like(tensor, total + size * (turn % 3)))
        same(scaled, small * 2)
        rows, ranks = torch.arange(size) * 100.0, torch.arange(size) * 1.0
        same(all_of_them[..., 7], (rows.view(1, -1) + ranks.view(-1, 1)) + small[0])
        same(exchanged[:, 3000], 100.0 * rank + ranks + small[0])
        same(scattered, torch.full_like(scattered, (100.0 * rank + ranks + small[0]).sum().item()))
        same(spread, torch.full_like(spread, 1.0 + small[0].item()))
        if turn % 4 == 0:  # the ranks also reduce outside of the graph, by both kinds of meetings
            for count in 10, 4_000_000:
                outside = torch.full((count,), rank + 1.0)
                dist.all_reduce(outside)
                same(outside, torch.full_like(outside, total))
    torch.cuda.synchronize()
    dist.barrier()


def symmetric() -> None:
    """Memory of tensorferry.empty() is read in place, until torch gives it back to the driver."""
    dist.all_reduce(torch.ones(1))

    def is_read_in_place() -> bool:
        return "allocations of other ranks are read in place" in group_of().explain("all_reduce", 4)

    assert not is_read_in_place()
    tensors = [tensorferry.empty(count, device="cuda") for count in (1000, 300_001, 5_000_000)]
    rows = tensorferry.empty((size, 3001), device="cuda")
    for turn in range(5):
        for tensor in tensors:
            tensor.fill_(turn + rank)
            dist.all_reduce(tensor)
            same(tensor, torch.full_like(tensor, sum(turn + other for other in range(size))))
        rows.fill_(turn + rank)
        gathered = torch.empty(size, size, 3001)
        dist.all_gather_into_tensor(gathered, rows)
        rows.fill_(-1)
        same(gathered[:, 0, 0], turn + torch.arange(size) * 1.0)
    assert is_read_in_place()
    torch.cuda.synchronize()
    dist.barrier()
    del tensors, tensor, rows, gathered
    torch.cuda.empty_cache()
    until = time.monotonic() + 10
    while is_read_in_place() and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_read_in_place()
    dist.barrier()


def dies_in_a_graph() -> None:
    """The last rank dies when the graphs of the others wait for it."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
    dist.barrier()
    if rank == size - 1:
        os._exit(9)
    began = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()  # released
    assert time.monotonic() - began < 20
    refused(dist.DistBackendError, lambda: dist.all_reduce(tensor), f"rank {size - 1}")
    print("survived", flush=True)
    os._exit(0)


def staged() -> None:
    explained = group_of().explain("all_reduce", 4)
    assert "copied through host memory, because rank 0" in explained and "CUDA_DEVICE_MAX_CON" in explained, explained


def dies_on_the_device() -> None:
    """The last rank dies when the streams of the others wait for its stream."""
    t = torch.ones(1 << 20)
    dist.all_reduce(t)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == size - 1:
        torch.cuda._sleep(20_000_000_000)
        dist.all_reduce(t)
        dist.barrier()
        os._exit(9)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    dist.barrier()
    began = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - began < 5
    assert work.is_completed() and not work.is_success()
    refused(dist.DistBackendError, work.wait, "died")
    refused(dist.DistBackendError, lambda: dist.all_reduce(t), f"rank {size - 1}")
    print("survived", flush=True)
    os._exit(0)


def late_on_the_device() -> None:
    """The stream of the last rank comes to an operation after its time-out."""
    t = torch.ones(4)
    dist.all_reduce(t)
    torch.cuda.synchronize()
    short = dist.new_group(timeout=timedelta(seconds=4))  # also for the first operation, which makes buffers
    dist.all_reduce(t, group=short)
    torch.cuda.synchronize()
    if rank == size - 1:
        torch.cuda._sleep(14_000_000_000)  # cycles: about 7 seconds
    dist.all_reduce(t, group=short)
    torch.cuda.synchronize()
    expected = f"rank {size - 1}" if rank != size - 1 else "reached its timeout"
    refused(dist.DistBackendError, lambda: dist.all_reduce(t, group=short), expected)
    dist.barrier()
    dist.all_reduce(t)  # another group is not concerned


def absent() -> None:
    """The last rank does not call new_group()."""
    dist.barrier()
    if rank < size - 1:
        never_comes(lambda: dist.new_group(timeout=timedelta(seconds=3)))


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
            timeout=timedelta(seconds=60), pg_options=Options(name="world", interface="localhost"),
        )  # fmt: skip
    globals()[name]()
    print("done", name, flush=True)
dist.barrier()  # a rank that leaves ends the others' receptions from any rank
dist.destroy_process_group()
