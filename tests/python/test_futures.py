"""Futures: subclasses of torch's, completed by the waiting thread, or by the pool if no thread waits."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import weakref

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually, repeated
from tensorferry import errors


def power(base, exponent):
    return base**exponent


def fail(text):
    raise KeyError(text)


def test_a_future_is_a_torch_future(pair):
    future = pair[0].rpc_async("b", power, (2, 3))
    assert isinstance(future, torch._C.Future)
    assert isinstance(future, tensorferry.Future)
    assert future.wait() == 8
    assert future.wait() == 8  # as often as one likes
    assert future.value() == 8
    assert future.done()
    assert future.exception() is None


def test_torchs_functions_take_them(pair):
    futures = [pair[0].rpc_async("b", power, (2, i)) for i in range(20)]
    assert torch.futures.wait_all(futures) == [2**i for i in range(20)]
    collected = torch.futures.collect_all([pair[0].rpc_async("b", power, (3, i)) for i in range(5)]).wait()
    assert [future.value() for future in collected] == [3**i for i in range(5)]


def test_torchs_functions_raise_the_exception_of_the_call(pair):
    futures = [pair[0].rpc_async("b", power, (2, 1)), pair[0].rpc_async("b", fail, ("torch",))]
    with pytest.raises(KeyError, match="torch"):
        torch.futures.wait_all(futures)


def test_a_future_completes_without_a_waiter(pair):
    future = pair[0].rpc_async("b", power, (2, 5))
    assert eventually(future.done)
    assert future.value() == 32


def test_value_of_an_uncompleted_future_is_an_error(pair):
    future = pair[0].rpc_async("b", time.sleep, (0.3,))
    with pytest.raises(errors.InvalidArgument, match="wait"):
        future.value()
    assert not future.done()
    assert future.wait() is None


def test_then_and_callbacks_get_this_very_future(pair):
    seen = []
    future = pair[0].rpc_async("b", power, (2, 4))
    future.add_done_callback(seen.append)
    chained = future.then(lambda f: f.wait() + 1).then(lambda f: f.wait() * 10)
    assert chained.wait() == 170
    assert isinstance(chained, tensorferry.Future)
    assert eventually(lambda: seen == [future])


def chain(to):
    """As PyTorch's test_future_nested_callback does: the answer is made by callbacks, whose futures are dropped."""
    out = torch.futures.Future()

    def first(done):
        second = rpc.rpc_async(to, torch.add, (done.wait(), 2))
        second.then(lambda done: out.set_result(done.wait()))

    rpc.rpc_async(to, torch.add, (torch.ones(2), 1)).then(first)
    return out.wait()


def test_a_callback_has_the_agent_of_the_code_that_added_it(agents):
    agents("a", rank=0), agents("c", rank=2)
    b = agents("b", rank=1)
    for _ in range(20):  # there is no default agent in this process
        assert torch.equal(b.rpc_sync("a", chain, ("c",), timeout=10), torch.full((2,), 4.0))


@repeated(1000)
def test_callbacks_may_open_links_while_agents_start(cluster, times):
    def call():
        assert torch.equal(rpc.rpc_sync("worker1", chain, ("worker2",), timeout=20), torch.full((2,), 4.0))

    for _ in range(times):
        cluster.start(2, at_once=call)
        cluster.stop()


def test_an_exception_in_then_is_the_exception_of_its_future(pair):
    future = pair[0].rpc_async("b", power, (2, 4)).then(lambda f: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        future.wait()
    failed = pair[0].rpc_async("b", fail, ("first",)).then(lambda f: f.wait())
    assert isinstance(failed.exception(), KeyError)


def test_an_exception_in_a_callback_is_reported_without_harm(pair, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.exc_type))
    future = pair[0].rpc_async("b", power, (2, 4))
    future.add_done_callback(lambda f: 1 // 0)
    assert future.wait() == 16
    assert eventually(lambda: reported == [ZeroDivisionError])


def test_the_exception_is_raised_at_each_wait(pair):
    future = pair[0].rpc_async("b", fail, ("again",))
    for _ in range(3):
        with pytest.raises(KeyError, match="again"):
            future.wait()
    assert isinstance(future.exception(), KeyError)
    assert future.done()


def test_wait_all_keeps_the_order(pair):
    futures = [pair[0].rpc_async("b", power, (i, 2)) for i in range(300)]
    assert tensorferry.wait_all(futures) == [i * i for i in range(300)]
    assert tensorferry.wait_all([]) == []
    assert tensorferry.wait_all(iter(futures[:3])) == [0, 1, 4]


def test_wait_all_takes_torchs_futures(pair):
    theirs = torch.futures.Future()
    threading.Timer(0.05, theirs.set_result, (5,)).start()
    assert tensorferry.wait_all([pair[0].rpc_async("b", power, (2, 2)), theirs]) == [4, 5]


def test_wait_all_raises_the_first_in_order(pair):
    futures = [
        pair[0].rpc_async("b", power, (2, 2)),
        pair[0].rpc_async("b", fail, ("one",)),
        pair[0].rpc_async("b", fail, ("two",)),
    ]
    with pytest.raises(KeyError, match="one"):
        tensorferry.wait_all(futures)
    assert all(future.done() for future in futures)


def test_a_wait_can_end_before_the_call(pair):
    future = pair[0].rpc_async("b", wait_until_let_go, ("late",))
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match="call continues"):
        future.wait(timeout=0.05)
    assert time.monotonic() - start < 20
    with pytest.raises(TimeoutError):
        tensorferry.wait_all([future], timeout=0.05)
    assert not future.done()
    let_go()
    assert future.wait() == "late"  # the call went on


def test_two_threads_wait_for_one_future(pair):
    future = pair[0].rpc_async("b", time.sleep, (0.2,))
    results = []
    threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [None] * 4


def test_one_thread_waits_while_another_times_out(pair):
    future = pair[0].rpc_async("b", wait_until_let_go, ("late",))
    results = []
    waits = threading.Thread(target=lambda: results.append(future.wait()))
    waits.start()
    with pytest.raises(errors.DeadlineExceeded):
        future.wait(timeout=0.05)
    let_go()
    waits.join(30)
    assert results == ["late"]


_caller_is_done = threading.Event()


def outlast_the_caller():
    _caller_is_done.wait(60)


def test_cancel_ends_the_call_here(pair):
    future = pair[0].rpc_async("b", outlast_the_caller)
    future.cancel()
    try:
        with pytest.raises(errors.Cancelled):
            future.wait()
        future.cancel()  # nothing happens
    finally:
        _caller_is_done.set()


def test_await_returns_the_value(pair):
    async def main():
        assert await pair[0].rpc_async("b", power, (2, 6)) == 64
        values = await asyncio.gather(*(pair[0].rpc_async("b", power, (2, i)) for i in range(50)))
        assert values == [2**i for i in range(50)]
        with pytest.raises(KeyError, match="awaited"):
            await pair[0].rpc_async("b", fail, ("awaited",))
        done = pair[0].rpc_async("b", power, (2, 1))
        assert await done == await done == 2
        return await pair[0].rpc_async("b", power, (2, 2)).then(lambda f: f.wait() + 1)

    assert asyncio.run(main()) == 5


_gone_on = threading.Event()


def wait_until_let_go(value):
    assert _gone_on.wait(30)
    _gone_on.clear()
    return value


def let_go():
    """Lets the wait_until_let_go() of this process return."""
    _gone_on.set()


def test_the_loop_runs_while_a_future_is_awaited(pair):
    async def main():
        call = asyncio.ensure_future(waits(pair[0].rpc_async("b", wait_until_let_go, ("done",))))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not call.done()
        let_go()
        return await call

    async def waits(future):
        return await future

    assert asyncio.run(main()) == "done"


# ---- as_completed


def sleep_and_return(seconds):
    time.sleep(seconds)
    return seconds


def test_as_completed_gives_futures_in_the_order_of_completion(cluster):
    cluster.start(2)
    futures = [rpc.rpc_async(to, wait_until_let_go, (to,)) for to in ("worker1", "worker2", "main")]
    came = tensorferry.as_completed(futures)
    for to in ("worker2", "main", "worker1"):
        rpc.rpc_sync(to, let_go)
        future = next(came)
        assert future.done()
        assert future.wait() == to
    assert list(came) == []


def test_as_completed_takes_torchs_futures_and_those_that_have_completed(pair):
    theirs = torch.futures.Future()
    ours = pair[0].rpc_async("b", wait_until_let_go, ("ours",))
    chained = ours.then(lambda f: "chained")
    done = pair[0].rpc_async("b", power, (2, 2))
    done.wait()
    completed = tensorferry.as_completed([theirs, chained, done, ours])
    assert next(completed) is done
    let_go()
    assert {next(completed), next(completed)} == {ours, chained}
    theirs.set_result(5)
    assert list(completed) == [theirs]


def test_as_completed_gives_each_future_once(pair):
    futures = [pair[0].rpc_async("b", power, (2, i)) for i in range(200)]
    came = list(tensorferry.as_completed(futures + futures))
    assert len(came) == 200
    assert set(came) == set(futures)
    assert list(tensorferry.as_completed([])) == []
    assert list(tensorferry.as_completed(iter(futures[:1]))) == futures[:1]


def test_wait_all_that_raises_before_it_waits_leaves_the_futures_as_they_are(pair):
    def futures():
        yield future
        raise KeyError("no more")

    future = pair[0].rpc_async("b", power, (2, 3))
    with pytest.raises(KeyError, match="no more"):
        tensorferry.wait_all(futures())
    with pytest.raises(ValueError, match="time-out"):
        tensorferry.wait_all([future], timeout=-1)
    assert future.wait(30) == 8
    pair[0].shutdown(timeout=30)


def test_as_completed_gives_failed_futures(pair):
    failed = pair[0].rpc_async("b", fail, ("as completed",))
    (came,) = tensorferry.as_completed([failed])
    with pytest.raises(KeyError, match="as completed"):
        came.wait()


def test_as_completed_can_end_before_the_calls(pair):
    slow = pair[0].rpc_async("b", wait_until_let_go, ("slow",))
    quick = pair[0].rpc_async("b", power, (2, 2))
    came = tensorferry.as_completed([slow, quick], timeout=3)
    assert next(came) is quick
    with pytest.raises(errors.DeadlineExceeded, match="1 of 2 futures"):
        next(came)
    let_go()
    assert slow.wait() == "slow"  # its call went on
    assert list(tensorferry.as_completed([slow, quick], timeout=0)) == [slow, quick]
    with pytest.raises(ValueError, match="time-out"):
        tensorferry.as_completed([slow], timeout=-1)


# ---- awaitable and cancelled tasks


def test_torchs_futures_can_be_awaited(pair):
    async def main():
        theirs = torch.futures.Future()
        threading.Timer(0.05, theirs.set_result, (5,)).start()
        both = torch.futures.collect_all([pair[0].rpc_async("b", power, (2, i)) for i in range(2)])
        awaited = tensorferry.awaitable(theirs)
        assert await awaited == await awaited == 5
        assert [future.value() for future in await tensorferry.awaitable(both)] == [1, 2]
        failed = torch.futures.Future()
        failed.set_exception(KeyError("theirs"))
        with pytest.raises(KeyError, match="theirs"):
            await tensorferry.awaitable(failed)
        ours = pair[0].rpc_async("b", power, (2, 3))
        assert tensorferry.awaitable(ours) is ours
        return await asyncio.wait_for(tensorferry.awaitable(torch.futures.collect_all([ours])), 5)

    assert [future.value() for future in asyncio.run(main())] == [8]


def test_a_cancelled_task_leaves_torchs_future_unchanged():
    async def main():
        theirs = torch.futures.Future()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(tensorferry.awaitable(theirs), 0.05)
        assert not theirs.done()
        theirs.set_result(1)
        return await tensorferry.awaitable(theirs)

    assert asyncio.run(main()) == 1


def test_cancelling_a_task_cancels_its_call(cluster):
    cluster.start(1)

    async def main():
        future = rpc.rpc_async("worker1", time.sleep, (4,))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.05)
        with pytest.raises(errors.Cancelled):
            await future
        shielded = rpc.rpc_async("worker1", sleep_and_return, (0.3,))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(shielded), 0.05)
        return await shielded

    start = time.monotonic()
    assert asyncio.run(main()) == 0.3
    assert time.monotonic() - start < 3.5


def interrupt_soon():
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()


INTERRUPTED = {
    "rpc_sync": '"sleep" on "b"',
    "wait": '"sleep" on "b"',
    "wait_all": '"sleep" on "b"',
    "then": "a future that a callback or another future completes",
    "to_here": 'an object on "b"',
    "method": 'the method "late" of an object on "b"',
    "method's future": 'the method "late" of an object on "b"',
    "local_value": "an object that is created here",
    "shutdown": "the calls of all agents to end, and for all agents to shut down",
}


class Late:
    def late(self):
        time.sleep(10)


@pytest.mark.parametrize("how", INTERRUPTED)
def test_ctrl_c_interrupts_a_wait_and_names_the_call(pair, how):
    a, _ = pair
    late = a.remote("b", Late)
    late.to_here()
    interrupt_soon()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match=f"^interrupted while waiting for {INTERRUPTED[how]}"):
        if how == "rpc_sync":
            a.rpc_sync("b", time.sleep, (10,))
        elif how == "wait":
            a.rpc_async("b", time.sleep, (10,)).wait()
        elif how == "wait_all":
            tensorferry.wait_all([a.rpc_async("b", time.sleep, (10,)) for _ in range(3)])
        elif how == "then":
            a.rpc_async("b", time.sleep, (10,)).then(lambda f: f.wait()).wait()
        elif how == "method":
            late.rpc_sync().late()
        elif how == "method's future":
            late.rpc_async().late().wait()
        elif how == "local_value":
            a.remote("a", time.sleep, (10,)).local_value()
        elif how == "shutdown":
            a.rpc_async("b", time.sleep, (10,))
            a.shutdown()
        else:
            a.remote("b", time.sleep, (10,)).to_here()
    assert time.monotonic() - start < 8
    if how != "shutdown":
        assert a.rpc_sync("b", power, (2, 2)) == 4


def test_ctrl_c_interrupts_joining(agents):
    interrupt_soon()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="interrupted while waiting for a world of 2 to join"):
        agents("w0", rank=0, world_size=2)
    assert time.monotonic() - start < 20
    assert agents("w0", rank=0).name == "w0"  # it has left


def test_a_user_defined_signal_handler_keeps_its_text(pair):
    def handler(*_):
        raise KeyboardInterrupt("my own text")

    before = signal.signal(signal.SIGINT, handler)
    try:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt, match=r"^my own text$"):
            pair[0].rpc_sync("b", time.sleep, (10,))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_dropped_future_runs_its_callbacks(pair):
    seen = []
    pair[0].rpc_async("b", power, (2, 7)).add_done_callback(lambda f: seen.append(f.value()))
    gc.collect()
    assert eventually(lambda: seen == [128])


class Value:
    pass


def test_results_and_callbacks_are_released(pair):
    future = pair[0].rpc_async("b", Value)
    result = future.wait()
    callback = Value()
    holder = [callback]
    future.add_done_callback(lambda f, held=holder: None)
    gone = [weakref.ref(result), weakref.ref(callback), weakref.ref(future)]
    del result, callback, holder, future
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_module_functions_use_the_default_agent(cluster):
    cluster.start(1)
    assert rpc.rpc_async("worker1", power, (2, 8)).wait() == 256
    assert tensorferry.wait_all([rpc.rpc_async(1, power, (i, 1)) for i in range(10)]) == list(range(10))
