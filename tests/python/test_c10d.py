"""The backend "tensorferry" of torch.distributed, in processes of their own (programs/c10d_rank.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorferry.rpc as rpc
import torch.distributed
from conftest import free_port
from programs.launch import run_ranks
from tensorferry import c10d, errors

programs = Path(__file__).parent / "programs"


def run(
    folder: Path, size: int, *scenarios: str, program: str = "c10d_rank.py", fresh: bool = False, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """Runs the scenarios one after the other at each rank. The ranks are forks of a process that has imported torch;
    with ``fresh`` each is an interpreter of its own, which reads its environment as torch is imported, and ends as
    interpreters do."""
    arguments = [[str(folder / "store"), str(rank), str(size), *scenarios] for rank in range(size)]
    if not fresh:
        return run_ranks(program, arguments, environment, folder)
    command = [sys.executable, str(programs / program)]
    ranks = [
        subprocess.Popen(
            [*command, *each], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
        )
        for each in arguments
    ]
    done = []
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=300)
            done.append(subprocess.CompletedProcess(rank.args, rank.returncode, out, error))
    finally:
        for rank in ranks:
            rank.kill()
    return done


def told(ranks: list[subprocess.CompletedProcess[str]]) -> str:
    """What each rank printed. The rank that failed first may not be the one whose failure is seen."""
    return "".join(f"rank {i} ended with {r.returncode}:\n{r.stderr[-3000:]}{r.stdout}\n" for i, r in enumerate(ranks))


def check(folder: Path, size: int, *scenarios: str, **options: Any) -> None:
    """All scenarios of ``run()`` pass at each rank."""
    ranks = run(folder, size, *scenarios, **options)
    assert not any(rank.returncode for rank in ranks), told(ranks)
    for rank in ranks:
        assert [line[5:] for line in rank.stdout.splitlines() if line.startswith("done ")] == list(scenarios)


of_tensors = (
    "dense", "strided", "uneven", "reductions", "several", "sparse", "shapes", "many", "refusals", "objects", "groups",
)  # fmt: skip
of_several_ranks = "functional", "mismatches", "ddp", "point_to_point"
alone = (*of_tensors, "options", "lazy", "split", "recorded")
together = (*alone, *of_several_ranks, "algorithms", "late", "absent")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_operations_give_what_torch_promises(tmp_path: Path, size: int) -> None:
    check(tmp_path, size, *(together if size > 1 else alone))


@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_may_have_several_tensors_as_with_gloo(tmp_path: Path, size: int) -> None:
    scenarios = "reduces", "sums_sparse", "broadcasts", "gathers", "refuses"
    check(tmp_path, size, *scenarios, program="c10d_as_gloo.py")


def test_process_groups_do_what_those_of_gloo_do_beside_them(tmp_path: Path) -> None:
    scenarios = (
        "refuses_other_shapes", "refuses_what_makes_no_sense", "takes_device_ids", "has_no_result_before_the_end",
        "has_a_source_if_it_receives", "calls_back_in_no_ones_state", "averages", "is_recorded",
        "splits_with_its_own_options", "names_who_misses_a_barrier",
    )  # fmt: skip
    check(tmp_path, 3, *scenarios, program="c10d_beside_gloo.py")


@pytest.mark.parametrize("size", [1, 4])
def test_groups_that_were_split_are_merged(tmp_path: Path, size: int) -> None:
    check(tmp_path, size, "merges", program="c10d_as_gloo.py")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 4])
def test_operations_on_a_gpu_give_what_torch_promises(tmp_path: Path, size: int) -> None:
    scenarios = ("streams", *of_tensors, "direct", *(of_several_ranks if size > 1 else ()))
    check(tmp_path, size, *scenarios, TEST_DEVICE="cuda")


@pytest.mark.gpu
def test_a_dead_rank_ends_operations_on_a_gpu_and_is_named(tmp_path: Path) -> None:
    ranks = run(tmp_path, 2, "dies", TEST_DEVICE="cuda")
    assert "survived" in ranks[0].stdout, told(ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_dies_when_streams_wait_for_it_releases_them_and_is_named(tmp_path: Path, size: int) -> None:
    ranks = run(tmp_path, size, "dies_on_the_device", TEST_DEVICE="cuda")
    assert ranks[-1].returncode == 9, told(ranks)
    for rank in ranks[:-1]:
        assert "survived" in rank.stdout, told(ranks)


@pytest.mark.gpu
def test_a_stream_that_is_late_is_named_and_the_others_are_released(tmp_path: Path) -> None:
    check(tmp_path, 2, "late_on_the_device", TEST_DEVICE="cuda")


@pytest.mark.gpu
def test_ranks_whose_streams_share_queues_copy_through_the_host(tmp_path: Path) -> None:
    check(tmp_path, 2, "dense", "staged", TEST_DEVICE="cuda", CUDA_DEVICE_MAX_CONNECTIONS="1")


@pytest.mark.gpu2
def test_ranks_with_a_gpu_each_reduce_and_replay_graphs(tmp_path: Path) -> None:
    check(tmp_path, 2, "dense", "reductions", "several", "direct", "graphs", "symmetric", TEST_DEVICE="cuda:RANK")


@pytest.mark.gpu2
@pytest.mark.parametrize("scenario", ["dies_on_the_device", "dies_in_a_graph"])
def test_a_rank_that_dies_releases_the_kernels_that_wait_for_it(tmp_path: Path, scenario: str) -> None:
    ranks = run(tmp_path, 2, scenario, TEST_DEVICE="cuda:RANK")
    assert ranks[1].returncode == 9, told(ranks)
    assert "survived" in ranks[0].stdout, told(ranks)


@pytest.mark.gpu2
def test_a_kernel_that_is_late_is_named_and_the_others_are_released(tmp_path: Path) -> None:
    check(tmp_path, 2, "late_on_the_device", TEST_DEVICE="cuda:RANK")


@pytest.mark.parametrize("size", [2, 3])
def test_a_dead_rank_ends_the_operations_of_the_others_and_is_named(tmp_path: Path, size: int) -> None:
    ranks = run(tmp_path, size, "dies")
    assert ranks[-1].returncode == 9, told(ranks)
    for rank in ranks[:-1]:
        assert rank.returncode == 0, told(ranks)
        assert rank.stdout == "survived\n"


def join_one_after_another(folder: Path, jobs: list[list[str]]) -> list[int]:
    """Runs a process (programs/c10d_again.py) for each list of jobs. Returns their exit codes."""
    program = [sys.executable, str(programs / "c10d_again.py"), str(folder)]
    processes = [
        subprocess.Popen([*program, *each], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in jobs
    ]
    try:
        out = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    print(out)
    return [process.returncode for process in processes]


def test_a_survivor_of_one_job_joins_another_with_a_process_that_was_not_in_the_first(tmp_path: Path) -> None:
    jobs = [["dies/0", "second/0", "third/1"], ["dies/1"], ["second/1"], ["third/0"]]
    assert join_one_after_another(tmp_path, jobs) == [0, 9, 0, 0]


def test_a_job_that_begins_again_at_the_same_server_keeps_its_agents(tmp_path: Path) -> None:
    port = str(free_port())
    assert join_one_after_another(tmp_path, [[f"{port}/{rank}"] * 4 for rank in ("0", "1")]) == [0, 0]


def test_debug_level_detail_names_the_rank_that_calls_another_operation(tmp_path: Path) -> None:
    check(tmp_path, 3, "detail", fresh=True, TORCH_DISTRIBUTED_DEBUG="DETAIL")


def test_options_of_the_agent_are_refused_if_init_rpc_has_made_it() -> None:
    rpc.init_rpc("a", store=torch.distributed.HashStore())
    try:
        with pytest.raises(errors.InvalidArgument, match=r"max_threads, but .* pass them to init_rpc"):
            c10d._agent(None, c10d.Options(max_threads=2)).__enter__()
        with c10d._agent(None, c10d.Options(name="a")) as agent:
            assert agent.name == "a"
    finally:
        rpc.shutdown(graceful=False)
