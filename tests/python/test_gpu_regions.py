"""Regions on GPUs: mapped by the driver, served by the owner's agent, in the order of streams, and their endings."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors

pytestmark = pytest.mark.gpu

kept: dict[str, tensorferry.OwnRegion] = {}


def make(name, shape, dtype=torch.float32, device="cuda", **rights):
    tensor = torch.arange(torch.Size(shape).numel(), device=device).reshape(shape).to(dtype)
    torch.cuda.synchronize()
    kept[name] = rpc.region(tensor, name, **rights)
    return kept[name]


def make_chunked(name, shape):
    """In memory of the virtual memory API, which the driver exports by no handle."""
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
    settings("expandable_segments:True")
    try:
        return make(name, shape, write=True)
    finally:
        settings("expandable_segments:False")


def drop(name):
    kept.pop(name).drop()


def fill(name, value):
    kept[name].tensor.fill_(value)
    torch.cuda.synchronize()


def contents(name):
    return kept[name].tensor.cpu()


def notified(name):
    told = kept[name].await_notification(timeout=60)
    return told.peer, told.number


def end():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128, torch.float8_e4m3fn])
def test_reads_bring_the_parts_and_blocks_of_memory_on_a_gpu(cluster, dtype):
    cluster.start(1)
    handle = rpc.rpc_sync("worker1", make, args=("table", (64, 33), dtype))
    whole = torch.arange(64 * 33).reshape(64, 33).to(dtype).cuda()

    def same(got, wanted):
        assert got.dtype == dtype
        return torch.equal(got.contiguous().view(torch.uint8).cuda(), wanted.contiguous().view(torch.uint8))

    got = handle.read()
    assert got.is_cuda
    assert same(got, whole)
    assert handle.carried() == "mapped"
    assert same(handle[3:40:2, 5].read(), whole[3:40:2, 5])
    on_host = torch.empty(64, 33, dtype=dtype)
    assert handle.read(into=on_host) is on_host
    assert same(on_host, whole)
    for blocks in (torch.tensor([63, 0, 7, 7]), torch.tensor([5, 4], dtype=torch.int32, device="cuda")):
        assert same(handle.read_blocks(blocks), whole[blocks])
        assert same(handle[:, 4:9].read_blocks(blocks), whole[blocks, 4:9])
        into = torch.empty(33, len(blocks), dtype=dtype, device="cuda").t()
        assert handle.read_blocks(blocks, into=into) is into
        assert same(into, whole[blocks])
    for device in ("cpu", "cuda"):
        for index in (64, -1):
            with pytest.raises(errors.InvalidArgument, match="from 0 to 63"):
                handle.read_blocks(torch.tensor([3, index], device=device))


def test_a_write_with_notify_is_seen_before_its_notification(cluster):
    cluster.start(1)
    handle = rpc.rpc_sync("worker1", make, args=("cells", (8, 4)), kwargs={"write": True})
    waiting = rpc.rpc_async("worker1", notified, args=("cells",))
    handle[2, 1:3].write(torch.tensor([-1.0, -2.0], device="cuda"))
    handle[3].write(torch.full((4,), 5.0))
    handle.write_blocks(torch.tensor([7, 6]), torch.full((2, 4), 9.0, device="cuda"), notify=5)
    assert waiting.wait() == ("main", 5)
    expected = torch.arange(32.0).reshape(8, 4)
    expected[2, 1:3] = torch.tensor([-1.0, -2.0])
    expected[3] = 5
    expected[6:8] = 9
    assert torch.equal(rpc.rpc_sync("worker1", contents, args=("cells",)), expected)
    with pytest.raises(errors.InvalidArgument, match="stream_ordered"):
        handle.write(torch.zeros(8, 4), notify=1, stream_ordered=True)
    only = rpc.rpc_sync("worker1", make, args=("only", (4,)))
    with pytest.raises(errors.PermissionDenied):
        only.write(torch.zeros(4, device="cuda"))


def test_memory_that_the_driver_exports_by_no_handle_is_served(cluster):
    cluster.start(1)
    handle = rpc.rpc_sync("worker1", make_chunked, args=("chunked", (1 << 20, 16)))  # a segment of its own
    whole = torch.arange(float(16 << 20)).reshape(-1, 16)
    assert handle.carried() == "served"
    assert torch.equal(handle.read().cpu(), whole)
    assert torch.equal(handle[2:4, 1].read(torch.empty(2, device="cuda")).cpu(), whole[2:4, 1])
    handle.write_blocks(torch.tensor([1]), torch.zeros(1, 16, device="cuda"))
    assert handle.read_blocks(torch.tensor([1, 2])).sum() == whole[2].sum()
    with pytest.raises(errors.InvalidArgument, match="cannot map this one"):
        handle.read(stream_ordered=True)


def test_memory_of_the_host_lands_on_a_gpu_too(cluster):
    cluster.start(1)
    handle = rpc.rpc_sync("worker1", make, args=("host", (16, 4)), kwargs={"device": "cpu", "write": True})
    into = torch.empty(16, 4, device="cuda")
    assert handle.read(into=into).sum() == torch.arange(64).sum()
    handle.write(into * 2)
    assert handle.read().sum() == 2 * torch.arange(64).sum()


def test_a_captured_read_brings_what_the_owner_has_at_each_replay(cluster):
    cluster.start(1)
    handle = rpc.rpc_sync("worker1", make, args=("weights", (1024,)))
    into = torch.zeros(1024, device="cuda")
    blocks = torch.tensor([3, 1], device="cuda")
    two = torch.zeros(2, device="cuda")
    handle.read(into=into)  # maps the memory
    with pytest.raises(errors.InvalidArgument, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        handle.read(into=into)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        handle.read(into=into, stream_ordered=True)
        handle.read_blocks(blocks, into=two, stream_ordered=True)
    for value in (4.0, -1.0):
        rpc.rpc_sync("worker1", fill, args=("weights", value))
        graph.replay()
        torch.cuda.synchronize()
        handle.check()
        assert into.eq(value).all()
        assert two.eq(value).all()


def test_many_regions_are_read_at_once(cluster):
    cluster.start(1)
    handles = [rpc.rpc_sync("worker1", make, args=(f"part{i}", (i + 1, 7))) for i in range(40)]
    handles.append(rpc.rpc_sync("worker1", make, args=("host", (3,)), kwargs={"device": "cpu"}))
    into = [torch.empty(handle.shape, device="cuda") for handle in handles]
    tensorferry.read_regions(handles, into)
    for out in into:
        assert torch.equal(out.cpu().flatten(), torch.arange(float(out.numel())))
    rpc.rpc_sync("worker1", drop, args=("part3",))
    with pytest.raises(errors.NotFound):
        tensorferry.read_regions(handles, into)


def test_a_region_that_is_dropped_or_whose_owner_dies_fails_by_name(cluster):
    cluster.start(2)
    handle = rpc.rpc_sync("worker1", make, args=("short", (1024,)))
    handle.read()
    rpc.rpc_sync("worker1", drop, args=("short",))
    with pytest.raises(errors.NotFound, match="worker1"):
        handle.read()
    with pytest.raises(errors.NotFound, match="worker1"):
        handle.check()
    other = rpc.rpc_sync("worker2", make, args=("short", (1 << 20,)))
    first = other.read()
    rpc.rpc_async("worker2", end)
    assert eventually(lambda: not other._grant.alive)
    with pytest.raises(errors.ConnectionLost, match="worker2"):
        other.check()
    assert first.sum() == torch.arange(float(1 << 20), device="cuda").sum(), "the reader goes on"


def test_awaited_reads_are_ordered_behind_the_current_stream(cluster):
    cluster.start(1)
    handle = rpc.rpc_sync("worker1", make, args=("awaited", (1 << 20,)), kwargs={"write": True})

    async def main():
        into = torch.empty(1 << 20, device="cuda")
        for _ in range(20):
            into.fill_(-1)
        await handle.read_async(into)
        source = torch.zeros(1 << 20, device="cuda")
        source += 3
        await handle.write_async(source)
        return into, await handle.read_blocks_async(torch.tensor([5, 6]))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        into, blocks = asyncio.run(main())
        assert into[-1] == (1 << 20) - 1
        assert blocks.tolist() == [3.0, 3.0]


def test_a_flag_on_the_stream_says_that_a_copy_came_too_late(cluster):
    cluster.start(1)
    handle = rpc.rpc_sync("worker1", make, args=("flagged", (256,)))
    poison = torch.zeros(1, dtype=torch.bool, device="cuda")
    into = handle.read(poison=poison)
    assert not poison.item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        handle.read(into=into, poison=poison)
    graph.replay()
    assert not poison.item()
    rpc.rpc_sync("worker1", drop, args=("flagged",))
    graph.replay()
    assert poison.item()
    with pytest.raises(errors.InvalidArgument, match="one element"):
        handle.read(poison=torch.zeros(2, device="cuda"))


def publish(name):
    model = torch.nn.Linear(8, 8, device="cuda")
    torch.nn.init.ones_(model.weight)
    kept[name] = model, rpc.publish(model.state_dict(), name)


def update(name):
    model, publication = kept[name]
    torch.nn.init.constant_(model.weight, 5.0)
    return publication.update(model.state_dict())


def test_versions_of_tensors_on_gpus_reach_tensors_on_gpus(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", publish, args=("on gpu",))
    mine = torch.nn.Linear(8, 8, device="cuda")
    loader = rpc.subscribe("on gpu", from_="worker1").into(mine)
    assert loader.load() == 1
    assert mine.weight.eq(1).all()
    assert rpc.rpc_sync("worker1", update, args=("on gpu",)) == 2
    assert loader.wait() == 2
    assert mine.weight.eq(5).all()
