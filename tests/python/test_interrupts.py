"""Ctrl-C ends every function that waits for other ranks. test_futures.py has the waits of tensorferry.rpc."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

PROGRAM = Path(__file__).parent / "programs" / "interrupted_rank.py"


def test_ctrl_c_ends_every_blocking_function_of_groups_and_the_others_learn_that_the_rank_left():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(store.port), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, errors = zip(*(rank.communicate(timeout=200) for rank in ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == -signal.SIGINT, errors[0]  # as Python ends by a KeyboardInterrupt
    assert said[0] == "interrupted\n"
    assert ranks[1].returncode == 0, errors[1]
    assert "rank 0" in said[1] and "has died or left" in said[1], said[1] + errors[1]
