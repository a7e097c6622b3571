"""One rank of a torch.distributed job on the backend tensorferry, for how things end: c10d_endings.py FILE RANK SIZE
SCENARIO."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path

import tensorferry.c10d
import torch
import torch.distributed as dist
from marks import await_mark, mark
from refusing import refused

path, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def init(ranks: int = size) -> None:
    store, timeout = dist.FileStore(str(path), ranks), timedelta(seconds=60)
    dist.init_process_group("tensorferry", store=store, rank=rank, world_size=ranks, timeout=timeout)


def begins_again_and_again() -> None:
    """A process that destroys its groups and begins again keeps nothing of them; groups that it drops cost little."""
    store = dist.FileStore(str(path), size)

    def held() -> tuple[int, ...]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident

    def come_down_to(before: tuple[int, ...], slack: tuple[int, ...]) -> None:
        until = time.monotonic() + 60
        while any(now > then + more for now, then, more in zip(held(), before, slack)):
            assert time.monotonic() < until, (held(), before)
            time.sleep(0.05)

    settled = 3  # the first turns make what is made once
    for turn in range(settled + int(os.environ["TEST_TURNS"])):
        place = dist.PrefixStore(f"turn{turn}", store)
        dist.init_process_group("tensorferry", store=place, rank=rank, world_size=size)
        part = dist.new_group()
        dist.all_reduce(torch.ones(100_000), group=part)
        dist.destroy_process_group()
        if turn == settled - 1:
            time.sleep(1)  # agents that leave do so in the background
            before = held()
    come_down_to(before, (2, 2, 64 << 20))
    dist.init_process_group("tensorferry", store=dist.PrefixStore("last", store), rank=rank, world_size=size)
    dist.all_reduce(torch.ones(100_000))
    before = held()
    for _ in range(10):
        dist.all_reduce(torch.ones(100_000), group=dist.new_group())
    come_down_to(before, (2, 1, 64 << 20))
    dist.destroy_process_group()


def sends_and_leaves() -> None:
    """What has been sent is received after the sender has gone, and the others go on among themselves."""
    init()
    t = torch.full((1000,), float(rank))
    if rank == 0:
        dist.send(t, 1)
        dist.destroy_process_group()
        mark("left")
        return
    await_mark("left")
    if rank == 1:
        dist.recv(t, 0)
        assert t.eq(0).all()
        dist.send(torch.ones(100_000), 2)
        refused(dist.DistBackendError, lambda: dist.recv(t, 0), 'rank 0 ("rank0@', "has left")
        os.kill(os.getpid(), signal.SIGKILL)  # nothing that happens later can help the receiver
    else:
        got = torch.zeros(100_000)
        dist.recv(got, 1)
        assert got.eq(1).all()
    dist.destroy_process_group()


def starts_and_leaves() -> None:
    """A rank leaves after the operations that it has started, although it has not waited for them."""
    init()
    t = torch.ones(100_000)
    if rank == 0:
        dist.all_reduce(t, async_op=True)
        mark("started")
    else:
        await_mark("started")
        dist.all_reduce(t)
        assert t.eq(size).all()
    dist.destroy_process_group()
    assert t.eq(size).all()


def ends_beside_a_thread() -> None:
    """The process ends while a daemon thread waits."""
    init()
    began = threading.Event()

    def wait() -> None:
        work = dist.irecv(torch.ones(3), (rank + 1) % size)
        began.set()
        work.wait()

    threading.Thread(target=wait, daemon=True).start()
    began.wait()
    time.sleep(0.2)  # until it waits
    dist.barrier()


def takes_a_rank_that_is_taken() -> None:
    """Two processes have rank 1: the second one that comes is told."""
    global rank
    second = rank == 2
    rank = min(rank, 1)
    if second:
        await_mark("first")
        texts = "rank 1 of the process group is taken", f'"rank1@{socket.gethostname()}:', f":{os.getpid()}/", "second"
        refused(dist.DistBackendError, lambda: init(2), *texts)
        mark("refused")
        return
    init(2)
    if rank == 1:
        mark("first")
    await_mark("refused")
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == 2
    dist.destroy_process_group()


def dies_before_a_new_group() -> None:
    """new_group(), and the first operation of a lazy group, name a member that has died."""
    init()
    lazy = dist.new_group(pg_options=tensorferry.c10d.Options(lazy=True))
    dist.barrier()
    if rank == size - 1:
        os._exit(9)
    text = f'rank {size - 1} ("rank{size - 1}@'
    began = time.monotonic()
    refused(dist.DistBackendError, dist.new_group, "cannot be formed", text, "its process has ended")
    refused(dist.DistBackendError, lambda: dist.barrier(lazy), text)
    assert time.monotonic() - began < 10  # of 60; ten times what it may take
    print("survived", flush=True)
    os._exit(0)


def waits_for_a_rank() -> None:
    """The last rank does not call new_group()."""
    init()
    dist.barrier()
    if rank < size - 1:
        text = f'rank {size - 1} ("rank{size - 1}@'
        refused(dist.DistBackendError, lambda: dist.new_group(timeout=timedelta(seconds=6)), text, "did not come")
    dist.barrier()
    dist.destroy_process_group()


def refuses() -> None:
    """What a call gets wrong is an error that says so, and the group goes on."""
    init()
    name = tensorferry.c10d.group_of().names[rank]
    assert name.startswith(f"rank{rank}@{socket.gethostname()}:{os.getpid()}/"), name
    world, one = dist.group.WORLD, torch.ones(1)
    refused(dist.DistBackendError, lambda: world.broadcast(one, root=-1), "no rank -1")
    refused(dist.DistBackendError, lambda: world.recv([one], -1, 0), "no rank -1")
    refused(ValueError, lambda: world.send([one], 0, -1), "a tag is at least 0")
    refused(ValueError, lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * 3, [1] * 3), "3 split sizes")
    other = 1 - rank
    if rank == 0:
        pending = dist.irecv(torch.ones(4), other, tag=9)
        refused(RuntimeError, pending.result, "call wait() before result()")
        dist.send(torch.ones(4, dtype=torch.int32), other)
        dist.send(torch.ones(3), other)
        big = lambda: dist.send(torch.ones(200_000), other)  # noqa: E731
        refused(dist.DistBackendError, big, "200000 float32 elements", "100000 float64 elements")
        pending.wait()
    else:
        refused(dist.DistBackendError, lambda: dist.recv(torch.ones(4), other), "4 int32", "4 float32", "same dtype")
        refused(dist.DistBackendError, lambda: dist.recv(torch.ones(6), other), "3 float32", "6 float32")
        halves = torch.ones(100_000, dtype=torch.float64)
        refused(dist.DistBackendError, lambda: dist.recv(halves, other), "200000 float32", "100000 float64")
        dist.send(torch.ones(4), other, tag=9)
    work = dist.all_reduce(one, async_op=True)
    work.wait()
    assert work.result()[0].item() == size
    refused(RuntimeError, work._source_rank, "recv or recv-from-any")
    shapes = torch.eye(3 + rank).to_sparse()
    refused(dist.DistBackendError, lambda: dist.all_reduce(shapes), "several shapes", "(3, 3)", "(4, 4)")
    dist.barrier()
    dist.destroy_process_group()


def calls_abort_hooks() -> None:
    """Hooks have run when the error of a late or a dead rank, or of an abort, reaches the program; others call none."""
    init()
    called: list[str] = []

    def fails() -> None:
        called.append("fails")
        raise ValueError("of a hook")

    world = dist.group.WORLD
    assert world.supports_abort_hooks
    for group, name in (world, "world"), (dist.new_group(), "part"):
        group.register_abort_hook(1, fails)
        group.register_abort_hook(2, partial(called.append, name))
        group.register_abort_hook(3, partial(called.append, "removed"))
        group.unregister_abort_hook(3)
        group.unregister_abort_hook(4)
    refused(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(1 + rank)), "elements")
    assert not called, called  # the group goes on
    dist.barrier()
    if rank == 0:
        refused(dist.DistBackendError, lambda: dist.barrier(group, timeout=timedelta(seconds=0.1)), " timeout ")
        assert called[:2] == ["fails", "part"] and {*called} == {"fails", "part"}, called
        called.clear()
    dist.barrier()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    refused(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(4)), f"rank {size - 1} (", "died")
    assert called[:2] == ["fails", "world"], called
    called.clear()
    world.abort()
    assert called[:2] == ["fails", "world"], called
    print("survived", flush=True)
    os._exit(0)


def drops_abort_hooks() -> None:
    """The end of a process group drops its hooks, also one that keeps the group."""
    init()
    world = dist.group.WORLD
    kept = threading.Event()
    world.register_abort_hook(1, partial(print, world, kept))
    seen = weakref.ref(kept)
    del kept
    assert seen() is not None
    dist.destroy_process_group()
    assert seen() is None


def sums_sparse_tensors_meanwhile() -> None:
    """A sum of sparse tensors does not hold up the caller that starts it."""
    init()
    t = torch.eye(3).to_sparse()
    if rank == 0:
        work = dist.all_reduce(t, async_op=True)
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(t)
    assert torch.equal(t.to_dense(), torch.eye(3) * size)
    # Pieces of several sizes.
    pieces = [torch.full((each + 1, 2), float(each)) for each in range(size)]
    outs = [torch.empty(each + 1, 2) for each in range(size)]
    dist.gather(pieces[rank], outs if rank == 1 else None, dst=1)
    if rank == 1:
        assert all(torch.equal(a, b) for a, b in zip(outs, pieces))
    got = torch.empty(rank + 1, 2)
    dist.scatter(got, pieces if rank == 0 else None, src=0)
    assert torch.equal(got, pieces[rank])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[4]]()
    print("done", sys.argv[4], flush=True)
