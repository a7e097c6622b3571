"""rpc_stream: the items of a generator at a peer, one by one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors

LONG = 60.0

made = 0  # items that generators of this process have yielded
closed: list[str] = []


def numbers(count, name=""):
    global made
    made = 0
    try:
        for i in range(count) if count is not None else itertools.count():
            made += 1
            yield i
    finally:
        closed.append(name)


async def async_numbers(count, name=""):
    global made
    made = 0
    try:
        for i in range(count) if count is not None else itertools.count():
            await asyncio.sleep(0)
            made += 1
            yield i
    finally:
        await asyncio.sleep(0)
        closed.append(name)


def tensors(count):
    for i in range(count):
        yield torch.full((50_000,), float(i))


def fails_at(place):
    for i in range(10):
        if i == place:
            raise KeyError("at its place")
        yield i


async def async_fails_at(place):
    for i in range(10):
        if i == place:
            raise KeyError("at its place")
        yield i


def stalls():
    yield 1
    time.sleep(6)
    yield 2


async def async_stalls(name):
    try:
        yield 1
        await asyncio.sleep(LONG)
        yield 2
    finally:
        closed.append(name)


def calls_on(to):
    yield 1
    rpc.rpc_sync(to, time.sleep, (LONG,), timeout=0)


def no_iterator():
    return 5


def refuses():
    raise LookupError("no stream today")


def take_closed():
    taken = closed.copy()
    closed.clear()
    return taken


def count_made():
    return made


def closes(to, name):
    seen = []

    def came():
        seen.extend(rpc.rpc_sync(to, take_closed))
        return name in seen

    return eventually(came, 20)


BOTH = pytest.mark.parametrize("generator", [numbers, async_numbers])


@BOTH
@pytest.mark.parametrize("window", [1, 3, 50])
def test_items_arrive_one_by_one_and_in_order(cluster, generator, window):
    cluster.start(1)
    stream = rpc.rpc_stream("worker1", generator, (200, "ended"), window=window)
    assert isinstance(stream, tensorferry.Stream)
    assert list(stream) == list(range(200))
    assert list(stream) == []
    assert closes("worker1", "ended")

    async def main():
        items = [item async for item in rpc.rpc_stream("worker1", generator, (200,), window=window)]
        assert items == list(range(200))

    asyncio.run(main())


def test_items_may_hold_tensors_and_be_made_by_any_iterator(pair):
    a, _ = pair
    assert [item[0].item() for item in a.rpc_stream("b", tensors, (10,))] == list(range(10))
    assert list(a.rpc_stream("b", enumerate, (["x", "y"],))) == [(0, "x"), (1, "y")]
    assert list(a.rpc_stream("b", numbers, kwargs={"count": 3})) == [0, 1, 2]
    assert list(a.peer("b").rpc_stream(numbers, (2,))) == [0, 1]


@BOTH
def test_the_generator_is_never_further_ahead_than_the_window(cluster, generator):
    cluster.start(1)
    with rpc.rpc_stream("worker1", generator, (None,), window=4) as stream:
        for taken in range(6):
            assert eventually(lambda n=taken: rpc.rpc_sync("worker1", count_made) == n + 4)
            assert rpc.rpc_sync("worker1", count_made) == taken + 4
            assert next(stream) == taken


@BOTH
@pytest.mark.parametrize("ending", ["close", "with", "dropped", "break", "async with"])
def test_the_generator_is_closed_when_its_caller_stops(cluster, generator, ending):
    cluster.start(1)
    rpc.rpc_sync("worker1", take_closed)
    name = f"{generator.__name__} {ending}"
    stream = rpc.rpc_stream("worker1", generator, (None, name), window=2)
    if ending == "close":
        assert next(stream) == 0
        stream.close()
        stream.close()
        assert list(stream) == []
    elif ending == "with":
        with pytest.raises(ZeroDivisionError), stream:
            next(stream)
            1 // 0  # noqa: B018
    elif ending == "dropped":
        assert next(stream) == 0
        del stream
    elif ending == "break":
        for _ in stream:
            break
        del stream
    else:

        async def main():
            async with stream:
                assert await stream.__anext__() == 0

        asyncio.run(main())
    gc.collect()
    assert closes("worker1", name)


def hold_stream_of_main(name):
    held.append(rpc.rpc_stream("main", numbers, (None, name), window=2))
    return next(held[0])


held: list[object] = []


def test_the_generator_is_closed_when_its_caller_dies(cluster):
    cluster.start(1)
    assert rpc.rpc_sync("worker1", hold_stream_of_main, ("died",)) == 0
    assert "died" not in take_closed()
    cluster.workers[0].kill()
    assert eventually(lambda: "died" in closed, 20)


@BOTH
def test_the_generator_is_closed_when_its_agent_leaves(agents, generator):
    a, b = agents("a"), agents("b")
    stream = a.rpc_stream("b", generator, (None, "left"), window=2)
    assert next(stream) == 0
    take_closed()
    b.leave()
    gc.collect()
    assert eventually(lambda: "left" in closed)
    with pytest.raises((errors.ConnectionLost, errors.AgentClosed)):  # items under way are told that it leaves
        list(stream)


@pytest.mark.parametrize("generator", [fails_at, async_fails_at])
@pytest.mark.parametrize("window", [1, 20])
def test_an_exception_arrives_in_the_place_of_its_item(pair, generator, window):
    stream = pair[0].rpc_stream("b", generator, (3,), window=window)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="place"):
        next(stream)
    assert list(stream) == []


def test_each_item_has_a_deadline(cluster):
    cluster.start(2)
    for to in ("worker1", "worker2"):
        rpc.rpc_sync(to, max, (1, 2))
    stream = rpc.rpc_stream("worker1", stalls, timeout=3)
    assert next(stream) == 1
    with pytest.raises(errors.DeadlineExceeded, match=r'"stalls" on "worker1" did not yield .* 3 s'):
        next(stream)
    assert list(stream) == []
    assert list(rpc.rpc_stream("worker1", stalls, timeout=0)) == [1, 2]

    async def main():
        slow = rpc.rpc_stream("worker1", async_stalls, ("stalled",), timeout=3)
        assert await slow.__anext__() == 1
        with pytest.raises(errors.DeadlineExceeded, match="async_stalls"):
            await slow.__anext__()
        assert [item async for item in slow] == []

    asyncio.run(main())
    assert closes("worker1", "stalled")
    limited = rpc.rpc_stream("worker1", calls_on, ("worker2",), timeout=3)
    assert next(limited) == 1
    with pytest.raises(errors.DeadlineExceeded):
        next(limited)


def test_a_task_that_is_cancelled_closes_the_stream(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", take_closed)

    async def main():
        stream = rpc.rpc_stream("worker1", async_stalls, ("cancelled",))
        came = asyncio.Event()

        async def read():
            async for _ in stream:
                came.set()

        task = asyncio.ensure_future(read())
        await came.wait()  # a generator that has not begun has no finally to run
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [item async for item in stream] == []

    asyncio.run(main())
    assert closes("worker1", "cancelled")


def test_a_function_without_an_iterator_is_refused(pair):
    with pytest.raises(TypeError, match="generator"):
        next(pair[0].rpc_stream("b", no_iterator))
    with pytest.raises(LookupError, match="today"):
        next(pair[0].rpc_stream("b", refuses))
    with pytest.raises(ValueError, match="window"):
        pair[0].rpc_stream("b", numbers, (1,), window=0)


def test_many_streams_run_at_once(pair):
    results = {}

    def read(number):
        results[number] = sum(pair[0].rpc_stream("b", range_of, (number * 100, number * 100 + 100)))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: sum(range(i * 100, i * 100 + 100)) for i in range(10)}


def range_of(first, last):
    yield from range(first, last)


def test_closed_streams_leak_nothing(pair):
    a, b = pair
    for _ in range(20):
        with contextlib.closing(a.rpc_stream("b", numbers, (None,), window=3)) as stream:
            next(stream)
    gc.collect()
    assert eventually(lambda: not any(a._in_flight()) and not any(b._in_flight()))


def test_a_registered_only_agent_streams_only_exposed_functions(agents):
    a, b = agents("a"), agents("b", trust="registered")
    b.expose(numbers)
    b.expose(async_numbers, name="slowly")
    b.expose(range_iterator)
    assert list(a.rpc_stream("b", numbers, (3,))) == [0, 1, 2]
    assert list(a.rpc_stream("b", "slowly", (3,))) == [0, 1, 2]
    with pytest.raises(errors.PermissionDenied, match="generators"):
        next(a.rpc_stream("b", range_iterator))
    with pytest.raises(errors.PermissionDenied):
        next(a.rpc_stream("b", tensors, (3,)))


def range_iterator():
    return iter(range(3))
