"""rpc.deadline() and rpc.cancelled(): deadlines that nested calls inherit, and the deadline that a function sees."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import tensorferry.rpc as rpc
from conftest import eventually
from tensorferry import errors

LONG = 15.0  # seconds; a call that takes so long was not cancelled

ended: list[tuple[str, float]] = []  # how calls that functions here made ended, and after how many seconds


def relay(way):
    """Sleeps at the end of the path; no call on the path has its own timeout."""
    start = time.monotonic()
    try:
        if len(way) == 1:
            rpc.rpc_sync(way[0], time.sleep, (LONG,), timeout=0)
        else:
            rpc.rpc_sync(way[0], relay, (way[1:],), timeout=0)
        ended.append(("returned", time.monotonic() - start))
    except Exception as error:
        ended.append((type(error).__name__, time.monotonic() - start))
        raise


def take_ended():
    return [ended.pop(0) for _ in range(len(ended))]  # others append meanwhile


def call_twice(seconds):
    """A call that uses all the time up, then another; how the second one ends, and whether it was sent."""
    for _ in range(2):
        sent = rpc.counters().calls_sent
        try:
            rpc.rpc_sync("main", time.sleep, (LONG,))
        except errors.DeadlineExceeded as error:
            said = str(error)
    ended.append((said, rpc.counters().calls_sent - sent))


def work_until_cancelled():
    ended.append(("began", float(rpc.cancelled())))
    until = time.monotonic() + LONG
    while not rpc.cancelled() and time.monotonic() < until:
        time.sleep(0.001)
    ended.append(("cancelled" if rpc.cancelled() else "never told", 0))


def note():
    ended.append(("ran", 0))


def cancelled_here_and_on_a_thread():
    seen = [rpc.cancelled()]
    thread = threading.Thread(target=lambda: seen.append(rpc.cancelled()))
    thread.start()
    thread.join()
    return seen


def call_for(seconds, to, **options):
    """Makes short calls for so long; notes how the last one ended."""
    until = time.monotonic() + seconds
    start = time.monotonic()
    try:
        while time.monotonic() < until:
            rpc.rpc_sync(to, time.sleep, (0.01,), **options)
        ended.append(("returned", time.monotonic() - start))
    except Exception as error:
        ended.append((type(error).__name__, time.monotonic() - start))
        raise


async def await_calls_for(seconds, to):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await rpc.rpc_async(to, time.sleep, (0.01,))
        await asyncio.sleep(0.01)
    ended.append(("returned", 0))


@rpc.functions.async_execution
def relay_async(to):
    return rpc.rpc_async(to, time.sleep, (LONG,), timeout=0)


class Sleeper:
    def sleep(self):
        ended.append(("ran", 0))
        time.sleep(2)

    def call_for(self, seconds, to):
        call_for(seconds, to)

    def call_on(self, to):
        rpc.rpc_sync(to, time.sleep, (LONG,), timeout=0)


def takes(seconds):
    """Whether ``seconds`` is plausible for a limit of 0.3 to 3 s on a busy machine."""
    return 0.2 < seconds < 10


def told(to, what):
    """Waits until a function at ``to`` has been told."""
    seen = []

    def came():
        seen.extend(name for name, _ in rpc.rpc_sync(to, take_ended))
        return what in seen

    return eventually(came)


def test_the_earlier_of_timeout_and_deadline_counts(pair):
    a, _ = pair
    for timeout, limit in [(0, 0.3), (LONG, 0.3), (-1, 0.3), (0.3, LONG)]:
        start = time.monotonic()
        with rpc.deadline(limit), pytest.raises(errors.DeadlineExceeded, match=r"no answer in 0\.[23] s"):
            a.rpc_sync("b", time.sleep, (2,), timeout=timeout)
        assert takes(time.monotonic() - start)
    assert a.rpc_sync("b", max, (1, 2)) == 2  # outside again


def test_inner_deadlines_can_only_be_earlier(pair):
    a, _ = pair
    for outer, inner in [(0.3, LONG), (LONG, 0.3)]:
        with rpc.deadline(outer), rpc.deadline(inner), pytest.raises(errors.DeadlineExceeded):
            a.rpc_sync("b", time.sleep, (2,))
    with rpc.deadline(LONG):
        with rpc.deadline(0.01):
            time.sleep(0.02)
        assert a.rpc_sync("b", max, (1, 2)) == 2


def test_every_kind_of_call_inherits_the_deadline(pair):
    a, _ = pair
    rref = a.remote("b", Sleeper)
    rref.to_here()
    with rpc.deadline(0.3):
        calls = [a.rpc_async("b", time.sleep, (2,)), rref.rpc_async().sleep()]
        late = a.remote("b", time.sleep, (2,))
        for call in (*calls, late):
            with pytest.raises(errors.DeadlineExceeded):
                call.wait() if call is not late else call.to_here()


def test_a_call_after_the_deadline_is_not_sent(pair):
    a, _ = pair
    rref = a.remote("b", Sleeper)
    rref.to_here()
    with rpc.deadline(0.01):
        time.sleep(0.02)
        take_ended()
        for call in (a.rpc_sync, a.rpc_async, a.remote):
            with pytest.raises(errors.DeadlineExceeded, match="not made"):
                call("b", note)
        for use in (rref.to_here, rref.rpc_sync().sleep, rref.rpc_async().sleep, rref.remote().sleep):
            with pytest.raises(errors.DeadlineExceeded, match="not made"):
                use()
    assert eventually(lambda: not any(a._in_flight()))
    assert a.rpc_sync("b", take_ended) == []


def test_a_past_deadline_is_refused():
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="more than 0"), rpc.deadline(seconds):
            pass


def test_a_far_deadline_counts_as_none(pair):
    with rpc.deadline(float("inf")):
        assert pair[0].rpc_sync("b", max, (1, 2), timeout=0) == 2


def test_tasks_but_not_threads_inherit_the_deadline(pair):
    a, _ = pair

    async def main():
        with rpc.deadline(0.3):
            task = asyncio.ensure_future(late())
        with pytest.raises(errors.DeadlineExceeded):
            await task

    async def late():
        await a.rpc_async("b", time.sleep, (2,))

    asyncio.run(main())
    with rpc.deadline(0.01):
        time.sleep(0.02)
        results = []
        thread = threading.Thread(target=lambda: results.append(a.rpc_sync("b", max, (1, 2))))
        thread.start()
        thread.join()
    assert results == [2]


@pytest.mark.parametrize("transport", ["ring", "unix", "tcp"])
@pytest.mark.parametrize("by", ["deadline", "timeout"])
def test_the_remaining_time_travels_with_the_call(cluster, transport, by):
    cluster.start(2, shared_memory=transport == "ring", unix_sockets=transport != "tcp")
    way = ["worker1", "worker2", "main", "worker1"]
    rpc.rpc_sync("worker2", max, (1, 2))
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):  # after 2 s: on a busy machine the last peer is reached before
        if by == "timeout":
            rpc.rpc_sync(way[0], relay, (way[1:],), timeout=2)
        else:
            with rpc.deadline(2):
                rpc.rpc_sync(way[0], relay, (way[1:],))
    assert takes(time.monotonic() - start)
    ended_there = []

    def came(at, count):
        ended_there.extend(rpc.rpc_sync(at, take_ended))
        return len(ended_there) == count

    for count, at in enumerate(("worker1", "worker2", "main"), 1):
        assert eventually(lambda at=at, count=count: came(at, count)), at
    assert [how for how, _ in ended_there] == ["DeadlineExceeded"] * 3
    assert all(seconds < 10 for _, seconds in ended_there)


def test_a_function_past_its_deadline_makes_no_calls(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", max, (1, 2))
    with rpc.deadline(2), pytest.raises(errors.DeadlineExceeded):
        rpc.rpc_sync("worker1", call_twice, (LONG,))
    seen = []
    assert eventually(lambda: seen.extend(rpc.rpc_sync("worker1", take_ended)) or len(seen) > 0)
    ((said, sent),) = seen
    assert "not made" in said
    assert sent == 0


def test_methods_and_async_functions_pass_the_deadline_on(cluster):
    cluster.start(2)
    rref = rpc.remote("worker1", Sleeper)
    for call in (
        lambda: rref.rpc_sync().call_on("worker2"),
        lambda: rpc.rpc_sync("worker1", relay_async, ("worker2",)),
    ):
        with rpc.deadline(0.3), pytest.raises(errors.DeadlineExceeded):
            call()
        assert eventually(lambda: rpc.rpc_sync("worker1", in_flight) == 0), "its own call has ended too"


def in_flight():
    return rpc._current()._in_flight()[0]


# ---- default time-outs


def how_it_ended():
    assert eventually(lambda: ended != [])
    ((how, seconds),) = take_ended()
    return how, seconds


@pytest.mark.parametrize("kind", ["function", "method", "remote", "ready"])
def test_a_default_timeout_bounds_one_call_alone(agents, kind):
    a = agents("a", rank=0, timeout=0.4)
    agents("b", rank=1)
    take_ended()
    sleeper = a.remote("b", Sleeper, timeout=LONG)  # also for the connection
    sleeper.to_here(timeout=LONG)
    if kind == "remote":
        a.remote("b", call_for, (1.2, "a"))
    elif kind == "ready":
        a.remote("b", call_for, (1.2, "a"), wait_for_ready=True)
    else:
        with pytest.raises(errors.DeadlineExceeded, match=r"no answer in 0\.4 s"):
            if kind == "method":
                sleeper.rpc_sync().call_for(1.2, "a")
            else:
                a.rpc_sync("b", call_for, (1.2, "a"))
    assert how_it_ended()[0] == "returned"


@pytest.mark.parametrize("by", ["timeout", "deadline", "ready"])
def test_a_deadline_that_the_caller_set_bounds_nested_calls(agents, by):
    a = agents("a", rank=0, timeout=3)
    agents("b", rank=1)
    a.rpc_sync("b", max, (1, 2))
    take_ended()
    for options in ({}, {"timeout": LONG}):
        if by == "ready":
            a.remote("b", call_for, (LONG, "a"), options, timeout=2, wait_for_ready=True)
        else:
            with pytest.raises(errors.DeadlineExceeded):
                if by == "timeout":
                    a.rpc_sync("b", call_for, (LONG, "a"), options, timeout=2)
                else:
                    with rpc.deadline(2):
                        a.rpc_sync("b", call_for, (LONG, "a"), options)
        how, seconds = how_it_ended()
        assert how == "DeadlineExceeded"
        assert takes(seconds)


def test_a_coroutine_ends_with_its_call_but_its_calls_have_time_outs_of_their_own(agents):
    a = agents("a", rank=0, timeout=0)
    b = agents("b", rank=1, timeout=3)
    take_ended()
    b.rpc_sync("a", max, (1, 2), timeout=LONG)  # makes the connection
    assert a.rpc_sync("b", await_calls_for, (4.0, "a")) is None
    assert how_it_ended()[0] == "returned"
    with pytest.raises(errors.DeadlineExceeded):
        b.rpc_sync("a", await_calls_for, (LONG, "b"))


def test_an_inherited_deadline_travels_on_through_default_timeouts(cluster):
    cluster.start(2)
    for to in ("worker1", "worker2"):
        rpc.rpc_sync(to, max, (1, 2))
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        rpc.rpc_sync("worker1", default_relay, (["worker2", "worker1"],), timeout=3)
    assert takes(time.monotonic() - start)
    for worker in ("worker1", "worker2"):
        seen = []
        assert eventually(lambda seen=seen, worker=worker: seen.extend(rpc.rpc_sync(worker, take_ended)) or seen)
        assert seen[0][0] == "DeadlineExceeded"
        assert takes(seen[0][1])


def default_relay(way):
    """Makes short calls at the end of the path; each call on the path has its agent's default time-out."""
    if not way:
        return call_for(LONG, "main")
    start = time.monotonic()
    try:
        rpc.rpc_sync(way[0], default_relay, (way[1:],))
    except Exception as error:
        ended.append((type(error).__name__, time.monotonic() - start))
        raise


# ---- cancelled


def test_cancelled_is_false_outside_calls_and_while_the_caller_waits(cluster):
    cluster.start(1)
    assert not rpc.cancelled()
    assert rpc.rpc_sync("worker1", cancelled_here_and_on_a_thread) == [False, False]
    assert rpc.rpc_sync("main", rpc.cancelled) is False
    assert not rpc.cancelled()


@pytest.mark.parametrize("transport", ["ring", "unix", "tcp"])
@pytest.mark.parametrize("ending", ["cancel", "time-out", "task"])
def test_a_function_sees_that_its_caller_cancelled(cluster, transport, ending):
    cluster.start(1, shared_memory=transport == "ring", unix_sockets=transport != "tcp")
    rpc.rpc_sync("worker1", max, (1, 2))
    assert eventually(lambda: rpc.explain("worker1").transport == transport)
    if ending == "task":
        asyncio.run(cancelled_task())
    elif ending == "cancel":
        future = rpc.rpc_async("worker1", work_until_cancelled)
        assert told("worker1", "began")
        future.cancel()
    else:
        with pytest.raises(errors.DeadlineExceeded):
            rpc.rpc_sync("worker1", work_until_cancelled, timeout=3)
    assert told("worker1", "cancelled")


async def cancelled_task():
    async def work():
        await rpc.rpc_async("worker1", work_until_cancelled)

    task = asyncio.ensure_future(work())
    while "began" not in [name for name, _ in await rpc.rpc_async("worker1", take_ended)]:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def call_main():
    rpc.rpc_async("main", work_until_cancelled, timeout=0)


@pytest.mark.parametrize("transport", ["ring", "unix", "tcp"])
def test_a_function_sees_that_its_caller_has_died(cluster, transport):
    cluster.start(1, shared_memory=transport == "ring", unix_sockets=transport != "tcp")
    take_ended()
    rpc.rpc_sync("worker1", call_main)
    assert told("main", "began")
    cluster.workers[0].kill()
    assert told("main", "cancelled")
