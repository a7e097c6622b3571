"""Tensors that go by network cards, and memory that is registered with them."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorferry
import torch
from conftest import Agents, Worker, card_of_end, eventually
from tensorferry import _C

MEGABYTE = 1 << 20
EMULATED = Path(_C.__file__).parents[2] / "tests" / "emulated_verbs" / "lib" / "libibverbs.so.1"


def echo(tensor):
    return tensor


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A process with cards: with emulated ones, unless TENSORFERRY_TEST_RDMA names real ones of this host.

    Each test has one of its own, because a process loads libibverbs once.
    """
    environment = {}
    if not os.environ.get("TENSORFERRY_TEST_RDMA"):
        if not EMULATED.exists():
            pytest.skip(f"there is no {EMULATED}: this build has no RDMA parts")
        environment["TENSORFERRY_LIBIBVERBS"] = str(EMULATED)
    worker = Worker(environment)
    yield worker
    worker.kill()


class Pair:
    """Two agents of this process, which reach each other by a card, or by the two that TENSORFERRY_TEST_RDMA names."""

    def __enter__(self):
        self.agents = Agents()
        self.a, _ = [self.join(name, card_of_end(end)) for end, name in enumerate("ab")]
        tensor = torch.ones(MEGABYTE)
        assert eventually(lambda: self.a.explain("b", tensor).channel == "ibv"), str(self.a.explain("b", tensor))
        return self.a

    def join(self, name, card):
        os.environ.update(card)  # an agent reads it while it joins
        return self.agents(name, channels="ibv,basic")

    def __exit__(self, *_):
        self.agents.leave()


def carries_a_tensor():
    with Pair() as a:
        assert " port 1" in str(a.explain("b", torch.ones(MEGABYTE)))
        tensor = torch.arange(4 * MEGABYTE, dtype=torch.float32)
        before = a.counters()
        assert torch.equal(a.rpc_sync("b", echo, (tensor,)), tensor)
        after = a.counters()
        assert after.bytes_received["ibv"] - before.bytes_received.get("ibv", 0) == tensor.nbytes
        assert after.bytes_sent["ibv"] - before.bytes_sent.get("ibv", 0) == tensor.nbytes
        assert after.pinned_bytes > 0


def carries_a_registered_tensor():
    with Pair() as a:
        tensor = torch.ones(MEGABYTE)
        pinned = a.counters().pinned_bytes
        with tensorferry.register(tensor) as registered:
            assert registered.bytes == tensor.nbytes
            assert a.counters().pinned_bytes >= pinned + tensor.nbytes, "it is registered ahead"
            for value in range(3):
                tensor.fill_(value)
                assert torch.equal(a.rpc_sync("b", echo, (tensor,)), tensor)
        while_registered = a.counters().pinned_bytes
        del tensor
        assert a.counters().pinned_bytes <= while_registered


def test_a_tensor_arrives_by_the_card(worker):
    worker.run(carries_a_tensor)


def test_a_registered_tensor_arrives(worker):
    worker.run(carries_a_registered_tensor)


def test_registered_memory_outlives_its_storage():
    tensor = torch.ones(MEGABYTE)
    address = tensor.data_ptr()
    registered = tensorferry.register(tensor)
    assert tensor.data_ptr() == address
    tensor.resize_(4 * MEGABYTE)  # torch frees the old memory, unless it is registered
    assert tensor.data_ptr() != address
    others = [torch.ones(MEGABYTE) for _ in range(20)]
    assert all(other.data_ptr() != address for other in others)
    registered.release()
    assert registered.bytes == 0


def test_a_tensor_that_moves_to_shared_memory_stays_right():
    tensor = torch.arange(MEGABYTE)
    with tensorferry.register(tensor):
        tensor.share_memory_()
        assert tensor.is_shared() and tensor[5] == 5
        with tensorferry.register(tensor):
            assert tensor.is_shared()


def test_registering_does_not_keep_the_tensor_object():
    tensor = torch.ones(MEGABYTE)
    gone = weakref.ref(tensor)
    registered = tensorferry.register(tensor)
    again = tensorferry.register(tensor[10:20])
    assert again.bytes == registered.bytes, "the whole storage is registered"
    del tensor
    gc.collect()
    assert gone() is None
    del registered, again


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_memory_that_cannot_be_registered_is_a_value_error(tensor):
    with pytest.raises(ValueError, match="cannot register"):
        tensorferry.register(tensor)


def test_only_tensors_are_registered():
    with pytest.raises(TypeError, match=r"takes a torch\.Tensor"):
        tensorferry.register([1.0])


def test_an_empty_tensor_registers_nothing():
    assert tensorferry.register(torch.empty(0)).bytes == 0
