"""Several agents in one process: each has the verbs of the module as methods, and they do not mix."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually

# Public functions of tensorferry.rpc that are no methods of an agent, and why.
NO_METHODS = {
    "init_rpc": "tensorferry.Agent(...) itself starts one",
    "is_available": "tells of the package",
    "get_rpc_timeout": "Agent.timeout, a property",
    "batch": "decorates functions, which any agent of the process may serve",
    "deadline": "bounds the calls made inside, whichever agent makes them",
    "cancelled": "tells of the call that this thread serves",
}


def verbs() -> list[str]:
    return [name for name in rpc.__all__ if inspect.isroutine(getattr(rpc, name)) and name not in NO_METHODS]


def test_exempt_names_exist() -> None:
    assert set(NO_METHODS) <= set(rpc.__all__)
    assert [name for name in NO_METHODS if hasattr(tensorferry.Agent, name)] == []


@pytest.mark.parametrize("name", verbs())
def test_every_verb_of_the_module_is_a_method_with_the_same_signature(name: str, pair) -> None:
    method = getattr(pair[0], name, None)
    assert method is not None, f"Agent has no {name}: add it, or say in NO_METHODS why there is none"
    assert inspect.signature(method) == inspect.signature(getattr(rpc, name))


@pytest.mark.parametrize("name", ["rpc_sync", "rpc_async", "remote", "rpc_stream", "call_many", "publish", "explain"])
def test_a_verb_of_the_module_has_the_docstring_of_the_method(name: str) -> None:
    function = getattr(rpc, name)
    assert (function.__module__, function.__qualname__) == ("tensorferry.rpc", name)
    assert inspect.getdoc(function) == inspect.getdoc(getattr(tensorferry.Agent, name))


@pytest.mark.parametrize("name", ["rpc_sync", "rpc_async", "remote", "rpc_stream"])
def test_a_verb_of_a_peer_is_the_one_of_the_agent_without_to(name: str) -> None:
    ours, agents = (inspect.signature(getattr(kind, name)).parameters for kind in (tensorferry.Peer, tensorferry.Agent))
    assert [*ours.values()] == [each for each in agents.values() if each.name != "to"]
    said = inspect.getdoc(getattr(tensorferry.Peer, name)).splitlines()
    assert said[0] == inspect.getdoc(getattr(tensorferry.Agent, name)).splitlines()[0]
    assert not [line for line in said if line.startswith(("    to:", "    to,"))]


def test_the_module_has_verbs() -> None:
    assert {"rpc_sync", "rpc_async", "remote", "shutdown", "get_worker_info", "explain", "counters"} <= set(verbs())


def whoami():
    return rpc.get_worker_info().name


def ask_on(name):
    """What a function calls goes out from the agent that serves it."""
    return whoami(), rpc.rpc_sync(name, whoami), rpc.remote(name, whoami).to_here()


class Place:
    def name(self):
        return whoami()

    def reference(self):
        return rpc.RRef(self)


def test_each_of_several_agents_calls_and_serves_as_itself(agents):
    made = [agents(name) for name in "abcd"]
    for one in made:
        for other in made:
            assert one.rpc_sync(other.name, whoami) == other.name
            assert one.rpc_async(other.name, whoami).wait() == other.name
            place = one.remote(other.name, Place)
            assert place.rpc_sync().name() == other.name
            assert place.rpc_sync().reference().owner_name() == other.name
    assert made[0].rpc_sync("b", ask_on, ("c",)) == ("b", "c", "c")
    with pytest.raises(RuntimeError, match="not been initialized"):
        rpc.rpc_sync("a", whoami)  # none of them is the default


def test_the_modules_functions_use_the_default_agent(cluster, agents):
    cluster.start(1)
    agents("a"), agents("b")
    assert whoami() == "main"
    assert rpc.rpc_sync("worker1", ask_on, ("main",)) == ("worker1", "main", "main")
    assert rpc.RRef(1).owner_name() == "main"


def test_agents_of_one_process_have_separate_counters(agents):
    a, b, c = agents("a"), agents("b"), agents("c")
    for _ in range(3):
        a.rpc_sync("b", max, (1, 2))
    c.rpc_sync("b", torch.sum, (torch.ones(100_000),))
    sent = [agent.counters().calls_sent for agent in (a, b, c)]
    assert sent == [3, 0, 1]
    assert eventually(lambda: b.counters().calls_served == 4)  # counted a moment after the answer
    assert a.counters().bytes_sent == {}
    assert sum(c.counters().bytes_sent.values()) == 400_000


def test_one_agent_may_leave_while_the_others_continue(agents):
    a, b, c = agents("a"), agents("b"), agents("c")
    stop, failed = threading.Event(), []

    def call():
        while not stop.is_set():
            try:
                a.rpc_sync("b", max, (1, 2))
            except Exception as error:
                failed.append(error)
                return

    thread = threading.Thread(target=call)
    thread.start()
    c.rpc_sync("a", max, (1, 2))
    c.leave()
    again = agents("c")
    assert again.rpc_sync("b", whoami) == "b"
    stop.set()
    thread.join(30)
    assert failed == []
    assert b.rpc_sync("c", whoami) == "c"


def test_an_agent_that_has_left_keeps_no_exposed_method_alive(agents):
    class Server:
        def __init__(self, agent):
            self.agent = agent
            agent.expose(self.answer, name="answer")

        def answer(self):
            return 42

    server = Server(agents("server"))
    assert agents("caller").rpc_sync("server", "answer") == 42
    gone = weakref.ref(server)
    server.agent.shutdown()
    del server
    assert eventually(lambda: gc.collect() >= 0 and gone() is None)
