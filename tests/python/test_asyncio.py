"""asyncio at both ends: awaited calls, coroutines as handlers, and unretrieved failures."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors

LONG = 60.0  # seconds; a call that takes so long was not cancelled

told: list[object] = []  # by handlers of this process
waiting = 0
go_on: asyncio.Event | None = None


async def double(value):
    await asyncio.sleep(0)
    return 2 * value


async def fail(text):
    await asyncio.sleep(0)
    raise KeyError(text)


async def wait_for_all():
    """Returns once it has been told to."""
    global waiting, go_on
    go_on = go_on or asyncio.Event()
    waiting += 1
    await go_on.wait()
    waiting -= 1
    return threading.get_ident()


def count_waiting():
    return waiting, threading.active_count(), threads_of_process()


def threads_of_process():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


async def let_all_go():
    global go_on
    if go_on is not None:
        go_on.set()
        go_on = None


async def sleep_long(tell=True):
    try:
        told.append("began")
        await asyncio.sleep(LONG)
    except asyncio.CancelledError:
        told.append(("cancelled", rpc.cancelled()))
        raise


def count_objects():
    return rpc.counters().objects


def take_told():
    taken = told.copy()
    told.clear()
    return taken


def comes(to, what):
    seen = []

    def came():
        seen.extend(rpc.rpc_sync(to, take_told))
        return what in seen

    return eventually(came, 20)


async def who_am_i():
    inner = await asyncio.gather(*(child() for _ in range(3)))
    return [rpc.get_worker_info().name, await asyncio.to_thread(lambda: rpc.get_worker_info().name), *inner]


async def child():
    return rpc.get_worker_info().name


async def relay(to, seconds):
    start = time.monotonic()
    try:
        await rpc.rpc_async(to, time.sleep, (seconds,), timeout=0)
    except BaseException:
        told.append(("ended in time", time.monotonic() - start < LONG / 2))
        raise


async def call_too_late(to):
    try:
        await asyncio.sleep(LONG)
    except asyncio.CancelledError:
        await asyncio.sleep(1)  # the deadline passes here a little later than at the caller
        try:
            await rpc.rpc_async(to, max, (1, 2), timeout=0)
        except errors.DeadlineExceeded as error:
            told.append(("not made", "not made" in str(error)))


async def tidy_up(seconds):
    told.append("began")
    try:
        await asyncio.sleep(LONG)
    finally:
        await asyncio.sleep(seconds)
        told.append("tidied up")


async def exit_():
    sys.exit(3)


async def cancel_myself():
    raise asyncio.CancelledError


async def shut_down():
    rpc.shutdown()


class Counter:
    def __init__(self):
        self.count = 0

    async def add(self, amount):
        before = self.count
        await asyncio.sleep(0.001)
        self.count = before + amount
        return self.count


def raise_(kind, text):
    raise kind(text)


# ---- awaiting


def test_awaited_calls_give_values_and_errors(pair):
    a, _ = pair

    async def main():
        assert await a.rpc_async("b", max, (1, 2)) == 2
        assert await asyncio.gather(*(a.rpc_async("b", pow, (2, i)) for i in range(300))) == [2**i for i in range(300)]
        with pytest.raises(KeyError, match="awaited"):
            await a.rpc_async("b", raise_, (KeyError, "awaited"))
        assert (await a.rpc_async("b", torch.ones, (100_000,))).sum() == 100_000

    asyncio.run(main())


def test_the_loop_completes_awaited_calls_on_its_own_thread(pair):
    threads = []

    async def main():
        future = pair[0].rpc_async("b", time.sleep, (0.1,))
        future.add_done_callback(lambda _: threads.append(threading.current_thread()))
        await future

    asyncio.run(main())
    assert threads == [threading.current_thread()]


def test_each_thread_of_a_process_may_run_its_own_loop(pair):
    results = []

    async def main(number):
        results.append(await asyncio.gather(*(pair[0].rpc_async("b", max, (number, i)) for i in range(100))))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(main(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for _ in range(3):
        asyncio.run(main(200))
    assert len(results) == 7
    assert results.count([200] * 100) == 3


def test_tasks_of_two_loops_and_a_thread_wait_for_one_future(pair):
    future = pair[0].rpc_async("b", time.sleep, (0.3,))
    ended = []

    async def wait():
        ended.append(await future)

    threads = [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(2)]
    threads.append(threading.Thread(target=lambda: ended.append(future.wait())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ended == [None] * 3


def test_a_blocked_loop_hands_its_reply_to_a_waiting_thread(pair):
    """The reply lies in the inbox of a loop that does not come to it."""

    async def main():
        future = pair[0].rpc_async("b", time.sleep, (0.1,))
        task = asyncio.ensure_future(wait_for(future))
        await asyncio.sleep(0)
        assert eventually(future.done)  # which blocks the loop
        assert future.value() is None
        other = pair[0].rpc_async("b", time.sleep, (0.1,))
        tasks = [task, asyncio.ensure_future(wait_for(other))]
        await asyncio.sleep(0)
        assert other.wait() is None
        return await asyncio.gather(*tasks)

    async def wait_for(future):
        return await future

    assert asyncio.run(main()) == [None, None]


def test_a_future_outlives_the_loop_that_awaited_it(pair):
    futures = []

    async def main():
        futures.append(pair[0].rpc_async("b", time.sleep, (0.2,)))
        task = asyncio.ensure_future(asyncio.shield(asyncio.ensure_future(wait_for(futures[0]))))
        await asyncio.sleep(0)
        task.cancel()

    async def wait_for(future):
        try:
            return await future
        except asyncio.CancelledError:
            return None

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    del loop
    assert futures[0].wait(20) is None


def test_a_shutdown_on_the_loops_thread_waits_for_no_task(pair):
    a, _ = pair

    async def call():
        return await a.rpc_async("b", slow_double, (4,))

    async def main():
        task = asyncio.create_task(call())
        await asyncio.sleep(0.05)
        a.shutdown(timeout=30)  # the task's reply comes meanwhile, and its loop does not run
        return await task

    assert asyncio.run(main()) == 8


def test_a_shutdown_waits_for_no_loop_that_was_closed(pair):
    a, _ = pair
    gone = []

    async def call():
        await a.rpc_async("b", slow_double, (4,))

    async def main():
        task = asyncio.ensure_future(call())
        gone.append(weakref.ref(task))
        await asyncio.sleep(0.05)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    a.shutdown(timeout=30)
    del loop
    asyncio.run(asyncio.sleep(0))
    asyncio.run(use_an_inbox(pair[1]))
    assert eventually(lambda: gc.collect() >= 0 and gone[0]() is None)


async def use_an_inbox(agent):
    assert await agent.rpc_async(agent.name, double, (1,)) == 2


def test_the_loop_can_await_torchs_futures(pair):
    async def main():
        both = torch.futures.collect_all([pair[0].rpc_async("b", pow, (2, i)) for i in range(2)])
        assert [each.value() for each in await tensorferry.awaitable(both)] == [1, 2]

    asyncio.run(main())


# ---- handlers


def test_coroutines_serve_every_kind_of_call(cluster):
    cluster.start(1)
    assert rpc.rpc_sync("worker1", double, (21,)) == 42
    assert tensorferry.wait_all([rpc.rpc_async("worker1", double, (i,)) for i in range(200)]) == list(range(0, 400, 2))
    assert rpc.remote("worker1", double, (4,)).to_here() == 8
    counter = rpc.remote("worker1", Counter)
    assert counter.rpc_sync().add(5) == 5
    assert counter.remote().add(1).to_here() == 6
    assert rpc.rpc_sync("main", double, (1,)) == 2
    assert rpc.rpc_sync("worker1", double, (torch.ones(100_000),)).sum() == 200_000


def test_an_exception_of_a_coroutine_is_raised_at_the_caller(cluster):
    cluster.start(1)
    with pytest.raises(KeyError, match="here") as caught:
        rpc.rpc_sync("worker1", fail, ("here",))
    assert "in fail" in str(caught.value.__cause__)
    assert "serving.py" not in str(caught.value.__cause__)
    with pytest.raises(KeyError):
        rpc.remote("worker1", fail, ("kept",)).to_here()
    with pytest.raises(errors.RemoteError, match="SystemExit"):
        rpc.rpc_sync("worker1", exit_)
    with pytest.raises(errors.Cancelled):
        rpc.rpc_sync("worker1", cancel_myself)
    assert rpc.rpc_sync("worker1", double, (1,)) == 2


def test_thousands_of_waiting_coroutines_occupy_no_thread(cluster):
    cluster.start(1)
    _, _, before = rpc.rpc_sync("worker1", count_waiting)
    calls = [rpc.rpc_async("worker1", wait_for_all) for _ in range(2000)]
    assert eventually(lambda: rpc.rpc_sync("worker1", count_waiting)[0] == 2000, 60)
    assert rpc.rpc_sync("worker1", count_waiting)[2] < before + 50
    rpc.rpc_sync("worker1", let_all_go)
    assert len(set(tensorferry.wait_all(calls))) == 1, "one thread has served them all"


def test_a_coroutine_and_its_tasks_use_the_called_agent(pair):
    assert pair[0].rpc_sync("b", who_am_i) == ["b"] * 5
    assert pair[1].rpc_sync("a", who_am_i) == ["a"] * 5
    with pytest.raises(errors.InvalidArgument, match="itself"):
        pair[0].rpc_sync("b", shut_down_agent)


async def shut_down_agent():
    rpc._current().shutdown()


@pytest.mark.parametrize("transport", ["ring", "unix", "tcp"])
@pytest.mark.parametrize("ending", ["cancel", "time-out", "task"])
def test_cancelling_a_call_cancels_its_coroutine(cluster, transport, ending):
    cluster.start(1, shared_memory=transport == "ring", unix_sockets=transport != "tcp")
    rpc.rpc_sync("worker1", take_told)
    assert eventually(lambda: rpc.explain("worker1").transport == transport)
    if ending == "task":
        asyncio.run(cancelled_task())
    elif ending == "cancel":
        future = rpc.rpc_async("worker1", sleep_long)
        assert comes("worker1", "began")
        future.cancel()
    else:
        with pytest.raises(errors.DeadlineExceeded, match="sleep_long"):
            rpc.rpc_sync("worker1", sleep_long, timeout=3)
    assert comes("worker1", ("cancelled", True))


async def cancelled_task():
    async def call():
        await rpc.rpc_async("worker1", sleep_long)

    task = asyncio.ensure_future(call())
    while "began" not in await rpc.rpc_async("worker1", take_told):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@rpc.batch(max_size=8)
def in_batches(value):
    return value


async def sleep_after_a_batch():
    await tensorferry.awaitable(in_batches(1))
    await sleep_long()


def test_a_coroutine_that_has_used_a_batch_is_cancelled(pair):
    take_told()
    future = pair[0].rpc_async("b", sleep_after_a_batch, timeout=0)
    assert eventually(lambda: told == ["began"])
    future.cancel()
    assert eventually(lambda: told == ["began", ("cancelled", True)])


def call_main():
    rpc.rpc_async("main", sleep_long, timeout=0)


def test_an_object_whose_coroutine_is_cancelled_fails_and_is_freed(cluster):
    cluster.start(1)
    before = rpc.rpc_sync("worker1", count_objects)
    made = rpc.remote("worker1", sleep_long, timeout=3)
    with pytest.raises(errors.DeadlineExceeded):
        made.to_here(timeout=LONG / 2)
    assert comes("worker1", ("cancelled", True))
    del made
    assert eventually(lambda: rpc.rpc_sync("worker1", count_objects) == before)


def test_the_death_of_the_caller_cancels_its_coroutines(cluster):
    cluster.start(1)
    take_told()
    rpc.rpc_sync("worker1", call_main)
    assert comes("main", "began")
    cluster.workers[0].kill()
    assert comes("main", ("cancelled", True))


def test_coroutines_inherit_the_deadline(cluster):
    cluster.start(2)
    with pytest.raises(errors.DeadlineExceeded), rpc.deadline(2):
        rpc.rpc_sync("worker1", relay, ("worker2", LONG))
    assert comes("worker1", ("ended in time", True))
    assert eventually(lambda: rpc.rpc_sync("worker1", in_flight) == 0), "its own call has ended too"
    with pytest.raises(errors.DeadlineExceeded):
        rpc.rpc_sync("worker1", call_too_late, ("worker2",), timeout=2)
    assert comes("worker1", ("not made", True))


def test_a_coroutine_is_cancelled_once(pair):
    take_told()
    future = pair[0].rpc_async("b", tidy_up, (2,), timeout=1.5)  # its deadline passes while it tidies up
    assert eventually(lambda: "began" in told)
    future.cancel()
    assert eventually(lambda: "tidied up" in told)


def in_flight():
    return rpc._current()._in_flight()[0]


def test_leaving_cancels_coroutines_and_ends_their_thread(agents):
    a, b = agents("a"), agents("b")
    take_told()
    future = a.rpc_async("b", sleep_long)
    assert eventually(lambda: "began" in told)
    assert any(thread.name == "tensorferry b" for thread in threading.enumerate())
    b.leave()
    assert ("cancelled", True) in told
    assert not any(thread.name == "tensorferry b" for thread in threading.enumerate())
    with pytest.raises(errors.ConnectionLost):
        future.wait()


def test_a_graceful_shutdown_waits_for_coroutines(pair):
    a, b = pair
    take_told()
    future = a.rpc_async("b", slow_double, (3,))
    assert eventually(lambda: told == ["began"])
    b.shutdown()
    assert future.wait() == 6


async def slow_double(value):
    told.append("began")
    await asyncio.sleep(0.3)
    return 2 * value


def test_a_process_may_end_while_coroutines_run(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, sys, time
            import tensorferry, torch.distributed as dist
            store = dist.HashStore()
            a, b = tensorferry.Agent("a", store=store), tensorferry.Agent("b", store=store)
            pending = [a.rpc_async("b", asyncio.sleep, (60,)) for _ in range(5)]
            time.sleep(0.2)
            sys.exit(7)
            """
        )
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 7, result.stderr
    assert result.stderr == ""


# ---- unretrieved failures


@pytest.fixture
def reports(caplog):
    caplog.set_level(logging.WARNING, "tensorferry")

    def lines():
        gc.collect()
        return [record.getMessage() for record in caplog.records if record.name == "tensorferry"]

    return lines


def test_an_unretrieved_failure_is_reported_once(pair, reports):
    pair[0].rpc_async("b", raise_, (KeyError, "unseen"))
    assert eventually(lambda: len(reports()) == 1)
    (line,) = reports()
    for part in ("raise_", '"b"', "KeyError", "unseen"):
        assert part in line
    future = pair[0].rpc_async("b", raise_, (KeyError, "polled"))
    assert eventually(future.done)
    assert len(reports()) == 1, "it may still be looked at"
    del future
    assert eventually(lambda: len(reports()) == 2)


def test_an_exception_of_thens_callback_is_reported_unless_its_future_is_retrieved(pair, reports):
    pair[0].rpc_async("b", max, (1, 2)).then(lambda done: 1 // 0)
    assert eventually(lambda: len(reports()) == 1)
    (line,) = reports()
    for part in ("callback", "then()", "ZeroDivisionError"):
        assert part in line
    kept = pair[0].rpc_async("b", max, (1, 2)).then(lambda done: 1 // 0)
    assert eventually(kept.done)
    assert len(reports()) == 1, "it may still be looked at"
    del kept
    assert eventually(lambda: len(reports()) == 2)
    with pytest.raises(ZeroDivisionError):
        pair[0].rpc_async("b", max, (1, 2)).then(lambda done: 1 // 0).wait()
    seen = threading.Event()
    pair[0].rpc_async("b", max, (1, 2)).then(lambda done: 1 // 0).add_done_callback(lambda done: seen.set())
    assert seen.wait(10)
    assert len(reports()) == 2


def test_retrieved_failures_are_not_reported(pair, reports):
    a, _ = pair

    def failing():
        return a.rpc_async("b", raise_, (KeyError, "seen"))

    async def main():
        with pytest.raises(KeyError):
            await failing()

    asyncio.run(main())
    for look in (lambda f: f.wait(), lambda f: f.value() if eventually(f.done) else None):
        with pytest.raises(KeyError):
            look(failing())
    assert failing().exception()
    for see in (tensorferry.wait_all, torch.futures.wait_all):
        with pytest.raises(KeyError):
            see([failing()])
    for each in tensorferry.as_completed([failing()]):
        del each
    seen = threading.Event()
    failing().add_done_callback(lambda f: seen.set())
    assert seen.wait(20)
    seen.clear()
    failing().then(lambda f: seen.set())
    assert seen.wait(20)
    given_up = a.rpc_async("b", time.sleep, (0.2,))
    given_up.cancel()
    del given_up
    assert a.rpc_sync("b", max, (1, 2)) == 2
    assert reports() == []


def test_failures_caused_by_leaving_are_not_reported(agents, reports):
    a, _ = agents("a"), agents("b")
    a.rpc_async("b", time.sleep, (0.3,))
    a.leave()  # which waits for the callbacks of its calls
    assert reports() == []


# ---- cancel


def test_cancelling_the_future_of_then_cancels_the_call(pair):
    future = pair[0].rpc_async("b", time.sleep, (LONG,))
    chained = future.then(lambda f: f.wait()).then(lambda f: f.wait())
    chained.cancel()
    for each in (future, chained):
        with pytest.raises(errors.Cancelled, match='"sleep" was cancelled'):
            each.wait(20)


def test_messages_name_the_function_and_give_short_times(pair):
    with pytest.raises(errors.DeadlineExceeded, match=r'^"sleep" on "b": no answer in 50 ms'):
        pair[0].rpc_sync("b", time.sleep, (1,), timeout=0.05)
    slow = pair[0].remote("b", Counter)
    with pytest.raises(errors.DeadlineExceeded, match=r'^"block" on "b"'):
        pair[0].remote("b", Blocker).rpc_sync(timeout=0.2).block()
    slow.to_here()


class Blocker:
    def block(self):
        time.sleep(1)
