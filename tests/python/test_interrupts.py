"""Ctrl-C ends every public function that blocks: the programs name each, and how to make it block."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

PROGRAMS = Path(__file__).parent / "programs"
LONGEST_EXIT = 20.0  # seconds; it may take one. The calls that go on take 100


def test_ctrl_c_ends_every_blocking_function_of_the_package(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "interrupted_calls.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    ended = time.monotonic()
    assert done.returncode == 0, done.stderr
    said, _, at = done.stdout.split()
    assert said == "interrupted" and ended - float(at) < LONGEST_EXIT


def test_ctrl_c_ends_every_blocking_function_of_groups_and_the_others_learn_that_the_rank_left():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "interrupted_rank.py"), str(store.port), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, errors = zip(*(rank.communicate(timeout=600) for rank in ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == -signal.SIGINT, errors[0]  # as Python ends by a KeyboardInterrupt
    assert said[0] == "interrupted\n"
    assert ranks[1].returncode == 0, errors[1]
    assert "rank 0" in said[1] and "has died or left" in said[1], said[1] + errors[1]
