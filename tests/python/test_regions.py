"""Regions: slices, blocks, notifications and endings, between real processes."""

from __future__ import annotations

import asyncio
import pickle
import threading

import hypothesis
import hypothesis.strategies as st
import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors

kept: dict[str, tensorferry.OwnRegion] = {}


def make(name, shape, mappable=True, **rights):
    tensor = tensorferry.empty(shape) if mappable else torch.empty(shape)
    tensor.copy_(torch.arange(tensor.numel()).reshape(shape))
    kept[name] = rpc.region(tensor, name, **rights)
    return kept[name]


def drop(name):
    kept.pop(name).drop()


def contents(name):
    return kept[name].tensor


def notified(name, number=None):
    told = kept[name].await_notification(number, timeout=60)
    return told.peer, told.number


def read_whole(handle):
    return handle.read()


def grants():
    return rpc._current()._regions.held_by_peers[0]


@pytest.fixture(params=["mapped", "in place"])
def way(request, cluster):
    cluster.start(1)
    return request.param


def test_a_handle_travels_in_calls_and_reads_what_the_owner_has(way):
    handle = rpc.rpc_sync("worker1", make, args=("table", (64, 33), way == "mapped"))
    assert handle.carried() == way
    whole = torch.arange(64.0 * 33).reshape(64, 33)
    assert torch.equal(handle.read(), whole)
    assert torch.equal(handle[3:40:2, 5].read(), whole[3:40:2, 5])
    into = torch.zeros(33, 64).t()
    assert handle.read(into=into) is into
    assert torch.equal(into, whole)
    blocks = torch.tensor([63, 0, 7, 7])
    assert torch.equal(handle.read_blocks(blocks), whole[blocks])
    assert torch.equal(handle[:, 4:9].read_blocks(blocks), whole[blocks, 4:9])
    assert rpc.rpc_sync("worker1", read_whole, args=(handle,)).shape == (64, 33), "the owner reads its own"


def test_a_write_with_notify_is_seen_before_its_notification(way):
    rpc.rpc_sync("worker1", make, args=("cells", (8, 4), way == "mapped"), kwargs={"write": True})
    handle = rpc.find_region("worker1", "cells")
    waiting = rpc.rpc_async("worker1", notified, args=("cells", 5))
    handle[2, 1:3].write(torch.tensor([-1.0, -2.0]), notify=4)
    handle.write_blocks(torch.tensor([7, 6]), torch.full((2, 4), 9.0), notify=5)
    assert waiting.wait() == ("main", 5)
    expected = torch.arange(32.0).reshape(8, 4)
    expected[2, 1:3] = torch.tensor([-1.0, -2.0])
    expected[6:8] = 9
    assert torch.equal(rpc.rpc_sync("worker1", contents, args=("cells",)), expected)
    assert rpc.rpc_sync("worker1", notified, args=("cells",)) == ("main", 4)


def test_a_dropped_region_and_a_missing_right_are_errors_by_name(way):
    handle = rpc.rpc_sync("worker1", make, args=("short", (4,), way == "mapped"))
    with pytest.raises(errors.PermissionDenied, match="does not let this agent write"):
        handle.write(torch.zeros(4))
    private = rpc.rpc_sync("worker1", make, args=("private", (4,), way == "mapped"), kwargs={"peers": ["worker7"]})
    with pytest.raises(errors.PermissionDenied, match="not among the region's peers"):
        private.read()
    handle.read()
    rpc.rpc_sync("worker1", drop, args=("short",))
    with pytest.raises(errors.NotFound, match="dropped or replaced by its owner"):
        handle.read()
    with pytest.raises(errors.NotFound, match='no region "short"'):
        rpc.find_region("worker1", "short")


def test_a_killed_owner_is_an_error_at_its_readers(cluster):
    cluster.start(1, static=False)
    handle = rpc.rpc_sync("worker1", make, args=("doomed", (1000,)))
    handle.read()
    cluster.workers[0].kill()
    failed = []

    def reads():
        try:
            handle.read(timeout=60)
        except errors.Error as error:
            failed.append(error)
        return bool(failed)

    assert eventually(reads)
    assert isinstance(failed[0], errors.ConnectionLost), failed[0]
    assert "worker1" in str(failed[0])


def test_regions_are_awaited_beside_other_tasks(cluster):
    cluster.start(1)
    handle = rpc.rpc_sync("worker1", make, args=("awaited", (100,)), kwargs={"write": True})
    mine = rpc.region(torch.zeros(3), "mine", write=True)

    async def main():
        waiting = asyncio.ensure_future(mine.await_notification_async(timeout=60))
        await handle.write_async(torch.full((100,), 2.0))
        both = await asyncio.gather(handle.read_async(), handle[:4].read_blocks_async(torch.tensor([3, 1])))
        rpc.find_region("main", "mine").write(torch.ones(3), notify=1)
        return both, (await waiting).number

    (whole, blocks), number = asyncio.run(main())
    assert whole.sum() == 200 and blocks.tolist() == [2.0, 2.0] and number == 1
    mine.drop()


def test_a_handle_never_reads_memory_of_a_restarted_owner(agents):
    b, first = agents("b"), agents("a")
    first.region(torch.zeros(4), "one")
    found = b.find_region("a", "one")
    assert found.read().sum() == 0
    first.leave()
    second = agents("a")
    second.region(torch.ones(4), "two")  # with the number that the other region had
    failed = []

    def refused():
        try:
            assert found.read().sum() == 0
        except errors.Error as error:
            failed.append(error)
        return bool(failed) and isinstance(failed[-1], errors.NotFound)

    assert eventually(refused), failed
    assert "earlier process" in str(failed[-1])


def test_a_wait_for_a_notification_ends_with_its_time_out_and_with_the_region(agents):
    a = agents("a")
    region = a.region(torch.zeros(3), write=True)
    with pytest.raises(errors.DeadlineExceeded):
        region.await_notification(timeout=0.05)
    dropping = threading.Timer(0.05, region.drop)
    dropping.start()
    with pytest.raises(errors.NotFound):
        region.await_notification(timeout=60)
    dropping.join()


def test_tensors_with_gaps_and_wrong_targets_are_refused(agents):
    a, b = agents("a"), agents("b")
    with pytest.raises(errors.InvalidArgument, match="gaps"):
        a.region(torch.zeros(4, 4)[:, 1])
    a.region(torch.zeros(4, 4), "t")
    found = b.find_region("a", "t")
    with pytest.raises(errors.InvalidArgument, match="shape"):
        found.read(into=torch.zeros(4, 3))
    with pytest.raises(errors.InvalidArgument, match="float64"):
        found.read(into=torch.zeros(4, 4, dtype=torch.float64))
    for indices in ([4], [-1], [0, 1 << 40]):
        with pytest.raises(errors.InvalidArgument, match="from 0 to 3"):
            found.read_blocks(torch.tensor(indices))
    with pytest.raises(IndexError, match="read_blocks"):
        found[[1, 2]]
    with pytest.raises(IndexError):
        found[7]


def test_grants_end_with_their_reader(cluster):
    cluster.start(1, static=False)
    mine = make("mine", (10,))
    handle = pickle.dumps(mine)
    cluster.workers[0].run(read_pickled, handle)
    assert grants() == 1
    cluster.workers[0].kill()
    assert eventually(lambda: grants() == 0)
    drop("mine")


def read_pickled(handle):
    kept["held"] = pickle.loads(handle)
    return kept["held"].read().shape


slices = st.builds(
    slice,
    st.none() | st.integers(-6, 6),
    st.none() | st.integers(-6, 6),
    st.none() | st.integers(1, 3),
)


@pytest.fixture(scope="module")
def shown():
    server = tensorferry.StoreServer("127.0.0.1")
    store = [tensorferry.connect_store("127.0.0.1", server.port) for _ in range(2)]
    a, b = tensorferry.Agent("a", store=store[0]), tensorferry.Agent("b", store=store[1])
    tensor = torch.arange(5 * 4 * 6, dtype=torch.int32).reshape(5, 4, 6).permute(1, 2, 0)
    a.region(tensor, "shown")
    yield tensor, b.find_region("a", "shown")
    b.leave()
    a.leave()


@hypothesis.given(st.lists(slices | st.integers(-4, 3) | st.just(...), max_size=3))
def test_slices_read_what_torch_reads(shown, index):
    hypothesis.assume(sum(each is ... for each in index) < 2)
    tensor, region = shown
    try:
        expected = tensor[tuple(index)]
    except IndexError:
        with pytest.raises(IndexError):
            region[tuple(index)]
        return
    part = region[tuple(index)]
    assert torch.equal(part.read(), expected)
    assert part.shape == expected.shape


@hypothesis.given(st.lists(st.integers(0, 3), max_size=50))
def test_blocks_read_what_torch_gathers(shown, indices):
    tensor, region = shown
    chosen = torch.tensor(indices, dtype=torch.int64)
    assert torch.equal(region[:, 0:1, 0:1].read_blocks(chosen), tensor[:, 0:1, 0:1][chosen])


def test_conjugates_and_negatives_are_written_and_read_by_their_values(pair):
    here = torch.zeros(4, dtype=torch.complex64)
    values = torch.tensor([1 + 2j, 3 - 4j, 5j, 6 + 0j], dtype=torch.complex64)
    pair[0].region(here, "complex", write=True)
    region = pair[1].find_region("a", "complex")
    region.write(values.conj())
    assert torch.equal(here, values.conj())
    into = torch.zeros(4, dtype=torch.complex64)
    region.read(into=into.conj())
    assert torch.equal(into.conj(), here)
    pair[0].region(torch.zeros(4), "real", write=True)
    real = pair[1].find_region("a", "real")
    real.write(values.conj().imag)
    assert torch.equal(real.read(), -values.imag)
