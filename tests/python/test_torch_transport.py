"""The documented contract of torch.distributed._transport, between real processes, for each implementation that is
installed here. test_torch_transport_endings.py has what transport "tensorferry" adds to it."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from datetime import timedelta

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from conftest import Worker, Workers
from transport_ends import PATIENT, Pair, api, close_theirs, meet_theirs, new_end, peer_process, read_by_them

LONG = timedelta(seconds=60)


def why_not(name: str) -> str | None:
    """Why the implementation cannot be tested here."""
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        return "the package nixl is not installed"
    return None


NAMES = [
    pytest.param(name, marks=pytest.mark.skipif((why := why_not(name)) is not None, reason=why or ""))
    for name in ("tensorferry", "nixl")
]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def peer(workers: Workers) -> Iterator[Worker]:
    with peer_process(workers) as worker:
        yield worker


@pytest.fixture
def pair(name: str, peer: Worker) -> Iterator[Pair]:
    made = Pair(name, peer)
    yield made
    made.close()


def test_the_registry_makes_a_connected_pair(pair: Pair) -> None:
    assert isinstance(pair.transport, api.Transport)
    assert type(pair.transport).supported()
    assert pair.transport.connected()
    assert pair.transport.device == torch.device("cpu")


def test_read_and_write_return_zero_and_move_the_bytes_of_views(pair: Pair) -> None:
    there = pair.shown("there", torch.arange(16, dtype=torch.int32))
    mine = pair.register("mine", torch.full((16,), -1, dtype=torch.int32))
    assert pair.transport.read(mine.to_mutable_view(), there) == 0
    assert pair.tensors["mine"].tolist() == list(range(16))
    pair.tensors["mine"].fill_(7)
    assert pair.transport.write(mine.to_view(8, 4), there) == 0
    assert pair.theirs("there").tolist() == [7, *range(1, 16)]
    assert pair.transport.read(mine.to_mutable_view(offset=60), there) == 0
    assert pair.tensors["mine"].tolist() == [7] * 16, "a view of the last element, and the first of the peer's"
    assert pair.transport.write(mine.to_view(64), there) == 0, "a view of no bytes"
    assert pair.transport.read(mine.to_mutable_view(64), there, async_op=True).wait(LONG)


def test_transfers_are_of_bytes_whatever_the_shapes_and_dtypes(pair: Pair) -> None:
    there = pair.shown("there", torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4))
    mine = pair.register("mine", torch.zeros(3, dtype=torch.complex64))
    assert pair.transport.read(mine.to_mutable_view(), there) == 0
    assert pair.tensors["mine"].view(torch.uint8).tolist() == list(range(24))


def test_several_megabytes_arrive_as_they_are(pair: Pair) -> None:
    there = pair.shown("there", torch.arange(3_000_000), mappable=False)
    mine = pair.register("mine", torch.zeros(3_000_000, dtype=torch.int64))
    assert pair.transport.read(mine.to_mutable_view(), there) == 0
    assert torch.equal(pair.tensors["mine"], torch.arange(3_000_000))
    pair.tensors["mine"].neg_()
    assert pair.transport.write(mine.to_view(), there) == 0
    assert torch.equal(pair.theirs("there"), -torch.arange(3_000_000))


def test_both_ends_read_from_each_other(pair: Pair) -> None:
    mine = pair.register("mine", torch.arange(4.0))
    pair.shown("there", torch.zeros(4))
    assert pair.peer.run(read_by_them, "there", mine.to_remote_buffer().serialize()) == 0
    assert pair.theirs("there").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_async_op_returns_a_work(pair: Pair) -> None:
    there = pair.shown("there", torch.arange(9.0))
    mine = pair.register("mine", torch.zeros(9))
    work = pair.transport.read(mine.to_mutable_view(), there, async_op=True)
    assert isinstance(work, dist.Work)
    assert work.wait(LONG) is True
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert pair.tensors["mine"].sum() == 36
    assert work.get_future().wait() == [] and work.result() == []
    works = [pair.transport.write(mine.to_view(4 * i, 4), there, async_op=True) for i in range(9)]
    assert all(work.wait(LONG) for work in works)


def test_coroutines_run_beside_each_other(pair: Pair) -> None:
    there = [pair.shown(f"there{i}", torch.full((10,), float(i))) for i in range(4)]
    mine = [pair.register(f"mine{i}", torch.zeros(10)) for i in range(4)]

    async def main() -> None:
        reads = (pair.transport.read_async(own.to_mutable_view(), other) for own, other in zip(mine, there))
        await asyncio.gather(*reads)
        await pair.transport.write_async(mine[3].to_view(), there[0])
        works = [pair.transport.read(mine[0].to_mutable_view(), there[0], async_op=True)]
        await api.wait_all(works)

    asyncio.run(main())
    assert [pair.tensors[f"mine{i}"][0].item() for i in range(4)] == [3.0, 1.0, 2.0, 3.0]


def test_views_and_descriptors_are_what_the_protocols_say(pair: Pair) -> None:
    memory = pair.register("mine", torch.zeros(10))
    assert isinstance(memory, api.Memory)
    view, mutable = memory.to_view(4, 8), memory.to_mutable_view(4)
    assert isinstance(view, api.MemoryView) and not isinstance(view, api.MutableMemoryView)
    assert isinstance(mutable, api.MutableMemoryView) and mutable.writable is True
    assert (view.size(), mutable.size(), memory.to_view().size(), memory.to_view(40).size()) == (8, 36, 40, 0)
    for offset, length in ((-1, 1), (41, 0), (0, 41), (40, 1), (0, -1)):
        with pytest.raises(ValueError):
            memory.to_view(offset, length)
        with pytest.raises(ValueError):
            memory.to_mutable_view(offset, length)
    descriptor = memory.to_remote_buffer(timeout=5)
    assert isinstance(descriptor, api.RemoteBuffer)
    assert type(descriptor.serialize()) is bytes
    assert type(descriptor).deserialize(descriptor.serialize()) == descriptor


def test_what_is_no_descriptor_is_refused(name: str) -> None:
    with new_end(name) as transport:
        good = transport.register_memory(torch.zeros(4)).to_remote_buffer()
        sent = good.serialize()
        kind = type(good)

        @hypothesis.given(st.binary(max_size=300) | st.integers(0, len(sent) - 1).map(lambda cut: sent[:cut]))
        def refused(data: bytes) -> None:
            with pytest.raises(ValueError):
                kind.deserialize(data)

        refused()
        for odd in (sent.replace(b'"version":1', b'"version":true'), sent + b" {}"):
            with pytest.raises(ValueError):
                kind.deserialize(odd)
        for other in (sent.decode(), bytearray(sent), None):
            with pytest.raises(TypeError):
                kind.deserialize(other)


def test_buffers_that_do_not_fit_are_refused_before_any_byte_moves(pair: Pair, name: str) -> None:
    there = pair.shown("there", torch.arange(4.0))
    mine = pair.register("mine", torch.zeros(5))
    with pytest.raises(TypeError):
        pair.transport.read(mine.to_view(), there)
    with pytest.raises(TypeError):
        pair.transport.write(torch.zeros(4), there)
    with pytest.raises(TypeError):
        pair.transport.write(mine.to_view(), mine)
    with pytest.raises(ValueError):
        pair.transport.write(mine.to_view(), there)
    with pytest.raises(ValueError):
        pair.transport.write(mine.to_view(), mine.to_remote_buffer())
    with new_end(name) as other, pytest.raises(TypeError):
        pair.transport.write(other.register_memory(torch.zeros(4)).to_view(), there)
    assert pair.theirs("there").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert pair.tensors["mine"].sum() == 0


def test_memory_with_gaps_and_of_other_devices_is_refused(name: str) -> None:
    with new_end(name) as transport:
        for tensor in (torch.zeros(4, 4)[:, 1], torch.zeros(4, device="meta")):
            with pytest.raises(ValueError):
                transport.register_memory(tensor)


def test_time_outs_are_finite_and_not_negative(pair: Pair) -> None:
    there = pair.shown("there", torch.arange(4.0))
    mine = pair.register("mine", torch.zeros(4))
    for timeout in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            pair.transport.read(mine.to_mutable_view(), there, timeout=timeout)
        with pytest.raises(ValueError):
            pair.transport.write(mine.to_view(), there, async_op=True, timeout=timeout)
        with pytest.raises(ValueError):
            pair.transport.register_memory(torch.zeros(1), timeout=timeout)
        with pytest.raises(ValueError):
            asyncio.run(pair.transport.read_async(mine.to_mutable_view(), there, timeout=timeout))


def test_unregistering_one_handle_ends_all_of_the_memory(pair: Pair) -> None:
    there = pair.shown("there", torch.arange(4.0))
    tensor = torch.zeros(4)
    one, other = pair.transport.register_memory(tensor), pair.transport.register_memory(tensor)
    view = other.to_mutable_view()
    assert pair.transport.read(view, there) == 0
    pair.transport.unregister_memory(one)
    pair.transport.unregister_memory(one)
    with pytest.raises(RuntimeError):
        pair.transport.read(view, there)
    with pytest.raises(RuntimeError):
        other.to_view()
    with pytest.raises(RuntimeError):
        other.to_remote_buffer()
    again = pair.transport.register_memory(tensor)
    assert pair.transport.read(again.to_mutable_view(), there) == 0


def test_a_registered_tensor_that_was_resized_is_refused(pair: Pair) -> None:
    there = pair.shown("there", torch.arange(4.0))
    view = pair.register("mine", torch.zeros(4)).to_mutable_view()
    pair.tensors["mine"].resize_(1000)
    with pytest.raises(RuntimeError):
        pair.transport.read(view, there)


def test_a_second_peer_and_operations_after_close_are_refused(name: str) -> None:
    with new_end(name) as one, new_end(name) as two:
        one.connect(two.bind())
        with pytest.raises(RuntimeError):
            one.connect(two.bind())
        memory = one.register_memory(torch.zeros(4))
        view = memory.to_view()
        descriptor = two.register_memory(torch.zeros(4)).to_remote_buffer()
        one.close()
        one.close()
        assert not one.connected()
        for refused in (
            one.bind,
            lambda: one.connect(two.bind()),
            lambda: one.register_memory(torch.zeros(1)),
            lambda: one.write(view, descriptor),
            memory.to_remote_buffer,
        ):
            with pytest.raises(RuntimeError):
                refused()


def test_close_waits_for_what_was_submitted(name: str) -> None:
    source, target = torch.arange(1 << 20), torch.zeros(1 << 20, dtype=torch.int64)
    with new_end(name) as two:
        one = new_end(name)
        one.connect(two.bind())
        view = one.register_memory(source).to_view()
        work = one.write(view, two.register_memory(target).to_remote_buffer(), async_op=True)
        asyncio.run(one.close_async())
        assert work.is_completed()
        assert torch.equal(source, target)


def test_two_ranks_meet_by_a_store(name: str, peer: Worker) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    peer.start(meet_theirs, name, store.port)
    with api.new_transport_rank(
        name, "cpu", store=store, rank=0, peer_rank=1, bootstrap_timeout=PATIENT, timeout=PATIENT
    ) as transport:
        received = torch.zeros(5)
        memory = transport.register_memory(received)
        there = type(memory.to_remote_buffer()).deserialize(store.get("descriptor"))
        assert transport.read(memory.to_mutable_view(), there) == 0
        assert received.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        peer.result()
    peer.run(close_theirs)
