"""The order of calls, and calls that wait for a peer to join."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors

seen: list[int] = []
running = 0
most_running = 0
lock = threading.Lock()


def note(number, *rest):
    global running, most_running
    with lock:
        running += 1
        most_running = max(most_running, running)
        seen.append(number)
    if number % 100 == 0:
        time.sleep(0.002)
    with lock:
        running -= 1
    return number


async def note_async(number):
    seen.append(number)
    await asyncio.sleep(0.001 * (number % 3))
    seen.append(number)


def take_seen():
    global most_running
    taken = seen.copy(), most_running
    seen.clear()
    most_running = 0
    return taken


met = threading.Barrier(2)


def meet(number):
    met.wait(30)
    return number


def fail(number):
    seen.append(number)
    raise KeyError(number)


class Log:
    def __init__(self, number):
        note(number)


@pytest.mark.parametrize("transport", ["ring", "tcp"])
def test_ordered_calls_run_one_after_another_in_order(cluster, transport):
    cluster.start(1, unix_sockets=transport == "ring")
    peer = rpc.peer("worker1").ordered()
    futures = [peer.rpc_async(note, (i,)) for i in range(1000)]
    assert tensorferry.wait_all(futures) == list(range(1000))
    assert rpc.rpc_sync("worker1", take_seen) == (list(range(1000)), 1)


def test_tensors_references_and_waiting_calls_keep_the_order(cluster):
    cluster.start(1)
    peer = rpc.peer("worker1").ordered()
    kept = []
    for i in range(0, 100, 4):
        kept.append(peer.rpc_async(note, (i, torch.ones(500_000 if i % 8 else 10))))
        kept.append(peer.remote(Log, (i + 1,)))
        kept.append(peer.rpc_async(note, (i + 2,)))
        assert peer.rpc_sync(note, (i + 3,)) == i + 3
    assert rpc.rpc_sync("worker1", take_seen) == (list(range(100)), 1)


def test_verbs_that_get_a_handle_keep_its_order(cluster):
    cluster.start(1)
    peer = rpc.peer("worker1").ordered()
    calls = [rpc.rpc_async(peer, note, (i,)) for i in range(100)]
    calls += rpc.call_many([peer, peer], note, (100,))
    assert tensorferry.wait_all(calls) == [*range(101), 100]
    assert rpc.rpc_sync("worker1", take_seen) == ([*range(101), 100], 1)


def test_unordered_calls_run_side_by_side(cluster):
    cluster.start(1)
    peer = rpc.peer("worker1")
    assert sorted(tensorferry.wait_all([peer.rpc_async(meet, (i,)) for i in range(2)])) == [0, 1]
    one, other = peer.ordered(), peer.ordered()
    assert tensorferry.wait_all([one.rpc_async(meet, (1,)), other.rpc_async(meet, (2,))]) == [1, 2], "two orders"


def test_an_order_waits_for_coroutines_and_continues_after_errors(cluster):
    cluster.start(1)
    peer = rpc.peer("worker1").ordered()
    tensorferry.wait_all([peer.rpc_async(note_async, (i,)) for i in range(30)])
    assert rpc.rpc_sync("worker1", take_seen)[0] == [i for i in range(30) for _ in range(2)]
    calls = [peer.rpc_async(fail if i % 2 else note, (i,)) for i in range(20)]
    given_up = peer.rpc_async(note, (99,))
    given_up.cancel()
    calls.append(peer.rpc_async(note, (20,)))
    assert [type(call.exception()) for call in calls] == [type(None), KeyError] * 10 + [type(None)]
    assert [number for number in rpc.rpc_sync("worker1", take_seen)[0] if number != 99] == list(range(21))


def test_a_peer_handle_stands_for_its_name(pair):
    a, _ = pair
    for name in ("b", 1, a.get_worker_info("b"), a.peer("b")):
        peer = a.peer(name)
        assert peer.name == "b"
        assert peer.rpc_sync(max, (1, 2)) == 2
        assert peer.rpc_async(max, (1, 2), timeout=5).wait() == 2
        assert peer.remote(max, (1, 2)).to_here() == 2
        assert a.rpc_sync(peer, max, (1, 2)) == 2
    assert "in order" in repr(a.peer("b").ordered())
    out = torch.empty(3)
    assert a.peer("b").ordered().rpc_sync(torch.ones, (3,), out=out) is out


# ---- peers that join later


def test_a_call_can_wait_for_a_peer_that_has_not_joined(agents):
    a = agents("a")
    with pytest.raises(errors.NotFound):
        a.rpc_sync("late", max, (1, 2), timeout=20)
    for verb in (
        lambda: a.rpc_sync("late", max, (1, 2), wait_for_ready=True),
        lambda: a.rpc_async("late", max, (1, 2), wait_for_ready=True).wait(),
        lambda: a.remote("late", max, (1, 2), wait_for_ready=True).to_here(),
        lambda: a.peer("late").ordered().rpc_sync(max, (1, 2), wait_for_ready=True),
        lambda: next(a.rpc_stream("late", iter, ([2],), wait_for_ready=True)),
    ):
        started = threading.Timer(0.3, agents, ("late",))
        started.start()
        assert verb() == 2
        started.join()
        agents._made[-1].leave()


def test_the_wait_for_a_peer_ends_at_the_deadline(agents):
    a = agents("a")
    for verb in (a.rpc_sync, a.remote):
        start = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded):
            verb("never", max, (1, 2), timeout=0.4, wait_for_ready=True)
        assert 0.3 < time.monotonic() - start < 20


def test_a_call_can_wait_for_a_restarted_peer(cluster, workers):
    import conftest

    cluster.start(1, static=False, prefix="restart")
    reference = rpc.remote("worker1", dict)
    assert reference.to_here() == {}
    pid = cluster.pids[0]
    pending = rpc.rpc_async("worker1", time.sleep, (60,))
    cluster.workers[0].kill()
    with pytest.raises(errors.ConnectionLost):
        pending.wait()  # nothing is retried by itself
    waits = rpc.rpc_async("worker1", pid_of, timeout=50, wait_for_ready=True)
    (again,) = workers.take(1)
    cluster.workers.append(again)
    again.run(conftest.join, "worker1", 1, None, cluster.store.port, {"prefix": "restart"})
    assert waits.wait() != pid
    made = rpc.remote("worker1", dict, wait_for_ready=True)
    assert made.to_here() == {}
    with pytest.raises(errors.ConnectionLost):
        reference.to_here()
    assert eventually(lambda: not any(rpc._current()._in_flight()[:2]))


def pid_of():
    import os

    return os.getpid()
