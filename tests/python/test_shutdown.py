"""Endings: calls that are under way are waited for, nobody hangs, exit codes are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import tensorferry
import tensorferry.rpc as rpc
from tensorferry import errors

done: list[object] = []


def slowly(value):
    time.sleep(0.3)
    done.append(value)
    return value


def start_chain(me, other, depth):
    """Each call lets the next one follow after it has been answered: only for an instant is nobody busy."""
    if depth:
        agent = rpc._current()  # on the timer's thread there is none
        threading.Timer(0.05, lambda: agent.rpc_async(other, start_chain, (other, me, depth - 1))).start()
        time.sleep(0.08)
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


def test_waits_for_everybodys_calls(world):
    futures = [agent.rpc_async((agent._self[1] + 1) % 3, slowly, (agent.name,)) for agent in world]
    assert shut_all_down(world) == []
    assert sorted(done) == ["w0", "w1", "w2"]
    assert [future.wait() for future in futures] == ["w0", "w1", "w2"]


def test_waits_for_calls_that_calls_make(world):
    world[0].rpc_async("w1", start_chain, ("w1", "w2", 6))
    assert shut_all_down(world) == []
    assert done == ["end of chain"]


def test_waits_for_those_that_come_late(world):
    start = time.monotonic()
    late = threading.Timer(0.4, world[2].shutdown)
    late.start()
    assert shut_all_down(world[:2]) == []
    assert time.monotonic() - start > 0.35
    late.join()


def test_gives_up_at_its_time_out(world):
    with pytest.raises(errors.DeadlineExceeded, match=r"w1.*w2"):
        world[0].shutdown(timeout=0.3)
    assert world[0]._left
    assert shut_all_down(world[1:]) != []  # they cannot all come any more


def test_without_grace_nobody_is_waited_for(world):
    future = world[0].rpc_async("w1", slowly, (1,))
    time.sleep(0.05)
    start = time.monotonic()
    world[0].shutdown(graceful=False)
    assert time.monotonic() - start < 2
    with pytest.raises(errors.AgentClosed):
        future.wait()


def test_an_agent_without_a_world_waits_for_its_own_calls(pair):
    a, b = pair
    done.clear()
    served = b.rpc_async("a", slowly, ("served",))
    made = a.rpc_async("b", slowly, ("made",))
    time.sleep(0.1)
    a.shutdown()
    assert made.wait() == "made"
    assert served.wait() == "served"
    with pytest.raises(errors.DeadlineExceeded, match="under way"):
        b.rpc_async("b", time.sleep, (1,))
        b.shutdown(timeout=0.1)


def test_a_dead_member_is_named(cluster):
    cluster.start(2)
    rpc.rpc_sync("worker1", os.getpid)
    cluster.workers[0].kill()
    with pytest.raises(errors.ConnectionLost, match="worker1"):
        rpc.shutdown(timeout=20)


def test_inside_a_function_it_is_refused(pair):
    with pytest.raises(errors.InvalidArgument, match="itself"):
        pair[0].rpc_sync("b", shut_down_here)


def test_inside_a_function_it_is_refused_and_the_default_agent_stays(cluster):
    cluster.start(1)
    with pytest.raises(errors.InvalidArgument, match="itself"):
        rpc.rpc_sync("worker1", rpc.shutdown)
    assert rpc.rpc_sync("worker1", rpc._is_current_rpc_agent_set)


def test_worlds_of_one_process_begin_again_in_the_same_store(agents):
    for size in (2, 3, 2):
        made = begin(agents, size)
        assert made[0].rpc_sync(size - 1, max, (1, 2)) == 2
        assert shut_all_down(made) == []


def test_twice_is_once(pair):
    a, _ = pair
    a.shutdown()
    a.shutdown()
    a.leave()
    assert "left" in repr(a)


def test_what_outlives_the_agent_says_so(agents):
    a, _ = agents("a"), agents("b")
    reference = a.remote("b", dict)
    reference.to_here()
    tensor = a.rpc_sync("b", __import__("torch").ones, (100_000,))
    a.shutdown()
    with pytest.raises(errors.AgentClosed):
        reference.to_here()
    with pytest.raises(errors.AgentClosed):
        a.remote("b", dict)
    assert tensor.sum().item() == 100_000


PROGRAM = """
    import os, sys, time, threading
    import tensorferry, tensorferry.rpc as rpc
    import torch.distributed as dist
    store = dist.HashStore()
    a = tensorferry.Agent("a", store=store)
    b = tensorferry.Agent("b", store=store)
    assert a.rpc_sync("b", max, (1, 2)) == 2
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
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, str(script)], env=dict(os.environ), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 7, result.stderr
    assert time.monotonic() - start < 30
    assert "Fatal" not in result.stderr
    assert "terminate" not in result.stderr


def test_agents_start_and_stop_again_and_again(agents):
    threads = len(os.listdir("/proc/self/task"))
    descriptors = len(os.listdir("/proc/self/fd"))
    for i in range(20):
        a, b = agents("a"), agents("b")
        assert a.rpc_sync("b", max, (i, 2)) == max(i, 2)
        a.leave()
        b.leave()
    time.sleep(0.5)
    assert len(os.listdir("/proc/self/task")) <= threads + 4
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4


def test_an_agent_lives_until_it_leaves(agents):
    a = agents("a")
    tensorferry.Agent("unheld", store=agents.store)
    __import__("gc").collect()
    assert a.rpc_sync("unheld", max, (1, 2)) == 2
    a.rpc_sync("unheld", leave_soon)


def leave_soon():
    agent = rpc._current()
    threading.Timer(0.05, agent.leave).start()
