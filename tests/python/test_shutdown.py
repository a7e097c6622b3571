"""Shutdown: it waits for calls under way, never hangs, and keeps exit codes."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist
from conftest import Worker, eventually, repeated
from tensorferry import errors

done: list[object] = []
kept: dict[str, object] = {}


def slowly(value):
    time.sleep(0.3)
    done.append(value)
    return value


def wait_for_the_end():
    kept["end"].wait(30)


def start_chain(me, other, depth):
    """Each reply starts the next call, so that the agents are idle only for an instant in between."""
    if depth:
        agent = rpc._current()  # on the timer's thread there is none
        made = threading.Event()

        def make_the_next():
            agent.rpc_async(other, start_chain, (other, me, depth - 1))
            made.set()

        threading.Timer(0.05, make_the_next).start()
        assert made.wait(30)
        time.sleep(0.03)
    else:
        done.append("end of chain")


def shut_down_here():
    rpc._current().shutdown()


def shut_all_down(agents_):
    raised = []

    def shut_down(agent):
        try:
            agent.shutdown()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=shut_down, args=(agent,)) for agent in agents_]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return raised


def begin(agents, size):
    made = {}

    def join(rank):
        made[rank] = agents(f"w{rank}", rank=rank, world_size=size, join_timeout=20)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(size)]


@pytest.fixture
def world(agents):
    done.clear()
    return begin(agents, 3)


def test_shutdown_waits_for_the_calls_of_all_agents(world):
    futures = [agent.rpc_async((agent._self[1] + 1) % 3, slowly, (agent.name,)) for agent in world]
    assert shut_all_down(world) == []
    assert sorted(done) == ["w0", "w1", "w2"]
    assert [future.wait() for future in futures] == ["w0", "w1", "w2"]


def test_shutdown_waits_for_nested_calls(world):
    world[0].rpc_async("w1", start_chain, ("w1", "w2", 6))
    assert shut_all_down(world) == []
    assert done == ["end of chain"]


def test_shutdown_waits_for_late_agents(world):
    start = time.monotonic()
    late = threading.Timer(0.4, world[2].shutdown)
    late.start()
    assert shut_all_down(world[:2]) == []
    assert time.monotonic() - start > 0.35
    late.join()


def test_shutdown_ends_at_its_timeout(world):
    with pytest.raises(errors.DeadlineExceeded, match=r"w1.*w2"):
        world[0].shutdown(timeout=0.3)
    assert world[0]._left
    assert shut_all_down(world[1:]) != []  # they cannot all come any more


def test_shutdown_without_grace_does_not_wait(world):
    kept["end"] = threading.Event()
    future = world[0].rpc_async("w1", wait_for_the_end)
    time.sleep(0.05)
    start = time.monotonic()
    world[0].shutdown(graceful=False)
    assert time.monotonic() - start < 10
    with pytest.raises(errors.AgentClosed):
        future.wait()
    kept["end"].set()


def test_an_agent_without_a_world_waits_for_its_own_calls(pair):
    a, b = pair
    done.clear()
    assert b.rpc_sync("a", max, (1, 2)) == a.rpc_sync("b", max, (1, 2)) == 2  # there are links now
    served = b.rpc_async("a", slowly, ("served",))
    made = a.rpc_async("b", slowly, ("made",))
    time.sleep(0.1)
    a.shutdown()
    assert made.wait() == "made"
    assert served.wait() == "served"
    kept["end"] = threading.Event()
    with pytest.raises(errors.DeadlineExceeded, match="under way"):
        b.rpc_async("b", wait_for_the_end)
        b.shutdown(timeout=0.1)
    kept["end"].set()


def test_a_dead_member_is_named(cluster):
    cluster.start(2)
    rpc.rpc_sync("worker1", os.getpid)
    cluster.workers[0].kill()
    with pytest.raises(errors.ConnectionLost, match="worker1"):
        rpc.shutdown(timeout=20)


def serve_store():
    """Serves a store in this process; returns its port."""
    store = kept["store"] = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port


def serve_built_in_store():
    store = kept["store"] = tensorferry.StoreServer("127.0.0.1", 0)
    return store.port


@pytest.mark.parametrize("kind", ["torch", "built-in"])
def test_a_rendezvous_host_that_has_died_is_named(kind):
    host = Worker()  # a process of this test's own, because it is killed
    try:
        if kind == "torch":
            port = host.run(serve_store)
            clients = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(3)]
        else:
            port = host.run(serve_built_in_store)
            clients = [tensorferry.connect_store("127.0.0.1", port) for _ in range(3)]
        make = functools.partial(tensorferry.Agent, timeout=20)
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(make, f"w{i}", i, 2, store=clients[i]) for i in range(2)]
            a, b = (future.result() for future in futures)
        assert a.rpc_sync("w1", os.getpid) == os.getpid()
    finally:
        host.kill()

    gone = rf"the rendezvous host at 127\.0\.0\.1:{port} is gone \("
    assert a.rpc_sync("w1", os.getpid) == os.getpid()  # the link needs no store
    assert a.get_worker_info("w1") == a.get_worker_info(1) == rpc.WorkerInfo("w1", 1)
    for lookup in (lambda: a.get_worker_info("w7"), lambda: a.rpc_sync("w7", os.getpid)):
        with pytest.raises(errors.ConnectionLost, match=gone) as raised:
            lookup()
        assert "\n" not in str(raised.value)
    with pytest.raises(errors.ConnectionLost, match=rf'^shutdown: {gone}.*; "w0" has left$') as raised:
        a.shutdown()
    assert "\n" not in str(raised.value)
    with pytest.raises(errors.AgentClosed):
        a.rpc_sync("w1", os.getpid)
    with pytest.raises(errors.ConnectionLost, match=gone):
        tensorferry.Agent("late", store=clients[2])
    b.leave()


def test_shutdown_inside_a_function_is_refused(pair):
    with pytest.raises(errors.InvalidArgument, match="itself"):
        pair[0].rpc_sync("b", shut_down_here)


def test_shutdown_inside_a_function_keeps_the_default_agent(cluster):
    cluster.start(1)
    with pytest.raises(errors.InvalidArgument, match="itself"):
        rpc.rpc_sync("worker1", rpc.shutdown)
    assert rpc.rpc_sync("worker1", rpc._is_current_rpc_agent_set)


def test_a_process_can_start_several_worlds_in_one_store(agents):
    for size in (2, 3, 2):
        made = begin(agents, size)
        assert made[0].rpc_sync(size - 1, max, (1, 2)) == 2
        assert shut_all_down(made) == []


def test_a_second_shutdown_does_nothing(pair):
    a, _ = pair
    a.shutdown()
    a.shutdown()
    a.leave()
    assert "left" in repr(a)


def reference_here():
    return rpc.RRef({"here": 1})


def test_objects_that_outlive_the_agent_raise(agents):
    a, _ = agents("a"), agents("b")
    reference, own = a.remote("b", dict), a.rpc_sync("a", reference_here)
    reference.to_here()
    tensor = a.rpc_sync("b", torch.ones, (100_000,))
    waiting = a.rpc_async("b", slowly, ("waiting",))
    done = a.rpc_async("b", max, (1, 2))
    assert done.wait() == 2
    then = waiting.then(lambda future: future.value())
    a.shutdown(graceful=False)
    uses = {
        "to_here": reference.to_here,
        "a method": reference.rpc_sync().keys,
        "a method's future": lambda: reference.rpc_async().keys().wait(),
        "a method's reference": lambda: reference.remote().keys().to_here(),
        "owner": reference.owner,
        "own to_here": own.to_here,
        "local_value": own.local_value,
        "own method": own.rpc_sync().keys,
        "passed on": lambda: a.rpc_sync("b", id, (reference,)),
        "remote": lambda: a.remote("b", dict),
        "rpc_sync": lambda: a.rpc_sync("b", max, (1, 2)),
        "rpc_async": lambda: a.rpc_async("b", max, (1, 2)).wait(),
        "a future": waiting.wait,
        "its callback": then.wait,
        "wait_all": lambda: tensorferry.wait_all([waiting]),
        "explain": lambda: a.explain("b"),
        "get_worker_info": lambda: a.get_worker_info("b"),
    }
    for name, use in uses.items():
        # Of a call under way the peer's end of the link may be the first to end.
        under_way = name in ("a future", "its callback", "wait_all")
        kinds = (errors.AgentClosed, errors.ConnectionLost) if under_way else errors.AgentClosed
        with pytest.raises(kinds, match=r"was shut down|has ended"):
            use()
            pytest.fail(f"{name} raised nothing")
    assert reference.owner_name() == "b" and not reference.is_owner() and "b" in repr(reference)
    assert (done.wait(), done.value()) == (2, 2)
    assert tensor.sum().item() == 100_000
    assert a.counters().calls_sent > 0
    assert a.name == a.get_worker_info().name == "a"


PROGRAM = """
    import os, sys, time, threading
    import tensorferry, tensorferry.rpc as rpc
    import torch.distributed as dist
    store = dist.HashStore()
    a = tensorferry.Agent("a", store=store)
    b = tensorferry.Agent("b", store=store)
    assert a.rpc_sync("b", max, (1, 2)) == 2
    print(time.monotonic(), flush=True)
    {body}
    sys.exit(7)
"""


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "pending = [a.rpc_async('b', time.sleep, (60,)) for _ in range(5)]; time.sleep(0.1)",
        "a.rpc_async('b', time.sleep, (60,))",
        "threading.Thread(target=a.rpc_sync, args=('b', time.sleep, (60,)), daemon=True).start(); time.sleep(0.1)",
        "a.rpc_async('b', time.sleep, (60,)).add_done_callback(print); time.sleep(0.1)",
        "kept = a.remote('b', dict); kept.to_here()",
        "pending = [a.rpc_async('b', exec, ('while True: pass',)) for _ in range(2)]; time.sleep(0.1)",
        "b.leave()",
        "a.rpc_async('b', sum, (range(20_000_000),)); time.sleep(0.1)",
    ],
)
def test_a_process_that_ends_without_shutdown_keeps_its_exit_code(tmp_path, body):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM).format(body=body))
    result = subprocess.run(
        [sys.executable, str(script)], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    ended = time.monotonic()
    assert result.returncode == 7, result.stderr
    assert ended - float(result.stdout.split()[0]) < 30  # the calls take 60 s
    assert "Fatal" not in result.stderr
    assert "terminate" not in result.stderr


# One process that has imported everything is forked again and again; each child starts agents, and ends by sys.exit().
MANY = """
    import os, sys, time, threading
    import tensorferry, tensorferry.rpc as rpc
    import torch.distributed as dist

    def live(kind):
        store = dist.HashStore()
        a = tensorferry.Agent("a", store=store)
        b = tensorferry.Agent("b", store=store)
        blocked = [a.rpc_async("b", time.sleep, (60,)) for _ in range(8)]
        if kind % 3 == 0:
            blocked[0].add_done_callback(print)
            blocked += [a.rpc_async("b", exec, ("while True: pass",))]
        if kind % 3 == 1:
            threading.Thread(target=a.rpc_sync, args=("b", time.sleep, (60,)), daemon=True).start()
            blocked += [a.remote("b", time.sleep, (60,))]
        assert a.rpc_sync("b", max, (1, 2)) == 2
        return blocked

    slowest = 0
    for i in range({times}):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            kept = live(i)
            os.write(theirs, str(time.monotonic()).encode())
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        ended = time.monotonic()
        assert status == 7 << 8, (i, status)
        slowest = max(slowest, ended - float(os.read(ours, 100)))
        os.close(ours), os.close(theirs)
    print(slowest)
"""


@repeated(100)
def test_exit_codes_are_kept_and_exits_are_quick_despite_blocked_threads(tmp_path, times):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(MANY).format(times=3 * times))  # each kind so often
    done = subprocess.run([sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr and "terminate" not in done.stderr
    assert float(done.stdout.splitlines()[-1]) < 20  # 2 s on a machine that is not busy


def mappings():
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held():
    """What this process has, to be compared: threads, descriptors, mappings."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), mappings()


def settle(reached):
    """Waits until the counts fall to ``reached`` (threads end, and memory is freed, a moment later)."""
    assert eventually(lambda: all(now <= then for now, then in zip(held(), reached)), 30), (held(), reached)


@repeated(100)
def test_a_second_start_keeps_nothing_of_the_first(cluster, workers, times):
    """init_rpc and shutdown, here and in another process, with tensors and references between them."""

    def session():
        cluster.start(1)
        big = torch.ones(300_000)
        assert torch.equal(rpc.rpc_sync("worker1", torch.mul, (big, 2)), 2 * big)
        kept = rpc.remote("worker1", dict)
        assert kept.to_here() == {}
        held_there = cluster.workers[0]
        cluster.stop()
        return held_there

    for _ in range(3):  # the first rounds make what is made once
        worker = session()
    gc.collect()
    there = worker.run(held)
    time.sleep(0.3)
    slack = (2, 2, 20)
    here = tuple(now + more for now, more in zip(held(), slack))
    there = tuple(now + more for now, more in zip(there, slack))
    memory = resident_bytes()
    for _ in range(3 * times):
        session()
    gc.collect()
    settle(here)
    assert eventually(lambda: all(now <= then for now, then in zip(worker.run(held), there)), 30)
    assert resident_bytes() - memory < 64 << 20


def test_an_agent_lives_until_it_leaves(agents):
    a = agents("a")
    tensorferry.Agent("unheld", store=agents.store)
    __import__("gc").collect()
    assert a.rpc_sync("unheld", max, (1, 2)) == 2
    a.rpc_sync("unheld", leave_soon)


def leave_soon():
    agent = rpc._current()
    threading.Timer(0.05, agent.leave).start()
