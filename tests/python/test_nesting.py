"""Calls inside calls: a function that waits for a call or a future holds no place that its callees need."""

from __future__ import annotations

import pytest
import tensorferry
import tensorferry.rpc as rpc


def hop(ring: list[str], left: int) -> str:
    """Calls itself at the next agent of the ring, until ``left`` calls have been made."""
    if left == 0:
        return "end"
    return rpc.rpc_sync(ring[0], hop, args=([*ring[1:], ring[0]], left - 1), timeout=60)


def hop_by_future(ring: list[str], left: int) -> str:
    if left == 0:
        return "end"
    call = rpc.rpc_async(ring[0], hop_by_future, args=([*ring[1:], ring[0]], left - 1), timeout=60)
    return call.then(lambda done: done.wait()).wait()  # a future that a callback completes


async def hop_async(ring: list[str], left: int) -> str:
    if left == 0:
        return "end"
    return await rpc.rpc_async(ring[0], hop_async, args=([*ring[1:], ring[0]], left - 1), timeout=60)


@pytest.mark.parametrize("function", [hop, hop_by_future, hop_async])
@pytest.mark.parametrize("max_threads", [16, 2])
def test_many_nested_chains_between_two_agents_end(agents, max_threads, function):
    a = agents("a", max_threads=max_threads)
    agents("b", max_threads=max_threads)
    chains = [a.rpc_async("b", function, args=(["a", "b"], 2), timeout=60) for _ in range(64)]
    assert tensorferry.wait_all(chains) == ["end"] * 64


def test_chains_around_three_agents_end(agents):
    for name in "abc":
        agents(name, max_threads=2)
    a = agents._made[0]
    chains = [a.rpc_async("b", hop, args=(["c", "a", "b"], 6), timeout=60) for _ in range(64)]
    assert tensorferry.wait_all(chains) == ["end"] * 64
