"""Transport "tensorferry" of torch.distributed._transport on memory of GPUs, and in the order of streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import Worker, Workers
from tensorferry import errors
from transport_ends import Pair, peer_process, unregister_theirs

pytestmark = pytest.mark.gpu


@pytest.fixture
def peer(workers: Workers) -> Iterator[Worker]:
    with peer_process(workers) as worker:
        yield worker


@pytest.fixture
def ferry(peer: Worker) -> Iterator[Pair]:
    made = Pair("tensorferry", peer, "cuda")
    yield made
    made.close()


def test_reads_and_writes_move_bytes_between_gpus_of_two_processes(ferry: Pair) -> None:
    there = ferry.shown("there", torch.arange(1000.0))
    mine = ferry.register("mine", torch.zeros(1000, device="cuda"))
    torch.cuda.synchronize()
    assert ferry.transport.read(mine.to_mutable_view(), there) == 0
    assert torch.equal(ferry.tensors["mine"].cpu(), torch.arange(1000.0))
    ferry.tensors["mine"].fill_(3)
    torch.cuda.synchronize()
    work = ferry.transport.write(mine.to_view(0, 400), there.part(400, 400), async_op=True)
    assert work.wait()
    expected = torch.arange(1000.0)
    expected[100:200] = 3
    assert torch.equal(ferry.theirs("there"), expected)


def test_stream_transfers_are_ordered_between_the_work_of_their_stream(ferry: Pair) -> None:
    there = ferry.shown("there", torch.arange(1 << 20, dtype=torch.float32))
    mine = ferry.register("mine", torch.zeros(1 << 20, device="cuda"))
    tensor = ferry.tensors["mine"]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(50):
            tensor.add_(1)
        ferry.transport.read_stream(mine.to_mutable_view(), there)
        tensor.mul_(2)
        ferry.transport.write_stream(mine.to_view(), there)
        assert not ferry.transport.poison().item()
    stream.synchronize()
    assert torch.equal(ferry.theirs("there"), 2 * torch.arange(1 << 20, dtype=torch.float32))


def test_a_graph_replays_a_stream_transfer(ferry: Pair) -> None:
    there = ferry.shown("there", torch.zeros(100))
    mine = ferry.register("mine", torch.ones(100, device="cuda"))
    ferry.transport.write(mine.to_view(), there)
    ferry.transport.poison()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ferry.tensors["mine"].add_(1)
        ferry.transport.write_stream(mine.to_view(), there)
    for value in (2.0, 3.0):
        graph.replay()
        torch.cuda.synchronize()
        assert ferry.theirs("there").eq(value).all()


def test_a_failed_stream_transfer_poisons_what_is_behind_it_and_ends_no_process(peer: Worker) -> None:
    ferry = Pair("tensorferry", peer, "cuda")
    there = ferry.shown("there", torch.ones(100))
    mine = ferry.register("mine", torch.zeros(100, device="cuda"))
    poison = ferry.transport.poison()
    graph = torch.cuda.CUDAGraph()
    ferry.transport.read(mine.to_mutable_view(), there)
    with torch.cuda.graph(graph):
        ferry.transport.read_stream(mine.to_mutable_view(), there)
        consumed = torch.where(poison, torch.nan, ferry.tensors["mine"])
    graph.replay()
    torch.cuda.synchronize()
    assert consumed.eq(1).all()
    peer.run(unregister_theirs, "there")
    graph.replay()
    torch.cuda.synchronize()
    assert consumed.isnan().all()
    with pytest.raises(errors.NotFound):
        ferry.transport.read_stream(mine.to_mutable_view(), there)
    with pytest.raises(errors.NotFound, match="stream transfer"):
        ferry.transport.close()
    ferry.close()
