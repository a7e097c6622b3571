"""A forked child cannot use its parent's agent, and gets an error that says so; the parent's agent continues."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist
from conftest import repeated
from tensorferry import errors

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.. may lead to deadlocks:DeprecationWarning")


def in_child(life, timeout=60):
    """What ``life()`` returns in a forked child, or raises there, as text."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = repr(life())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(ours, said.encode())
        os._exit(0)
    os.close(ours)
    with os.fdopen(theirs, "rb") as said:
        if not select.select([said], [], [], timeout)[0]:
            os.kill(child, signal.SIGKILL)
        text = said.read().decode()
    _, ended = os.waitpid(child, 0)
    return text or f"the child said nothing and ended with {os.waitstatus_to_exitcode(ended)}"


TOLD = r'AgentClosed: the agent "\w+" belongs to the parent of this forked process'


def slow(seconds):
    time.sleep(seconds)
    return seconds


over = threading.Event()


def until_over():
    assert over.wait(60)


class Thing:
    def ask(self):
        return "answer"


def uses(a):
    """What a child may try, by name."""
    thing, own = a.remote("b", Thing), a.rpc_sync("a", make_here)
    thing.to_here()
    pending = a.rpc_async("b", until_over)
    then = a.rpc_async("b", until_over).then(lambda done: done.value())
    return {
        "rpc_sync": lambda: a.rpc_sync("b", max, (1, 2)),
        "rpc_sync to itself": lambda: a.rpc_sync("a", max, (1, 2)),
        "rpc_async": lambda: a.rpc_async("b", max, (1, 2)).wait(),
        "remote": lambda: a.remote("b", Thing),
        "to_here": thing.to_here,
        "a method": thing.rpc_sync().ask,
        "a method's future": lambda: thing.rpc_async().ask().wait(),
        "a method's reference": thing.remote().ask,
        "a reference among arguments": lambda: a.rpc_sync("b", id, (thing,)),
        "confirmed_by_owner": thing.confirmed_by_owner,
        "owner": thing.owner,
        "local_value": own.local_value,
        "to_here at the owner": own.to_here,
        "a future under way": pending.wait,
        "its exception": lambda: pending_raises(pending),
        "a callback's": lambda: pending.then(lambda done: done.value()).wait(),
        "wait_all": lambda: tensorferry.wait_all([pending]),
        "explain": lambda: a.explain("b"),
        "get_worker_info": lambda: a.get_worker_info("b"),
        "counters": a.counters,
        "shutdown": a.shutdown,
        "then": then.wait,
    }


def pending_raises(future):
    raise future.exception()


def make_here():
    return rpc.RRef(Thing())


def test_a_child_gets_an_error_at_its_first_use(pair):
    a, _ = pair
    for name, use in uses(a).items():
        said = in_child(use)
        if name == "then":
            assert "AgentClosed: the future belongs to the parent of this forked process" in said
        else:
            assert re.search(TOLD, said), (name, said)
    assert a.rpc_sync("b", max, (1, 2)) == 2
    over.set()


def test_a_group_in_a_child_needs_an_agent_of_the_childs(pair):
    before = tensorferry._C.default_agent()
    tensorferry._C.set_default_agent(pair[0])
    try:
        said = in_child(lambda: tensorferry.collectives.form_group(["a", "b"]))
    finally:
        tensorferry._C.set_default_agent(before)
    assert "InvalidArgument: form_group() needs an agent" in said


def test_a_child_has_no_part_in_its_parents_group(pair):
    names = [agent.name for agent in pair]
    with ThreadPoolExecutor() as pool:
        forming = [pool.submit(tensorferry.collectives.form_group, names, agent=agent) for agent in pair]
        groups = [each.result() for each in forming]
    mine = torch.ones(3)
    for said in (
        in_child(lambda: groups[0].all_reduce(mine).wait()),
        in_child(lambda: groups[0].send(mine, 1).wait()),
    ):
        assert re.search(TOLD, said), said
    assert in_child(groups[0].close) == "None"
    works = [group.all_reduce(torch.ones(3)) for group in groups]
    for work in works:
        assert work.wait().tolist() == [2.0] * 3


def test_ends_of_a_child_do_not_disturb_the_parents_agent(pair):
    a, b = pair
    thing = a.remote("b", Thing)
    assert thing.rpc_sync().ask() == "answer"
    pending = a.rpc_async("b", slow, (1,))

    def end_everything():
        nonlocal thing, pending
        pending.cancel()
        del thing, pending
        gc.collect()
        with a:
            pass
        b.leave()
        tensorferry._C.leave_all()
        return "ended"

    assert in_child(end_everything) == "'ended'"
    assert pending.wait() == 1
    assert thing.rpc_sync().ask() == "answer"
    assert b.rpc_sync("a", max, (1, 2)) == 2


def use_the_default_agent():
    said = []
    for use in (lambda: rpc.rpc_sync("main", max, (1, 2)), rpc.shutdown, lambda: rpc.RRef(1), rpc.get_worker_info):
        try:
            said.append(use())
        except errors.AgentClosed as error:
            said.append("belongs to the parent of this forked process" in str(error))
        except tensorferry.Error as error:
            said.append(error)
    return said, rpc._is_current_rpc_agent_set()


def test_a_child_starts_its_own_agent(cluster):
    cluster.start(1, static=False, prefix="forks")
    port = cluster.store.port

    def begin():
        torch.set_num_threads(1)  # OpenMP waits for ever for threads that it had before a fork
        assert use_the_default_agent()[0][:3] == [True, True, True]
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
        rpc.init_rpc("child", store=store, prefix="forks")
        there = [rpc.rpc_sync(peer, os.getpid) for peer in ("main", "worker1", "child")]
        total = rpc.rpc_sync("worker1", torch.sum, (torch.ones(300_000),)).item()
        rpc.shutdown()
        return [*there[:2], there[2] == os.getpid(), total]

    assert in_child(begin) == repr([os.getpid(), cluster.pids[0], True, 300_000.0])
    assert rpc.rpc_sync("worker1", os.getpid) == cluster.pids[0]


def test_the_default_agent_belongs_to_the_parent(cluster):
    cluster.start(1)
    said = in_child(use_the_default_agent)
    assert said.startswith("([True, True, True,") and said.endswith("False)")
    assert rpc._is_current_rpc_agent_set()
    assert rpc.rpc_sync("worker1", max, (1, 2)) == 2


class Squares(torch.utils.data.Dataset):
    def __init__(self):
        self.kept = []

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.kept.clear()
        gc.collect()
        return index * index


@pytest.mark.filterwarnings("ignore")
def test_loaders_fork_beside_an_agent(cluster):
    cluster.start(1)
    thing = rpc.remote("worker1", Thing)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    loader.dataset.kept = [thing]
    batches = [rpc.rpc_sync("worker1", torch.sum, (batch,)).item() for batch in loader]
    assert sum(batches) == sum(i * i for i in range(16))
    assert thing.rpc_sync().ask() == "answer"


def fork_and_return():
    return os.fork()


def fork_and_raise():
    if os.fork() == 0:
        raise LookupError("in the child")
    return os.getpid()


def test_a_function_that_forks_answers_once(cluster):
    """Its child must not come back to what called it: it is ended instead."""
    cluster.start(1)
    child = rpc.rpc_sync("worker1", fork_and_return)
    assert child > 0
    assert rpc.rpc_sync("worker1", os.waitpid, (child, 0), timeout=30) == (child, 1 << 8)
    assert rpc.rpc_sync("worker1", fork_and_raise) == cluster.pids[0]
    assert rpc.rpc_sync("worker1", os.wait, timeout=30)[1] == 1 << 8
    assert rpc.rpc_sync("worker1", os.getpid) == cluster.pids[0]


def test_a_child_can_exit_beside_the_parents_agent(tmp_path):
    """By sys.exit(), with everything that Python runs then."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, tensorferry, torch.distributed as dist
        store = dist.HashStore()
        a, b = (tensorferry.Agent(name, store=store) for name in "ab")
        kept = a.remote("b", dict), a.rpc_async("b", __import__("time").sleep, (1,))
        for _ in range(3):
            child = os.fork()
            if child == 0:
                sys.exit(3)
            assert os.waitpid(child, 0)[1] == 3 << 8
            assert a.rpc_sync("b", max, (1, 2)) == 2
        kept[1].wait()
        sys.exit(7)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert "Fatal" not in done.stderr


@repeated(100)
def test_children_beside_busy_threads(pair, times):
    a, _ = pair
    stop = threading.Event()
    failed = []

    def work():
        while not stop.is_set():
            try:
                thing = a.remote("b", Thing)
                assert thing.rpc_sync().ask() == "answer"
                assert a.rpc_async("b", max, (1, 2)).wait() == 2
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    kept = [a.remote("b", Thing) for _ in range(20)]

    def use():
        kept.clear()
        gc.collect()
        return a.rpc_sync("b", max, (1, 2))

    for _ in range(times):
        said = in_child(use)
        assert re.match(TOLD, said), said
    stop.set()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert [thing.rpc_sync().ask() for thing in kept] == ["answer"] * 20
