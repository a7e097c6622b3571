"""Windows of torch.distributed (torch 2.15) on the backend tensorferry, in processes of their own
(programs/window_rank.py)."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import test_c10d
import torch.distributed as dist
from test_c10d import told

pytestmark = pytest.mark.skipif(not hasattr(dist, "_new_window"), reason="this version of torch has no windows")
check = partial(test_c10d.check, program="window_rank.py")

SCENARIOS = "puts_and_signals", "puts_much_at_once", "signals_count", "registers_what_ranks_have", "maps", "refuses"
LAST = "parts_have_windows", "drops_alone", "goes_with_its_group"
SHARED: dict[str, str] = {}
APART = {"TENSORFERRY_CHANNELS": "basic"}  # on one host; as between hosts, without shared memory


@pytest.mark.parametrize("environment", [SHARED, APART], ids=["shared memory", "messages"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_put_and_signal_through_windows(tmp_path: Path, size: int, environment: dict[str, str]) -> None:
    check(tmp_path, size, *SCENARIOS, *LAST, **environment)


@pytest.mark.parametrize("environment", [SHARED, APART], ids=["shared memory", "messages"])
def test_a_dead_rank_ends_puts_and_waits_and_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    ranks = test_c10d.run(tmp_path, 3, "dies", program="window_rank.py", **environment)
    assert [rank.returncode for rank in ranks] == [0, 0, -signal.SIGKILL], told(ranks)
    assert [rank.stdout for rank in ranks[:2]] == ["survived\n"] * 2, told(ranks)


def test_ctrl_c_ends_a_wait_for_a_signal_which_then_takes_none(tmp_path: Path) -> None:
    check(tmp_path, 2, "is_interrupted")
