"""The channel that carries a tensor: explained, counted, required."""

from __future__ import annotations

import time

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import carried_into_a_container
from tensorferry import errors

MEGABYTE = torch.ones(1 << 18)


def norm(tensor):
    return tensor.norm().item()


def echo(tensor):
    return tensor


def risen(before, after):
    """Channels whose bytes rose by about a megabyte."""
    return {name for name, bytes_ in after.items() if bytes_ - before.get(name, 0) >= 1 << 20}


@pytest.mark.parametrize("peer", ["a", "b"])
@pytest.mark.parametrize("channels", ["", "basic", "-xth"])
def test_the_channel_that_explain_names_is_the_one_whose_counter_rises(agents, peer, channels):
    a = agents("a", channels=channels)
    agents("b", channels=channels)
    for _ in range(500):  # until shared memory is warm: other channels carry before that
        explanation = a.explain(peer, MEGABYTE)
        before = a.counters()
        a.rpc_sync(peer, norm, (MEGABYTE,))
        carried_by = risen(before.bytes_sent, a.counters().bytes_sent)
        if carried_by == {explanation.channel}:
            break
        time.sleep(0.01)
    assert carried_by == {explanation.channel}


def test_explain_works_between_processes(cluster):
    cluster.start(1)
    for _ in range(500):  # until probes have ended and shared memory is warm
        explanation = rpc.explain("worker1", MEGABYTE)
        before = rpc.counters()
        assert torch.equal(rpc.rpc_sync(1, echo, (MEGABYTE,)), MEGABYTE)
        after = rpc.counters()
        ways = [risen(before.bytes_sent, after.bytes_sent), risen(before.bytes_received, after.bytes_received)]
        if ways == [{explanation.channel}] * 2:
            break
        time.sleep(0.01)
    assert risen(before.bytes_sent, after.bytes_sent) == {explanation.channel}
    assert risen(before.bytes_received, after.bytes_received) == {explanation.channel}
    assert after.calls_sent == before.calls_sent + 1
    assert explanation.peer == "worker1"
    assert explanation.transport in ("ring", "unix", "tcp")
    refused = [(name, reason) for name, usable, reason in explanation.candidates if not usable]
    assert all(reason for _, reason in refused)
    text = str(explanation)
    assert explanation.channel in text
    assert all(reason in text for _, reason in refused)


def test_shared_memory_reaches_into_a_container():
    assert carried_into_a_container("cpu") == "shm"


def test_small_tensors_travel_inside_the_frame(pair):
    a, _ = pair
    before = a.counters()
    a.rpc_sync("b", norm, (torch.ones(4),))
    after = a.counters()
    assert after.bytes_sent["inline"] > before.bytes_sent.get("inline", 0)


def test_require_uses_that_channel_or_fails(pair):
    a, _ = pair
    before = a.counters()
    assert a.rpc_sync("b", norm, (MEGABYTE,), require="basic") == 512.0
    assert risen(before.bytes_sent, a.counters().bytes_sent) == {"basic"}
    for wrong in ("nonesuch", "cuda_ipc"):
        with pytest.raises(errors.ChannelUnavailable, match=wrong):
            a.rpc_sync("b", norm, (MEGABYTE,), require=wrong)
    with pytest.raises(errors.ChannelUnavailable):
        a.rpc_async("b", norm, (MEGABYTE,), require="nonesuch").wait()
    assert a.rpc_sync("b", norm, (MEGABYTE,)) == 512.0  # the link is as it was


def test_unknown_channels_are_refused_at_the_start(agents):
    with pytest.raises(errors.InvalidArgument, match="nonesuch"):
        agents("a", channels="nonesuch")


def test_tcp_between_processes_of_one_host(agents):
    a = agents("a", unix_sockets=False)
    agents("b", unix_sockets=False)
    explanation = a.explain("b")
    assert explanation.transport == "tcp"
    assert explanation.no_ring in str(explanation) and "unix socket" in explanation.no_ring
    assert a.rpc_sync("b", norm, (MEGABYTE,)) == 512.0


def test_counters_count_calls(pair):
    a, b = pair
    for _ in range(5):
        a.rpc_sync("b", norm, (torch.ones(4),))
    with pytest.raises(TypeError):
        a.rpc_sync("b", norm, (1, 2))
    assert isinstance(a.counters(), tensorferry.Counters)
    assert a.counters().calls_sent == 6
    assert b.counters().calls_served == 6
    assert a.counters().calls_failed == 0  # the function raised, the call did not fail


def test_explain_of_an_unknown_peer_is_an_error(pair):
    with pytest.raises(errors.NotFound, match="nobody"):
        pair[0].explain("nobody")
