"""`require=` with a measured floor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorferry
import torch
from tensorferry import errors
from torch.distributed import HashStore


@pytest.fixture(scope="module")
def agent() -> Iterator[tensorferry.Agent]:
    store = HashStore()
    with tensorferry.Agent("a", store=store) as here, tensorferry.Agent("b", store=store):
        yield here
        here.leave()


def test_a_path_that_is_fast_enough_is_named_for_require(agent: tensorferry.Agent) -> None:
    name = tensorferry.measured("b", min_gbps=0.001, agent=agent)
    assert name == agent.explain("b", torch.zeros(16 << 20, dtype=torch.uint8)).channel
    given = torch.ones(1 << 20)
    assert agent.rpc_sync("b", torch.numel, args=(given,), require=name) == given.numel()
    assert tensorferry.measured("b", min_gbps=0.001, channel="basic", tensor=given, agent=agent) == "basic"


def test_a_path_below_the_floor_is_refused_with_its_rate(agent: tensorferry.Agent) -> None:
    with pytest.raises(errors.ChannelUnavailable, match=r"basic carries tensors to 'b' at [\d.e+]+ Gbit/s, less than"):
        tensorferry.measured("b", min_gbps=1e9, channel="basic", agent=agent)


def test_a_floor_needs_an_agent_and_a_channel_that_exists(agent: tensorferry.Agent) -> None:
    with pytest.raises(errors.InvalidArgument, match="call init_rpc"):
        tensorferry.measured("b", min_gbps=1)
    with pytest.raises((errors.ChannelUnavailable, errors.InvalidArgument), match="pigeon"):
        tensorferry.measured("b", min_gbps=1, channel="pigeon", agent=agent)
