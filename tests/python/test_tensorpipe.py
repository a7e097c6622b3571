"""The channel tensorpipe: only agents that name it use it."""

from __future__ import annotations

import time

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from tensorferry import errors

MEGABYTE = torch.ones(1 << 18)


def echo(tensor):
    return tensor


def norm(tensor):
    return tensor.norm().item()


def several(tensors, times):
    return [tensor * times for tensor in tensors]


def nap(tensor, seconds):
    time.sleep(seconds)


def wholly(channel, before, after):
    """Whether only this channel carried the bytes that do not fit a frame."""
    risen = {name for name, bytes_ in after.items() if bytes_ - before.get(name, 0) >= 1 << 16}
    return risen == {channel}


def missing(agent):
    """The reason why this build lacks the channel, or "" if it has it."""
    return next((why for name, usable, why in agent.explain("b").candidates if name == "tensorpipe" and not usable), "")


@pytest.fixture
def piped(agents):
    """Two agents of this process that have no other channel."""
    a, b = (agents(name, rank=rank, channels="tensorpipe") for rank, name in enumerate("ab"))
    if why := missing(a):
        pytest.skip(why)
    return a, b


@pytest.mark.parametrize("channels", ["", "-xth", "basic"])
def test_the_channel_is_used_only_if_it_is_named(agents, channels):
    a = agents("a", channels=channels)
    agents("b", channels="tensorpipe,basic")
    assert "tensorpipe" not in [name for name, *_ in a.explain("b", MEGABYTE).candidates]
    assert a.rpc_sync("b", norm, (MEGABYTE,)) == 512.0
    assert not a.counters().bytes_sent.get("tensorpipe")
    with pytest.raises(errors.ChannelUnavailable, match="no channel of that name"):
        a.rpc_sync("b", norm, (MEGABYTE,), require="tensorpipe")


def test_a_mistyped_channel_name_lists_it(agents):
    with pytest.raises(errors.InvalidArgument, match=r"known are.*tensorpipe"):
        agents("a", channels="tensorpip")


def test_the_channel_carries_from_the_first_call(piped):
    a, b = piped
    before = a.counters()
    assert torch.equal(a.rpc_sync("b", echo, (MEGABYTE,)), MEGABYTE)
    after = a.counters()
    assert wholly("tensorpipe", before.bytes_sent, after.bytes_sent)
    assert wholly("tensorpipe", before.bytes_received, after.bytes_received)
    assert wholly("tensorpipe", {}, b.counters().bytes_sent)
    explanation = a.explain("b", MEGABYTE)
    assert explanation.channel == "tensorpipe"
    assert "TensorPipe" in str(explanation)


def test_calls_to_the_same_agent_use_another_channel(agents):
    a = agents("a", channels="tensorpipe")
    with pytest.raises(errors.ChannelUnavailable, match="tensorpipe"):
        a.rpc_sync("a", norm, (MEGABYTE,))
    b = agents("b", channels="tensorpipe,xth")
    assert b.rpc_sync("b", norm, (MEGABYTE,)) == 512.0
    assert b.explain("b", MEGABYTE).channel == "xth"


def test_the_environment_can_name_the_channel(agents, monkeypatch):
    monkeypatch.setenv("TENSORFERRY_CHANNELS", "tensorpipe,basic")
    a = agents("a")
    agents("b")
    if why := missing(a):
        pytest.skip(why)
    assert [name for name, *_ in a.explain("b").candidates] == ["tensorpipe", "basic"]
    deadline = time.monotonic() + 20
    while not wholly("tensorpipe", (before := a.counters()).bytes_sent, _after(a)):  # `basic` carries until it is ready
        assert time.monotonic() < deadline, a.explain("b")
        assert before is not None


def _after(agent):
    agent.rpc_sync("b", norm, (MEGABYTE,))
    return agent.counters().bytes_sent


def test_a_peer_without_the_channel_is_given_as_the_reason(agents):
    a = agents("a", channels="tensorpipe,basic")
    agents("b", channels="basic")
    explanation = a.explain("b", MEGABYTE)
    assert explanation.channel == "basic"
    reasons = {name: why for name, usable, why in explanation.candidates if not usable}
    assert reasons["tensorpipe"]


def test_the_channel_carries_between_processes(cluster):
    cluster.start(2, channels="tensorpipe")
    if rpc.explain("worker1", MEGABYTE).channel != "tensorpipe":
        pytest.skip(str(rpc.explain("worker1", MEGABYTE)))
    before = rpc.counters()
    for peer in "worker1", "worker2":
        for size in 1025, 1 << 18, 5 << 20:
            x = torch.arange(size, dtype=torch.float32)
            assert torch.equal(rpc.rpc_sync(peer, echo, (x,)), x)
        tensors = [torch.full((5000 * i,), float(i)) for i in range(10)]
        for i, tensor in enumerate(rpc.rpc_sync(peer, several, (tensors, 3))):
            assert torch.equal(tensor, torch.full((5000 * i,), 3.0 * i))
    after = rpc.counters()
    assert wholly("tensorpipe", before.bytes_sent, after.bytes_sent)
    assert wholly("tensorpipe", before.bytes_received, after.bytes_received)


def test_many_threads_call_at_once(piped):
    a, _ = piped
    xs = [torch.full((20_000 + i,), float(i)) for i in range(64)]
    for x, y in zip(xs, tensorferry.wait_all([a.rpc_async("b", echo, (x,)) for x in xs])):
        assert torch.equal(x, y)


def test_a_result_lands_in_the_callers_memory(piped):
    a, _ = piped
    out = torch.zeros(1 << 18)
    assert a.rpc_sync("b", echo, (MEGABYTE,), out=out) is out
    assert torch.equal(out, MEGABYTE)


def test_a_peer_that_is_killed_fails_its_calls(cluster):
    cluster.start(1, channels="tensorpipe", environment={})
    if rpc.explain("worker1", MEGABYTE).channel != "tensorpipe":
        pytest.skip(str(rpc.explain("worker1", MEGABYTE)))
    assert rpc.rpc_sync("worker1", norm, (MEGABYTE,)) == 512.0
    futures = [rpc.rpc_async("worker1", nap, (MEGABYTE, 60)) for _ in range(4)]
    cluster.workers[0].kill()
    for future in futures:
        with pytest.raises(errors.ConnectionLost):
            future.wait()


@pytest.mark.gpu
def test_gpu_tensors_travel_between_processes(cluster):
    cluster.start(1, channels="tensorpipe")
    x = torch.arange(1 << 20, dtype=torch.float32, device="cuda:0")
    if rpc.explain("worker1", x).channel != "tensorpipe":
        pytest.skip(str(rpc.explain("worker1", x)))
    before = rpc.counters()
    for i in range(20):
        x.add_(1)  # not waited for
        y = rpc.rpc_sync("worker1", several, ([x], 2))[0]
        assert y.device == x.device
        assert torch.equal(y, x * 2), i
    assert wholly("tensorpipe", before.bytes_sent, rpc.counters().bytes_sent)
