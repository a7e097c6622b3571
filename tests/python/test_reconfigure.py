"""``reconfigure()`` of torch 2.15: a process group goes on without the ranks that have died, and with new ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

PROGRAM = Path(__file__).parent / "programs/reconfigured_rank.py"
pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this version of torch cannot reconfigure")


class Rank:
    def __init__(self, store: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.handle = ""

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()


class Ranks:
    """Processes that wait for commands, and have told their handles."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.started: list[Rank] = []

    def start(self, count: int) -> list[Rank]:
        ranks = [Rank(self.store) for _ in range(count)]
        self.started += ranks
        for rank in ranks:
            rank.handle = rank.read()
        return ranks


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    all_ranks = Ranks(tmp_path / "store")
    yield all_ranks
    for rank in all_ranks.started:
        rank.process.kill()
        rank.process.communicate()


def reconfigure(group: list[Rank], uuid: int, ordered: bool = True) -> list[list[int]]:
    for rank in group:
        rank.tell(uuid=uuid, handles=[one.handle for one in group], ordered=ordered)
    return [json.loads(rank.read()) for rank in group]


def reduce(group: list[Rank]) -> list[str]:
    for rank in group:
        rank.tell(reduce=1.0)
    return [rank.read() for rank in group]


def test_survivors_go_on_without_a_killed_rank_and_take_in_a_new_one(ranks: Ranks) -> None:
    first = ranks.start(3)
    (early,) = ranks.start(1)
    early.tell(reduce=1.0)
    assert "call reconfigure() first" in early.read()

    assert reconfigure(first, 1) == [[0, 3], [1, 3], [2, 3]]
    assert reduce(first) == ["3.0"] * 3

    first[1].process.kill()
    survivors = [first[0], first[2]]
    for failed in reduce(survivors):
        assert failed.startswith("failed: ") and "rank 1" in failed, failed
    assert reconfigure(survivors, 2) == [[0, 2], [1, 2]]
    assert reduce(survivors) == ["2.0"] * 2

    grown = [survivors[1], early, survivors[0]]
    assert reconfigure(grown, 3) == [[0, 3], [1, 3], [2, 3]]
    assert reduce(grown) == ["3.0"] * 3

    places = sorted(reconfigure(grown, 4, ordered=False))
    assert places == [[0, 3], [1, 3], [2, 3]]

    early.tell(uuid=4, handles=[early.handle], ordered=True)
    assert "uuid 4 has been used before" in early.read()
    early.tell(uuid=5, handles=[survivors[0].handle], ordered=True)
    assert "is not among the 1 handles" in early.read()


def test_a_group_with_a_dead_member_fails_by_name_and_forms_without_it(ranks: Ranks) -> None:
    group = ranks.start(3)
    assert reconfigure(group, 1)[0] == [0, 3]
    group[2].process.kill()
    group[2].process.wait()
    for rank in group[:2]:
        rank.tell(uuid=2, handles=[one.handle for one in group], ordered=True)
    for rank in group[:2]:
        failed = rank.read()
        assert failed.startswith("failed: ") and "rank 2" in failed, failed
    assert reconfigure(group[:2], 3) == [[0, 2], [1, 2]]
    assert reduce(group[:2]) == ["2.0"] * 2
