"""What the program's code throws on threads of the library ends neither a process nor what it serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "thrown.py"


def test_both_processes_go_on_whatever_the_programs_code_throws_on_their_threads(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path), str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said, errors = zip(*(rank.communicate(timeout=300) for rank in ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert all(text.startswith("survived ") for text in said), said
    assert "terminate called" not in "".join(errors), errors
