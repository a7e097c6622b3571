"""One rank of a torch.distributed job on the backend tensorferry, for windows: window_rank.py FILE RANK SIZE
SCENARIO..."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import tensorferry
import tensorferry.c10d
import torch
import torch.distributed as dist
from marks import await_mark, mark
from refusing import refused
from torch._C._distributed_c10d import PutOptions, SignalOptions, WaitSignalOptions, WindowAccessType

path, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
right, left = (rank + 1) % size, (rank - 1) % size
MAPPED = os.environ.get("TENSORFERRY_CHANNELS") != "basic"  # whether ranks map memory of one another
LARGE = 5_000_000  # elements; several messages, if a put is served


def short(options: Any, seconds: float) -> Any:
    options.timeout = timedelta(seconds=seconds)
    return options


def puts_and_signals() -> None:
    """Each rank puts to the next one. What has been put is there when the signal has come."""
    for make in (tensorferry.empty, torch.empty):
        tensor = make(size, 4).fill_(-1.0)
        window = dist._new_window(tensor)
        for turn in range(20):
            window.put(torch.full((4,), turn + rank / 8), right, 4 * rank, False)
            window.signal(right, False)
            window.wait_signal(left, False)
            assert tensor[left].eq(turn + left / 8).all(), (turn, tensor)
            dist.barrier()
        assert window.get_attr(right).access_type == WindowAccessType.UNIFIED
        untouched = [row for row in range(size) if row != left]
        assert tensor[untouched].eq(-1).all(), tensor
        window.tensor_deregister()


def puts_much_at_once() -> None:
    """Works of puts that go on end in their order, and a signal comes after them."""
    tensor = torch.zeros(LARGE, dtype=torch.float64)
    window = dist._new_window(tensor)
    whole, part = torch.full((LARGE,), rank + 1.0, dtype=torch.float64), torch.arange(10, dtype=torch.float64)[::2]
    works = [
        window.put(whole, right, 0, True),
        window.put(part, right, LARGE - 5, True),
        window.put(part[:0], right, LARGE, True),
        window.signal(right, True),
    ]
    window.wait_signal(left, True).wait()
    assert tensor[:-5].eq(left + 1).all() and tensor[-5:].equal(part)
    for work in works:
        assert work.wait()
        assert work.is_completed()
    assert works[0].get_future().wait() == []
    dist.barrier()
    window.tensor_deregister()


def signals_count() -> None:
    """Each wait takes one signal, also one that came long before; windows and ranks have their own."""
    window, other = dist._new_window(), dist._new_window()
    for _ in range(3):
        window.signal(right, False)
    other.signal(right, False)
    for _ in range(3):
        window.wait_signal(left, False)
    refused(
        dist.DistBackendError,
        lambda: window.wait_signal(left, False, short(WaitSignalOptions(), 0.2)),
        f"a receive from rank {left} (",
        "reached its timeout",
    )
    other.wait_signal(left, False)
    dist.barrier()
    window.signal(right, False)  # the wait that was late takes none
    window.wait_signal(left, False)


def registers_what_ranks_have() -> None:
    """Dtypes and sizes differ between the ranks, and a window takes one tensor after another."""
    kinds = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
    window = dist._new_window()
    for turn in range(3):
        kind, there = kinds[(rank + turn) % 4], kinds[(right + turn) % 4]
        tensor = torch.zeros(rank, 3, dtype=kind)
        window.tensor_register(tensor, owning=turn != 1)
        window.put(torch.ones(3 * right, dtype=there), right, 0, False)
        if right > 0:
            window.put(torch.zeros((), dtype=there), right, 3 * right - 1, False)
        more = torch.ones(3 * right + 1, dtype=there)
        refused(ValueError, partial(window.put, more, right, 0, False), "elements at 0")
        refused(ValueError, partial(window.put, more.char(), right, 0, False), "a put of Char")
        window.signal(right, False)
        window.wait_signal(left, False)
        assert tensor.sum() == max(tensor.numel() - 1, 0), tensor
        refused(ValueError, partial(window.tensor_register, tensor), "tensor_deregister() first")
        window.tensor_deregister()
        refused(ValueError, lambda: window.put(torch.ones(1), right, 0, False), "tensor_register() at every rank")
        refused(ValueError, window.tensor_deregister, "no tensor is registered")


def maps() -> None:
    """A rank's tensor can be read and written by the others, unless it is memory that they cannot map."""
    tensor = tensorferry.empty(2, 3).fill_(float(rank))
    window = dist._new_window(tensor)
    own = window.map_remote_tensor(rank)
    assert own.data_ptr() == tensor.data_ptr() and own.shape == tensor.shape
    if size > 1 and not MAPPED:
        refused(dist.DistBackendError, lambda: window.map_remote_tensor(right), "is not mapped", "tensorferry.empty")
        return window.tensor_deregister()
    theirs = window.map_remote_tensor(right)
    assert theirs.shape == (2, 3) and theirs.eq(right).all()
    dist.barrier()
    theirs[1, 2] = 40.0 + rank
    dist.barrier()
    assert tensor[1, 2] == 40 + left
    window.tensor_deregister()
    theirs.fill_(2.0)  # the memory stays
    plain = dist._new_window(torch.zeros(2))
    if size > 1:
        refused(dist.DistBackendError, lambda: plain.map_remote_tensor(right), f"rank {right} (", "tensorferry.empty")
    plain.tensor_deregister()


def refuses() -> None:
    """All ranks learn that one of them cannot register, and use the window afterwards."""
    dist.barrier()
    strided = torch.zeros(4, 4).t()
    if rank == size - 1:
        refused(ValueError, lambda: dist._new_window(strided), "contiguous")
    else:
        refused(ValueError, lambda: dist._new_window(torch.zeros(4)), f"rank {size - 1} (", "could not register")
    if size > 1:
        refused(ValueError, lambda: dist._new_window(torch.zeros(4) if rank == 0 else None), "do not both register")
    tensor = torch.zeros(4)
    window = dist._new_window(tensor)
    for wrong in (-1, size):
        refused(ValueError, partial(window.put, torch.ones(1), wrong, 0, False), f"no rank {wrong}")
        refused(ValueError, partial(window.signal, wrong, False), f"no rank {wrong}")
        refused(ValueError, partial(window.wait_signal, wrong, False), f"no rank {wrong}")
        refused(ValueError, partial(window.map_remote_tensor, wrong), f"no rank {wrong}")
        refused(ValueError, partial(window.get_attr, wrong), f"no rank {wrong}")
    refused(ValueError, lambda: window.put(torch.ones(1), right, -1, False), "at -1")
    refused(ValueError, lambda: window.put(torch.ones(1).to_sparse(), right, 0, False), "dense")
    window.put(torch.ones(4), right, 0, False, short(PutOptions(), 30))
    window.signal(right, False, short(SignalOptions(), 30))
    window.wait_signal(left, False)
    assert tensor.eq(1).all()
    window.tensor_deregister()


def parts_have_windows() -> None:
    """A part of a group has windows of its own, whose ranks are those of the part."""
    part = dist.new_group([size - 1])
    if isinstance(part, dist.ProcessGroup):  # of the last rank alone
        tensor = torch.zeros(2)
        window = dist._new_window(tensor, group=part)
        window.put(torch.ones(2), 0, 0, False)
        window.signal(0, False)
        window.wait_signal(0, False)
        assert tensor.eq(1).all()
        window.tensor_deregister()
    dist.barrier()


def goes_with_its_group() -> None:
    """A window does not keep its group, and says so."""
    tensor = torch.zeros(2)
    window = dist._new_window(tensor)
    dist.barrier()
    dist.destroy_process_group()
    for call in (lambda: window.put(torch.ones(2), right, 0, False), lambda: window.wait_signal(left, False)):
        refused(dist.DistBackendError, call, "Cancelled")
    refused(dist.DistBackendError, window.tensor_deregister, "Cancelled")
    refused(ValueError, window.tensor_deregister, "no tensor is registered")


def drops_alone() -> None:
    """A put to a rank that has dropped its window fails by name, and the group goes on."""
    tensor = torch.zeros(4)
    window = dist._new_window(tensor)
    window.put(torch.ones(4), right, 0, False)
    dist.barrier()
    if rank == 0:
        del window
        dist.barrier()
    else:
        dist.barrier()
        if right == 0:
            refused(dist.DistBackendError, lambda: window.put(torch.ones(4), 0, 0, False), "rank 0 (", "deregistered")
    dist.barrier()


def dies() -> None:
    """The last rank dies: puts to it and waits for it end by name, also those under way."""
    tensor = torch.zeros(1000)
    window = dist._new_window(tensor)
    window.put(torch.ones(1000), right, 0, False)
    dist.barrier()
    dead = size - 1
    if rank == dead:
        window.signal(0, False)
        os.kill(os.getpid(), signal.SIGKILL)
    waiting = window.wait_signal(dead, True) if rank == 0 else None  # takes the signal that was sent before
    if waiting is not None:
        waiting.wait()
    refused(dist.DistBackendError, lambda: window.wait_signal(dead, False), f'rank {dead} ("rank{dead}@', "died")

    def put_until_it_fails() -> None:
        while True:
            window.put(torch.ones(1000), dead, 0, False)

    refused(dist.DistBackendError, put_until_it_fails, f"rank {dead} (")
    refused(dist.DistBackendError, window.tensor_deregister, f"rank {dead} (")
    print("survived", flush=True)
    os._exit(0)


def is_interrupted() -> None:
    """Ctrl-C ends a wait, which then takes no signal."""
    window = dist._new_window()
    if rank == 0:

        def wait_until_interrupted() -> None:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            window.wait_signal(right, False)

        refused(KeyboardInterrupt, wait_until_interrupted)
        mark("interrupted")
        window.wait_signal(right, False)
    elif left == 0:
        await_mark("interrupted")
        window.signal(0, False)
    dist.barrier()


def main() -> None:
    store = dist.FileStore(str(path), size)
    dist.init_process_group("tensorferry", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    for name in sys.argv[4:]:
        globals()[name]()
        print("done", name, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
