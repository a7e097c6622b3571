"""Tensors between processes by the channel ibv: on emulated cards, unless TENSORFERRY_TEST_RDMA names real ones of
this host (make test-rdma makes some)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist
from conftest import PATIENCE, Worker, card_of_end, join
from tensorferry import errors

EMULATED = Path(tensorferry.__file__).parents[2] / "tests/emulated_verbs/lib/libibverbs.so.1"
COUNT = 1 << 18  # of the elements of a megabyte


class Peers:
    """Two processes that have joined, whose channels are ibv and basic. Both are new, because a process loads
    libibverbs once. The tests' functions run in the first one, and call the second."""

    def __init__(self) -> None:
        environment = {}
        if not os.environ.get("TENSORFERRY_TEST_RDMA"):
            if not EMULATED.exists():
                pytest.skip(f"there is no {EMULATED}: this build has no RDMA parts")
            environment["TENSORFERRY_LIBIBVERBS"] = str(EMULATED)
        timeout = timedelta(seconds=max(120, PATIENCE))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.workers = [Worker(environment | card_of_end(end)) for end in range(2)]
        for rank, worker in enumerate(self.workers):
            worker.start(join, f"worker{rank}", rank, 2, self.store.port, {"channels": "ibv,basic"})
        for worker in self.workers:
            worker.result(120)

    def run(self, function, *args):
        self.workers[0].start(function, *args)
        return self.workers[0].result(120)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    made = Peers()
    made.run(wait_for_the_card)
    yield made
    made.close()


# ---- what runs in the processes


def echo(tensor):
    return tensor


def total(tensor):
    return tensor.double().sum().item()


def double(tensors):
    return [tensor * 2 for tensor in tensors]


def numbers(count):
    return torch.arange(count, dtype=torch.float32)


def wait_for_the_card():
    until = time.monotonic() + max(30, PATIENCE)
    while rpc.explain("worker1", numbers(COUNT)).channel != "ibv":
        assert time.monotonic() < until, str(rpc.explain("worker1", numbers(COUNT)))
        rpc.rpc_sync("worker1", total, (numbers(COUNT),))
        time.sleep(0.01)


def carried(before, after):
    """The channels that carried a megabyte or more."""
    return {name for name, bytes_ in after.items() if bytes_ - before.get(name, 0) >= 1 << 20}


def both_directions():
    before = rpc.counters()
    assert torch.equal(rpc.rpc_sync("worker1", echo, (numbers(COUNT),)), numbers(COUNT))
    after = rpc.counters()
    return carried(before.bytes_sent, after.bytes_sent), carried(before.bytes_received, after.bytes_received)


def of_size(count):
    return torch.equal(rpc.rpc_sync("worker1", echo, (numbers(count),)), numbers(count))


def at_one_address():
    sums = []
    for value in range(20):
        tensor = torch.full((COUNT,), float(value))  # the allocator gives the same address again
        sums.append(rpc.rpc_sync("worker1", total, (tensor,)) / COUNT)
        del tensor
    return sums


def many_at_once():
    tensors = [torch.full((1 << 16,), float(at)) for at in range(64)]
    calls = [rpc.rpc_async("worker1", double, ([tensor, tensor[:10]],)) for tensor in tensors]
    for tensor, call in zip(tensors, calls, strict=True):
        whole, part = call.wait()
        assert torch.equal(whole, tensor * 2)
        assert torch.equal(part, tensor[:10] * 2)


def a_quarter_of_a_gigabyte():
    tensors = [numbers(1 << 22) for _ in range(16)]
    calls = [rpc.rpc_async("worker1", total, (tensor,)) for tensor in tensors]
    return {call.wait() for call in calls}


def until_the_peer_is_lost():
    while True:
        calls = [rpc.rpc_async("worker1", echo, (numbers(1 << 22),)) for _ in range(4)]
        for call in calls:
            try:
                call.wait()
            except errors.ConnectionLost as lost:
                return str(lost)


# ---- the tests


def test_tensors_go_by_the_card_in_both_directions(peers):
    assert peers.run(both_directions) == ({"ibv"}, {"ibv"})


@pytest.mark.parametrize("count", [0, 1, 1000, 1 << 20, 1 << 24])
def test_tensors_of_every_size_arrive_whole(peers, count):
    assert peers.run(of_size, count)


def test_memory_that_is_used_again_carries_its_new_bytes(peers):
    assert peers.run(at_one_address) == list(range(20))


def test_many_calls_are_under_way_at_once(peers):
    peers.run(many_at_once)


def test_a_quarter_of_a_gigabyte_is_under_way_at_once(peers):
    assert len(peers.run(a_quarter_of_a_gigabyte)) == 1


def test_a_killed_peer_ends_the_calls_to_it(peers):  # the last test: no process is left to call
    peers.workers[0].start(until_the_peer_is_lost)
    time.sleep(0.2)
    peers.workers[1].kill()
    assert "worker1" in peers.workers[0].result(60)
