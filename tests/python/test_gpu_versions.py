"""Versions whose tensors stay on a GPU: what is compared and copied, and, on a GPU, between two processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors
from tensorferry.gpu_versions import changed_blocks, most_spans, on_one_gpu, spans_of

kept: dict[str, Any] = {}


def test_blocks_are_compared_bit_by_bit():
    base = torch.zeros(5 * 4096, dtype=torch.uint8)
    assert changed_blocks(base, None, 4096).tolist() == [1] * 5
    assert changed_blocks(base.clone(), base, 4096).tolist() == [0] * 5
    for at in (0, 4095, 4096, 3 * 4096 + 7, 5 * 4096 - 1):
        image = base.clone()
        image[at] = 1
        assert changed_blocks(image, base, 4096).tolist() == [int(at // 4096 == block) for block in range(5)]
    nan = torch.full((1024,), float("nan")).view(torch.uint8)
    assert changed_blocks(nan.clone(), nan, 4096).tolist() == [0]


@pytest.mark.parametrize("block", [4096, 65536])
def test_the_spans_of_a_tensor_are_what_of_the_ranges_lies_in_it(block):
    begin, nbytes = 3 * 65536 + 64, 5 * 65536 - 192
    assert spans_of(None, begin, nbytes) == [(0, nbytes)]
    assert spans_of([], begin, nbytes) == []
    ranges = [(0, block), (3 * 65536, block), (5 * 65536, block), (8 * 65536 - block, 2 * block)]
    spans = spans_of(ranges, begin, nbytes)
    assert spans == [(0, block - 64), (2 * 65536 - 64, 2 * 65536 - 64 + block), (5 * 65536 - 64 - block, nbytes)]
    many = [(begin + 2 * block * each, block) for each in range(most_spans + 1)]
    assert spans_of(many, begin, 1 << 30) == [(0, (2 * most_spans + 1) * block)]


def test_tensors_of_the_host_stay_there(agents):
    a, b = agents("a"), agents("b")
    state = {"w": torch.ones(10)}
    assert on_one_gpu(state) == []
    publication = a.publish(state, name="host", on_gpu=True, checksums=True)
    mine = {"w": torch.zeros(10)}
    loader = b.subscribe("host", from_="a").into(mine)
    assert loader.load() == 1 and loader.carried == "mapped" and mine["w"].sum() == 10
    state["w"].fill_(2)
    assert publication.update(state) == 2
    assert loader.load() == 2 and mine["w"].sum() == 20


def begin(name, on_gpu=True, **options):
    state = {
        "w": torch.ones(3 << 20, device="cuda"),
        "half": torch.ones(1000, 7, device="cuda", dtype=torch.bfloat16).t(),
        "flags": torch.ones(5, device="cuda", dtype=torch.bool),
        "step": torch.ones((), device="cuda", dtype=torch.int64),
        "host": torch.ones(100),
        "none": torch.ones(0, device="cuda"),
    }
    kept[name] = state, rpc.publish(state, name=name, on_gpu=on_gpu, **options)


def change(name, value, rows=None):
    state, publication = kept[name]
    for each in state.values():
        (each[:rows] if rows is not None and each.dim() else each).fill_(value)
    return publication.update(state, timeout=60)


def leases(name):
    return kept[name][1].leases


def withdraw(name):
    kept[name][1].withdraw()


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def mine():
    return {
        "w": torch.zeros(3 << 20, device="cuda"),
        "shard": torch.zeros(100, device="cuda"),
        "cast": torch.zeros(7, 1000, device="cuda"),
        "flags": torch.zeros(5, device="cuda", dtype=torch.bool),
        "step": torch.zeros((), dtype=torch.int64),
        "host": torch.zeros(100, device="cuda"),
        "none": torch.zeros(0, device="cuda"),
    }


parts = {"shard": ("w", slice(2_000_000, 2_000_100)), "cast": "half"}


@pytest.mark.gpu
def test_versions_go_from_gpu_to_gpu(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", begin, args=("policy",))
    target = mine()
    subscription = rpc.subscribe("policy", from_="worker1")
    loader = subscription.into(target, map=parts)
    assert loader.load() == 1
    assert loader.carried == "gpu to gpu"
    assert all(each.eq(1).all() for each in target.values())
    for value in range(2, 12):
        assert rpc.rpc_sync("worker1", change, args=("policy", value)) == value
        assert loader.wait(timeout=60) == value
        assert all(each.eq(value).all() for name, each in target.items() if name != "flags")
    version = subscription.latest()
    assert version["w"].is_cpu and version["w"].eq(11).all() and version["half"].shape == (7, 1000)
    assert version["half"].eq(11).all() and version["step"] == 11


@pytest.mark.gpu
def test_only_blocks_that_changed_go_from_gpu_to_gpu(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", begin, args=("policy",), kwargs={"block": 4096})
    target = mine()
    loader = rpc.subscribe("policy", from_="worker1").into(target, map=parts)
    loader.load()
    target["w"][-1] = 77  # a load copies changed blocks alone, so this stays
    assert rpc.rpc_sync("worker1", change, args=("policy", 5, 1_000)) == 2
    assert loader.wait(timeout=60) == 2
    assert target["w"][:1_000].eq(5).all()
    assert target["w"][1_000:-1].eq(1).all()
    assert target["w"][-1] == 77
    assert target["shard"].eq(1).all()
    assert rpc.rpc_sync("worker1", change, args=("policy", 6, 2_000_050)) == 3
    assert loader.wait(timeout=60) == 3
    assert target["w"][:2_000_050].eq(6).all() and target["w"][2_000_050:-1].eq(1).all()
    assert target["w"][-1] == 1, "more than half of the tensor has changed, so all of it is copied"
    assert target["shard"].tolist() == [6.0] * 50 + [1.0] * 50


@pytest.mark.gpu
def test_a_killed_publisher_is_an_error_and_the_next_load_brings_all(cluster):
    cluster.start(1, static=False)
    rpc.rpc_sync("worker1", begin, args=("policy",))
    target = mine()
    loader = rpc.subscribe("policy", from_="worker1").into(target, map=parts)
    assert loader.load() == 1
    rpc.rpc_async("worker1", end)
    with pytest.raises(errors.ConnectionLost, match="worker1"):
        loader.wait(timeout=60)
    assert target["w"].eq(1).all(), "the reader goes on"
    begin("policy")
    other = rpc.subscribe("policy", from_="main").into(target, map=parts)
    change("policy", 3)
    assert other.load() == 2 and other.carried == "gpu to gpu"
    assert target["w"].eq(3).all() and target["shard"].eq(3).all()
    kept.pop("policy")[1].withdraw()


def load_and_hold(name):
    target = mine()
    kept["held"] = rpc.subscribe(name, from_="main")._source.newest(None, 60.0, True), target
    return kept["held"][0].region is not None


@pytest.mark.gpu
def test_a_killed_reader_harms_nobody(cluster):
    cluster.start(1, static=False)
    begin("policy")
    assert cluster.workers[0].run(load_and_hold, "policy")
    assert leases("policy") == 1
    target = mine()
    loader = rpc.subscribe("policy", from_="main").into(target, map=parts)
    assert loader.load() == 1
    cluster.workers[0].kill()
    assert eventually(lambda: leases("policy") == 0)
    for value in range(2, 7):
        assert change("policy", value) == value
        assert loader.load() == value
        assert target["w"].eq(value).all()
    kept.pop("policy")[1].withdraw()


@pytest.mark.gpu
def test_a_withdrawn_publication_and_wrong_options_fail_by_name(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", begin, args=("policy",))
    loader = rpc.subscribe("policy", from_="worker1").into(mine(), map=parts)
    assert loader.load() == 1
    rpc.rpc_sync("worker1", withdraw, args=("policy",))
    with pytest.raises(errors.NotFound, match="policy"):
        loader.load()
    with pytest.raises(errors.InvalidArgument, match="checksums"):
        rpc.publish({"w": torch.ones(4, device="cuda")}, name="sums", on_gpu=True, checksums=True)


def publish_two(name, device):
    """Publishes two tensors of one block each: the first is on the device, the second on the GPU."""
    if name in kept:
        kept.pop(name)[1].withdraw()
    state = {"a": torch.full((16384,), 1.0, device=device), "b": torch.full((16384,), 2.0, device="cuda")}
    kept[name] = state, rpc.publish(state, name=name, on_gpu=True)


@pytest.mark.gpu
def test_one_more_tensor_on_the_gpu_after_a_republish_is_planned_anew(cluster):
    cluster.start(1)
    target = {name: torch.zeros(16384, device="cuda") for name in ("a", "b")}
    rpc.rpc_sync("worker1", publish_two, args=("policy", "cpu"))
    loader = rpc.subscribe("policy", from_="worker1").into(target)
    for device in ("cpu", "cuda", "cpu"):
        rpc.rpc_sync("worker1", publish_two, args=("policy", device))
        for each in target.values():
            each.zero_()
        assert loader.load() == 1
        assert target["a"].eq(1).all() and target["b"].eq(2).all()


@pytest.mark.gpu
def test_indices_that_copy_and_conjugates_come_by_their_values_of_each_version(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", begin_rows, args=("policy",))
    rows = [3, 1]
    target = {
        "rows": torch.zeros(2, 5, device="cuda"),
        "c": torch.zeros(3, dtype=torch.complex64, device="cuda").conj(),
    }
    loader = rpc.subscribe("policy", from_="worker1").into(target, map={"rows": ("w", rows)})
    for version in range(1, 9):  # an image has several of them
        assert loader.load() == version
        assert target["rows"].tolist() == [[float(version * row)] * 5 for row in rows]
        assert target["c"].tolist() == [complex(version, -1)] * 3
        rpc.rpc_sync("worker1", change_rows, args=("policy", version + 1))


def rows_of(version):
    rows = torch.arange(4.0, device="cuda").mul(version).view(4, 1).expand(4, 5)
    return {"w": rows, "c": torch.full((3,), complex(version, 1), device="cuda", dtype=torch.complex64).conj()}


def begin_rows(name):
    kept[name] = None, rpc.publish(rows_of(1), name=name, on_gpu=True)


def change_rows(name, version):
    return kept[name][1].update(rows_of(version), timeout=60)


@pytest.mark.gpu
def test_a_capture_takes_neither_a_load_nor_an_update(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", begin_rows, args=("policy",))
    target = {"w": torch.zeros(4, 5, device="cuda")}
    loader = rpc.subscribe("policy", from_="worker1").into(target)
    begin_rows("mine")
    state = rows_of(2)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        target["w"].add_(1)
        with pytest.raises(errors.InvalidArgument, match="capture"):
            loader.load()
        with pytest.raises(errors.InvalidArgument, match="capture"):
            kept["mine"][1].update(state)
    assert loader.load() == 1
    assert kept["mine"][1].update(state) == 2
    kept.pop("mine")[1].withdraw()


def begin_chunked(name):
    """In memory of the virtual memory API, which the driver exports by no handle."""
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
    torch.cuda.empty_cache()  # else the memory may be of a segment that is there
    settings("expandable_segments:True")
    try:
        begin(name)
    finally:
        settings("expandable_segments:False")


@pytest.mark.gpu
def test_versions_in_memory_that_cannot_be_mapped_come_by_the_host(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", begin_chunked, args=("policy",))
    target = mine()
    loader = rpc.subscribe("policy", from_="worker1").into(target, map=parts)
    assert loader.load() == 1
    assert loader.carried == "mapped"
    assert all(each.eq(1).all() for each in target.values())
    assert rpc.rpc_sync("worker1", change, args=("policy", 4)) == 2
    assert loader.load() == 2
    assert target["w"].eq(4).all() and target["shard"].eq(4).all() and target["cast"].eq(4).all()
