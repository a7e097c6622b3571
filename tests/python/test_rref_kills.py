"""References while processes are killed: the owner, a user, or the agent that passes a reference on."""

from __future__ import annotations

import collections
import gc
import itertools
import random

import pytest
import tensorferry
import tensorferry.rpc as rpc
from conftest import Cluster, eventually, join, repeated, stop_child
from tensorferry import errors

alive: collections.Counter[str] = collections.Counter()
kept: dict[str, object] = {}


class Thing:
    def __init__(self, name):
        self.name = name
        alive[name] += 1

    def __del__(self):
        alive[self.name] -= 1

    def ask(self):
        return self.name


def create(owner, name):
    kept[name] = rpc.remote(owner, Thing, (name,))


def keep(name, reference):
    kept[name] = reference


def pass_on(name, to):
    rpc.rpc_sync(to, keep, (name, kept[name]))


def drop(name):
    kept.pop(name, None)
    gc.collect()


def names_kept():
    return sorted(kept)


def names_alive():
    gc.collect()
    return sorted(name for name, count in alive.items() if count)


def use(name):
    """What the object answers, or the error's name and text."""
    try:
        return kept[name].rpc_sync(timeout=20).ask()
    except errors.Error as error:
        return type(error).__name__, str(error)


def held_by_owner():
    return {owner: count for owner, count in rpc.counters().references_held.items() if count}


def given():
    counts = rpc.counters()
    return counts.objects, counts.references_given


@pytest.fixture(autouse=True)
def nothing_is_kept():
    kept.clear()
    alive.clear()
    yield
    kept.clear()


def start(cluster):
    cluster.start(3, static=False)
    for worker in cluster.workers:
        worker.run(forget)
    return cluster


def forget():
    kept.clear()
    alive.clear()


def test_every_agent_names_a_killed_owner(cluster):
    start(cluster)
    create("worker1", "thing")
    for user in ("worker2", "worker3"):
        pass_on("thing", user)
        assert rpc.rpc_sync(user, use, ("thing",)) == "thing"
    cluster.workers[0].kill()
    for user in ("main", "worker2", "worker3"):
        name, text = rpc.rpc_sync(user, use, ("thing",))
        assert name == "ConnectionLost" and "worker1" in text
        assert rpc.rpc_sync(user, use, ("thing",))[0] == "ConnectionLost"  # at each use
    for user in ("main", "worker2", "worker3"):
        rpc.rpc_sync(user, drop, ("thing",))
        assert eventually(lambda user=user: rpc.rpc_sync(user, held_by_owner) == {})


def test_a_killed_users_objects_are_freed_and_others_are_kept(cluster):
    start(cluster)
    create("worker1", "shared")
    create("worker1", "only there")
    pass_on("shared", "worker2")
    pass_on("shared", "worker3")
    pass_on("only there", "worker2")
    drop("only there")
    assert eventually(lambda: rpc.rpc_sync("worker1", given) == (2, 4))
    assert rpc.rpc_sync("worker2", held_by_owner) == {"worker1": 2}
    cluster.workers[1].kill()
    assert eventually(lambda: rpc.rpc_sync("worker1", names_alive) == ["shared"], 30)
    assert eventually(lambda: rpc.rpc_sync("worker1", given) == (1, 2))
    assert rpc.rpc_sync("worker3", use, ("shared",)) == "shared"
    assert use("shared") == "shared"
    drop("shared")
    rpc.rpc_sync("worker3", drop, ("shared",))
    assert eventually(lambda: rpc.rpc_sync("worker1", names_alive) == [], 30)


def test_the_passer_of_a_reference_may_be_killed(cluster):
    start(cluster)
    create("worker1", "thing")
    pass_on("thing", "worker2")
    drop("thing")  # the middle one alone has it
    rpc.rpc_sync("worker2", pass_on, ("thing", "worker3"))
    assert eventually(lambda: rpc.rpc_sync("worker1", given)[1] == 2)
    cluster.workers[1].kill()
    assert eventually(lambda: rpc.rpc_sync("worker1", given) == (1, 1), 30)
    assert rpc.rpc_sync("worker3", use, ("thing",)) == "thing"
    rpc.rpc_sync("worker3", drop, ("thing",))
    assert eventually(lambda: rpc.rpc_sync("worker1", names_alive) == [], 30)


def restart(cluster, workers, number, prefix):
    [cluster.workers[number]] = workers.take(1)
    name = f"worker{number + 1}"
    cluster.workers[number].run(join, name, number + 1, None, cluster.store.port, {"prefix": prefix})
    cluster.workers[number].run(forget)


def test_a_peer_that_died_before_its_link_returns_as_a_new_incarnation(cluster, workers):
    cluster.start(2, static=False, prefix="unlinked")
    worker = cluster.workers[1]
    stop_child(worker.process.pid)  # so that it does not answer handshakes
    early = rpc.remote("worker2", Thing, ("early",))
    worker.kill()
    with pytest.raises(errors.ConnectionLost):
        early.to_here(timeout=60)
    restart(cluster, workers, 1, "unlinked")
    late = rpc.remote("worker2", Thing, ("late",))
    assert late.rpc_sync().ask() == "late"
    mine = rpc.RRef("mine")
    assert rpc.rpc_sync("worker2", read, (mine,)) == "mine"


def read(reference):
    return reference.to_here()


class Killing:
    """Creates, passes on, drops and kills at random, beside a model of the holders of each object."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.owners: dict[str, str] = {}  # by object
        self.sure: dict[str, set[str]] = {}  # agents that certainly hold it
        self.agents = ["main", "worker1", "worker2", "worker3"]

    def tell(self, agent, function, *args):
        return rpc.rpc_sync(agent, function, args, timeout=60)

    def operate(self) -> None:
        held = [(name, holder) for name, holders in self.sure.items() for holder in holders]
        kind = self.random.choice(["create", "pass", "pass", "drop"]) if held else "create"
        if kind == "create":
            name, owner, creator = f"o{next(self.numbers)}", *self.random.choices(self.agents, k=2)
            self.tell(creator, create, owner, name)
            self.owners[name], self.sure[name] = owner, {creator}
            return
        name, holder = self.random.choice(held)
        if kind == "pass":
            to = self.random.choice(self.agents)
            self.tell(holder, pass_on, name, to)
            self.sure[name].add(to)
        else:
            self.tell(holder, drop, name)
            self.sure[name].discard(holder)

    def kill_in_the_middle(self, number: int) -> str:
        """Kills while it owns, gets and passes on."""
        victim = f"worker{number + 1}"
        under_way = []
        for name, holders in self.sure.items():
            for holder in holders:
                to = self.random.choice([agent for agent in self.agents if agent != holder])
                if victim in (holder, to, self.owners[name]) or self.random.random() < 0.3:
                    under_way.append(rpc.rpc_async(holder, pass_on, (name, to), timeout=60))
        made = f"o{next(self.numbers)}"
        self.owners[made], self.sure[made] = victim, {"main"}
        under_way.append(rpc.rpc_async("main", create, (victim, made)))
        self.cluster.workers[number].kill()
        for future in under_way:
            future.exception()
        return victim

    def check(self, victim: str) -> None:
        survivors = [agent for agent in self.agents if agent != victim]
        holders = collections.defaultdict(set)
        for agent in survivors:
            for name in self.tell(agent, names_kept):
                holders[name].add(agent)
        for name, owner in self.owners.items():
            assert self.sure[name] - {victim} <= holders[name], name
            for holder in holders[name]:
                answer = self.tell(holder, use, name)
                if owner == victim:
                    assert answer[0] == "ConnectionLost" and victim in answer[1], (name, answer)
                elif holder in self.sure[name]:
                    assert answer == name, (name, holder, answer)
                else:  # it came from the dead one, perhaps before the owner knew
                    assert answer == name or answer[0] in ("ConnectionLost", "NotFound"), (name, answer)
        for agent in survivors:
            for name, holding in holders.items():
                if self.owners[name] == victim and agent in holding:
                    self.tell(agent, drop, name)
        for owner in survivors:
            # What has a holder that the owner may not have known of may be gone.
            wanted = {n for n, o in self.owners.items() if o == owner and self.sure[n] - {victim}}
            allowed = {n for n, o in self.owners.items() if o == owner and holders[n]}
            assert eventually(lambda owner=owner, allowed=allowed: set(self.tell(owner, names_alive)) <= allowed, 60), (
                owner,
                self.tell(owner, names_alive),
                allowed,
            )
            assert wanted <= set(self.tell(owner, names_alive))

    def let_go(self, victim: str) -> None:
        """All agents drop all references, and all objects are freed."""
        survivors = [agent for agent in self.agents if agent != victim]

        def nothing_is_kept():
            """Includes references that the dead agent passed on and that may just have been unpacked."""
            left = [(agent, name) for agent in survivors for name in self.tell(agent, names_kept)]
            for agent, name in left:
                self.tell(agent, drop, name)
            return not left

        assert eventually(nothing_is_kept)
        for agent in survivors:
            gone = eventually(lambda agent=agent: self.tell(agent, names_alive) == [], 60)
            assert gone, (agent, self.tell(agent, names_alive), self.tell(agent, given), self.tell(agent, rpc.counters))
            assert eventually(lambda agent=agent: self.tell(agent, given) == (0, 0), 60), agent
            assert eventually(lambda agent=agent: self.tell(agent, held_by_owner) == {}, 60), agent
        self.owners.clear()
        self.sure.clear()

    prefix = "kills"

    def run(self, rounds: int, workers) -> None:
        for round_ in range(rounds):
            for _ in range(15):
                self.operate()
            number = round_ % 3
            victim = self.kill_in_the_middle(number)
            self.check(victim)
            self.let_go(victim)
            restart(self.cluster, workers, number, self.prefix)


@repeated(50)
def test_nothing_leaks_and_nothing_is_freed_early_when_processes_are_killed(cluster, workers, times):
    cluster.start(3, static=False, prefix=Killing.prefix)
    for worker in cluster.workers:
        worker.run(forget)
    Killing(cluster, seed=times).run(times, workers)


def test_references_are_counted_by_their_owner(pair):
    a, b = pair
    things = [a.remote("b", Thing, (str(i),)) for i in range(5)]
    for thing in things:
        thing.to_here()
    assert a.counters().references_held == {"b": 5}
    assert eventually(lambda: (b.counters().objects, b.counters().references_given) == (5, 5))
    del thing, things[1:]
    gc.collect()
    assert eventually(lambda: (b.counters().objects, b.counters().references_given) == (1, 1))
    assert a.counters().references_held == {"b": 1}
    assert tensorferry.Counters(0, 0, 0).references_held == {}
