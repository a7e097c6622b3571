"""Calls in the traces of torch.profiler, at both ends, with one number."""

from __future__ import annotations

import json
import time

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

profiler = None


def everywhere():
    """A profiler that sees the threads which run what peers call."""
    config = _ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=config)


def start():
    global profiler
    profiler = everywhere()
    profiler.start()


def stop(path):
    profiler.stop()
    profiler.export_chrome_trace(str(path))


def work(tensor):
    return torch.mm(tensor, tensor)


def fail():
    raise ValueError("on purpose")


@rpc.functions.async_execution
def later():
    future = torch.futures.Future()
    future.set_result(1)
    return future


class Thing:
    def method(self):
        return 5


def calls_in(path):
    """The ranges of ours, by name: (begin, end, number) of each, in microseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    found = {}
    for event in events:
        if event.get("ph") == "X" and event["name"].startswith(("rpc", "remote")):
            number = event["args"]["Sequence number"]
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"], number))
    return found


def numbers(ranges):
    return [number for _, _, number in sorted(ranges)]  # a trace has them by thread


@pytest.fixture
def traced(cluster, tmp_path):
    """Calls, from a profiled caller to a profiled callee: what both traces show."""

    def run(calls):
        cluster.start(1)
        rpc.rpc_sync("worker1", start)
        with profile(activities=[ProfilerActivity.CPU]) as here:
            calls()
        rpc.rpc_sync("worker1", stop, args=(tmp_path / "callee.json",))
        here.export_chrome_trace(str(tmp_path / "caller.json"))
        return calls_in(tmp_path / "caller.json"), calls_in(tmp_path / "callee.json")

    return run


def test_a_call_is_one_range_at_each_end_with_one_number(traced):
    def calls():
        rpc.rpc_sync("worker1", work, args=(torch.ones(64, 64),))
        rpc.rpc_sync("worker1", work, args=(torch.ones(64, 64),))

    caller, callee = traced(calls)
    here = caller["rpc_sync#test_profiler.work(main -> worker1)"]
    there = callee["rpc_handler#test_profiler.work(main -> worker1)"]
    assert len(here) == 2
    assert numbers(here) == numbers(there)
    assert len(set(numbers(here))) == 2


def test_ranges_of_asynchronous_calls_last_until_completion(traced):
    def calls():
        futures = [rpc.rpc_async("worker1", time.sleep, args=(0.2,)) for _ in range(3)]
        with record_function("meanwhile"):
            torch.ones(5).sum()
        tensorferry.wait_all(futures)
        rpc.rpc_async("worker1", later).wait()

    caller, callee = traced(calls)
    here = caller["rpc_async#time.sleep(main -> worker1)"]
    there = callee["rpc_handler#time.sleep(main -> worker1)"]
    assert sorted(numbers(here)) == sorted(numbers(there))
    assert len(here) == 3
    assert all(end - begin >= 190_000 for begin, end, _ in here + there)
    (one,), (other,) = (
        caller["rpc_async#test_profiler.later(main -> worker1)"],
        callee["rpc_handler#test_profiler.later(main -> worker1)"],
    )
    assert one[2] == other[2]


def test_references_and_failures_have_ranges(traced):
    def calls():
        thing = rpc.remote("worker1", Thing)
        assert thing.rpc_sync().method() == 5
        assert eventually(thing.confirmed_by_owner)
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync("worker1", fail)
        with pytest.raises(AttributeError):
            rpc.rpc_sync("worker1", work, args=(lambda: 1,))  # is never sent

    caller, callee = traced(calls)
    assert numbers(caller["remote#test_profiler.Thing(main -> worker1)"]) == numbers(
        callee["rpc_handler#test_profiler.Thing(main -> worker1)"]
    )
    assert numbers(caller["rpc#tf:method(main -> worker1)"]) == numbers(
        callee["rpc_handler#tf:method(main -> worker1)"]
    )
    assert numbers(caller["rpc_sync#test_profiler.fail(main -> worker1)"]) == numbers(
        callee["rpc_handler#test_profiler.fail(main -> worker1)"]
    )
    assert not any(name.startswith("rpc_handler#test_profiler.work") for name in callee)


def test_events_of_the_profiler_have_the_number_of_their_call(pair):
    a, _ = pair
    with profile(activities=[ProfilerActivity.CPU]) as here:
        a.rpc_sync("b", work, args=(torch.ones(4, 4),))
    (event,) = [event for event in here.events() if event.name.startswith("rpc_sync#")]
    assert event.sequence_nr >= 0
    assert event.name == "rpc_sync#test_profiler.work(a -> b)"


def test_a_range_may_end_after_the_profiler(pair):
    a, _ = pair
    with profile(activities=[ProfilerActivity.CPU]):
        future = a.rpc_async("b", time.sleep, args=(0.2,))
    assert future.wait() is None
    a.rpc_sync("b", work, args=(torch.ones(2, 2),))
