"""Many tensors in one message: the small ones travel in bundles, and arrive as separate tensors."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

WAYS = {
    "shm-ring": {"channels": "shm,basic"},
    "shm-unix": {"channels": "shm,basic", "shared_memory": False},
    "basic-tcp": {"channels": "basic", "unix_sockets": False},
}


def echo(value):
    return value


def model(count=100, elements=2000):
    return {f"layers.{i}.weight": torch.arange(elements, dtype=torch.float32) + i for i in range(count)}


def started(cluster, way):
    cluster.start(1, **WAYS[way])
    eventually(lambda: rpc.explain("worker1").channel == way.split("-")[0], 3)
    for _ in range(20):  # until memory for them is warm
        rpc.rpc_sync("worker1", echo, (model(),))


@pytest.mark.parametrize("way", WAYS)
def test_each_leaf_is_a_separate_tensor(cluster, way):
    started(cluster, way)
    sent = model()
    came = rpc.rpc_sync("worker1", echo, (sent,))
    assert list(came) == list(sent)
    for name, tensor in came.items():
        assert torch.equal(tensor, sent[name])
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
        assert tensor.data_ptr() % 64 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in came.values()}) == len(came)

    for i, tensor in enumerate(came.values()):
        if i % 2:
            tensor.fill_(-1)
    assert all(torch.equal(came[name], sent[name]) for name in list(sent)[::2])
    came["layers.3.weight"].resize_(5000)[2000:] = 7
    assert torch.equal(came["layers.4.weight"], sent["layers.4.weight"])
    one = came["layers.8.weight"]
    file = io.BytesIO()
    torch.save(one, file)
    assert len(file.getvalue()) < 4 * one.nbytes  # the others are not in it
    assert torch.equal(copy.deepcopy(one), sent["layers.8.weight"])
    assert torch.equal(one.clone().share_memory_(), one.share_memory_())


@pytest.mark.parametrize("way", WAYS)
def test_a_leaf_outlives_the_others_and_both_agents(cluster, way):
    started(cluster, way)
    kept = [rpc.rpc_sync("worker1", echo, (model(),))[f"layers.{i}.weight"] for i in range(10)]
    for _ in range(5):
        rpc.rpc_sync("worker1", echo, (model(),))
    cluster.workers[0].kill()
    rpc.shutdown(graceful=False)
    for i, tensor in enumerate(kept):
        assert torch.equal(tensor, model()[f"layers.{i}.weight"])
        tensor.zero_()


def test_the_arguments_may_be_overwritten_once_they_are_sent(cluster):
    started(cluster, "shm-ring")
    sent, expected = model(), model()
    future = rpc.rpc_async("worker1", echo, (sent,))
    future.sent.wait()
    for tensor in sent.values():
        tensor.zero_()
    came = future.wait()
    assert all(torch.equal(came[name], expected[name]) for name in expected)


leaf = st.builds(
    lambda elements, dtype, offset: torch.arange(elements + offset).to(dtype)[offset:],
    st.sampled_from([0, 1, 7, 900, 1100, 9000, 17_000, 40_000]),
    st.sampled_from([torch.float32, torch.int8, torch.float64, torch.bool]),
    st.integers(0, 2),
)
leaves = leaf | st.builds(lambda bytes: np.arange(bytes, dtype=np.uint8), st.sampled_from([0, 9000, 70_000]))
nested = st.recursive(
    leaves | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            same(left, right)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    else:
        assert a == b


@pytest.mark.parametrize("way", WAYS)
def test_leaves_of_all_sizes_keep_their_positions(cluster, way):
    started(cluster, way)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(nested)
    def check(value):
        same(rpc.rpc_sync("worker1", echo, (value,)), value)

    check()


@pytest.mark.parametrize("way", WAYS)
def test_a_structure_that_is_sent_again_arrives(cluster, way):
    cluster.start(1, **WAYS[way])
    sent = {"step": 1.5, "model": model(), "names": [f"a rather long name {i}" for i in range(20)]}
    rpc.rpc_sync("worker1", echo, (sent,))
    sent = {**sent, "step": 2.5, "model": {name: tensor + 1 for name, tensor in sent["model"].items()}}
    came = rpc.rpc_sync("worker1", echo, (sent,))
    same(came, sent)
    same(rpc.rpc_sync("worker1", echo, (sent,)), sent)


def test_similar_keys_stay_separate(cluster):
    cluster.start(1)
    keys = [f"{'k' * (i % 70)}{i}" for i in range(3000)] + ["", "é", "k\x00", "k", "日本語"]
    value = {key: number for number, key in enumerate(keys)}
    for _ in range(2):
        assert rpc.rpc_sync("worker1", echo, (value,)) == value
