"""One rank of what process groups do as Gloo's do, each beside a group of Gloo's: c10d_beside_gloo.py FILE RANK SIZE
SCENARIO..."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import tensorferry.c10d  # noqa: F401
import torch
import torch.distributed as dist
from marks import await_mark, mark
from refusing import refused

rank, size = int(sys.argv[2]), int(sys.argv[3])
cpu = torch.device("cpu")


def beside(body: Callable[[dist.ProcessGroup, str], None]) -> Callable[[], None]:
    """Runs the scenario with a group of ours, and then with one of Gloo's."""

    def run() -> None:
        for backend in "tensorferry", "gloo":
            group = dist.new_group(backend=backend)
            assert isinstance(group, dist.ProcessGroup)
            body(group, backend)

    return run


def goes_on(group: dist.ProcessGroup) -> None:
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    assert t.item() == size


@beside
def refuses_other_shapes(group: dist.ProcessGroup, _: str) -> None:
    """A tensor that a rank gives to itself has as many elements as the output for it, and another shape."""
    mine, wrong = torch.ones(2, 3), [torch.ones(3, 2) for _ in range(size)]
    refused(RuntimeError, lambda: dist.all_gather(wrong, mine, group=group), "(3, 2)")
    refused(RuntimeError, lambda: dist.reduce_scatter(mine, wrong, group=group))
    if rank == 0:  # it refuses before it waits for the others
        refused(RuntimeError, lambda: dist.gather(mine, wrong, 0, group=group), "(3, 2)")
        refused(RuntimeError, lambda: dist.scatter(mine, wrong, 0, group=group), "(3, 2)")
    goes_on(group)


@beside
def refuses_what_makes_no_sense(group: dist.ProcessGroup, backend: str) -> None:
    given, splits = torch.ones(2 * size), [1] * (size + 1)
    split = lambda: dist.all_to_all_single(given.clone(), given, splits, splits, group=group)  # noqa: E731
    refused(ValueError if backend == "tensorferry" else RuntimeError, split, "split")
    refused(RuntimeError, lambda: group.broadcast(torch.ones(1), root=-1), " -1")
    goes_on(group)


@beside
def takes_device_ids(group: dist.ProcessGroup, _: str) -> None:
    """A barrier of the host has no use for them."""
    dist.barrier(group, device_ids=[0])


def held_by_rank_0(group: dist.ProcessGroup, name: str, meanwhile: Callable[[Any], Any]) -> Any:
    """Rank 0 starts a reduction, which ends after ``meanwhile`` has returned; it returns what that did."""
    t = torch.full((4,), float(rank))
    if rank > 0:
        await_mark(name)
        dist.all_reduce(t, group=group)
        return None
    work = dist.all_reduce(t, group=group, async_op=True)
    out = meanwhile(work)
    mark(name)
    work.wait()
    assert work.result()[0].eq(sum(range(size))).all()
    return out


@beside
def has_no_result_before_the_end(group: dist.ProcessGroup, backend: str) -> None:
    held_by_rank_0(
        group, "result." + backend, lambda work: refused(RuntimeError, work.result, "wait() before result()")
    )


@beside
def has_a_source_if_it_receives(group: dist.ProcessGroup, _: str) -> None:
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()
    refused(RuntimeError, work._source_rank, "recv or recv-from-any")
    if rank == 1:
        dist.send(torch.ones(1), 0, group=group)
    if rank == 0:
        received = dist.irecv(torch.ones(1), group=group)
        received.wait()
        assert received._source_rank() == 1


def modes() -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


@beside
def calls_back_in_no_ones_state(group: dist.ProcessGroup, backend: str) -> None:
    """What a thread that waits has set for itself is not set for the callbacks, although it may run them."""
    seen = []
    for mode in torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"):
        with mode:
            called_back = held_by_rank_0(
                group, f"{type(mode).__name__}.{backend}", lambda work: work.get_future().then(lambda _: modes())
            )
        seen.append(rank > 0 or called_back.wait())
    assert seen == [rank > 0 or (True, False, False)] * 3, seen


@beside
def averages(group: dist.ProcessGroup, _: str) -> None:
    t = torch.tensor([1.0, 2.0]) * rank
    dist.all_reduce(t, dist.ReduceOp.AVG, group=group)
    assert t.tolist() == [(size - 1) / 2, size - 1.0]


@beside
def is_recorded(group: dist.ProcessGroup, backend: str) -> None:
    """Torch's flight recorder has the operations of a group, and knows that they have ended."""
    if torch.__version__ < "2.15":
        return  # it asks no backend of a third party
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier(group)

    def entries() -> list[dict[str, Any]]:
        found = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend=backend))
        return [each for each in found["entries"] if each["process_group"][0] == group.group_name]

    until = time.monotonic() + 60
    while not all(each["retired"] for each in entries()) and time.monotonic() < until:
        time.sleep(0.01)
    assert [each["profiling_name"] for each in entries()] == [f"{backend}:all_reduce", f"{backend}:barrier"]
    state = "completed" if backend == "tensorferry" else "scheduled"  # Gloo's say no more
    assert all(each["retired"] and each["state"] == state for each in entries()), entries()


@beside
def splits_with_its_own_options(group: dist.ProcessGroup, backend: str) -> None:
    """With those of another backend Gloo warns and takes its defaults, and we refuse."""
    if torch.__version__ < "2.15":
        return  # its split_group() is for GPUs
    other = "gloo" if backend == "tensorferry" else "tensorferry"
    foreign = dist.new_group(backend=other)._get_backend(cpu).options
    ranks = [[each] for each in range(size)]
    if backend == "tensorferry":
        refused(TypeError, lambda: dist.split_group(group, ranks, pg_options=foreign), "not options of gloo")
    else:
        assert dist.split_group(group, ranks, pg_options=foreign).size() == 1
    goes_on(group)


@beside
def names_who_misses_a_barrier(group: dist.ProcessGroup, _: str) -> None:
    """Rank 1 does not come. Another one may be late too, on a busy machine."""
    if torch.__version__ < "2.15":
        return  # there torch refuses the operation, but of a group whose backend is named gloo
    if rank != 1:
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=3), wait_all_ranks=True)
        except RuntimeError as error:
            text = r"Ranks? (\d, )*1(, \d)* failed to pass " if rank == 0 else ""
            assert re.search(text + "monitoredBarrier", str(error)), error
        else:
            raise AssertionError("no error")


dist.init_process_group("tensorferry", store=dist.FileStore(sys.argv[1], size), rank=rank, world_size=size)
for scenario in sys.argv[4:]:
    globals()[scenario]()
    print("done", scenario, flush=True)
dist.barrier()
dist.destroy_process_group()
