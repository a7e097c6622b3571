"""Published versions: subscribers, loaders, deltas and endings, between real processes."""

from __future__ import annotations

import gc
import threading

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors

kept: dict[str, object] = {}


def begin(name="policy", size=100_000, **options):
    kept["state"] = {"w": torch.ones(size), "b": torch.ones(3, dtype=torch.int64), "none": torch.ones(0)}
    kept[name] = rpc.publish(kept["state"], name=name, **options)


def change(value, rows=None, name="policy"):
    state = kept["state"]
    state["w"][:rows].fill_(value)
    return kept[name].update(state, timeout=60)


def leases(name="policy"):
    return kept[name].leases


def hold(name="policy"):
    kept["subscription"] = rpc.subscribe(name, from_="main")
    kept["version"] = kept["subscription"].latest()
    return kept["version"].version


def test_a_version_stays_as_it_is_while_the_publisher_goes_on(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", begin, kwargs={"checksums": True})
    policy = rpc.subscribe("policy", from_="worker1")
    assert policy.carried == "mapped"
    first = policy.latest()
    assert (first.version, sorted(first), first["w"].sum()) == (1, ["b", "none", "w"], 100_000)
    assert first["b"].dtype == torch.int64 and first["none"].shape == (0,) and first.checksum != 0
    for value in range(2, 6):
        waiting = rpc.rpc_async("worker1", change, args=(value,))
        newer = policy.wait(newer_than=value - 1, timeout=60)
        assert waiting.wait() == newer.version == value
        assert torch.equal(newer["w"], torch.full((100_000,), float(value)))
        assert torch.equal(first["w"], torch.ones(100_000))
    tensor = policy.latest()["w"]
    del newer
    gc.collect()
    rpc.rpc_sync("worker1", change, args=(6,))
    assert tensor[0] == 5, "a tensor keeps its version"


def test_a_loader_casts_slices_and_copies_what_changed(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", begin)
    policy = rpc.subscribe("policy", from_="worker1")
    mine = {
        "w": torch.zeros(100_000),
        "shard": torch.zeros(10, dtype=torch.float64),
        "b": torch.zeros(3, dtype=torch.int64),
    }
    loader = policy.into(mine, map={"shard": ("w", slice(20_000, 20_010))})
    assert loader.load() == 1
    assert mine["w"].sum() == 100_000 and mine["shard"].sum() == 10 and mine["b"].sum() == 3
    mine["w"][-1] = 77  # a load copies changed blocks alone, so this stays
    rpc.rpc_sync("worker1", change, args=(2, 20_005))
    assert loader.wait(timeout=60) == 2
    assert mine["w"][:20_005].eq(2).all() and mine["w"][-1] == 77
    assert mine["shard"].tolist() == [2.0] * 5 + [1.0] * 5
    assert loader.load() == 2
    with pytest.raises(errors.InvalidArgument, match="no tensor 'x'"):
        policy.into({"x": torch.zeros(1)}).load()
    with pytest.raises(errors.InvalidArgument, match="shape"):
        policy.into({"w": torch.zeros(1)}).load()
    with pytest.raises(errors.InvalidArgument, match="map= names"):
        policy.into({"w": torch.zeros(1)}, map={"y": "w"})


@pytest.mark.parametrize("index", [[3, 1], (slice(None), [1, 0]), torch.tensor([2, 2]), (torch.tensor([0]), slice(1))])
def test_a_loader_follows_an_index_that_makes_a_copy(agents, index):
    a, b = agents("a"), agents("b")
    state = {"w": torch.arange(12.0).view(4, 3)}
    publication = a.publish(state, name="policy")
    mine = {"w": torch.zeros_like(state["w"][index])}
    loader = b.subscribe("policy", from_="a").into(mine, map={"w": ("w", index)})
    for version in range(1, 6):
        assert loader.load() == version
        assert torch.equal(mine["w"], state["w"][index])
        state["w"].mul_(-2)
        publication.update(state)


def test_conjugates_and_negatives_are_published_and_loaded_by_their_values(agents):
    a, b = agents("a"), agents("b")
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugate": numbers.conj(), "negative": numbers.conj().imag, "plain": numbers, "real": numbers.imag}
    assert state["conjugate"].is_conj() and state["negative"].is_neg()
    a.publish(state, name="policy")
    zeros = torch.zeros(2, dtype=torch.complex64)
    mine = {
        "conjugate": zeros.clone(),
        "negative": torch.zeros(2),
        "plain": zeros.clone().conj(),
        "real": zeros.clone().conj().imag,
    }
    assert mine["plain"].is_conj() and mine["real"].is_neg()
    subscription = b.subscribe("policy", from_="a")
    assert subscription.into(mine).load() == 1
    version = subscription.latest()
    for name, tensor in state.items():
        assert torch.equal(version[name], tensor)
        assert torch.equal(mine[name], tensor)


def test_a_module_publishes_and_loads_its_state(agents):
    a, b = agents("a"), agents("b")
    source, target = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    publication = a.publish(source, name="linear")
    assert publication.version == 1
    b.subscribe("linear", from_="a").into(target).load()
    assert torch.equal(source.weight, target.weight) and torch.equal(source.bias, target.bias)


def test_over_a_socket_only_changed_blocks_travel(cluster):
    cluster.start(1, shared_memory=False)
    rpc.rpc_sync("worker1", begin, kwargs={"size": 1 << 20, "block": 4096, "checksums": True})
    policy = rpc.subscribe("policy", from_="worker1")
    assert policy.latest().version == 1
    assert policy.carried == "copied"
    whole = policy.fetched
    for value in range(2, 9):
        rpc.rpc_sync("worker1", change, args=(value, 10))
        assert policy.latest()["w"].sum() == 10 * value + (1 << 20) - 10
    assert policy.fetched - whole == 7 * 4096, "a block of each version, from the second on"


ROWS = {
    "all": (..., range(500)),
    "slice": (slice(3, 5), [3, 4]),
    "steps": (slice(20, 30, 4), range(20, 29)),  # with what lies between
    "backwards": (slice(None, -3, -1), [498, 499]),
    "indices": ([7, -1, 7], [7, 499]),
    "tensor": (torch.tensor([[2], [9]], dtype=torch.int32), [2, 9]),
    "mask": (torch.arange(500) == 11, [11]),
    "one": (12, [12]),
    "none": ([], []),
    "no slice": (slice(5, 5), []),
}


@pytest.mark.parametrize("rows", ROWS)
def test_an_update_of_rows_leaves_the_others(pair, rows):
    given, picked = ROWS[rows]
    state = {"w": torch.ones(500, 1024), "b": torch.ones(3), "scalar": torch.tensor(1.0)}  # a row of w is a block
    policy = pair[0].publish(state, name="rows", block=4096, checksums=True)
    mine = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    loader = pair[1].subscribe("rows", from_="a").into(mine)
    loader.load()
    for value in range(2, 6):  # more than there are images
        state["w"].fill_(value)
        assert policy.update({"w": state["w"]}, changed={"w": given}) == loader.load() == value
        expected = torch.ones(500, 1024)
        expected[list(picked)] = value
        assert torch.equal(mine["w"], expected)
    state["scalar"].fill_(7)
    policy.update(state, changed=["scalar"])
    loader.load()
    assert (mine["scalar"], mine["w"].sum()) == (7, expected.sum())
    policy.update(state)
    loader.load()
    assert all(torch.equal(mine[name], tensor) for name, tensor in state.items())


def test_an_update_of_what_is_not_there_is_refused(pair):
    state = {"w": torch.ones(5, 3), "b": torch.ones(3)}
    policy = pair[0].publish(state, name="rows")
    for changed, said in (
        ({"w": [5]}, "5 rows"),
        ({"w": -6}, "5 rows"),
        ({"w": True}, "mask"),
        ({"w": torch.ones(5, 3, dtype=torch.bool)}, "mask"),
        ({"w": torch.ones(5, dtype=torch.uint8)}, "mask"),
        ({"w": [0.5]}, "indices"),
        (["bias"], "bias"),
        (["w", "b"], "w"),
    ):
        with pytest.raises(errors.InvalidArgument, match=said):
            policy.update(state if said != "w" else {"b": state["b"]}, changed=changed)
    assert policy.version == 1


def test_readers_that_hold_all_versions_are_named(agents):
    a, b = agents("a"), agents("b")
    state = {"w": torch.zeros(10)}
    publication = a.publish(state, name="policy", kept=2)
    policy = b.subscribe("policy", from_="a")
    held = policy.latest()
    publication.update(state)
    with pytest.raises(errors.ResourceExhausted, match='all 2 images of the publication are read, by "b"'):
        publication.update(state, timeout=0.05)
    freeing = threading.Timer(0.1, lambda: kept.clear())
    kept["held"] = held
    del held
    freeing.start()
    assert publication.update(state, timeout=60) == 3
    freeing.join()


def test_other_tensors_and_a_second_publication_of_a_name_are_refused(agents):
    a, b = agents("a"), agents("b")
    publication = a.publish({"w": torch.zeros(2)}, name="policy")
    for other in ({"w": torch.zeros(3)}, {"v": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.int32)}):
        with pytest.raises(errors.InvalidArgument, match="other tensors than before"):
            publication.update(other)
    with pytest.raises(errors.InvalidArgument, match='publishes "policy" already'):
        a.publish({"w": torch.zeros(2)}, name="policy")
    with pytest.raises(errors.InvalidArgument, match="power of two"):
        a.publish({"w": torch.zeros(2)}, name="other", block=5000)
    policy = b.subscribe("policy", from_="a")
    publication.withdraw()
    with pytest.raises(errors.NotFound):
        policy.latest()
    with pytest.raises(errors.NotFound, match='publishes no "policy"'):
        a.subscribe("policy", from_="b")
    a.publish({"w": torch.ones(5)}, name="policy")
    assert b.subscribe("policy", from_="a").latest()["w"].sum() == 5


def test_a_killed_subscriber_leaves_no_lease(cluster):
    cluster.start(1, static=False)
    begin()
    assert cluster.workers[0].run(hold) == 1
    assert leases() == 1
    cluster.workers[0].kill()
    assert eventually(lambda: leases() == 0)
    assert change(3) == 2
    kept.pop("policy").withdraw()


def test_a_killed_publisher_is_an_error_and_what_is_held_stays(cluster):
    cluster.start(1, static=False)
    rpc.rpc_sync("worker1", begin)
    policy = rpc.subscribe("policy", from_="worker1")
    held = policy.latest()
    killing = threading.Timer(0.1, cluster.workers[0].kill)
    killing.start()
    with pytest.raises(errors.ConnectionLost, match="worker1"):
        policy.wait(newer_than=1, timeout=60)
    killing.join()
    assert held["w"].sum() == 100_000


def test_a_graceful_shutdown_waits_for_no_subscriber(agents):
    a, b = agents("a"), agents("b")
    a.publish({"w": torch.zeros(2)}, name="policy")
    held = b.subscribe("policy", from_="a").latest()
    b.shutdown(timeout=60)
    a.shutdown(timeout=60)
    assert held["w"].sum() == 0
    with pytest.raises(errors.AgentClosed):
        tensorferry.regions.service_of(b).subscribe("a", "policy", 5.0)
