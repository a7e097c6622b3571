"""Ray Direct Transport over regions, by actors of the real Ray."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import eventually
from tensorferry import errors

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.60'")
adapter = pytest.importorskip("tensorferry.integrations.ray")

from ray.experimental import set_target_for_ref  # noqa: E402
from ray.experimental.rdt.util import get_tensor_transport_manager  # noqa: E402

adapter.register(timeout=30.0)
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this file


class Owner:
    def __init__(self) -> None:
        self.weights = torch.arange(1000.0)

    @ray.method(tensor_transport="tensorferry")
    def state(self) -> dict[str, torch.Tensor]:
        return {"weights": self.weights, "transposed": torch.arange(6.0).reshape(2, 3).t(), "empty": torch.empty(0, 3)}

    @ray.method(tensor_transport="tensorferry")
    def with_gaps(self) -> torch.Tensor:
        return torch.arange(16.0).reshape(4, 4)[:, :2]

    def add(self, amount: float) -> None:
        self.weights += amount

    def owned(self) -> int:
        return len(get_tensor_transport_manager(adapter.NAME)._owned)

    def pid(self) -> int:
        return os.getpid()


class Reader:
    def sums(self, state: dict[str, torch.Tensor]) -> dict[str, float]:
        return {name: float(tensor.sum()) for name, tensor in state.items()}

    def get_into(self, refs: list[Any], elements: int) -> float:
        buffer = torch.zeros(elements)
        set_target_for_ref(refs[0], [buffer])
        (got,) = ray.get(refs[0])
        assert got is buffer
        return float(buffer.sum())


SUMS = {"weights": 499500.0, "transposed": 15.0, "empty": 0.0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home: Path = tmp_path_factory.mktemp("home")  # Ray writes a token there
    before = os.environ.get("HOME", "")
    os.environ["HOME"] = str(home)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()
    os.environ["HOME"] = before


def actor(kind: type) -> Any:
    return ray.remote(enable_tensor_transport=True, num_cpus=0)(kind).remote()


def test_an_actors_tensors_reach_another_actor(cluster) -> None:
    owner, reader = actor(Owner), actor(Reader)
    assert ray.get(reader.sums.remote(owner.state.remote())) == SUMS


def test_the_driver_reads_and_a_second_read_sees_the_memory_as_it_is(cluster) -> None:
    owner = actor(Owner)
    state = owner.state.remote()
    got = ray.get(state)
    assert got["weights"].equal(torch.arange(1000.0)) and got["transposed"].equal(torch.arange(6.0).reshape(2, 3).t())
    assert got["empty"].shape == (0, 3)
    ray.get(owner.add.remote(1.0))
    assert ray.get(state)["weights"].equal(torch.arange(1000.0) + 1)
    assert got["weights"].equal(torch.arange(1000.0))  # a copy


def test_the_owner_drops_regions_when_the_last_reference_goes(cluster) -> None:
    owner, reader = actor(Owner), actor(Reader)
    refs = [owner.state.remote() for _ in range(3)]
    assert ray.get([reader.sums.remote(ref) for ref in refs]) == [SUMS] * 3
    assert ray.get(owner.owned.remote()) == 3
    del refs
    assert eventually(lambda: ray.get(owner.owned.remote()) == 0)


def test_an_object_of_the_driver_is_read_into_the_readers_buffer(cluster) -> None:
    ref = ray.put([torch.ones(64)], _tensor_transport="tensorferry")
    assert ray.get(actor(Reader).get_into.remote([ref], 64)) == 64


def test_a_tensor_with_gaps_fails_its_task_by_name(cluster) -> None:
    with pytest.raises(errors.InvalidArgument, match="make it contiguous"):
        ray.get(actor(Owner).with_gaps.remote())


def test_a_dead_owner_fails_the_reads_and_no_reader(cluster) -> None:
    owner, reader, late = actor(Owner), actor(Reader), actor(Reader)
    state = owner.state.remote()
    assert ray.get(reader.sums.remote(state)) == SUMS
    os.kill(ray.get(owner.pid.remote()), signal.SIGKILL)
    for each in (reader, late):  # `late` has never had a link to the owner
        with pytest.raises(errors.ConnectionLost):
            ray.get(each.sums.remote(state), timeout=60)
    with pytest.raises(errors.ConnectionLost):
        ray.get(state, timeout=60)
    assert ray.get([reader.sums.remote({}), late.sums.remote({})]) == [{}, {}]
