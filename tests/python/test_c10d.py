"""The backend "tensorferry" of torch.distributed, in processes of their own (programs/c10d_rank.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

program = Path(__file__).parent / "programs" / "c10d_rank.py"


def run(folder: Path, size: int, *scenarios: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs the scenarios one after the other at each rank."""
    command = [sys.executable, str(program), str(folder / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), *scenarios], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
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


together = (
    "dense", "strided", "uneven", "reductions", "several", "objects", "groups", "functional", "mismatches", "ddp",
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4])
def test_operations_give_what_torch_promises(tmp_path: Path, size: int) -> None:
    scenarios = together if size > 1 else together[:7]
    if size > 1:
        scenarios = (*scenarios, "point_to_point")
    for rank in run(tmp_path, size, *scenarios):
        assert rank.returncode == 0, rank.stderr[-3000:] + rank.stdout
        assert rank.stdout.split("\n").count("done dense") == 1


@pytest.mark.parametrize("size", [2, 3])
def test_a_dead_rank_ends_the_operations_of_the_others_and_is_named(tmp_path: Path, size: int) -> None:
    ranks = run(tmp_path, size, "dies")
    assert ranks[-1].returncode == 9
    for rank in ranks[:-1]:
        assert rank.returncode == 0, rank.stderr[-3000:]
        assert rank.stdout == "survived\n"
