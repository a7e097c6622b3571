"""rpc.batch: calls that are served together."""

from __future__ import annotations

import threading
import time

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually

sizes: list[int] = []
may_run = threading.Event()


@rpc.batch(max_size=8, max_wait=0.05)
def add(left, right=100):
    sizes.append(len(left))
    return [a + b for a, b in zip(left, right)]


@rpc.batch(max_size=4, max_wait=60.0)
def full_only(value):
    sizes.append(len(value))
    return value


@rpc.batch(max_size=1000)
def slow_batch(value):
    sizes.append(len(value))
    may_run.wait(30)
    return value


@rpc.batch(max_size=100, max_wait=0.2)
def picky(value):
    return [ValueError(f"not {each}") if each % 2 else each for each in value]


@rpc.batch(max_size=100, max_wait=0.1)
def wrong_count(value):
    return value[:-1]


@rpc.batch(max_size=100, max_wait=0.1)
def raises(value):
    raise KeyError("all of them")


@rpc.batch(max_size=3, max_wait=0.1)
def whose(value):
    return [rpc.get_worker_info().name for _ in value]


class Model:
    def __init__(self, factor):
        self.weight = torch.full((3,), float(factor))
        self.batches = []

    @rpc.batch(max_size=16, max_wait=0.05)
    @torch.no_grad()
    def predict(self, rows, bias=0.0):
        self.batches.append(len(rows))
        return list(torch.stack(rows) * self.weight + torch.tensor(bias)[:, None])

    def sizes(self):
        return self.batches


def take_sizes():
    taken = sizes.copy()
    sizes.clear()
    return taken


def test_each_caller_gets_its_own_result(cluster):
    cluster.start(1)
    futures = [rpc.rpc_async("worker1", add, (i, i)) for i in range(50)]
    assert tensorferry.wait_all(futures) == [2 * i for i in range(50)]
    assert rpc.rpc_sync("worker1", add, (1,)) == 101
    assert rpc.rpc_sync("worker1", add, kwargs={"right": 1, "left": 2}) == 3
    taken = rpc.rpc_sync("worker1", take_sizes)
    assert sum(taken) == 52
    assert max(taken) <= 8


def test_a_full_batch_does_not_wait(cluster):
    cluster.start(1)
    start = time.monotonic()
    futures = [rpc.rpc_async("worker1", full_only, (i,), timeout=0) for i in range(8)]
    assert tensorferry.wait_all(futures, timeout=50) == list(range(8))
    assert time.monotonic() - start < 30
    assert rpc.rpc_sync("worker1", take_sizes) == [4, 4]


def test_without_a_wait_a_batch_holds_the_calls_that_arrived_during_the_last_one(pair):
    a, _ = pair
    may_run.clear()
    take_sizes()
    first = a.rpc_async("b", slow_batch, (0,))
    assert eventually(lambda: sizes == [1])
    others = [a.rpc_async("b", slow_batch, (i,)) for i in range(1, 30)]
    given_up = a.rpc_async("b", slow_batch, (99,))
    assert eventually(lambda: len(slow_batch._own._waiting) == 30)
    given_up.cancel()
    assert eventually(lambda: any(call.given_up for call in list(slow_batch._own._waiting)))
    may_run.set()
    assert tensorferry.wait_all([first, *others]) == list(range(30))
    assert sizes == [1, 29], "the one that was given up is left out"


def test_an_exception_among_the_results_fails_only_its_caller(pair):
    futures = [pair[0].rpc_async("b", picky, (i,)) for i in range(6)]
    for i, future in enumerate(futures):
        if i % 2:
            with pytest.raises(ValueError, match=f"not {i}"):
                future.wait()
        else:
            assert future.wait() == i


@pytest.mark.parametrize(
    "function, kind, text",
    [(wrong_count, ValueError, "returned 2 results for a batch of 3"), (raises, KeyError, "all of them")],
)
def test_a_failure_of_the_batch_fails_every_caller(pair, function, kind, text):
    futures = [pair[0].rpc_async("b", function, (i,)) for i in range(3)]
    for future in futures:
        with pytest.raises(kind, match=text if kind is KeyError else "results for a batch"):
            future.wait()


def test_a_call_that_does_not_fit_the_function_fails_alone(pair):
    good = pair[0].rpc_async("b", add, (1, 2))
    with pytest.raises(TypeError, match="missing a required argument"):
        pair[0].rpc_sync("b", add, ())
    assert good.wait() == 3


def test_methods_have_a_batch_for_each_object(cluster):
    cluster.start(1)
    models = [rpc.remote("worker1", Model, (factor,)) for factor in (2, 3)]
    futures = [(factor, m.rpc_async().predict(torch.ones(3))) for factor, m in zip((2, 3), models) for _ in range(20)]
    for factor, future in futures:
        assert torch.equal(future.wait(), torch.full((3,), float(factor)))
    assert torch.equal(models[0].rpc_sync().predict(torch.ones(3), bias=1.0), torch.full((3,), 3.0))
    for model, count in zip(models, (21, 20)):
        assert sum(model.rpc_sync().sizes()) == count


def test_functions_use_the_called_agent(pair):
    assert pair[0].rpc_sync("b", whose, (1,)) == "b"


def test_a_local_call_returns_a_future():
    assert add(1, 2).wait() == 3
    assert Model(2).predict(torch.ones(3)).wait().tolist() == [2.0] * 3
    assert add.__name__ == "add"


def test_a_batch_function_whose_thread_could_not_start_serves_the_next_call(monkeypatch):
    @rpc.batch(max_size=8)
    def same(value):
        return value

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            same(1)
    assert same(2).wait() == 2


def test_unsupported_functions_are_refused():
    for limits in ((0, 0), (1, -1)):
        with pytest.raises(ValueError, match="batch"):
            rpc.batch(*limits)

    async def coroutine(value):
        return value

    for function in (coroutine, lambda *values: values, lambda **values: values):
        with pytest.raises(TypeError):
            rpc.batch(4)(function)
