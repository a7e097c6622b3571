"""Processes that end without shutdown() or destroy_process_group(): exits.py FOLDER.

Each scenario runs in a forked process, as rank 0 of a world of two, with an agent and a process group. Rank 1 waits for
it, and ends well if it learns that rank 0 has gone. Prints one line of JSON for each scenario: its name, the expected
exit status of rank 0, those of rank 0 and rank 1 (as subprocess gives them), and the seconds that rank 0 took to end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import tensorferry.c10d  # noqa: F401  # registers the backend
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist

FOLDER = Path(sys.argv[1])
kept: list[Any] = []


def blocked() -> list[Any]:
    """Calls and operations that do not end."""
    return [rpc.rpc_async("rank1", time.sleep, (100,), timeout=0), dist.irecv(torch.ones(1), 1)]


def pending() -> None:
    kept.extend(blocked())
    sys.exit(7)


def pending_and_dropped() -> None:
    blocked()
    sys.exit(7)


def in_daemon_threads() -> None:
    waits = lambda: rpc.rpc_sync("rank1", time.sleep, (100,), timeout=0)  # noqa: E731
    for target in (waits, lambda: dist.recv(torch.ones(1), 1), lambda: dist.monitored_barrier()):
        threading.Thread(target=target, daemon=True).start()
    time.sleep(0.2)  # until they wait
    sys.exit(7)


def in_callbacks() -> None:
    """Callbacks on our threads hang."""
    began = threading.Semaphore(0)

    def hang(_: object) -> None:
        began.release()
        time.sleep(100)

    # A future that is done already runs its callback at once, on the thread that adds it: on none that ends here.
    call = rpc.rpc_async("rank1", max, (1, 2))
    operation = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    for adds in (partial(call.add_done_callback, hang), partial(operation.then, hang)):
        threading.Thread(target=adds, daemon=True).start()
    began.acquire()
    began.acquire()
    sys.exit(7)


def by_an_exception() -> None:
    kept.extend(blocked())
    raise ValueError("this is meant")


def at_once() -> None:
    kept.extend(blocked())
    os._exit(7)


def beside_a_forked_child() -> None:
    kept.extend(blocked())
    child = os.fork()
    if child == 0:
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert rpc.rpc_sync("rank1", max, (1, 2)) == 2
    sys.exit(7)


def beside_a_pool() -> None:
    kept.extend(blocked())
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    assert rpc.rpc_sync("rank1", max, (1, 2)) == 2
    sys.exit(7)


def by_sigterm() -> None:
    """As the kernel of a notebook is restarted."""
    kept.extend(blocked())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)


def by_sigint() -> None:
    kept.extend(blocked())
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)


SCENARIOS: dict[Callable[[], None], int] = {
    pending: 7, pending_and_dropped: 7, in_daemon_threads: 7, in_callbacks: 7, by_an_exception: 1, at_once: 7,
    beside_a_forked_child: 7, beside_a_pool: 7, by_sigterm: -signal.SIGTERM, by_sigint: -signal.SIGINT,
}  # fmt: skip


def join(name: str, rank: int) -> None:
    store = dist.FileStore(str(FOLDER / name), 2)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, store=store)
    dist.init_process_group("tensorferry", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=100))


def survivor(name: str) -> None:
    join(name, 1)
    try:
        if name == "in_callbacks":
            dist.all_reduce(torch.ones(1))  # rank 0 may go before this end of it is over
        dist.recv(torch.ones(1), 0, tag=9)
    except dist.DistBackendError as error:
        assert "rank 0" in str(error) and "has died or left" in str(error), error
        os._exit(0)
    os._exit(1)


def run(scenario: Callable[[], None]) -> tuple[int, int, float]:
    name = scenario.__name__
    second = os.fork()
    if second == 0:
        survivor(name)
    ours, theirs = os.pipe()
    first = os.fork()
    if first == 0:
        join(name, 0)
        os.write(theirs, str(time.monotonic()).encode())
        scenario()
        os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    ended = time.monotonic()
    others = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
    os.close(theirs)
    began = float(os.read(ours, 100) or b"0")
    os.close(ours)
    return status, others, ended - began


signal.signal(signal.SIGINT, signal.default_int_handler)
for scenario, expected in SCENARIOS.items():
    print(json.dumps([scenario.__name__, expected, *run(scenario)]), flush=True)
