"""Idempotent calls: sent again when their connection is lost."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import threading
from typing import Any

import pytest
import tensorferry
import torch
from conftest import eventually
from tensorferry import errors

runs: collections.Counter[int] = collections.Counter()
begun = threading.Event()
go_on = threading.Event()


def sever() -> None:
    """Ends every connection of this process, as a failing network does."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = os.dup(int(entry))
            try:
                end = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with end:
                if end.type == socket.SOCK_STREAM and not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    end.shutdown(socket.SHUT_RDWR)


def double(number: int, tensor: torch.Tensor) -> torch.Tensor:
    runs[number] += 1
    return 2 * tensor


def held(number: int, tensor: torch.Tensor) -> torch.Tensor:
    runs[number] += 1
    begun.set()
    assert go_on.wait(30)
    return 2 * tensor


class Holder:
    def held(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        return held(number, tensor)


@pytest.fixture(autouse=True)
def fresh() -> None:
    runs.clear()
    begun.clear()
    go_on.clear()


def test_calls_run_while_connections_end_at_random(pair):
    a, _b = pair
    stop = threading.Event()

    def cut() -> None:
        while not stop.wait(0.01):
            sever()

    cutter = threading.Thread(target=cut)
    assert a.rpc_sync("b", max, args=(1, 2), idempotent=True) == 2
    cutter.start()
    try:
        for number in range(100):
            tensor = torch.full((100_000 if number % 10 == 0 else 10,), float(number))
            result = a.rpc_sync("b", double, args=(number, tensor), timeout=60, idempotent=True)
            assert torch.equal(result, 2 * tensor)
        futures = [a.rpc_async("b", double, args=(n, torch.ones(3)), idempotent=True) for n in range(100, 150)]
        assert all(result.tolist() == [2, 2, 2] for result in tensorferry.wait_all(futures))
    finally:
        stop.set()
        cutter.join()
    assert sorted(runs) == list(range(150))


def test_a_call_whose_connection_is_lost_runs_again(pair):
    a, _b = pair
    future = a.rpc_async("b", held, args=(1, torch.ones(3)), timeout=30, idempotent=True)
    assert begun.wait(10)
    sever()
    assert eventually(lambda: runs[1] >= 2)
    assert not future.done()
    go_on.set()
    assert future.wait().tolist() == [2, 2, 2]


def test_methods_of_objects_are_sent_again_and_creations_make_one_object(pair):
    a, _b = pair
    holder = a.remote("b", Holder, idempotent=True)
    future = holder.rpc_async(idempotent=True).held(1, torch.ones(3))
    assert begun.wait(10)
    sever()
    go_on.set()
    assert future.wait().tolist() == [2, 2, 2]
    begun.clear()
    go_on.clear()
    made = a.remote("b", held, args=(2, torch.ones(2)), idempotent=True)
    assert begun.wait(10)
    sever()
    assert eventually(lambda: a.rpc_sync("b", max, args=(1, 2), idempotent=True) == 2)
    go_on.set()

    def value() -> list[float]:
        try:
            return made.to_here().tolist()
        except errors.ConnectionLost:  # both agents dialled at once, and one of the new connections is given up
            return []

    assert eventually(lambda: value() == [2, 2])
    assert runs[2] == 1


async def held_on_the_loop(number: int) -> int:
    runs[number] += 1
    begun.set()
    while not go_on.is_set():
        await asyncio.sleep(0.005)
    return number


def value_of(number: int, rref: Any) -> int:
    runs[number] += 1
    if runs[number] == 1:
        begun.set()
        assert go_on.wait(30)
    while True:
        with contextlib.suppress(errors.ConnectionLost):  # both agents dialled, and one of the connections is given up
            return int(rref.to_here())


def test_a_creation_by_a_coroutine_goes_on_when_its_connection_is_lost(pair):
    a, _b = pair
    made = a.remote("b", held_on_the_loop, args=(3,), idempotent=True)
    assert begun.wait(10)
    sever()
    assert eventually(lambda: a.rpc_sync("b", max, args=(1, 2), idempotent=True) == 2)
    go_on.set()

    def value() -> int | None:
        with contextlib.suppress(errors.ConnectionLost):  # both agents dialled, and one of the connections is given up
            return made.to_here()
        return None

    assert eventually(lambda: value() == 3)
    assert runs[3] == 1


def test_a_call_with_a_reference_is_sent_again(pair):
    a, _b = pair
    mine = a.remote("a", int, args=(7,))
    future = a.rpc_async("b", value_of, args=(4, mine), timeout=60, idempotent=True)
    assert begun.wait(10)
    sever()
    assert eventually(lambda: runs[4] >= 2)
    go_on.set()
    assert future.wait() == 7


def test_other_calls_fail_with_their_connection(pair):
    a, _b = pair
    future = a.rpc_async("b", held, args=(1, torch.ones(3)), timeout=30)
    assert begun.wait(10)
    sever()
    with pytest.raises(errors.ConnectionLost):
        future.wait()
    go_on.set()


def test_an_ordered_handle_makes_no_idempotent_calls(pair):
    a, _b = pair
    with pytest.raises(errors.InvalidArgument, match="order key"):
        a.rpc_sync(a.peer("b").ordered(), max, args=(1, 2), idempotent=True)
