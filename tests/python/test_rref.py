"""Remote references: used from every agent, and freed with the last hold, never earlier."""

from __future__ import annotations

import collections
import gc
import pickle
import threading
import time

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors

alive: collections.Counter[str] = collections.Counter()
kept: list[object] = []
gates: dict[str, threading.Event] = collections.defaultdict(threading.Event)


class Thing:
    def __init__(self, name, value=0):
        self.name = name
        self.value = value
        alive[name] += 1

    def __del__(self):
        alive[self.name] -= 1

    def __reduce__(self):  # copies count too
        return Thing, (self.name, self.value)

    def add(self, n=1):
        self.value += n
        return self.value

    def itself(self):
        return rpc.RRef(self)

    def fail(self):
        raise LookupError("no such page")

    @rpc.functions.async_execution
    def later(self, value):
        future = torch.futures.Future()
        future.set_result((self.value, value))
        return future


class Opaque:
    """Cannot be copied; a reference to it can."""

    def __reduce__(self):
        raise TypeError("stays where it is")

    def ask(self):
        return "answer"


def freed(name):
    gc.collect()
    return alive[name] == 0


def make(name):
    return rpc.RRef(Thing(name, 7))


def broken():
    raise OSError("disk full")


def slow_thing(name, seconds):
    time.sleep(seconds)
    return Thing(name)


def gated_thing(name):
    """Made when the test opens its gate."""
    assert gates[name].wait(60)
    return Thing(name)


def keep(reference):
    kept.append(reference)


def use_kept():
    return kept[0].rpc_sync().add(1)


def drop():
    kept.clear()


def value_of(reference):
    return (reference.local_value() if reference.is_owner() else reference.to_here()).value


def add_through(reference, n):
    return reference.rpc_sync().add(n)


def pass_on(reference, path):
    """Through all agents of ``path``; the last one keeps it."""
    if not path:
        kept.append(reference)
        return reference.owner_name()
    return rpc.rpc_sync(path[0], pass_on, (reference, path[1:]))


@pytest.fixture(autouse=True)
def nothing_is_kept():
    yield
    kept.clear()


@pytest.fixture
def three(agents):
    return agents("a", rank=0), agents("b", rank=1), agents("c", rank=2)


def test_remote_makes_an_object_that_stays(pair):
    a, _ = pair
    thing = a.remote("b", Thing, ("stays",), kwargs={"value": 3})
    assert isinstance(thing, rpc.RRef)
    assert thing.owner() == rpc.WorkerInfo("b", 1)
    assert thing.owner_name() == "b"
    assert not thing.is_owner()
    assert thing.to_here().value == 3
    assert thing.rpc_sync().add(2) == 5
    assert thing.rpc_async().add(2).wait() == 7
    assert thing.remote().add(n=3).to_here() == 10
    assert thing.rpc_sync(timeout=5).add() == 11
    assert thing.to_here().value == 11
    assert eventually(thing.confirmed_by_owner)
    assert "b" in repr(thing)
    assert thing._get_type() is Thing


def test_methods_are_called_without_another_lookup(pair):
    a, _ = pair
    thing = a.remote("b", Thing, ("once",))
    add = thing.rpc_sync().add
    assert add() == 1
    before = a.counters().calls_sent
    assert [add(), add(), thing.rpc_sync().add()] == [2, 3, 4]
    assert a.counters().calls_sent == before + 3


class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def script_module():
    return torch.jit.script(Double())


def test_scripted_modules_arrive_as_copies(pair):
    a, _ = pair
    module = a.remote("b", script_module)
    assert module.rpc_sync().forward(torch.ones(1)).item() == 2
    copy = module.to_here()
    assert isinstance(copy, torch.jit.ScriptModule)
    assert copy(torch.full((1,), 2.0)).item() == 4
    came = a.rpc_sync("b", list, ([copy, "beside"],))
    assert came[0](torch.ones(1)).item() == 2 and came[1] == "beside"


def test_methods_may_use_async_execution(pair):
    thing = pair[0].remote("b", Thing, ("async", 1))
    assert thing.rpc_sync().later("x") == (1, "x")


def test_references_may_refer_to_unpicklable_objects(pair):
    opaque = pair[0].remote("b", Opaque)
    assert opaque.rpc_sync().ask() == "answer"
    with pytest.raises(TypeError, match="stays where it is"):
        opaque.to_here()


def test_a_local_object_can_have_a_reference(pair):
    _, b = pair
    reference = b.rpc_sync("b", make, ("own",))
    assert reference.is_owner()
    assert reference.confirmed_by_owner()
    assert reference.local_value() is reference.to_here()
    assert reference.rpc_sync().add(1) == 8
    assert reference.local_value().value == 8


def test_remote_works_at_the_same_agent(pair):
    a, _ = pair
    thing = a.remote("a", Thing, ("self", 1))
    assert thing.is_owner()
    assert thing.to_here().value == 1
    assert thing.rpc_sync().add(1) == 2
    assert thing.local_value().value == 2
    del thing
    assert eventually(lambda: freed("self"))


def test_local_value_at_another_agent_is_an_error_with_advice(pair):
    thing = pair[0].remote("b", Thing, ("elsewhere",))
    with pytest.raises(errors.InvalidArgument, match="to_here"):
        thing.local_value()


def test_results_may_hold_references(pair):
    a, _ = pair
    thing = a.rpc_sync("b", make, ("made",))
    assert thing.owner_name() == "b"
    assert thing.to_here().value == 7
    assert thing.rpc_sync().itself().rpc_sync().add(1) == 8


def test_a_reference_can_be_used_during_the_creation(pair):
    a, _ = pair
    thing = a.remote("b", slow_thing, ("slow", 0.3))
    sums = [thing.rpc_async().add(1) for _ in range(5)]
    assert sorted(tensorferry.wait_all(sums)) == [1, 2, 3, 4, 5]
    assert thing.to_here().value == 5


def test_a_reference_can_be_passed_to_third_parties(three):
    a, _, _ = three
    thing = a.remote("b", Thing, ("third", 5))
    assert a.rpc_sync("c", value_of, (thing,)) == 5
    assert a.rpc_sync("b", value_of, (thing,)) == 5  # home to its owner
    assert a.rpc_sync("a", value_of, (thing,)) == 5
    assert a.rpc_sync("c", add_through, (thing, 4)) == 9
    assert a.rpc_sync("c", len, ({"in": [thing, thing]},)) == 1


def test_a_reference_can_be_passed_on_during_the_creation(three):
    a, _, _ = three
    thing = a.remote("b", slow_thing, ("early", 0.3))
    assert a.rpc_sync("c", value_of, (thing,)) == 0


def test_an_object_is_freed_with_its_last_reference(three):
    a, _, _ = three
    thing = a.remote("b", Thing, ("last",))
    a.rpc_sync("c", keep, (thing,))
    assert thing.rpc_sync().add(1) == 1
    del thing
    for uses in range(20):  # the other reference is good after a has let go of its own
        assert a.rpc_sync("c", use_kept) == uses + 2
        assert not freed("last")
    a.rpc_sync("c", drop)
    assert eventually(lambda: freed("last"))


def test_a_reference_can_be_dropped_at_once(pair):
    pair[0].remote("b", Thing, ("dropped",))
    assert eventually(lambda: alive["dropped"] in (0, 1))
    assert eventually(lambda: freed("dropped"))


def test_an_object_is_kept_while_its_reference_travels(three):
    a, _, _ = three
    thing = a.remote("b", Thing, ("round",))
    assert a.rpc_sync("c", pass_on, (thing, ["a", "b", "c", "a", "c"])) == "b"
    del thing
    gc.collect()
    for agent in three:  # what their counts have sent before has come
        for peer in "abc":
            agent.rpc_sync(peer, gc.collect)
    assert not freed("round")
    assert kept[0].rpc_sync().add(2) == 2
    drop()
    assert eventually(lambda: freed("round"))


def test_an_object_is_freed_after_its_message_failed(three):
    a, _, _ = three
    thing = a.remote("b", Thing, ("carried",))
    with pytest.raises(errors.NotFound):
        a.rpc_sync("nobody", keep, (thing,), timeout=5)
    with pytest.raises(Exception, match="pickle"):
        a.rpc_sync("c", keep, (thing, lambda: 1))
    with pytest.raises(TypeError):
        a.rpc_sync("c", keep, (thing, 1))  # the function takes one
    del thing
    assert eventually(lambda: freed("carried"))


def test_an_exception_of_the_creation_is_raised_at_each_use(pair):
    a, _ = pair
    thing = a.remote("b", broken)
    for _ in range(2):
        with pytest.raises(OSError, match="disk full") as caught:
            thing.to_here()
        assert '"b"' in str(caught.value.__cause__)
        with pytest.raises(OSError, match="disk full"):
            thing.rpc_sync().anything()


def test_an_exception_of_a_method_is_raised_at_the_caller(pair):
    thing = pair[0].remote("b", Thing, ("raises",))
    with pytest.raises(LookupError, match="no such page"):
        thing.rpc_sync().fail()
    with pytest.raises(AttributeError, match="nothing_like_it"):
        thing.rpc_sync().nothing_like_it()
    assert thing.rpc_sync().add(1) == 1


def test_uses_of_a_reference_end_at_their_timeout(pair):
    thing = pair[0].remote("b", gated_thing, ("late",))
    with pytest.raises(errors.DeadlineExceeded):
        thing.to_here(timeout=0.1)
    gates["late"].set()
    assert thing.to_here().value == 0  # it was only slow


def test_a_creation_that_replies_too_late_is_undone(pair):
    thing = pair[0].remote("b", gated_thing, ("never",), timeout=0.1)
    with pytest.raises(errors.DeadlineExceeded, match="gated_thing"):
        thing.to_here(timeout=0)  # ends with the creation, although the function runs on
    with pytest.raises(errors.DeadlineExceeded):
        thing.rpc_sync().add(1)
    with pytest.raises(errors.DeadlineExceeded):
        pair[0].rpc_sync("b", value_of, (thing,))
    del thing
    gates["never"].set()
    assert eventually(lambda: "never" in alive and freed("never"))


def test_plain_pickle_is_refused(pair):
    with pytest.raises(TypeError, match="call"):
        pickle.dumps(pair[0].remote("b", Thing, ("pickle",)))


def test_rref_has_a_generic_alias():
    assert rpc.RRef[int].__origin__ is rpc.RRef


def test_references_refer_to_tensors(pair):
    a, _ = pair
    tensor = a.remote("b", torch.arange, (10,))
    assert torch.equal(tensor.to_here(), torch.arange(10))
    assert tensor.rpc_sync().sum().item() == 45
    assert torch.equal(tensor.remote().mul(2).to_here(), torch.arange(10) * 2)


def test_many_references_leak_nothing(three):
    a, _, _ = three
    things = [a.remote("b", Thing, ("many", i)) for i in range(200)]
    assert tensorferry.wait_all([a.rpc_async("c", value_of, (thing,)) for thing in things]) == list(range(200))
    del things
    assert eventually(lambda: freed("many"), 30)


def test_a_dead_owner_is_named(cluster):
    cluster.start(1)
    thing = rpc.remote("worker1", Thing, ("dies",))
    assert thing.rpc_sync().add(1) == 1
    cluster.workers[0].kill()
    with pytest.raises(errors.ConnectionLost, match="worker1"):
        thing.to_here(timeout=10)
    with pytest.raises(errors.ConnectionLost, match="worker1"):
        thing.rpc_sync(timeout=10).add(1)


def test_objects_held_by_a_dead_user_are_freed(cluster):
    cluster.start(1)
    thing = rpc.RRef(Thing("orphan"))
    rpc.rpc_sync("worker1", keep, (thing,))
    del thing
    rpc.rpc_sync("worker1", gc.collect)  # what the references have sent before has come
    assert not freed("orphan")
    cluster.workers[0].kill()
    assert eventually(lambda: freed("orphan"))
