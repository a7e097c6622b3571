"""How processes end that call neither shutdown() nor destroy_process_group(): as Python says, soon, and without a word.

test_shutdown.py has the agents that are several in one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "exits.py"
LONGEST = 20.0  # seconds; ten times what it may take


def test_a_process_with_an_agent_and_a_group_ends_as_python_says(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 10
    for name, expected, status, of_the_other, seconds in told:
        assert (status, of_the_other) == (expected, 0), (name, done.stderr)
        assert seconds < LONGEST, name
    assert "terminate called" not in done.stderr and "Fatal Python error" not in done.stderr, done.stderr
    assert done.stderr.count("ValueError: this is meant") == 1, done.stderr


def test_pytest_xdist_runs_tests_that_leave_agents_and_groups_behind(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            import pytest, tensorferry.c10d, tensorferry.rpc as rpc, torch, torch.distributed as dist

            @pytest.mark.parametrize("number", range(2))
            def test_one(number, tmp_path):
                if not dist.is_initialized():
                    rpc.init_rpc("one", store=dist.HashStore())
                    dist.init_process_group("tensorferry", store=dist.HashStore(), rank=0, world_size=1)
                dist.all_reduce(torch.ones(1), async_op=True)
                assert rpc.rpc_sync("one", max, (number, 0)) == number
            """
        )
    )
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-c", str(tmp_path / "none.ini"),
        str(tmp_path / "test_it.py"),
    ]  # fmt: skip
    (tmp_path / "none.ini").touch()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert "terminate called" not in done.stderr, done.stderr
