"""Calls: the functions that can be called, the names of peers, and the values that arrive."""

from __future__ import annotations

import collections
import functools
import inspect
import math
import operator
import threading
import time

import numpy as np
import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
import torch.distributed.rpc as torch_rpc
import torch.nn.functional as F
from tensorferry import errors


def add(x, y=10, *, scale=1):
    return (x + y) * scale


def who():
    return rpc.get_worker_info().name


def append(values):
    values.append("remote")
    return values


def double_in_place(tensor):
    return tensor.mul_(2)


class Counter:
    def __init__(self, start=0):
        self.count = start

    def add(self, n):
        self.count += n
        return self.count

    def __call__(self, n):
        return self.count * n

    @classmethod
    def named(cls, start):
        return cls(start)

    @staticmethod
    def twice(n):
        return 2 * n

    class Inner:
        @staticmethod
        def deep():
            return "deep"


@torch.jit.script
def script_add(x: torch.Tensor, y: int) -> torch.Tensor:
    return x + y


def test_calls_a_module_level_function(pair):
    a, _ = pair
    assert a.rpc_sync("b", add, args=(1,)) == 11
    assert a.rpc_sync("b", add, (1, 2)) == 3
    assert a.rpc_sync("b", add, args=(1,), kwargs={"y": 2, "scale": 3}) == 9
    with pytest.raises(TypeError, match=r"args must be a tuple .* not int: a tuple of one needs a comma, args=\(x,\)"):
        a.rpc_sync("b", add, args=(1))
    assert a.rpc_sync("b", add, [1, 2]) == 3  # torch takes any sequence


def test_runs_at_the_peer(pair):
    a, b = pair
    assert a.rpc_sync("b", who) == "b"
    assert b.rpc_sync("a", who) == "a"


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (max, (1, 5, 2), 5),
        (math.sqrt, (9.0,), 3.0),
        (operator.mul, (6, 7), 42),
        (str.upper, ("abc",), "ABC"),
        (dict.fromkeys, (["a"], 1), {"a": 1}),
        (int, ("12",), 12),
        (collections.Counter, ("aab",), collections.Counter("aab")),
        (np.add, (1, 2), 3),
        (Counter.twice, (4,), 8),
        (Counter.Inner.deep, (), "deep"),
        (functools.partial(add, 1, scale=2), (4,), 10),
        ("abc".startswith, ("a",), True),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_calls_functions_that_can_be_imported_or_pickled(pair, function, args, expected):
    result = pair[0].rpc_sync("b", function, args=args)
    assert result == expected
    assert type(result) is type(expected) or isinstance(result, np.generic)


@pytest.mark.parametrize(
    ("operator_", "args"),
    [
        (torch.add, (torch.ones(2), 3)),
        (torch.ones, (2, 3)),
        (torch.Tensor.add, (torch.ones(2), 1)),
        (torch.Tensor.sum, (torch.ones(4),)),
        (torch.linalg.norm, (torch.ones(4),)),
        (torch.fft.fft, (torch.ones(4),)),
        (torch.ops.aten.mul, (torch.ones(2), 4)),
        (torch.ops.aten.add.Tensor, (torch.ones(2), torch.ones(2))),
        (F.relu, (torch.tensor([-1.0, 1.0]),)),
        (F.gelu, (torch.ones(3),)),
        (script_add, (torch.ones(2), 5)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_calls_torch_operators(pair, operator_, args):
    torch.testing.assert_close(pair[0].rpc_sync("b", operator_, args=args), operator_(*args))


def test_constructs_classes(pair):
    counter = pair[0].rpc_sync("b", Counter, args=(4,))
    assert type(counter) is Counter
    assert counter.count == 4
    assert pair[0].rpc_sync("b", Counter.named, args=(5,)).count == 5
    layer = pair[0].rpc_sync("b", torch.nn.Linear, args=(2, 3))
    assert layer.weight.shape == (3, 2)


def test_a_bound_method_travels_with_its_instance(pair):
    counter = Counter(3)
    assert pair[0].rpc_sync("b", counter.add, args=(2,)) == 5
    assert counter.count == 3  # a copy was changed
    assert pair[0].rpc_sync("b", counter, args=(7,)) == 21


def test_functions_that_the_peer_cannot_find_are_refused_at_the_caller(pair):
    def local():
        pass

    for function in (lambda: 1, local):
        with pytest.raises(Exception, match=r"(?i)pickle|local"):
            pair[0].rpc_sync("b", function)
    with pytest.raises(TypeError, match="callable"):
        pair[0].rpc_sync("b", 5)


def test_a_redefined_function_is_run_in_its_new_form(pair, monkeypatch):
    original = who
    assert pair[0].rpc_sync("b", original) == "b"
    monkeypatch.setattr("test_rpc_sync.who", lambda: "anew")
    assert pair[0].rpc_sync("b", original) == "anew"


def test_peers_are_names_ranks_and_worker_infos(pair):
    a, _ = pair
    assert a.rpc_sync(1, who) == "b"
    assert a.rpc_sync(0, who) == "a"
    info = a.get_worker_info("b")
    assert (info.name, info.id) == ("b", 1)
    assert info == rpc.WorkerInfo("b", 1) == a.get_worker_info(1)
    assert a.rpc_sync(info, who) == "b"
    assert a.rpc_sync(torch_rpc.WorkerInfo("b", 1), who) == "b"
    assert a.get_worker_info() == rpc.WorkerInfo("a", 0)


def test_unknown_peers_are_named(pair):
    with pytest.raises(errors.NotFound, match="nobody"):
        pair[0].rpc_sync("nobody", who, timeout=5)
    with pytest.raises(errors.NotFound, match="7"):
        pair[0].rpc_sync(7, who, timeout=5)
    for wrong in (None, 1.5, b"b", True):
        with pytest.raises(TypeError, match="peer"):
            pair[0].rpc_sync(wrong, who)


def test_a_call_to_the_same_agent_copies_values(pair):
    a, _ = pair
    values = ["local"]
    assert a.rpc_sync("a", append, (values,)) == ["local", "remote"]
    assert values == ["local"]
    tensor = torch.ones(1000)
    assert torch.equal(a.rpc_sync("a", double_in_place, (tensor,)), torch.full((1000,), 2.0))
    assert torch.equal(tensor, torch.ones(1000))


def test_the_caller_keeps_its_tensors(pair):
    tensor = torch.ones(100_000)
    assert torch.equal(pair[0].rpc_sync("b", double_in_place, (tensor,)), torch.full((100_000,), 2.0))
    assert torch.equal(tensor, torch.ones(100_000))


def test_arguments_of_rpc_sync_are_checked(pair):
    a, _ = pair
    with pytest.raises(TypeError, match="'func'"):
        a.rpc_sync("b")
    with pytest.raises(TypeError, match="5 positional"):
        a.rpc_sync("b", add, (), None, 1, "basic")
    with pytest.raises(TypeError, match=r"unexpected.*'time_out'"):
        a.rpc_sync("b", add, time_out=5)
    with pytest.raises(TypeError, match=r"second.*'to'"):
        a.rpc_sync("b", add, to="b")
    with pytest.raises(TypeError, match="dict"):
        a.rpc_sync("b", add, (1,), [("y", 2)])
    with pytest.raises(TypeError):
        a.rpc_sync("b", add, 5)
    with pytest.raises(ValueError, match="time-out"):
        a.rpc_sync("b", add, (1,), timeout=-3)
    with pytest.raises(TypeError):
        a.rpc_sync("b", add, (1,), timeout="soon")


def ping_pong(me, other, depth):
    return 0 if depth == 0 else 1 + rpc.rpc_sync(other, ping_pong, args=(other, me, depth - 1))


def test_calls_nest_200_deep_between_two_agents(pair):
    assert pair[0].rpc_sync("b", ping_pong, args=("b", "a", 200), timeout=60) == 200


def test_many_threads_call_at_once(pair):
    a, _ = pair
    failures = []

    def call(number):
        for i in range(50):
            if a.rpc_sync("b", add, (number, i)) != number + i:
                failures.append((number, i))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


_side_by_side = threading.Barrier(8)


def meet():
    _side_by_side.wait(60)


def test_slow_functions_run_side_by_side(pair):
    a, _ = pair
    tensorferry.wait_all([a.rpc_async("b", meet) for _ in range(_side_by_side.parties)])


@rpc.functions.async_execution
def add_chained(to, x, y, z):
    return rpc.rpc_async(to, add, (x, y)).then(lambda future: future.wait() + z)


@torch_rpc.functions.async_execution
def add_chained_by_torchs_decorator(to, x, y, z):
    return rpc.rpc_async(to, add, (x, y)).then(lambda future: future.wait() + z)


@rpc.functions.async_execution
def completed_later(seconds, value):
    future = torch.futures.Future()
    threading.Timer(seconds, future.set_result, (value,)).start()
    return future


@rpc.functions.async_execution
def failed_later():
    return rpc.rpc_async(rpc.get_worker_info().name, math.sqrt, (-1.0,))


@rpc.functions.async_execution
def no_future():
    return 5


class Async:
    @staticmethod
    @rpc.functions.async_execution
    def static(to, x):
        return rpc.rpc_async(to, add, (x, 1))

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to, x):
        return rpc.rpc_async(to, add, (x, 2))

    @rpc.functions.async_execution
    def bound(self, to, x):
        return rpc.rpc_async(to, add, (x, 3))


@rpc.functions.async_execution
@torch.jit.script
def script_async(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(script_add, x, 3)


def test_async_execution_replies_when_the_future_completes(pair):
    a, _ = pair
    assert a.rpc_sync("b", add_chained, ("a", 1, 2, 3)) == 6
    assert a.rpc_sync("b", add_chained_by_torchs_decorator, ("a", 1, 2, 3)) == 6
    assert a.rpc_sync("b", completed_later, (0.1, "late")) == "late"
    assert a.rpc_sync("b", Async.static, ("a", 1)) == 2
    assert a.rpc_sync("b", Async.of_class, ("a", 1)) == 3
    assert a.rpc_sync("b", Async().bound, ("a", 1)) == 4
    assert torch.equal(a.rpc_sync("b", script_async, (torch.ones(2),)), torch.full((2,), 4.0))


def test_async_execution_propagates_exceptions(pair):
    a, _ = pair
    with pytest.raises(ValueError, match=r"math domain|nonnegative"):
        a.rpc_sync("b", failed_later)
    with pytest.raises(TypeError, match="Future"):
        a.rpc_sync("b", no_future)


def test_async_execution_occupies_no_thread(agents):
    a = agents("a")
    agents("b", max_threads=4)
    start = time.monotonic()
    values = tensorferry.wait_all([a.rpc_async("b", completed_later, (0.3, i)) for i in range(32)])
    assert values == list(range(32))
    assert time.monotonic() - start < 2


def test_names_positions_and_defaults_are_torchs():
    for name in ("rpc_sync", "rpc_async", "remote", "shutdown", "get_worker_info", "init_rpc"):
        theirs = inspect.signature(getattr(torch_rpc, name)).parameters
        ours = inspect.signature(getattr(rpc, name)).parameters
        for position, (parameter, mine) in enumerate(zip(theirs.values(), ours.values())):
            assert mine.name == parameter.name, (name, position)
            # One may be left out here that torch wants: the name, which torchrun's environment gives.
            assert mine.default == parameter.default or (name, mine.name) == ("init_rpc", "name"), (name, mine)
        extra = list(ours.values())[len(theirs) :]
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in extra), name
    assert inspect.signature(rpc.functions.async_execution).parameters.keys() == {"fn"}


def test_torchs_options_have_the_same_parameters():
    theirs = inspect.signature(torch_rpc.TensorPipeRpcBackendOptions).parameters
    ours = inspect.signature(rpc.TensorPipeRpcBackendOptions).parameters
    mine, torchs = ([(p.name, p.kind, p.default) for p in each.values()] for each in (ours, theirs))
    assert mine == torchs
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"worker1": {0: 1}})
    assert options.device_maps == torch_rpc.TensorPipeRpcBackendOptions(device_maps={"worker1": {0: 1}}).device_maps
    with pytest.raises(ValueError, match="one to one"):
        options.set_device_map("worker1", {2: 1})


def test_every_public_verb_of_torchs_is_here():
    ours = {name for name in torch_rpc.__all__ if hasattr(rpc, name)}
    assert ours >= {
        "init_rpc", "shutdown", "get_worker_info", "remote", "rpc_sync", "rpc_async", "RRef", "BackendType",
        "TensorPipeRpcBackendOptions", "is_available",
    }  # fmt: skip
    public = {name for name in dir(torch_rpc.RRef) if not name.startswith("_")} - {"backward"}
    assert public <= set(dir(rpc.RRef))
