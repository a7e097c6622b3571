"""What torch.distributed's users find on a process group beside its operations, with a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorferry.c10d as c10d
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("tensorferry", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["tensorferry", "gloo"])
def test_a_wait_takes_the_work_out_of_torchs_registry(group: dist.ProcessGroup, backend: str) -> None:
    registry = torch._C._distributed_c10d
    beside = dist.new_group(backend=backend)
    before = registry._get_work_registry_size()
    with functional.allow_inflight_collective_as_graph_input_ctx():
        work = dist.all_reduce(torch.ones(4), group=beside, async_op=True)
        assert registry._get_work_registry_size() == before + 1
        work.wait()
        assert registry._get_work_registry_size() == before


def test_operations_are_timed_if_the_program_asks_for_it(group: Any) -> None:
    untimed = dist.all_reduce(torch.ones(4), async_op=True)
    untimed.wait()
    with pytest.raises(RuntimeError, match="does not time its operations"):
        untimed._get_duration()
    group._enable_collectives_timing()
    timed = dist.all_reduce(torch.ones(4), async_op=True)
    timed.wait()
    assert timed._get_duration() >= 0


def test_the_variables_of_gloo_choose_interface_and_laziness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert c10d.Options().lazy
    assert not c10d.Options(lazy=False).lazy
    monkeypatch.delenv("TENSORFERRY_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(Exception, match="nosuch0"):
        dist.init_process_group("tensorferry", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("TENSORFERRY_SOCKET_IFNAME", "lo")
    dist.init_process_group("tensorferry", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
