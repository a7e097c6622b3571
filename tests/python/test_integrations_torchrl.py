"""TorchRL's weight synchronisation over publications, by processes and collectors of the real TorchRL."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import tensorferry
import torch
from tensorferry import errors
from torch import nn

pytest.importorskip("torchrl", reason="TorchRL is not installed: pip install 'torchrl>=0.14'")
adapter = pytest.importorskip("tensorferry.integrations.torchrl")

from tensordict.nn import TensorDictModule  # noqa: E402

SPAWN = multiprocessing.get_context("spawn")


class Policy(nn.Module):
    """A layer, a buffer, and state beside them."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(3))
        self.extra = torch.zeros(2)
        self.fill(value)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in (self.layer.weight, self.layer.bias, self.mean, self.extra):
                tensor.fill_(value)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.extra = state["extra"].clone()

    def values(self) -> list[float]:
        return sorted({float(each) for t in (*self.state_tensors(), self.extra) for each in t.flatten()})

    def state_tensors(self) -> list[torch.Tensor]:
        return [self.layer.weight, self.layer.bias, self.mean]


def work(scheme: Any, number: int, pipe: Any) -> None:
    """A worker: it joins, and then does what it is told."""
    policy = Policy(-1.0)
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=number)
    scheme.connect()
    pipe.send(policy.values())
    while (told := pipe.recv()) != "end":
        try:
            if told != "values":
                assert (scheme.receive(timeout=told) is None) == (told == 0)
            pipe.send(policy.values())
        except Exception as error:
            pipe.send(type(error).__name__)
    scheme.shutdown()


class Workers:
    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme
        self.processes: dict[int, Any] = {}
        self._pipes: dict[int, Any] = {}

    def start(self, number: int) -> None:
        self._pipes[number], there = SPAWN.Pipe()
        self.processes[number] = SPAWN.Process(target=work, args=(self._scheme, number, there))
        self.processes[number].start()

    def answer(self, number: int) -> Any:
        assert self._pipes[number].poll(120), "the worker says nothing"
        return self._pipes[number].recv()

    def ask(self, number: int, what: Any) -> Any:
        self._pipes[number].send(what)
        return self.answer(number)

    def tell(self, number: int, what: Any) -> None:
        self._pipes[number].send(what)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].join()


@pytest.fixture
def team() -> Iterator[tuple[Policy, Any, Workers]]:
    policy = Policy(1.0)
    scheme = adapter.RegionWeightSyncScheme(timeout=60.0)
    scheme.init_on_sender(model_id="policy", model=policy)
    workers = Workers(scheme)
    yield policy, scheme, workers
    scheme.shutdown()
    for process in workers.processes.values():
        process.kill()
        process.join()


def test_workers_have_each_version_when_send_returns(team) -> None:
    policy, scheme, workers = team
    workers.start(0)
    workers.start(1)
    scheme.connect()
    assert [workers.answer(number) for number in (0, 1)] == [[1.0], [1.0]]
    for value in (2.0, 3.0):
        policy.fill(value)
        scheme.send()
        assert [workers.ask(number, "values") for number in (0, 1)] == [[value]] * 2
    assert workers.ask(0, 0) == [3.0]  # there is nothing newer


def test_only_what_the_trainer_names_as_changed_is_published(team) -> None:
    policy, scheme, workers = team
    workers.start(0)
    scheme.connect()
    assert workers.answer(0) == [1.0]
    policy.fill(2.0)
    scheme.send(changed=["layer.bias"])
    assert workers.ask(0, "values") == [1.0, 2.0]
    with pytest.raises(errors.InvalidArgument, match="lacks tensors that changed= names: head"):
        scheme.send(changed=["head"])
    scheme.send()
    assert workers.ask(0, "values") == [2.0]


def test_versions_stay_on_the_gpu_if_the_scheme_says_so(monkeypatch) -> None:
    asked = []
    publish = tensorferry.Agent.publish
    monkeypatch.setattr(
        tensorferry.Agent, "publish", lambda *args, **options: asked.append(options) or publish(*args, **options)
    )
    for on_gpu in (False, True):
        scheme = adapter.RegionWeightSyncScheme(on_gpu=on_gpu)
        scheme.init_on_sender(model_id="policy", model=Policy())
        scheme.connect()
        scheme.shutdown()
    assert [options["on_gpu"] for options in asked] == [False, True]


def test_a_killed_worker_is_left_out_and_may_join_again(team) -> None:
    policy, scheme, workers = team
    workers.start(0)
    workers.start(1)
    scheme.connect()
    assert [workers.answer(number) for number in (0, 1)] == [[1.0], [1.0]]
    workers.kill(1)
    for value in (2.0, 3.0, 4.0, 5.0):  # more versions than a publication keeps
        policy.fill(value)
        scheme.send()
        assert workers.ask(0, "values") == [value]
    with pytest.raises(ValueError, match=r"have died: \[1\]"):
        scheme.send(worker_ids=1)
    workers.start(1)
    assert workers.answer(1) == [5.0]
    policy.fill(6.0)
    scheme.send()
    assert [workers.ask(number, "values") for number in (0, 1)] == [[6.0], [6.0]]


def test_a_worker_that_leaves_ends_no_send(team) -> None:
    policy, scheme, workers = team
    workers.start(0)
    workers.start(1)
    scheme.connect()
    assert [workers.answer(number) for number in (0, 1)] == [[1.0], [1.0]]
    workers.tell(1, "end")
    workers.processes[1].join(60)
    assert workers.processes[1].exitcode == 0
    for value in (2.0, 3.0):
        policy.fill(value)
        scheme.send()
        assert workers.ask(0, "values") == [value]


def test_a_worker_that_was_not_called_takes_the_version_itself(team) -> None:
    policy, scheme, workers = team
    workers.start(0)
    workers.start(1)
    scheme.connect()
    assert [workers.answer(number) for number in (0, 1)] == [[1.0], [1.0]]
    policy.fill(2.0)
    scheme.send(policy, worker_ids=[0])
    assert workers.ask(0, "values") == [2.0]
    assert workers.ask(1, "values") == [1.0]
    assert workers.ask(1, 30.0) == [2.0]


def test_a_worker_learns_that_the_trainer_has_gone_and_keeps_its_weights(team) -> None:
    _, scheme, workers = team
    workers.start(0)
    scheme.connect()
    assert workers.answer(0) == [1.0]
    scheme.shutdown()
    assert workers.ask(0, 30.0) in ("ConnectionLost", "NotFound")
    assert workers.ask(0, "values") == [1.0]
    workers.tell(0, "end")
    workers.processes[0].join(60)
    assert workers.processes[0].exitcode == 0


def test_send_before_connect_is_an_error(team) -> None:
    with pytest.raises(RuntimeError, match="come before send"):
        team[1].send()


def test_a_collectors_workers_act_by_the_newest_weights() -> None:
    from torchrl.collectors import MultiSyncCollector
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    env = ContinuousActionVecMockEnv()
    layer = nn.Linear(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1])
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, 0.25)
    collector = MultiSyncCollector(
        [ContinuousActionVecMockEnv] * 2,
        TensorDictModule(layer, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=20,
        total_frames=200,
        weight_sync_schemes={"policy": adapter.RegionWeightSyncScheme()},
    )
    try:
        batches = iter(collector)
        assert next(batches)["action"].unique().tolist() == [0.25]
        for value in (0.5, 0.75):
            nn.init.constant_(layer.bias, value)
            collector.update_policy_weights_()
            next(batches)  # it may have been begun before
            assert next(batches)["action"].unique().tolist() == [value]
    finally:
        collector.shutdown()


def test_torchrl_finds_it_by_its_name() -> None:
    from torchrl.weight_update import WeightSyncScheme

    assert type(WeightSyncScheme.from_backend("tensorferry")) is adapter.RegionWeightSyncScheme
