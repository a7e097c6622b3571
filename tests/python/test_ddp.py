"""tensorferry.ddp over agents of this process, and in DistributedDataParallel (programs/data_parallel_rank.py)."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tensorferry
import test_c10d
import torch
from conftest import Agents, eventually
from tensorferry import collectives, ddp, errors
from test_collectives import at_all_ranks, form

sys.path.append(str(Path(__file__).parents[2] / "examples/14-gradient-server"))
example = importlib.import_module("gradient_server")


@pytest.fixture
def three(agents: Agents) -> list[tensorferry.Agent]:
    return [agents(name, rank=rank) for rank, name in enumerate("abc")]


def parameters_of(rank: int) -> list[torch.Tensor]:
    """Parameters of several shapes and two dtypes, with gradients of ``rank + 1``."""
    made = [torch.zeros(3, 4), torch.zeros(5, dtype=torch.float64), torch.zeros(6, 2).t(), torch.zeros(())]
    for parameter in made:
        parameter.requires_grad_()
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    return made


def gradients_of(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("bucket_bytes", [0, 100, 1 << 20])
def test_hooks_average_without_torchs_process_groups(three: list[tensorferry.Agent], bucket_bytes: int) -> None:
    assert not torch.distributed.is_initialized()
    groups = form(three)

    def body(rank: int, _: tensorferry.Agent) -> None:
        for hook in ddp.all_reduce_hook, ddp.half_hook, ddp.bfloat16_hook:
            parameters = parameters_of(rank)
            ddp.reduce_gradients(parameters, groups[rank], hook, bucket_bytes=bucket_bytes)
            assert all(gradient.eq(2).all() for gradient in gradients_of(parameters))

    assert at_all_ranks(three, body) == [None] * 3


def test_half_hooks_round(three: list[tensorferry.Agent]) -> None:
    groups = form(three)
    third, large = 1 / 3, 1e6

    def body(rank: int, _: tensorferry.Agent) -> list[list[float]]:
        out = []
        for hook in ddp.all_reduce_hook, ddp.half_hook, ddp.bfloat16_hook:
            parameter = torch.zeros(2, requires_grad=True)
            parameter.grad = torch.tensor([third, large])
            ddp.reduce_gradients([parameter], groups[rank], hook)
            out.append(parameter.grad.tolist())
        return out

    for found in at_all_ranks(three, body):
        assert found[0] == pytest.approx([third, large])
        assert found[1] == [torch.tensor(third).half().item(), float("inf")]
        assert found[2] == torch.tensor([third, large]).bfloat16().tolist()


def test_a_hook_of_ones_own_may_answer_in_any_way(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    def by_work(group: collectives.Group, bucket: ddp.GradBucket) -> Any:
        return group.all_reduce(bucket.buffer(), "average")

    def by_list(group: collectives.Group, bucket: ddp.GradBucket) -> Any:
        return group.all_reduce_coalesced([bucket.buffer()], "average")

    def at_once(group: collectives.Group, bucket: ddp.GradBucket) -> Any:
        return group.all_reduce(bucket.buffer(), "average").wait()

    def by_future(group: collectives.Group, bucket: ddp.GradBucket) -> Any:
        return ddp.all_reduce_hook(group, bucket)

    @ddp.CommHook
    def decorated(group: collectives.Group, bucket: ddp.GradBucket) -> Any:
        return group.all_reduce(bucket.buffer(), "average")

    in_turn = ddp.CommHook(by_future, overlap=False)

    def body(rank: int, _: tensorferry.Agent) -> None:
        for hook in by_work, by_list, at_once, by_future, decorated, in_turn:
            parameters = parameters_of(rank)
            ddp.reduce_gradients(parameters, groups[rank], hook, bucket_bytes=60)
            assert all(gradient.eq(2).all() for gradient in gradients_of(parameters)), hook

    assert at_all_ranks(three, body) == [None] * 3


def test_buckets_have_index_buffer_gradients_parameters_and_last() -> None:
    parameters = parameters_of(0)
    seen = []

    def look(state: str, bucket: ddp.GradBucket) -> torch.Tensor:
        assert state == "state"
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            assert gradient.shape == parameter.shape and gradient.dtype == parameter.dtype
            assert gradient.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
        bucket.gradients()[0].mul_(3)  # a view of the buffer
        seen.append((bucket.index(), bucket.is_last(), [tuple(p.shape) for p in bucket.parameters()]))
        return bucket.buffer()

    ddp.reduce_gradients(parameters, "state", look, bucket_bytes=60)
    assert seen == [(0, False, [(3, 4)]), (1, False, [(5,)]), (2, True, [(2, 6), ()])]
    assert [gradient.max().item() for gradient in gradients_of(parameters)] == [3, 3, 3, 1]


@pytest.mark.parametrize(("overlap", "most"), [(True, 2), (False, 1)])
def test_two_buckets_are_in_flight_unless_they_may_not_overlap(overlap: bool, most: int) -> None:
    lock = threading.Lock()
    flying: list[int] = []
    counts = []

    def slow(_: None, bucket: ddp.GradBucket) -> torch.futures.Future[torch.Tensor]:
        index, buffer = bucket.index(), bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        with lock:
            flying.append(index)
            counts.append(len(flying))

        def land() -> None:
            with lock:
                flying.remove(index)
            future.set_result(buffer)

        threading.Timer(0.05, land).start()
        return future

    parameters = [torch.zeros(4, requires_grad=True) for _ in range(6)]
    ddp.reduce_gradients(parameters, None, ddp.CommHook(slow, overlap=overlap), bucket_bytes=16)
    assert len(counts) == 6 and max(counts) == most and not flying


def fails_with(hook: Callable[[Any, ddp.GradBucket], Any], bucket_bytes: int = 1 << 20) -> str:
    with pytest.raises(RuntimeError) as caught:
        ddp.reduce_gradients(parameters_of(0), None, hook, bucket_bytes=bucket_bytes)
    return str(caught.value)


def test_errors_name_the_hook_and_the_bucket() -> None:
    def raises(_: None, bucket: ddp.GradBucket) -> torch.Tensor:
        if bucket.index() == 1:
            raise ValueError("no gradients today")
        return bucket.buffer()

    def fails_later(_: None, bucket: ddp.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        threading.Timer(0.05, future.set_exception, (OSError("the line is cut"),)).start()
        return future

    name = re.escape(test_errors_name_the_hook_and_the_bucket.__qualname__)
    hook = rf'the hook "{name}\.<locals>'
    assert re.match(rf'{hook}\.raises" failed at bucket 1: ValueError: no gradients today', fails_with(raises, 60))
    assert re.search(rf'{hook}\.fails_later" failed at bucket 0: OSError: the line is cut', fails_with(fails_later))
    for answer, text in (
        (None, "TypeError: its result is a NoneType; return one tensor, or a future of one"),
        ([torch.ones(1)] * 2, "TypeError: its result is a list of 2; return one tensor, or a future of one"),
        (torch.ones(1), "ValueError: its result has 1 elements, and the bucket has 25; return as many"),
    ):
        assert text in fails_with(lambda _, bucket, answer=answer: answer)
    with pytest.raises(RuntimeError) as caught:
        ddp.reduce_gradients(parameters_of(0), None, raises, bucket_bytes=60)
    assert isinstance(caught.value.__cause__, ValueError)


def test_errors_of_a_group_keep_their_type(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    def body(rank: int, agent: tensorferry.Agent) -> None:
        if rank == 1:
            agent.leave()
            return
        ddp.reduce_gradients(parameters_of(rank), groups[rank], ddp.half_hook)

    found = at_all_ranks(three, body)
    for error in found[0], found[2]:
        assert isinstance(error, (errors.ConnectionLost, errors.Cancelled)), error
        assert 'the hook "half" failed at bucket 0: ' in str(error) and 'rank 1 ("b")' in str(error), error


def test_parameters_that_a_group_cannot_take_are_refused() -> None:
    layer = torch.nn.Embedding(3, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(errors.InvalidArgument, match="a gradient in bucket 0 is sparse"):
        ddp.reduce_gradients(layer.parameters(), None, ddp.all_reduce_hook)
    with pytest.raises(errors.InvalidArgument, match="parameter 0 of 1"):
        ddp.reduce_gradients([torch.ones(2).to_sparse()], None, ddp.all_reduce_hook)
    with pytest.raises(ValueError, match="no default process group"):
        ddp.broadcast_coalesced(None, [torch.ones(2)])


@pytest.mark.parametrize("bucket_bytes", [0, 40, 1 << 20])
def test_broadcast_coalesced_copies_a_network(three: list[tensorferry.Agent], bucket_bytes: int) -> None:
    groups = form(three)

    def tensors(rank: int) -> list[torch.Tensor]:
        chosen = torch.Generator().manual_seed(rank)
        mixed = [torch.rand(2, 5, generator=chosen), torch.randint(9, (4, 3), generator=chosen).t(), torch.zeros(0)]
        return [*mixed, torch.nn.Parameter(torch.rand(7, generator=chosen)), torch.rand(3, generator=chosen).half()]

    def body(rank: int, _: tensorferry.Agent) -> None:
        mine = tensors(rank)
        ddp.broadcast_coalesced(groups[rank], mine, 2, bucket_bytes=bucket_bytes)
        assert all(a.equal(b) for a, b in zip(mine, tensors(2)))

    assert at_all_ranks(three, body) == [None] * 3


def test_two_buckets_of_a_broadcast_are_in_flight(three: list[tensorferry.Agent]) -> None:
    groups = form(three[:2])
    before = groups[0]._group.progress[0]

    def body(rank: int, _: tensorferry.Agent) -> list[int]:
        if rank == 0:
            ddp.broadcast_coalesced(groups[0], [torch.ones(100_000) for _ in range(5)], bucket_bytes=1)
            return []
        started = []
        for most in (2, 3, 4, 5, 5):  # takes part in one bucket at a time, when rank 0 has begun all that it may
            assert eventually(lambda: groups[0]._group.progress[0] - before >= most)  # noqa: B023
            started.append(groups[0]._group.progress[0] - before)
            ddp.broadcast_coalesced(groups[1], [torch.ones(100_000)], bucket_bytes=1)
        return started

    assert at_all_ranks(three[:2], body)[1] == [2, 3, 4, 5, 5]
    assert groups[0]._group.progress[0] - before == 5


class BrokenServer:
    def average(self, index: int, gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("the server is closed")


handed: list[Any] = []


def hand(reference: Any) -> None:
    handed.append(reference)


def test_a_parameter_server_averages_behind_a_remote_reference(three: list[tensorferry.Agent]) -> None:
    server = three[0].remote("c", example.GradientServer, args=(2,))
    three[0].rpc_sync("b", hand, args=(server,))
    references = [server, handed.pop()]

    def body(rank: int, _: tensorferry.Agent) -> None:
        for step in range(3):
            parameters = parameters_of(rank + step)
            ddp.reduce_gradients(parameters, references[rank], example.gradient_server_hook, bucket_bytes=60)
            assert all(gradient.eq(step + 1.5).all() for gradient in gradients_of(parameters))

    assert at_all_ranks(three[:2], body) == [None] * 2
    references.clear()


def test_errors_of_a_parameter_server_reach_the_training_step(
    pair: tuple[tensorferry.Agent, tensorferry.Agent],
) -> None:
    a, _ = pair
    text = '"gradient_server_hook" failed at bucket 0: ValueError: the server is closed'
    with pytest.raises(RuntimeError, match=text):
        ddp.reduce_gradients(parameters_of(0), a.remote("b", BrokenServer), example.gradient_server_hook)
    server = a.remote("b", example.GradientServer, args=(2,))
    first = server.rpc_async().average(3, torch.ones(2))
    second = server.rpc_async().average(3, torch.ones(5))
    for each in first, second:
        with pytest.raises(errors.InvalidArgument, match="bucket 3 is"):
            each.wait()
    with pytest.raises(ValueError, match="at least one trainer"):
        example.GradientServer(0)


check = partial(test_c10d.check, program="data_parallel_rank.py")


def test_hooks_in_distributed_data_parallel(tmp_path: Path) -> None:
    check(tmp_path, 3, "hooks", "sparse", "own_hooks", "errors", "server", "without_ddp")


@pytest.mark.gpu
def test_a_gradient_server_adds_in_the_order_of_the_calls_although_their_streams_differ() -> None:
    server = example.GradientServer(2)
    one, three = torch.ones(1000, device="cuda"), torch.full((1000,), 3.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(400_000_000)  # cycles: a fifth to half of a second
        first = server.average(0, one)
    with torch.cuda.stream(torch.cuda.Stream()):
        second = server.average(0, three)
    for each in first, second:
        assert (each.wait() == 2).all().item()


@pytest.mark.gpu
def test_hooks_in_distributed_data_parallel_take_buckets_of_a_gpu(tmp_path: Path) -> None:
    check(tmp_path, 2, "hooks", "sparse", "own_hooks", "errors", "without_ddp", TEST_DEVICE="cuda")


def test_torchs_own_hooks_train_as_with_gloo(tmp_path: Path) -> None:
    check(tmp_path, 3, "torch_hooks")


def test_fsdp2_trains_a_network_of_two_layers_as_one_process_does(tmp_path: Path) -> None:
    check(tmp_path, 2, "fsdp2")


@pytest.mark.gpu2
def test_gpus_train_as_with_nccl(tmp_path: Path) -> None:
    check(tmp_path, 2, "as_with_nccl", TEST_DEVICE="cuda:RANK")
