"""Jobs that torchrun starts again: the ranks of the next round meet at the store of the one that failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import free_port

PROGRAM = Path(__file__).parent / "programs" / "restarted_rank.py"
RANKS = 3
RENDEZVOUS = {
    "standalone": lambda: ["--standalone"],
    "c10d": lambda: [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--local-addr=127.0.0.1",
    ],
    "static": lambda: ["--master-addr=127.0.0.1", f"--master-port={free_port()}"],
}


def run(what: str, rendezvous: str) -> str:
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--max-restarts=1",
        "--monitor-interval=0.2", *RENDEZVOUS[rendezvous](), str(PROGRAM), what,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def check(said: str) -> None:
    assert sorted(re.findall(r"done (\d) 1", said)) == [str(rank) for rank in range(RANKS)], said


@pytest.mark.parametrize("what", ["group", "rpc"])
def test_a_job_goes_on_after_a_rank_was_killed(what: str) -> None:
    check(run(what, "standalone"))


@pytest.mark.soak
@pytest.mark.parametrize("what", ["group", "rpc"])
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_a_job_goes_on_after_a_rank_was_killed_with_each_rendezvous(what: str, rendezvous: str) -> None:
    check(run(what, rendezvous))
