"""rpc.publish and rpc.call_many: encoded once, and mapped copy-on-write by each receiver."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors

ELEMENTS = 1 << 18  # of 4 bytes: 1 MB
PROGRAM = Path(__file__).parent / "programs" / "one_to_many.py"
kept: dict[str, object] = {}


def keep(name, value):
    kept[name] = value
    return sorted(value) if isinstance(value, dict) else None


def take(name):
    return kept[name]


def total_of(name, key):
    return kept[name][key].sum().item()


def fill(name, key, value):
    kept[name][key].fill_(value)


def forget():
    kept.clear()
    gc.collect()


def echo(*args, **kwargs):
    return args, kwargs


def describe(value):
    """What arrived, without sending it back."""
    return {key: (type(item).__name__, str(item)) for key, item in value.items()}


def made_here():
    kept["published"] = rpc.publish({"weights": torch.full((ELEMENTS,), 2.0), "step": 3})
    return kept["published"]


def blocks():
    """How often this process has memory of ours mapped, and how many descriptors it has."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:tensorferry" in line for line in maps)
    return mapped, len(os.listdir("/proc/self/fd"))


def mapped_privately():
    """Mappings of ours that this process copies when it writes."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:tensorferry" in line and "rw-p" in line for line in maps)


def model():
    return {"weights": torch.arange(ELEMENTS, dtype=torch.float32), "bias": torch.ones(5000), "epoch": 3}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# ---- Values


def test_a_published_value_arrives_as_the_value(cluster):
    cluster.start(1)
    parameter = torch.nn.Parameter(torch.ones(10_000))
    whole = torch.arange(20_000.0)
    given = {
        "p": parameter,
        "view": whole[:10_000],
        "whole": whole,
        "array": np.arange(5000),
        "text": "x" * 20_000,
        "empty": torch.empty(0, 3),
        "number": 5,
    }
    (got,), _ = rpc.rpc_sync("worker1", echo, args=(rpc.publish(given),))
    assert type(got["p"]) is torch.nn.Parameter and got["p"].equal(parameter)
    assert got["view"].data_ptr() == got["whole"].data_ptr()
    assert got["whole"].equal(whole)
    assert np.array_equal(got["array"], given["array"])
    assert got["text"] == given["text"]
    assert got["empty"].shape == (0, 3)
    assert got["number"] == 5


def test_each_receiver_has_its_own_value(cluster):
    cluster.start(2)
    given = model()
    published = rpc.publish(given)
    given["weights"].zero_()  # does not show
    expected = float(torch.arange(ELEMENTS, dtype=torch.float32).sum())
    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, keep, args=("first", published))
        rpc.rpc_sync(worker, keep, args=("second", published))
    rpc.rpc_sync("worker1", fill, args=("first", "weights", 0.0))
    totals = [
        rpc.rpc_sync(w, total_of, args=(n, "weights")) for w in ("worker1", "worker2") for n in ("first", "second")
    ]
    assert totals == [0.0, expected, expected, expected]
    rpc.rpc_sync("worker1", keep, args=("third", published))  # as it was, though the peer has written there
    assert rpc.rpc_sync("worker1", total_of, args=("third", "weights")) == expected
    for worker in ("worker1", "worker2"):
        assert rpc.rpc_sync(worker, mapped_privately) > 0
        rpc.rpc_sync(worker, forget)


def test_an_actor_may_fetch_the_published_value_of_its_peer(cluster):
    cluster.start(1)
    first = rpc.rpc_sync("worker1", made_here)
    second = rpc.rpc_sync("worker1", made_here)
    first["weights"].zero_()
    assert second["weights"].sum().item() == 2.0 * ELEMENTS
    assert second["step"] == 3
    rpc.rpc_sync("worker1", forget)


def test_a_call_to_the_same_agent_gives_a_copy(cluster):
    cluster.start(1)
    published = rpc.publish(torch.ones(ELEMENTS))
    for _ in range(2):
        (got,), _ = rpc.rpc_sync("main", echo, args=(published,))
        assert got.sum().item() == ELEMENTS
        got.zero_()


def test_the_same_handle_twice_in_a_message_is_one_object(cluster):
    cluster.start(1)
    published = rpc.publish({"a": torch.ones(ELEMENTS)})
    (first, others), named = rpc.rpc_sync("main", echo, args=(published, [published, 1]), kwargs={"k": published})
    assert first is others[0] is named["k"]


def test_unmappable_values_are_copied(cluster):
    cluster.start(1, shared_memory=False)
    published = rpc.publish(model())
    assert rpc.rpc_sync("worker1", keep, args=("a", published)) == ["bias", "epoch", "weights"]
    assert rpc.rpc_sync("worker1", total_of, args=("a", "bias")) == 5000
    assert rpc.rpc_sync("worker1", mapped_privately) == 0
    rpc.rpc_sync("worker1", forget)


def test_a_published_result_lands_in_out(pair):
    a, b = pair
    with torch.no_grad():
        out = torch.zeros(ELEMENTS)
        kept["published"] = b.publish(torch.ones(ELEMENTS))
        assert a.rpc_sync("b", take, args=("published",), out=out) is out
    assert out.sum().item() == ELEMENTS
    kept.clear()


def test_values_without_tensors_need_no_block(pair):
    a, _ = pair
    published = a.publish([1, "two"])
    assert published.nbytes == 0
    assert a.rpc_sync("b", echo, args=(published,)) == (([1, "two"],), {})


# ---- Unpublishable values


def test_unpublishable_values_are_refused_with_a_reason(pair):
    a, _ = pair
    board = tensorferry.empty(1000)
    with pytest.raises(errors.InvalidArgument, match="handed over already"):
        a.publish(tensorferry.share(board))
    published = a.publish(torch.ones(10))
    with pytest.raises(TypeError, match="published again"):
        a.publish([published])
    with pytest.raises(TypeError, match="reference"):
        a.publish(a.remote("b", echo))
    with pytest.raises(TypeError, match="pickled"):
        copy.deepcopy(published)
    with pytest.raises(AttributeError, match="local"):
        a.publish(lambda: 1)


# ---- Lifetimes


def test_the_block_lives_as_long_as_a_tensor_uses_it(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", keep, args=("warm", rpc.publish(torch.ones(ELEMENTS))))
    rpc.rpc_sync("worker1", forget)
    before_here, before_there = blocks(), rpc.rpc_sync("worker1", blocks)
    published = rpc.publish({"a": torch.ones(ELEMENTS)})
    rpc.rpc_sync("worker1", keep, args=("a", published))
    assert blocks() == (before_here[0] + 1, before_here[1] + 1)
    del published
    assert eventually(lambda: blocks() == before_here)
    assert rpc.rpc_sync("worker1", total_of, args=("a", "a")) == ELEMENTS
    rpc.rpc_sync("worker1", forget)
    assert eventually(lambda: rpc.rpc_sync("worker1", blocks) == before_there)


def test_receivers_keep_values_of_a_killed_publisher(cluster):
    cluster.start(1)
    got = rpc.rpc_sync("worker1", made_here)
    with pytest.raises(errors.ConnectionLost):
        rpc.rpc_sync("worker1", die)
    assert got["weights"].sum().item() == 2.0 * ELEMENTS
    got["weights"].add_(1)
    assert got["weights"].sum().item() == 3.0 * ELEMENTS


# ---- call_many


def test_call_many_gives_a_future_for_each_in_order(cluster):
    cluster.start(2)
    futures = rpc.call_many(["worker2", 1, "main"], rpc.get_worker_info)
    assert [info.name for info in tensorferry.wait_all(futures)] == ["worker2", "worker1", "main"]
    tensor = torch.ones(ELEMENTS)
    for (got, number), named in tensorferry.wait_all(
        rpc.call_many(["worker1", "worker2"], echo, args=(tensor, 5), kwargs={"key": tensor})
    ):
        assert got is named["key"]
        assert got.equal(tensor) and number == 5
        got.zero_()
    assert tensor.sum().item() == ELEMENTS


def test_call_many_fails_for_each_peer_separately(cluster):
    cluster.start(1)
    good, bad = rpc.call_many(["worker1", "nobody"], describe, args=(model(),))
    assert good.wait()["epoch"] == ("int", "3")
    with pytest.raises(errors.NotFound):
        bad.wait()
    with pytest.raises(errors.DeadlineExceeded):
        rpc.call_many(["worker1"], wait_long, timeout=0.05)[0].wait()


def wait_long():
    import time

    time.sleep(0.5)


def test_call_many_takes_unpublishable_values(cluster):
    cluster.start(2)
    reference = rpc.RRef(torch.ones(3))
    for (got,), _ in tensorferry.wait_all(rpc.call_many(["worker1", "worker2"], echo, args=(reference,))):
        assert got.to_here().sum().item() == 3
    counter = Counter()
    assert tensorferry.wait_all(rpc.call_many(["worker1", "worker2"], counter.plus, args=(2,))) == [12, 12]
    with pytest.raises(AttributeError, match="local"):
        rpc.call_many(["worker1"], echo, args=(lambda: 1,))


class Counter:
    def __init__(self):
        self.value = 10

    def plus(self, number):
        return self.value + number


# ---- Memory


def one_to_many(actors, megabytes):
    """The additional memory of all actors and the publisher, divided by the bytes of the published value."""
    program = [sys.executable, str(PROGRAM), str(actors), str(megabytes)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


def test_eight_actors_use_the_memory_of_one():
    assert one_to_many(8, 32) <= 1.2


@pytest.mark.soak
def test_sixty_four_actors_use_the_memory_of_one():
    assert one_to_many(64, 40) <= 1.2
