"""Agents that meet by their addresses alone, without a store in common."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from emulated_network import outputs_on_two_hosts
from tensorferry import errors
from tensorferry.standalone import StandaloneAgent


@pytest.fixture
def two() -> Iterator[tuple[StandaloneAgent, StandaloneAgent]]:
    owner, reader = StandaloneAgent("owner"), StandaloneAgent("reader")
    yield owner, reader
    reader.leave()
    owner.leave()


def test_one_address_is_enough_for_reads_and_calls(two) -> None:
    owner, reader = two
    owner.agent.region(torch.arange(4.0), name="kv")
    owner.agent.expose(max, name="largest")
    name, incarnation = reader.introduce(owner.address)
    assert (name, incarnation) == ("owner", owner.incarnation)
    assert reader.agent.find_region(name, "kv").read().sum() == 6
    assert reader.agent.rpc_sync(name, "largest", args=(1, 2)) == 2


def test_peers_call_only_what_is_exposed(two) -> None:
    owner, reader = two
    name, _ = reader.introduce(owner.address)
    with pytest.raises(errors.PermissionDenied, match="expose"):
        reader.agent.rpc_sync(name, max, args=(1, 2))


def test_an_introduction_may_be_repeated_and_undone(two) -> None:
    owner, reader = two
    for _ in range(3):
        name, _ = reader.introduce(owner.address)
    reader.forget(name)
    name, _ = reader.introduce(owner.address)
    owner.agent.region(torch.ones(3), name="ones")
    assert reader.agent.find_region(name, "ones").read().sum() == 3
    assert owner.introduce(owner.address) == ("owner", owner.incarnation)  # to itself
    assert owner.agent.find_region("owner", "ones").read().sum() == 3


@pytest.mark.parametrize("address", [b"", b"{}", b'{"tensorferry":"address","version":1,"name":"x"}', b"\xff"])
def test_other_bytes_are_refused(two, address: bytes) -> None:
    with pytest.raises(errors.InvalidArgument, match="this is no address"):
        two[1].introduce(address)


def own(pipe: Connection) -> None:
    owner = StandaloneAgent("killed")
    owner.agent.region(torch.ones(2), name="kv")
    pipe.send(owner.address)
    pipe.recv()


def test_a_peer_that_died_before_the_first_use_is_reported(two) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=own, args=(there,))
    process.start()
    address = here.recv()
    process.kill()
    process.join()
    name, _ = two[1].introduce(address)
    with pytest.raises(errors.ConnectionLost, match="killed"):
        two[1].agent.find_region(name, "kv", timeout=30)


ON_A_HOST = """
import itertools, pathlib, sys, time, torch
from tensorferry.standalone import StandaloneAgent

folder, me, other = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def tell(what, data=b""):
    (folder / f"{me}.part").write_bytes(data)
    (folder / f"{me}.part").rename(folder / f"{me}.{what}")

def hear(what):
    while not (folder / f"{other}.{what}").exists():
        time.sleep(0.01)
    return (folder / f"{other}.{what}").read_bytes()

here = StandaloneAgent(f"agent-{me}")
if me == "trainer":
    weights = torch.ones(1 << 20)
    publication = here.agent.publish({"w": weights}, name="policy")
    tell("address", here.address)
    name, _ = here.introduce(hear("address"))
    for first in range(2, 7):
        weights[0] = first
        publication.update({"w": weights})
        print(*here.agent.rpc_sync(name, "load"))
    tell("done")
else:
    mine = {"w": torch.zeros(1 << 20)}
    name, _ = here.introduce(hear("address"))
    subscription = here.agent.subscribe("policy", from_=name)
    loader = subscription.into(mine)
    loader.load()
    fetched = [subscription.fetched]

    def load():
        loader.load()
        fetched.append(subscription.fetched)
        return mine["w"][:2].int().tolist()

    here.agent.expose(load)
    tell("address", here.address)
    hear("done")
    print(fetched[0] >= 4 << 20, [after - before for before, after in itertools.pairwise(fetched)])
here.leave()
"""


def test_between_hosts_the_environment_has_the_key_and_the_interface(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key of the job's own")
    (tmp_path / "key").chmod(0o600)
    environment = {"TENSORFERRY_KEY_FILE": str(tmp_path / "key"), "TENSORFERRY_SOCKET_IFNAME": "eth0"}
    printed = outputs_on_two_hosts(tmp_path, ON_A_HOST, "trainer", "sampler", **environment)
    assert printed == ["2 1\n3 1\n4 1\n5 1\n6 1\n", f"True {[64 << 10] * 5}\n"]
