"""tensorferry.collectives over agents of this process. test_c10d.py has groups over several processes."""

from __future__ import annotations

import asyncio
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
from tensorferry import collectives, errors


def at_all_ranks(agents: list[tensorferry.Agent], body: Callable[[int, tensorferry.Agent], Any]) -> list[Any]:
    """Runs ``body`` for each agent on a thread of its own, and returns the results or exceptions."""
    results: list[Any] = [None] * len(agents)

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank, agents[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(agents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def form(agents: list[tensorferry.Agent], **options: Any) -> list[collectives.Group]:
    names = [agent.name for agent in agents]
    options.setdefault("timeout", 30)
    groups = at_all_ranks(agents, lambda _, agent: collectives.form_group(names, agent=agent, **options))
    for group in groups:
        assert isinstance(group, collectives.Group), group
    return groups


@pytest.fixture
def three(agents: Agents) -> list[tensorferry.Agent]:
    return [agents(name, rank=rank) for rank, name in enumerate("abc")]


def test_operations_return_their_results(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    def body(rank: int, _: tensorferry.Agent) -> None:
        group = groups[rank]
        assert (group.rank, group.size, group.names) == (rank, 3, ["a", "b", "c"])
        mine = torch.full((2, 5), float(rank + 1))
        assert group.all_reduce(mine, out=torch.empty(2, 5)).wait().eq(6).all()
        assert mine.eq(rank + 1).all()
        assert group.all_reduce(mine.clone(), "premultiplied_sum", factor=0.5).wait().eq(3).all()
        assert [each[0, 0].item() for each in group.all_gather(mine).wait()] == [1, 2, 3]
        assert [each[0, 0].item() for each in group.gather(mine, 1).wait()] == ([1, 2, 3] if rank == 1 else [])
        given = [torch.tensor([float(i)]) for i in range(3)] if rank == 2 else []
        assert group.scatter(torch.empty(1), given, 2).wait().item() == rank
        assert group.broadcast(mine.clone(), 2).wait().eq(3).all()
        parts = [torch.tensor([float(10 * rank + i)]) for i in range(3)]
        assert group.reduce_scatter(torch.empty(1), parts, "max").wait().item() == 20 + rank
        outs = group.all_to_all([torch.empty(1) for _ in range(3)], parts).wait()
        assert [each.item() for each in outs] == [rank, 10 + rank, 20 + rank]
        send = group.send(mine, (rank + 1) % 3, tag=7)
        got = torch.empty(2, 5)
        assert group.receive(got, tag=7).wait() == (rank - 1) % 3
        send.wait()
        assert got.eq((rank - 1) % 3 + 1).all()
        group.barrier().wait()
        group.monitored_barrier(10)

    assert at_all_ranks(three, body) == [None] * 3


def test_operations_take_one_tensor_several_and_sparse_ones(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    def body(rank: int, _: tensorferry.Agent) -> None:
        group = groups[rank]
        whole = torch.empty(6, 2)
        group.all_gather(torch.full((2, 2), float(rank)), whole).wait()
        assert whole[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        assert group.reduce_scatter(torch.empty(2, 2), whole).wait().eq(3 * rank).all()
        gathered = group.all_gather_coalesced([torch.tensor([rank]), torch.tensor([rank, 7.0])]).wait()
        assert [[each.tolist() for each in outs] for outs in gathered] == [
            [[0], [1], [2]],
            [[0, 7], [1, 7], [2, 7]],
        ]
        outs = [torch.empty(1), torch.empty(2, 2)]
        first, second = group.reduce_scatter_coalesced(
            outs, [[torch.tensor([float(i)]) for i in range(3)], whole]
        ).wait()
        assert first.item() == 3 * rank and second.eq(3 * rank).all()

        # Rank r gives i + 1 rows to rank i.
        given, taken = torch.full((6,), float(rank)), torch.empty(3 * (rank + 1))
        group.all_to_all(taken, given, sizes=[1, 2, 3], out_sizes=[rank + 1] * 3).wait()
        assert taken.tolist() == [float(source) for source in range(3) for _ in range(rank + 1)]
        with pytest.raises(errors.InvalidArgument, match=r"6 rows do not divide as \[1, 2\] among 3 ranks"):
            group.all_to_all(taken, given, sizes=[1, 2])
        with pytest.raises(errors.InvalidArgument, match="4 rows do not divide among 3 ranks"):
            group.all_gather(torch.ones(1), torch.empty(4))

        sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 5.0], (5,))
        assert group.all_reduce(sparse).wait().to_dense().tolist() == [3, 5, 5, 5, 0]
        with pytest.raises(errors.InvalidArgument, match="sparse tensors are summed"):
            group.all_reduce(sparse, "max")

    assert at_all_ranks(three, body) == [None] * 3


def test_a_reduction_can_be_a_function_of_the_program(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    def farther(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(b.abs() > a.abs(), b, a)

    def added(a: torch.Tensor, b: torch.Tensor) -> None:
        a += 10 * b

    def raises(a: torch.Tensor, b: torch.Tensor) -> None:
        raise ValueError("no sum of these")

    def body(rank: int, _: tensorferry.Agent) -> None:
        group = groups[rank]
        mine = torch.tensor([float(rank), -10.0 * rank, 3.0 - rank])
        assert group.all_reduce(mine.clone(), farther).wait().tolist() == [2, -20, 3]
        assert group.all_reduce(mine.double(), added).wait()[0] == 30
        large = torch.full((1 << 18,), float(rank))
        assert group.all_reduce(large, farther).wait().eq(2).all()
        assert group.reduce_scatter(torch.empty(1), mine, farther).wait().item() == [2, -20, 3][rank]
        with pytest.raises(errors.InvalidArgument, match="the function that reduces has raised ValueError: no sum of"):
            group.all_reduce(mine.clone(), raises).wait()
        group.barrier().wait()

    assert at_all_ranks(three, body) == [None] * 3


def test_objects_travel_pickled(three: list[tensorferry.Agent], agents: Agents) -> None:
    groups = form(three)

    def body(rank: int, _: tensorferry.Agent) -> None:
        group = groups[rank]
        mine = {"rank": rank, "tensor": torch.arange(rank)}
        everybodys = group.all_gather_object(mine)
        assert [each["rank"] for each in everybodys] == [0, 1, 2] and everybodys[2]["tensor"].tolist() == [0, 1]
        assert group.broadcast_object("a" * 1000 if rank == 1 else None, root=1) == "a" * 1000
        assert group.gather_object(rank * "x", root=2) == (["", "x", "xx"] if rank == 2 else [])
        assert group.scatter_object([rank, {}, "three"] if rank == 0 else ()) == [0, {}, "three"][rank]

    assert at_all_ranks(three, body) == [None] * 3
    strict = collectives.form_group(["strict"], agent=agents("strict", trust="registered"))
    with pytest.raises(errors.PermissionDenied, match='trust="registered"'):
        strict.all_gather_object(1)


def test_objects_travel_whatever_the_default_device_is(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    def body(rank: int, _: tensorferry.Agent) -> None:
        group = groups[rank]
        with torch.device("meta"):  # a tensor that is made there by mistake has no bytes
            assert group.all_gather_object(rank) == [0, 1, 2]
            assert group.broadcast_object("a" if rank == 1 else None, root=1) == "a"
            assert group.gather_object(rank * "x", root=2) == (["", "x", "xx"] if rank == 2 else [])
            assert group.scatter_object([rank, {}, "three"] if rank == 0 else ()) == [0, {}, "three"][rank]
            assert group.split(0, -rank).rank == 2 - rank

    assert at_all_ranks(three, body) == [None] * 3


def test_work_can_be_awaited(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    async def steps(group: collectives.Group) -> float:
        works = [group.all_reduce(torch.full((1000,), float(step))) for step in range(20)]
        return sum([(await work)[0].item() for work in works])

    expected = sum(3.0 * step for step in range(20))
    assert at_all_ranks(three, lambda rank, _: asyncio.run(steps(groups[rank]))) == [expected] * 3


def test_a_mismatch_names_the_rank_and_the_group_goes_on(three: list[tensorferry.Agent]) -> None:
    groups = form(three)
    found = at_all_ranks(three, lambda rank, _: groups[rank].all_reduce(torch.ones(4 + (rank == 1))).wait())
    for error in found:
        assert isinstance(error, errors.InvalidArgument)
        assert 'rank 1 ("b") called all_reduce(sum) of 5 float32 elements' in str(error)
    ended = at_all_ranks(three, lambda rank, _: groups[rank].all_reduce(torch.ones(4)).wait())
    assert [each[0].item() for each in ended] == [3, 3, 3]


def test_a_receive_that_is_awaited_or_polled_ends_at_its_timeout(three: list[tensorferry.Agent]) -> None:
    groups = form(three)
    group = groups[0]

    async def awaited() -> None:
        await group.receive(torch.empty(1), source=1, timeout=0.3)

    with pytest.raises(errors.DeadlineExceeded, match='receive from rank 1 \\("b"\\)'):
        asyncio.run(asyncio.wait_for(awaited(), 30))
    polled = group.receive(torch.empty(1), source=2, timeout=0.3)
    assert eventually(polled.done)


def test_a_late_rank_is_named_and_the_survivors_form_another_group(three: list[tensorferry.Agent]) -> None:
    groups = form(three)
    found = at_all_ranks(three[:2], lambda rank, _: groups[rank].barrier(timeout=0.3).wait())
    assert all(isinstance(error, errors.DeadlineExceeded) for error in found), found
    assert any('rank 2 ("c")' in str(error) for error in found), found

    def fails_at_the_late_rank() -> bool:  # at once, unless the word of the others is still on its way
        try:
            groups[2].barrier(timeout=0.3).wait()
        except errors.DeadlineExceeded:
            return True
        return False

    assert eventually(fails_at_the_late_rank)
    again = form(three[:2], label="survivors")
    ended = at_all_ranks(three[:2], lambda rank, _: again[rank].all_reduce(torch.ones(1)).wait().item())
    assert ended == [2, 2]


def test_an_aborted_group_fails_everywhere(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    def body(rank: int, _: tensorferry.Agent) -> None:
        if rank == 2:
            groups[2].abort("enough")
        groups[rank].all_reduce(torch.ones(3)).wait()

    for error in at_all_ranks(three, body):
        assert isinstance(error, errors.Cancelled) and 'rank 2 ("c") aborted' in str(error), error


def test_an_agent_that_leaves_ends_the_operations_of_the_others(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    def body(rank: int, agent: tensorferry.Agent) -> None:
        if rank == 1:
            agent.leave()
        else:
            groups[rank].barrier().wait()

    found = at_all_ranks(three, body)
    assert found[1] is None
    for error in found[0], found[2]:
        assert isinstance(error, (errors.ConnectionLost, errors.Cancelled)) and 'rank 1 ("b")' in str(error), error


def test_groups_split_and_merge(three: list[tensorferry.Agent]) -> None:
    groups = form(three)

    def body(rank: int, _: tensorferry.Agent) -> list[str]:
        part = groups[rank].split(0 if rank != 1 else None, key=-rank, timeout=30)
        if rank == 1:
            assert part is None
            return collectives.form_group(["c", "a", "b"], agent=three[1], label="default/0/merged", timeout=30).names
        assert part is not None and part.names == ["c", "a"]
        whole = part.merge(["b"], timeout=30)
        part.barrier().wait()
        return whole.names

    assert at_all_ranks(three, body) == [["c", "a", "b"]] * 3


def test_explain_says_which_algorithm_and_why(three: list[tensorferry.Agent]) -> None:
    groups = form(three, algorithms="all_reduce=two_shot")
    text = groups[0].explain("all_reduce", 8)
    assert text == "all_reduce of 8 bytes over 3 ranks: two_shot (prescribed), in the slots of the board"
    by_mail = form(three, label="mail", board=False)
    assert by_mail[0].explain("broadcast", 8).endswith("as messages: the option board is off")
    with pytest.raises(errors.InvalidArgument, match="prescribes no algorithm"):
        collectives.form_group(["a"], agent=three[0], algorithms="all_reduce=fast")


ASKED = {
    "all_reduce": ("one_shot", "two_shot", "ring"),
    "all_reduce_coalesced": ("one_shot", "two_shot", "ring"),
    "reduce": ("one_shot", "two_shot", "ring"),
    "broadcast": ("direct", "ring"),
    "all_gather": ("direct", "ring"),
    "all_gather_coalesced": ("direct", "ring"),
    "reduce_scatter": ("direct", "ring"),
    "reduce_scatter_coalesced": ("direct", "ring"),
}


def call_at(
    groups: list[collectives.Group], operation: str, rank: int, agent: tensorferry.Agent, **options: Any
) -> Any:
    """Performs the operation on tensors whose sums depend on the order in which the ranks are combined."""
    group = groups[rank]
    own = torch.randn(300, generator=torch.Generator().manual_seed(group.rank))
    function = getattr(group, operation)
    if operation.endswith("_coalesced") and operation != "reduce_scatter_coalesced":
        return function([own[:100], own[100:]], **options).wait()
    if operation == "reduce_scatter":
        return function(torch.empty(100), own, **options).wait()
    if operation == "reduce_scatter_coalesced":
        return function([torch.empty(100)], [own], **options).wait()
    return function(own, **options).wait()


@pytest.mark.parametrize("board", [True, False])
def test_a_call_takes_the_algorithm_that_it_asks_for(three: list[tensorferry.Agent], board: bool) -> None:
    groups = form(three, board=board)
    explained = groups[0].explain("all_reduce", 1200)
    for operation, algorithms in ASKED.items():
        kind = operation.removesuffix("_coalesced")
        for algorithm in algorithms:
            whole = form(three, label=f"{operation} by {algorithm}", board=board, algorithms=f"{kind}={algorithm}")
            expected = at_all_ranks(three, partial(call_at, whole, operation))
            taken = [group.paths.get((kind, "host", algorithm), 0) for group in groups]
            got = at_all_ranks(three, partial(call_at, groups, operation, algorithm=algorithm))
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            calls = 2 if operation == "all_gather_coalesced" else 1
            assert [group.paths[(kind, "host", algorithm)] for group in groups] == [each + calls for each in taken]
    assert groups[0].explain("all_reduce", 1200) == explained


@pytest.mark.parametrize("board", [True, False])
def test_ranks_that_ask_for_different_algorithms_are_named(three: list[tensorferry.Agent], board: bool) -> None:
    groups = form(three, board=board)

    def differ(count: int, asked: tuple[str, ...], rank: int, agent: tensorferry.Agent) -> Any:
        return groups[rank].all_reduce(torch.ones(count), algorithm=asked[rank]).wait()

    for asked in ("two_shot", "one_shot", "two_shot"), ("one_shot", "", "one_shot"), ("ring", "two_shot", "ring"):
        for count in 10, 100_000:
            usual = f'2 ranks called all_reduce(sum) of {count} float32 elements by algorithm "{asked[0]}"'
            for error in at_all_ranks(three, partial(differ, count, asked)):
                assert isinstance(error, errors.InvalidArgument), error
                assert 'rank 1 ("b") called all_reduce(sum)' in str(error) and usual in str(error), error
    sums = at_all_ranks(three, partial(differ, 1, ("ring",) * 3))
    assert [each.tolist() for each in sums] == [[3.0]] * 3


def test_an_algorithm_that_does_not_fit_is_refused_with_those_that_do(three: list[tensorferry.Agent]) -> None:
    group = form(three)[0]

    def refused(fit: str, operation: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(errors.InvalidArgument, match=f"cannot take the algorithm .*: it can take {fit}$"):
            getattr(group, operation)(*arguments, **options)

    ones = torch.ones(3)
    refused("one_shot, two_shot, ring", "all_reduce", ones, algorithm="fast")
    refused("one_shot, two_shot, ring", "reduce", ones, algorithm="two_level")
    refused("one_shot, two_shot", "all_reduce", ones, "average", algorithm="ring")
    refused("direct, ring", "broadcast", ones, algorithm="one_shot")
    refused("direct", "all_gather", ones, [ones, torch.ones(1), ones], algorithm="ring")
    refused("direct", "reduce_scatter", ones, [ones, ones, ones], "average", algorithm="ring")
    with pytest.raises(errors.InvalidArgument, match="by one algorithm"):
        group.all_reduce(torch.eye(2).to_sparse(), algorithm="one_shot")
    assert group.progress == (0, 0)
    alone = collectives.form_group(["a"], agent=three[0], label="alone")
    assert alone.all_reduce(ones, algorithm="ring").wait().eq(1).all()


def test_form_group_checks_its_names(three: list[tensorferry.Agent]) -> None:
    for names in ["b", "c"], ["a", "a"]:
        with pytest.raises(errors.InvalidArgument, match="needs each name once"):
            collectives.form_group(names, agent=three[0])
    with pytest.raises(errors.DeadlineExceeded, match='"b" did not join'):
        collectives.form_group(["a", "b"], agent=three[0], timeout=0.2)


def test_tensors_that_a_group_cannot_take_are_refused(agents: Agents) -> None:
    group = collectives.form_group(["a"], agent=agents("a"))
    with pytest.raises(errors.InvalidArgument, match="not defined for float32"):
        group.all_reduce(torch.ones(1), "band")
    with pytest.raises(errors.InvalidArgument, match="no rank 1"):
        group.broadcast(torch.ones(1), 1)
    with pytest.raises(errors.InvalidArgument, match="2 tensors for 1 ranks"):
        group.all_gather(torch.ones(1), [torch.ones(1)] * 2)
    with pytest.raises(ValueError, match="no reduction"):
        group.all_reduce(torch.ones(1), "median")
    assert group.all_reduce(torch.ones(3)).wait().eq(1).all()


check = partial(test_c10d.check, program="group_rank.py")


@pytest.mark.parametrize("size", [1, 3])
def test_operations_and_hooks_of_processes(tmp_path: Path, size: int) -> None:
    check(tmp_path, size, "operations", "kinds", "waits", "hooks")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_operations_and_hooks_take_tensors_of_a_gpu(tmp_path: Path, size: int) -> None:
    check(tmp_path, size, "operations", "kinds", "waits", "hooks", "stays", TEST_DEVICE="cuda")


@pytest.mark.gpu2
def test_collectives_on_gpus_are_counted_by_their_paths(tmp_path: Path) -> None:
    check(tmp_path, 2, "counts_paths", TEST_DEVICE="cuda:RANK")


@pytest.mark.gpu
def test_tensors_of_gpus_are_copied_through_the_host_if_they_cannot_stay(tmp_path: Path) -> None:
    check(tmp_path, 2, "operations", "kinds", "waits", "hooks", TEST_DEVICE="cuda", CUDA_DEVICE_MAX_CONNECTIONS="1")


@pytest.mark.gpu2
@pytest.mark.parametrize("seconds", ["6", pytest.param("60", marks=pytest.mark.soak)])
def test_calls_and_nccl_share_the_one_queue_of_a_gpu(tmp_path: Path, seconds: str) -> None:
    environment = {"TEST_DEVICE": "cuda:RANK", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "BESIDE_SECONDS": seconds}
    check(tmp_path, 2, "beside_nccl", **environment)
