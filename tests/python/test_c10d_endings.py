"""How process groups, their operations and their processes end (programs/c10d_endings.py)."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path

import pytest
import test_c10d
import torch.distributed as dist
from conftest import repeated
from test_c10d import told

run = partial(test_c10d.run, program="c10d_endings.py", fresh=True)
check = partial(test_c10d.check, program="c10d_endings.py", fresh=True)


def test_what_a_rank_has_sent_is_received_after_it_has_left_or_was_killed(tmp_path: Path) -> None:
    ranks = run(tmp_path, 3, "sends_and_leaves")
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL, 0], told(ranks)


@repeated(100)
def test_a_process_that_begins_again_and_again_keeps_nothing(tmp_path: Path, times: int) -> None:
    check(tmp_path, 2, "begins_again_and_again", TEST_TURNS=str(max(times, 3)))


def test_a_rank_leaves_after_what_it_has_started(tmp_path: Path) -> None:
    check(tmp_path, 3, "starts_and_leaves")


def test_a_process_ends_in_order_while_a_daemon_thread_waits(tmp_path: Path) -> None:
    check(tmp_path, 2, "ends_beside_a_thread")


def test_two_processes_of_a_rank_are_told_of_each_other(tmp_path: Path) -> None:
    ranks = run(tmp_path, 3, "takes_a_rank_that_is_taken")
    assert [rank.returncode for rank in ranks] == [0, 0, 0], told(ranks)  # the second one checks what it is told
    of_rank_1 = r'"rank1@\S+:\d+/\w+"'
    text = f"{of_rank_1} was refused because it has the rank of this process, {of_rank_1}, in a process group"
    assert re.search(text, ranks[1].stderr), told(ranks)


def test_a_group_with_a_dead_member_is_refused_by_name(tmp_path: Path) -> None:
    ranks = run(tmp_path, 3, "dies_before_a_new_group")
    assert ranks[-1].returncode == 9, told(ranks)
    for rank in ranks[:-1]:
        assert rank.returncode == 0 and rank.stdout == "survived\n", told(ranks)


@pytest.mark.parametrize("scenario", ["refuses", "sums_sparse_tensors_meanwhile"])
def test_a_call_says_what_is_wrong_and_holds_up_nothing(tmp_path: Path, scenario: str) -> None:
    check(tmp_path, 2, scenario)


has_abort_hooks = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_abort_hook"), reason="this version of torch has no hooks"
)


@has_abort_hooks
def test_abort_hooks_run_before_the_program_gets_the_error(tmp_path: Path) -> None:
    ranks = run(tmp_path, 3, "calls_abort_hooks")
    assert [rank.returncode for rank in ranks] == [0, 0, -signal.SIGKILL], told(ranks)
    for rank in ranks[:-1]:
        assert rank.stdout == "survived\n" and "abort hook 1 of a process group threw: " in rank.stderr, told(ranks)


@has_abort_hooks
def test_a_hook_that_keeps_its_process_group_goes_with_it(tmp_path: Path) -> None:
    check(tmp_path, 1, "drops_abort_hooks")
