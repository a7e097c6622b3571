"""vLLM's weight transfer over publications: against vLLM's base classes if it is installed, else a stub of them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensorferry
import torch
import vllm_stub
from tensorferry import errors

SPAWN = multiprocessing.get_context("spawn")
STUBBED = importlib.util.find_spec("vllm") is None


def part(name: str) -> Any:
    """A module of vLLM's weight transfer, which has the adapter's backend."""
    if STUBBED:
        for each, module in vllm_stub.modules().items():
            sys.modules.setdefault(each, module)
    importlib.import_module("tensorferry.integrations.vllm").register()
    return importlib.import_module(f"vllm.distributed.weight_transfer.{name}")


@pytest.fixture(autouse=True, scope="module")
def without_traces() -> Iterator[None]:
    yield
    if STUBBED:
        for name in [*vllm_stub.modules(), "tensorferry.integrations.vllm"]:
            sys.modules.pop(name, None)


class Model(torch.nn.Module):
    """An inference model: it loads checkpoints in its own way, here into a transposed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 5000))
        self.bias = torch.nn.Parameter(torch.zeros(3))
        self.reloads = False

    def load_weights(self, weights: Any) -> None:
        assert self.reloads, "start_weight_update comes first"
        for name, tensor in weights:
            with torch.no_grad():
                self.get_parameter(name).copy_(tensor.t() if name == "weight" else tensor)

    def values(self) -> list[float]:
        return sorted({float(each) for each in (*self.weight.flatten(), *self.bias)})


def serve(pipe: Any) -> None:
    """An inference worker: it lets the engine do what the trainer's client says."""
    model = Model()
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = part("factory").WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend="tensorferry"), config, torch.device("cpu"), model
    )
    while True:
        method, fields = pipe.recv()
        try:
            if method == "init":
                engine.init_transfer_engine(engine.parse_init_info(fields))
            elif method == "values":
                pipe.send(model.values())
                continue
            elif method == "update":
                engine.receive_weights(engine.parse_update_info(fields))
            else:
                getattr(engine, method)()
            pipe.send("")
        except Exception as error:
            pipe.send(type(error).__name__)
        if method == "shutdown":
            return


class Client:
    """vLLM's control messages, to every worker that lives."""

    def __init__(self, workers: int) -> None:
        self.pipes, self.processes = [], []
        for _ in range(workers):
            here, there = SPAWN.Pipe()
            self.pipes.append(here)
            self.processes.append(SPAWN.Process(target=serve, args=(there,)))
            self.processes[-1].start()

    def tell(self, method: str, fields: Any = None) -> list[Any]:
        living = [pipe for pipe, process in zip(self.pipes, self.processes) if process.is_alive()]
        for pipe in living:
            pipe.send((method, json.loads(json.dumps(fields))))  # as by HTTP
        assert all(pipe.poll(120) for pipe in living), "a worker says nothing"
        return [pipe.recv() for pipe in living]

    def checked(self, method: str, fields: Any = None) -> None:
        if failed := [error for error in self.tell(method, fields) if error]:
            raise RuntimeError(f"{method} failed: {failed[0]}")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.checked("init", init_info)

    def start_weight_update(self) -> None:
        self.checked("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.checked("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.checked("finish_weight_update")


def source_of(tensors: dict[str, torch.Tensor], owners: tuple[int, ...] | None = None) -> Any:
    base = part("base")

    class Source(base.WeightSource):  # type: ignore[misc]
        @functools.cached_property
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(name, t.dtype, tuple(t.shape), owners=owners) for name, t in tensors.items()]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors.items()

    return Source()


def trainer_of(client: Any, source: Any, rank: int = 0, **options: Any) -> Any:
    factory = part("factory").WeightTransferTrainerFactory
    adapter = importlib.import_module("tensorferry.integrations.vllm")
    info = adapter.RegionTrainerInfo(rank=rank, publication="policy", **(options or {"checksums": True}))
    return factory.trainer_init(info, client=client, source=source)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(5000, 3), "bias": torch.ones(3)}


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(2)
    yield made
    for process in made.processes:
        process.kill()
        process.join()


def test_workers_load_each_version_and_a_killed_one_holds_nothing_up(client: Client, weights) -> None:
    trainer = trainer_of(client, source_of(weights))
    for value in (1.0, 2.0):
        for tensor in weights.values():
            tensor.fill_(value)
        trainer.send_weights()
        assert client.tell("values") == [[value], [value]]
    client.processes[1].kill()
    client.processes[1].join()
    for value in (3.0, 4.0, 5.0, 6.0):  # more versions than a publication keeps
        weights["bias"].fill_(value)
        weights["weight"].fill_(value)
        trainer.send_weights()
        assert client.tell("values") == [[value]]
    trainer.shutdown()


@pytest.mark.parametrize("on_gpu", [False, True])  # True: workers load by a copy of their own
def test_only_what_the_trainer_names_as_changed_is_published(client: Client, weights, on_gpu: bool) -> None:
    trainer = trainer_of(client, source_of(weights), on_gpu=on_gpu)
    trainer.send_weights(changed=["bias"])  # the first version is whole
    assert client.tell("values") == [[1.0]] * 2
    for tensor in weights.values():
        tensor.fill_(2.0)
    trainer.send_weights(changed={"bias": slice(0, 3)})
    assert client.tell("values") == [[1.0, 2.0]] * 2
    trainer.send_weights(["weight"])
    assert client.tell("values") == [[2.0]] * 2
    with pytest.raises(errors.InvalidArgument, match="lacks tensors that changed= names: head"):
        trainer.send_weights(["head"])
    trainer.shutdown()


def test_versions_stay_on_the_gpu_if_the_trainer_says_so(client: Client, weights, monkeypatch) -> None:
    asked = []
    publish = tensorferry.Agent.publish
    monkeypatch.setattr(
        tensorferry.Agent, "publish", lambda *args, **options: asked.append(options) or publish(*args, **options)
    )
    for on_gpu in (False, True):
        trainer = trainer_of(client, source_of(weights), on_gpu=on_gpu)
        trainer.send_weights()
        trainer.shutdown()
    assert [options["on_gpu"] for options in asked] == [False, True]


def test_workers_of_a_trainer_that_has_gone_fail_the_update_and_take_the_next_trainer(client: Client, weights) -> None:
    first = trainer_of(client, source_of(weights))
    first.send_weights()
    first.shutdown()
    assert set(client.tell("update", {"version": 2})) <= {"ConnectionLost", "NotFound"}
    assert client.tell("values") == [[1.0], [1.0]]
    for tensor in weights.values():
        tensor.fill_(9.0)
    second = trainer_of(client, source_of(weights))
    second.send_weights()
    assert client.tell("values") == [[9.0], [9.0]]
    assert client.tell("shutdown") == ["", ""]
    second.shutdown()


def test_an_update_before_the_trainer_has_told_where_it_is_fails(client: Client) -> None:
    assert client.tell("update", {"version": 1}) == ["RuntimeError"] * 2
    assert client.tell("init", {"trainer": "nowhere", "publication": "policy"}) == ["InvalidArgument"] * 2


def test_a_rank_that_does_not_publish_gathers_and_tells_nothing(weights) -> None:
    gathered = []

    class Counting(type(source_of(weights))):  # type: ignore[misc]
        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            for pair in super().iter_full():
                gathered.append(pair[0])
                yield pair

    trainer = trainer_of(None, Counting(), rank=1)  # a call of the client would fail
    trainer.send_weights()
    assert gathered == ["weight", "bias"]
    trainer.shutdown()


def test_a_source_that_cannot_be_published_is_refused(weights) -> None:
    base = part("base")

    class Local(base.WeightSource):  # type: ignore[misc]
        @functools.cached_property
        def metadata(self) -> list[Any]:
            return []

    with pytest.raises(ValueError, match="source= is missing"):
        trainer_of(None, None)
    with pytest.raises(TypeError, match="has no iter_full"):
        trainer_of(None, Local())
    with pytest.raises(ValueError, match="does not own all parameters"):
        trainer_of(None, source_of(weights, owners=(1,)))
