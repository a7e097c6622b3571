"""`tensorferry bench`, and the line that shows the progress of a command at a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from conftest import run_at_terminal
from tensorferry import bench, errors


def test_the_command_measures_both_libraries_and_prints_how_much_faster() -> None:
    command = [sys.executable, "-m", "tensorferry", "bench", "--seconds", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(.+?)  +[\d.,]+ [mu]s +[\d.,]+ [mu]s  [\d.]+x faster$", done.stdout, re.MULTILINE)
    assert rows == [name for name, _ in bench.ROWS], done.stdout
    assert "\x1b" not in done.stdout + done.stderr  # no terminal, no progress


def test_at_a_terminal_the_progress_goes_to_the_standard_error_alone() -> None:
    command = [sys.executable, "-m", "tensorferry", "bench", "--seconds", "0.01", "--json"]
    out, shown = run_at_terminal(command)
    assert set(json.loads(out)) == {name for name, _ in bench.ROWS}
    assert "1 of 4: empty call, tensorferry, turn 1 of 3" in shown and shown.endswith("\r\x1b[K"), shown


def test_a_second_process_that_ends_is_told_at_once() -> None:
    pair = bench._Pair("torch.distributed.rpc")  # whose caller would wait for a minute
    try:
        pair._other.kill()
        with pytest.raises(errors.InternalError, match="its second process has ended"):
            pair.measure({"bytes": 0}, 60.0)
    finally:
        pair.close()
